"""What each algorithm of ``llmq quantize`` gives: perplexity, seconds and peak memory in one table.

    python -m benchmarks.quantize MODEL --dataset FILE --text FILE --window 2048 [--text FILE --window 1024]
        [--max-tokens 16384] [--num-samples 32] [--groupsize 64] [--algorithms rtn,mse,gptq] [--peer hqq=PYTHON] [--work DIR]

Every artifact is made by the command in a process of its own, with embedding and head kept, and
measured on the first `--max-tokens` of each text, in windows that do not overlap. Its seconds are wall
time, CPU seconds stand beside them, and the load of the machine above: on a busy one only the second tells.
A peer is `peers/quantize_NAME.py` run by an interpreter that has the library: it writes a dequantized
checkpoint, which is measured in the same way.
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

PEERS = Path(__file__).parent / "peers"
#: Only linears are quantized, as the peers do.
KEEP = ("--embedding", "none", "--lm-head", "none")
LLMQ = (sys.executable, "-m", "llmq")


def measure(model: Path | str, texts: list[tuple[Path, int]], max_tokens: int, output: Path) -> list[float]:
    """Perplexity of a model on each text."""
    found = []
    for text, window in texts:
        options = ["--perplexity", text, "--window", window, "--max-tokens", max_tokens, "--backend", "cpu"]
        run(*LLMQ, "eval", model, *options, "--output", output)
        found.append(json.loads(output.read_text())["metrics"]["perplexity/token"]["value"])
    return found


def run(*args: object) -> tuple[float, float, float]:
    """Run a command: wall seconds, CPU seconds, peak memory in GB."""
    start = time.monotonic()
    process = subprocess.Popen(list(map(str, args)), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
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
    parser.add_argument("--max-tokens", type=int, default=16_384)
    parser.add_argument("--num-samples", type=int, default=32)
    parser.add_argument("--groupsize", type=int, default=64)
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS))
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--work", type=Path)
    args = parser.parse_args()
    texts = list(zip(args.text, args.window, strict=True))
    work = args.work or Path(tempfile.mkdtemp())
    names = [f"{text.stem} / {window}" for text, window in texts]
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; {args.num_samples} samples of 512 tokens")
    print(f"| algorithm | grid | {' | '.join(names)} | s | CPU s | GB |")
    print("|---" * (5 + len(names)) + "|")
    print(
        f"| source | | {' | '.join(f'{p:.2f}' for p in measure(args.model, texts, args.max_tokens, work / 'eval.json'))} | | | |"
    )
    for algorithm in args.algorithms.split(","):
        for grid in ("sym", "asym"):
            if ALGORITHMS[algorithm].grid == "hqq" and grid == "sym":
                continue
            artifact = work / f"{algorithm}-{grid}"
            options = ["--algorithm", algorithm, f"--{grid}", "--groupsize", args.groupsize, *KEEP, "--backend", "cpu"]
            data = ["--dataset", args.dataset, "--num-samples", args.num_samples]
            options += data if ALGORITHMS[algorithm].needs_data else []
            cost = run(*LLMQ, "quantize", args.model, "-o", artifact, "--force", *options)
            print(row(algorithm, grid, measure(artifact, texts, args.max_tokens, work / "eval.json"), cost), flush=True)
    for name, python in (peer.split("=", 1) for peer in args.peer):
        twin, artifact = work / "twin", work / f"peer-{name}"
        run(sys.executable, "-m", "benchmarks.twin", args.model, twin)
        options = ["--groupsize", args.groupsize, "--dataset", args.dataset, "--num-samples", args.num_samples]
        cost = run(python, PEERS / f"quantize_{name}.py", twin, artifact, *options)
        print(row(f"peer: {name}", "", measure(artifact, texts, args.max_tokens, work / "eval.json"), cost), flush=True)


def row(name: str, grid: str, perplexities: list[float], cost: tuple[float, float, float]) -> str:
    """A line of the table."""
    wall, cpu, memory = cost
    return (
        f"| {name} | {grid} | {' | '.join(f'{p:.2f}' for p in perplexities)} | {wall:.0f} | {cpu:.0f} | {memory:.1f} |"
    )


if __name__ == "__main__":
    main()
