"""From the start of a command to its first token on the JAX backend, with an empty compilation cache and with a full one.

    python -m benchmarks.tpu_start MODEL [--rounds 3] [--device cpu]

Each start is a process of its own, ``llmq generate --max-tokens 1``, and each round has a cache of its own. CPU
seconds stand beside wall time: on a busy machine only these tell. A program that a start compiles is kept in the
cache, so programs that appear there are those it compiled.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path


def start(model: str, device: str | None, cache: Path) -> tuple[float, float, int]:
    """Wall seconds, CPU seconds and compiled programs of a start."""
    options = ["--max-tokens", "1", "--backend", "tpu", *(["--device", device] if device else [])]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    before, begin = set(cache.rglob("*-cache")), time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "llmq", "generate", model, "The capital of France is", *options],
        env={**environment, "XDG_CACHE_HOME": str(cache)},
        stdout=subprocess.DEVNULL,
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(process.returncode)
    return time.monotonic() - begin, used.ru_utime + used.ru_stime, len(set(cache.rglob("*-cache")) - before)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device")
    args = parser.parse_args()
    found: dict[str, list[tuple[float, float, int]]] = {"empty": [], "full": []}
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as cache:
            for kind in found:
                found[kind].append(start(args.model, args.device, Path(cache)))
    print(f"llmq {version('llmq')}, jax {version('jax')}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print("| compilation cache | wall s | CPU s | programs compiled |\n|---|---|---|---|")
    for kind, starts in found.items():
        wall, cpu, compiled = (statistics.median(values) for values in zip(*starts, strict=True))
        print(f"| {kind} | {wall:.1f} | {cpu:.1f} | {compiled:.0f} |")
    wall, cpu = (
        statistics.median(full[at] / empty[at] for empty, full in zip(*found.values(), strict=True)) for at in (0, 1)
    )
    print(f"full against empty, median of the rounds: {wall:.2f} of the wall time, {cpu:.2f} of the CPU time")


if __name__ == "__main__":
    main()
