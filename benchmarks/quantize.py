"""What each algorithm of ``llmq quantize`` gives: perplexity, seconds and peak memory in one table.

    python benchmarks/quantize.py MODEL --dataset FILE --text FILE --window 2048 [--text FILE --window 1024]
        [--num-samples 32] [--groupsize 64] [--algorithms rtn,mse,gptq] [--work DIR]

Every artifact is made by the command in a process of its own, with embedding and head kept, and
measured on the first 16,384 tokens of each text, in windows that do not overlap. Its seconds are wall
time, CPU seconds stand beside them, and the load of the machine above: on a busy one only the second tells.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from llmq.quantize.options import ALGORITHMS

MAX_TOKENS = 16_384


def measure(model: Path | str, texts: list[tuple[Path, int]], output: Path) -> list[float]:
    """Perplexity of a model on each text."""
    found = []
    for text, window in texts:
        options = ["--perplexity", text, "--window", window, "--max-tokens", MAX_TOKENS, "--backend", "cpu"]
        run("eval", model, *options, "--output", output)
        found.append(json.loads(output.read_text())["metrics"]["perplexity/token"]["value"])
    return found


def run(*args: object) -> tuple[float, float, float]:
    """Run a command: wall seconds, CPU seconds, peak memory in GB."""
    start = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", "llmq", *map(str, args)], stderr=subprocess.PIPE)
    assert process.stderr
    error = process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(error.decode())
    return time.monotonic() - start, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 / 1e9


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--dataset", type=Path, required=True)
    parser.add_argument("--text", type=Path, action="append", required=True)
    parser.add_argument("--window", type=int, action="append", required=True)
    parser.add_argument("--num-samples", type=int, default=32)
    parser.add_argument("--groupsize", type=int, default=64)
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS))
    parser.add_argument("--work", type=Path)
    args = parser.parse_args()
    texts = list(zip(args.text, args.window, strict=True))
    work = args.work or Path(tempfile.mkdtemp())
    names = [f"{text.stem} / {window}" for text, window in texts]
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; {args.num_samples} samples of 512 tokens")
    print(f"| algorithm | grid | {' | '.join(names)} | s | CPU s | GB |")
    print("|---" * (5 + len(names)) + "|")
    print(f"| source | | {' | '.join(f'{p:.2f}' for p in measure(args.model, texts, work / 'eval.json'))} | | | |")
    for algorithm in args.algorithms.split(","):
        for grid in ("sym", "asym"):
            if ALGORITHMS[algorithm].grid == "hqq" and grid == "sym":
                continue
            artifact = work / f"{algorithm}-{grid}"
            options = ["--algorithm", algorithm, f"--{grid}", "--groupsize", args.groupsize, "--embedding", "none"]
            data = ["--dataset", args.dataset, "--num-samples", args.num_samples]
            options += data if ALGORITHMS[algorithm].needs_data else []
            cost = run(
                "quantize", args.model, "-o", artifact, "--force", "--lm-head", "none", *options, "--backend", "cpu"
            )
            found = measure(artifact, texts, work / "eval.json")
            cells = [*(f"{p:.2f}" for p in found), f"{cost[0]:.0f}", f"{cost[1]:.0f}", f"{cost[2]:.1f}"]
            print(f"| {algorithm} | {grid} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
