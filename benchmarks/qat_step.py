"""What fake quantization costs a training step, as a ratio measured in one run.

    python benchmarks/qat_step.py MODEL [--backend gpu] [--dtype bfloat16] [--scheme int4_blockwise] [--groupsize 64]
        [--activation int8] [--compile] [--repeats 4]

Steps with and without fake quantization of every linear take turns on the same trainer; the figure is
the ratio of their medians in CPU seconds of this process (of wall time on an accelerator).
"""

import argparse
import json
import platform
import statistics
import time

import numpy as np

from llmq.backends.base import TrainBatch, TrainOptions
from llmq.backends.registry import select_backend
from llmq.checkpoint.coverage import plan_coverage
from llmq.checkpoint.layout import rounds_inputs
from llmq.checkpoint.loader import load_weights
from llmq.config import QuantizationConfig, validated


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--backend", default="gpu")
    parser.add_argument("--device")
    parser.add_argument("--dtype")
    parser.add_argument("--scheme", default="int4_blockwise")
    parser.add_argument("--groupsize", type=int, help="of a blockwise scheme")
    parser.add_argument("--activation", default="none")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=4)
    options = parser.parse_args()

    weights = load_weights(options.model)
    asked = {"scheme": options.scheme, "group_size": options.groupsize, "activation": options.activation}
    config = validated(QuantizationConfig, **asked, embedding="none", lm_head="none")
    rows = plan_coverage(weights.reader.tensors, weights.config, config)
    rounded = frozenset(row.name for row in rows if rounds_inputs(row.name, row.stored, config))
    schemes = {row.name: row.scheme for row in rows if row.scheme}
    plugin, device = select_backend(options.backend, options.device)
    trainer = plugin.open_trainer(
        weights,
        TrainOptions(
            device=device,
            dtype=options.dtype,
            max_len=options.seq_len,
            schemes=schemes,
            rounded_inputs=rounded,
            compile=options.compile,
        ),
    )
    shape = (options.rows, options.seq_len)
    ids = np.random.default_rng(0).integers(0, weights.config.vocab_size, shape).astype(np.int32)
    positions = np.tile(np.arange(options.seq_len, dtype=np.int32), (options.rows, 1))
    batch = TrainBatch(ids, ids, np.ones(shape, bool), np.ones(shape, np.int32), positions)
    clock = time.process_time if "cpu" in trainer.device else time.perf_counter
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for repeat in range(options.repeats + 1):
        for quantized in (False, True):
            start = clock()
            trainer.step([batch], 0.0, quantized=quantized)
            if repeat:  # the first one compiles, and allocates
                seconds[quantized].append(clock() - start)
    plain, aware = (statistics.median(seconds[quantized]) for quantized in (False, True))
    figures = {"plain_s": plain, "fake_quantized_s": aware, "ratio": aware / plain}
    print(json.dumps({"machine": platform.processor(), "device": trainer.device, "dtype": trainer.dtype, **figures}))


if __name__ == "__main__":
    main()
