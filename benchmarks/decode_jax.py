"""What int4 gives on JAX without an accelerator: prompts and answers, as ratios to the same model in float32.

    python -m benchmarks.decode_jax MODEL [--groupsize 64] [--prompt-len 128] [--gen-len 64] [--rounds 5] [--work DIR]

Converts the model with ``llmq convert``, opens both in one process and lets them take turns; each figure is the median of
the rounds' ratios. A batch of 1 runs in a model opened for one sequence, as a user of one would open it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import numpy as np

from llmq.backends import speed
from llmq.backends.base import ModelOptions
from llmq.backends.registry import load_backend
from llmq.checkpoint.loader import load_weights

BATCH_SIZES = (1, 8)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--groupsize", type=int, default=64)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--gen-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", type=Path)
    args = parser.parse_args()
    artifact = (args.work or Path(tempfile.mkdtemp())) / "int4"
    options = ["--scheme", "int4_blockwise", "--groupsize", str(args.groupsize), "--force"]
    subprocess.run([sys.executable, "-m", "llmq", "convert", args.model, "-o", artifact, *options], check=True)
    versions = {name: version(name) for name in ("llmq", "jax", "jaxlib")}
    print(json.dumps({"versions": versions, "cores": os.cpu_count(), "load": os.getloadavg()[0], **speed.machine()}))
    print("| batch | float32: prefill, decode, both tokens/s | int4 | ratios |\n|---|---|---|---|")
    for batch_size in BATCH_SIZES:
        rounds = measure([args.model, str(artifact)], batch_size, args.prompt_len, args.gen_len, args.rounds)
        figures = [*np.median(rounds, axis=1), np.median(rounds[1] / rounds[0], axis=0)]
        cells = [", ".join(f"{one:.{digits}f}" for one in row) for row, digits in zip(figures, (1, 1, 2), strict=True)]
        print(f"| {batch_size} | {' | '.join(cells)} |", flush=True)


def measure(models: list[str], batch_size: int, prompt_len: int, gen_len: int, num_rounds: int) -> np.ndarray:
    """Tokens a second of prompts, of answers and of both: `[models, rounds, 3]`."""
    options = ModelOptions(dtype="float32", num_slots=batch_size, max_len=prompt_len + gen_len)
    opened = [load_backend("tpu").open_model(load_weights(model), options) for model in models]
    states = [model.warmup(model.init_state()) for model in opened]
    found = np.empty((len(models), num_rounds, 3))
    for turn in range(num_rounds):
        for index, model in enumerate(opened):
            states[index], (_, prefill, decode) = speed.run_once(model, states[index], batch_size, prompt_len, gen_len)
            prompts, answers = batch_size * prompt_len, batch_size * (gen_len - 1)
            found[index, turn] = prompts / prefill, answers / decode, (prompts + answers) / (prefill + decode)
    return found


if __name__ == "__main__":
    main()
