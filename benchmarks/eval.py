"""Seconds that tasks take through `llmq eval` and through lm-eval's own adapter for transformers models.

    python benchmarks/eval.py MODEL --data-dir DIR [--tasks hellaswag,truthfulqa_mc2] [--limit 50] [--batch-size 8]

Both answer the same requests with the same weights, compute type, threads and number of
continuations at once, one after the other. Building prompts counts for both, loading for neither.
MODEL is anything llmq opens; transformers gets its weights, dequantized. Needs transformers.
"""

import argparse
import os
import platform
import sys
import tempfile
import time
import types
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from llmq.backends.base import ModelOptions
from llmq.backends.reference import reference_weight
from llmq.backends.registry import select_backend
from llmq.checkpoint.loader import ModelWeights, load_weights
from llmq.evaluate.options import EvalOptions
from llmq.evaluate.packs import Limits, tokens_per_call
from llmq.evaluate.tasks import TaskResults, load_tasks
from llmq.model.tokenizer import Tokenizer

MAX_LEN = 2048


@cache
def import_hflm() -> Any:
    """lm-eval's adapter class. It imports accelerate, of which a model that is open already needs nothing."""
    names = ("Accelerator", "InitProcessGroupKwargs", "find_executable_batch_size", "get_max_memory")
    stubs = {name: types.ModuleType(name) for name in ("accelerate", "accelerate.utils")}
    for stub in stubs.values():
        vars(stub).update(dict.fromkeys(names))
    with mock.patch.dict(sys.modules, {} if find_spec("accelerate") else stubs):
        from lm_eval.models.huggingface import HFLM
    return HFLM


def transformers_adapter(weights: ModelWeights, dtype: str, batch_size: int) -> Any:
    """lm-eval's own adapter on the same weights."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.for_model(**weights.reader.config)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tensors = {name: torch.from_numpy(reference_weight(weights[name]).astype(np.float32)) for name in weights}
    left_out = model.load_state_dict(tensors, strict=False)
    assert not left_out.unexpected_keys
    model.tie_weights()
    with tempfile.TemporaryDirectory() as directory:
        for name, contents in weights.reader.side_files().items():
            (Path(directory) / name).write_bytes(contents)
        config.save_pretrained(directory)
        tokenizer = AutoTokenizer.from_pretrained(directory)
    model = model.to(getattr(torch, dtype))
    return import_hflm()(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, max_length=MAX_LEN)


def timed(task: str, options: dict[str, Any], lm: Any) -> tuple[float, TaskResults]:
    """Seconds and results of a task, its data loaded before."""
    with load_tasks(EvalOptions(tasks=(task,), **options)) as tasks:
        start = time.perf_counter()
        results = tasks.run(lm)
        return time.perf_counter() - start, results


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--tasks", default="hellaswag,truthfulqa_mc2")
    parser.add_argument("--limit", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--backend", default="gpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    args = parser.parse_args()

    weights = load_weights(args.model)
    tokenizer = Tokenizer.from_files(weights.reader.side_files(), weights.config)
    backend, device = select_backend(args.backend, None)
    model = backend.open_model(weights, ModelOptions(device=device, dtype=args.dtype, max_len=MAX_LEN))
    from llmq.evaluate.adapter import Adapter, prefix_token

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = Limits(tokens_per_call(weights.config.vocab_size, memory), args.batch_size)
    ours = Adapter(model, tokenizer, prefix_token(tokenizer, weights.config), limits=limits)
    theirs = transformers_adapter(weights, args.dtype, args.batch_size)
    versions = ", ".join(f"{name} {version(name)}" for name in ("llmq", "lm-eval", "transformers", "torch"))
    print(f"{versions}; {model.caps.device}, {platform.processor() or platform.machine()}")
    print(
        f"{args.dtype}, {torch.get_num_threads()} threads, {args.batch_size} continuations at once, {args.limit} items"
    )
    for task in args.tasks.split(","):
        options = {"limit": args.limit, "data_dir": args.data_dir}
        timed(task, {**options, "limit": 2}, ours)  # kernels are compiled, memory is touched
        timed(task, {**options, "limit": 2}, theirs)
        seconds, found = timed(task, options, ours)
        other_seconds, expected = timed(task, options, theirs)
        figures = ", ".join(
            f"{name.split('/')[1]} {metric.value:.4f} and {expected.metrics[name].value:.4f}"
            for name, metric in found.metrics.items()
        )
        print(
            f"{task}: llmq {seconds:.1f} s, lm-eval {other_seconds:.1f} s, {other_seconds / seconds:.1f} times; {figures}",
            flush=True,
        )


if __name__ == "__main__":
    main()
