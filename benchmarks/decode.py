"""Tokens a second of llmq and of others on one CPU, side by side in one run.

    python -m benchmarks.decode MODEL [--groupsize 64] [--rounds 5] [--steps 128] [--threads 1,2 | --cpu]
        [--genai PYTHON=MODEL] [--work DIR]

Every contestant is a process of its own for every number of threads, and all take turns, so that whatever else the
machine does falls on all of them. A row is the better number of threads, its median and its range, for a
prompt of 128 tokens and 128 steps of one sequence, the same of eight, and a prompt of 512. `llmq`
chooses its threads itself. transformers and torchao run from this interpreter, on the weights dequantized to bf16;
onnxruntime-genai from one that has it, on what its own builder made. On a machine that is busy with other
things --cpu counts tokens a CPU second of one thread.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

PEERS = Path(__file__).parent / "peers"


@dataclass
class Contestant:
    """A process that answers lines."""

    name: str
    threads: str
    process: subprocess.Popen[str]
    told: dict[str, str]

    @classmethod
    def start(cls, name: str, threads: str, command: list[object]) -> "Contestant":
        environment = {**os.environ, "OMP_NUM_THREADS": str(os.cpu_count())}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(list(map(str, command)), text=True, env=environment, **pipes)
        return cls(name, threads, process, json.loads(process.stdout.readline() or '{"name": "", "head": "failed"}'))

    def seconds(self, load: tuple[int, int, int]) -> tuple[float, float]:
        """Of the prompt, and of all further steps."""
        self.process.stdin.write(" ".join(map(str, load)) + "\n")
        self.process.stdin.flush()
        return tuple(json.loads(self.process.stdout.readline()))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--groupsize", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--genai", metavar="PYTHON=MODEL")
    parser.add_argument("--work", type=Path)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--compile", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.answer:
        answer(args.model, args.compile, args.cpu)
        return
    loads = {
        "decode, batch 1": (128, args.steps, 1),
        "decode, batch 8": (128, max(2, args.steps // 4), 8),
        "prefill 512": (512, 2, 1),
    }
    work = args.work or Path(tempfile.mkdtemp())
    int4, twin = work / "int4", work / "twin"
    if not int4.exists():
        convert = ("convert", args.model, "--scheme", "int4_blockwise", "--groupsize", str(args.groupsize), "-o", int4)
        subprocess.run([sys.executable, "-m", "llmq", *convert], check=True, stderr=subprocess.DEVNULL)
    if not twin.exists():
        subprocess.run([sys.executable, "-m", "benchmarks.twin", args.model, twin], check=True)
    contestants = started(args, int4, twin)
    print(f"{platform.platform()}, {cpu_name()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start")
    print(f"llmq {version('llmq')}, " + ", ".join(dict.fromkeys(c.told["name"] for c in contestants if c.told["name"])))
    found = {(id(c), load): [] for c in contestants for load in loads}
    for _ in range(args.rounds):
        for load, sizes in loads.items():
            for contestant in contestants:
                prompt, steps = contestant.seconds(sizes)
                prompt_len, gen_len, batch_size = sizes
                done = prompt_len / prompt if load.startswith("prefill") else batch_size * (gen_len - 1) / steps
                found[id(contestant), load].append(done)
    print(
        f"load {os.getloadavg()[0]:.1f} at the end; tokens a {'CPU second of one thread' if args.cpu else 'second'}, median of {args.rounds} rounds (lowest to highest), threads"
    )
    print(f"| contestant | head | {' | '.join(loads)} |")
    print("|---" * (2 + len(loads)) + "|")
    best: dict[str, list[float]] = {}
    for name in dict.fromkeys(c.name for c in contestants):
        cells, best[name] = [], []
        for load in loads:
            mine = [(found[id(c), load], c.threads) for c in contestants if c.name == name]
            rates, threads = max(mine, key=lambda one: statistics.median(one[0]))
            best[name].append(statistics.median(rates))
            cells.append(f"{best[name][-1]:.1f} ({min(rates):.1f} to {max(rates):.1f}), {threads}")
        head = next(c.told["head"] for c in contestants if c.name == name)
        print(f"| {name} | {head} | {' | '.join(cells)} |")
    print("\nllmq against the others, rounds paired, median of the ratios: batch 1, batch 8, prefill 512")
    ours = [name for name in best if name.startswith("llmq int4")]
    for mine in ours:
        for other in best:
            if other != mine:
                ratios = [paired(found, contestants, mine, other, load) for load in loads]
                print(f"  {mine} / {other}: {', '.join(f'{ratio:.2f}' for ratio in ratios)}")
    for contestant in contestants:
        contestant.process.stdin.close()


def started(args: argparse.Namespace, int4: Path, twin: Path) -> list[Contestant]:
    """All of them, loaded one after the other."""
    clock = ["--cpu"] if args.cpu else []
    ours = [sys.executable, "-m", "benchmarks.decode", "--answer", *clock]
    chosen = "1" if args.cpu else "own choice"
    contestants = [
        Contestant.start("llmq int4 --compile", chosen, [*ours, "--compile", int4]),
        Contestant.start("llmq int4", chosen, [*ours, int4]),
        Contestant.start("llmq bf16", chosen, [*ours, twin]),
    ]
    peer = [sys.executable, PEERS / "decode_transformers.py", twin]
    for threads in ["1"] if args.cpu else args.threads.split(","):
        contestants.append(Contestant.start("transformers bf16", threads, [*peer, threads, *clock]))
        int4_peer = [*peer, threads, *clock, "--int4", args.groupsize]
        contestants.append(Contestant.start("transformers + torchao int4", threads, int4_peer))
        if args.genai and not args.cpu:
            python, model = args.genai.split("=", 1)
            command = [python, PEERS / "decode_genai.py", model, threads]
            contestants.append(Contestant.start("onnxruntime-genai int4, int8 activations", threads, command))
    for contestant in contestants:
        if contestant.told["head"] == "failed":
            print(f"{contestant.name}: did not start, and is left out")
    return [contestant for contestant in contestants if contestant.told["head"] != "failed"]


def paired(found: dict, contestants: list[Contestant], mine: str, other: str, load: str) -> float:
    """Median over rounds of the ratio of neighbours, each with its better number of threads."""

    def rates(name: str) -> list[float]:
        return max((found[id(c), load] for c in contestants if c.name == name), key=statistics.median)

    return statistics.median(a / b for a, b in zip(rates(mine), rates(other), strict=True))


def answer(path: str, compiled: bool, cpu: bool) -> None:
    """llmq's own contestant."""
    from llmq.backends import speed
    from llmq.backends.base import ModelOptions
    from llmq.backends.registry import load_backend
    from llmq.checkpoint.loader import load_weights

    options = ModelOptions(device="cpu", num_slots=8, max_len=640, compile=compiled, num_threads=1 if cpu else None)
    if cpu:
        speed.time = SimpleNamespace(perf_counter=time.process_time)
    weights = load_weights(path)
    model = load_backend("gpu").open_model(weights, options)
    state = model.warmup(model.init_state())
    kernels = "; ".join(kernel for kernel in model.caps.kernels if "1 of" in kernel)
    head = "bf16" if weights.quantization is None else weights.quantization.embedding
    print(json.dumps({"name": "", "head": head, "kernels": kernels}), flush=True)
    for line in sys.stdin:
        prompt_len, gen_len, batch_size = map(int, line.split())
        state, (_, prompt, steps) = speed.run_once(model, state, batch_size, prompt_len, gen_len)
        print(json.dumps((prompt, steps)), flush=True)


def cpu_name() -> str:
    """As the system names it."""
    with Path("/proc/cpuinfo").open() as lines:
        return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


if __name__ == "__main__":
    main()
