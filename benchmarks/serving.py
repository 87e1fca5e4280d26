"""`llmq serve` and other people's servers under the same load on one CPU, side by side in one run.

    python -m benchmarks.serving ARTIFACT [--vllm PYTHON=CHECKPOINT] [--vllm-threads 1] [--llama-server BINARY=GGUF]...
        [--llama-threads 1,2] [--rounds 3] [--waves 1] [--concurrency 1,8,16]

Every server is a process of its own, and a peer runs in its own environment, once for every number of threads, vllm
compiled, as is its default, and eager; `llmq` chooses its threads itself, and runs with and without --compile. All are
started first, then loaded one at a time and in turns by the client of `llmq bench serve`, so that whatever else the
machine does falls on all of them: a closed loop of streams, 64 greedy tokens each, whatever they are, for random
prompts of 64 that are new and the same for all. Peers wait for their threads without spinning, so that an idle one
takes nothing from the others. ``peers/checkpoint_w4a16.py`` writes vllm's checkpoint.
"""

import argparse
import itertools
import json
import os
import platform
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer

from benchmarks.decode import cpu_name
from llmq.serve.load import LoadOptions, run_load
from llmq.serve.load_summary import summarize

PROMPT_LEN, GEN_LEN, MAX_LEN = 64, 64, 256
START_SECONDS = 300
#: As vllm's documentation has it for a machine that is shared.
VLLM = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1", "OMP_WAIT_POLICY": "passive",
}  # fmt: skip

#: Name, command and environment.
Contestant = tuple[str, list[object], dict[str, str]]


@dataclass
class Server:
    """A process that answers OpenAI's API, and what it reached: for each concurrency, the numbers of each round."""

    name: str
    process: subprocess.Popen[bytes]
    url: str
    found: dict[int, list[tuple[float, float, float]]] = field(default_factory=dict)

    @classmethod
    def start(cls, name: str, command: list[object], environment: dict[str, str], log: Path) -> "Server":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        words = [str(port if part == "PORT" else part) for part in command]
        with log.open("wb") as output:
            process = subprocess.Popen(
                words, env={**os.environ, **environment}, stdout=output, stderr=subprocess.STDOUT, cwd=log.parent
            )
        server, until = cls(name, process, f"http://127.0.0.1:{port}"), time.monotonic() + START_SECONDS
        while not server.healthy():
            if process.poll() is not None or time.monotonic() > until:
                process.kill()
                sys.exit(f"{name}: did not start; {log} says why")
            time.sleep(0.5)
        return server

    def healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5).is_success
        except httpx.HTTPError:
            return False

    def load(self, prompts: Path, concurrency: int, num_requests: int) -> dict[str, Any]:
        """The summary of as many requests as there are prompts."""
        options = LoadOptions(
            url=self.url, concurrency=concurrency, num_requests=num_requests, max_tokens=GEN_LEN, dataset=prompts
        )
        summary = summarize(run_load(options))
        if summary["output_tokens"] != num_requests * GEN_LEN:
            sys.exit(f"{self.name}: {summary['output_tokens']} tokens, errors {summary['errors']}")
        return summary


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("artifact")
    parser.add_argument("--vllm", metavar="PYTHON=CHECKPOINT")
    parser.add_argument("--llama-server", metavar="BINARY=GGUF", action="append", default=[])
    parser.add_argument("--vllm-threads", default="1")
    parser.add_argument("--llama-threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--waves", type=int, default=1, help="requests of a load, in multiples of its concurrency")
    parser.add_argument("--concurrency", default="1,8,16")
    args = parser.parse_args()
    work, widths = Path(tempfile.mkdtemp()), [int(width) for width in args.concurrency.split(",")]
    rng, vocabulary = random.Random(0), Tokenizer.from_file(f"{args.artifact}/tokenizer.json").get_vocab_size()
    servers: list[Server] = []

    def prompts(count: int) -> Path:
        """Fresh ones, for a cache of prefixes must not answer."""
        rows = [{"prompt": rng.choices(range(100, vocabulary), k=PROMPT_LEN)} for _ in range(count)]
        (path := work / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    try:
        print(f"{platform.platform()}, {cpu_name()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at first")
        for number, (name, command, environment) in enumerate(contestants(args, max(widths))):
            servers.append(Server.start(name, command, environment, work / f"{number}.log"))
            told = servers[-1].load(prompts(max(widths)), max(widths), max(widths))["server"]
            print(f"  {name} {told.get('version', '')}".rstrip(), flush=True)
        for binary in dict.fromkeys(peer.split("=", 1)[0] for peer in args.llama_server):
            told = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True)
            print(f"  llama-server {(told.stdout + told.stderr).partition(chr(10))[0]}", flush=True)
        for _ in range(args.rounds):
            for width in widths:
                path = prompts(width * args.waves)
                for server in servers:
                    summary = server.load(path, width, width * args.waves)
                    first, further = (summary["latency"][part]["p50"] for part in ("first_token", "per_output_token"))
                    numbers = summary["output_tokens_per_second"], 1e3 * first, 1e3 * further
                    server.found.setdefault(width, []).append(numbers)
        print(f"load {os.getloadavg()[0]:.1f} at the end")
        show(servers, widths, args.rounds)
    finally:
        for server in servers:
            server.process.terminate()
        for server in servers:
            server.process.wait(60)


def contestants(args: argparse.Namespace, width: int) -> list[Contestant]:
    """Names, commands and environments; PORT stands for the port."""
    ours: list[object] = [sys.executable, "-m", "llmq", "serve", Path(args.artifact).resolve()]
    ours += ["--port", "PORT", "--max-num-seqs", width, "--max-model-len", MAX_LEN]
    found: list[Contestant] = [("llmq int4", ours, {}), ("llmq int4 --compile", [*ours, "--compile"], {})]
    for threads in args.vllm_threads.split(",") if args.vllm else ():
        python, checkpoint = args.vllm.split("=", 1)
        command: list[object] = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", checkpoint]
        command += ["--port", "PORT", "--max-num-seqs", width, "--max-model-len", MAX_LEN]
        for eager in (["--enforce-eager"], []):
            name = f"vllm-cpu W4A16{', eager' if eager else ''}, threads {threads}"
            found.append((name, [*command, *eager], {**VLLM, "OMP_NUM_THREADS": threads}))
    for peer, threads in itertools.product(args.llama_server, args.llama_threads.split(",")):
        binary, gguf = peer.split("=", 1)
        command = [binary, "-m", gguf, "--port", "PORT", "--parallel", width, "-c", width * MAX_LEN]
        command += ["--threads", threads, "--poll", 0, "--no-webui"]
        name = f"llama-server {Path(gguf).stem.rpartition('.')[2]}, threads {threads}"
        found.append((name, command, {"OMP_WAIT_POLICY": "passive"}))
    return found


def show(servers: list[Server], widths: list[int], num_rounds: int) -> None:
    """The table, and ratios of neighbours in a round."""
    print(
        f"\nmedian of {num_rounds} rounds (lowest to highest): tokens/s, ms to the first token, ms from token to token\n"
    )
    print(f"| server | {' | '.join(f'{width} at once' for width in widths)} |")
    print("|---" * (1 + len(widths)) + "|")
    for server in servers:
        cells = (zip(*server.found[width], strict=True) for width in widths)
        print(f"| {server.name} | {' | '.join('; '.join(map(spread, cell)) for cell in cells)} |")
    print(
        f"\ntokens/s against the others, rounds paired, median (lowest to highest): {', '.join(map(str, widths))} at once"
    )
    for ours in (server for server in servers if server.name.startswith("llmq")):
        for other in (server for server in servers if server is not ours):
            pairs = (zip(ours.found[width], other.found[width], strict=True) for width in widths)
            ratios = ", ".join(spread([mine[0] / theirs[0] for mine, theirs in cell], 2) for cell in pairs)
            print(f"  {ours.name} / {other.name}: {ratios}")


def spread(values: Any, digits: int = 1) -> str:
    """Median and range."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


if __name__ == "__main__":
    main()
