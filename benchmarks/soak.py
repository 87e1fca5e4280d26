"""A server under mixed load for a while, held against the figures it promises; exits 1 when one is missed.

    python -m benchmarks.soak MODEL [--backend gpu] [--slots 8] [--streams 64] [--seconds 60] [--json]
    python -m benchmarks.soak --fake [--seconds 10]

MODEL is anything `llmq serve` opens; ``--fake`` takes the tests' scripted model, and loses its device
at the end. One request in ten hangs up, one in twenty is invalid; the others are greedy, seeded,
grammars, and several choices.
"""

import argparse
import asyncio
import json
import platform
import random
import signal
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import numpy as np

from llmq.serve.load_client import EventParser
from tests.conformance.api import COMPLETIONS, FIXED, Api
from tests.conformance.servers import FAKE, REAL, ServerProcess, free_port, running

PROMPTS = (
    "Once upon a time",
    "The capital of France is",
    "one two three",
    "def fibonacci(n):",
    "It was",
    "Q: Why?\nA:",
)
SCHEMA = {
    "type": "object",
    "properties": {"yes": {"type": "boolean"}, "of": {"enum": ["a", "b"]}},
    "required": ["yes", "of"],
    "additionalProperties": False,
}

#: Kind of request -> its fields, beside the prompt. Whoever asks the same again gets the same.
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {**FIXED, "max_tokens": 24},
    "long greedy": {**FIXED, "max_tokens": 64},
    "seeded": {"temperature": 1, "seed": 7, "ignore_eos": True, "max_tokens": 24},
    "n": {"temperature": 0.8, "seed": 5, "n": 2, "ignore_eos": True, "max_tokens": 12},
    "grammar": {
        "temperature": 1,
        "seed": 3,
        "max_tokens": 100,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    },
}

INVALID: tuple[dict[str, Any], ...] = (
    {"prompt": ""},
    {"prompt": "x", "temperature": -1},
    {"prompt": "x", "max_tokens": 1 << 30},
    {"prompt": "x", "logit_bias": {"99999999": 1}},
    {
        "prompt": "x",
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "banana"}}},
    },
)


@dataclass
class Figure:
    """One promise: what was measured, and how far it may go."""

    name: str
    measured: float
    bound: float
    unit: str = ""
    exact: bool = False

    @property
    def met(self) -> bool:
        """Whether it was kept."""
        return self.measured == self.bound if self.exact else self.measured < self.bound

    def __str__(self) -> str:
        relation = "=" if self.exact else "<"
        return f"{'ok  ' if self.met else 'MISS'}  {self.name:<46} {self.measured:>10.4g} {self.unit:<3} ({relation} {self.bound:g})"


@dataclass
class Tally:
    """What the streams saw."""

    requests: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    health: list[float] = field(default_factory=list)


async def answer(client: httpx.AsyncClient, body: dict[str, Any], parts: int | None = None) -> Sequence[str] | None:
    """Texts of a streamed answer; None if it is left after some parts. Anything else than an answer is an error."""
    texts = [""] * body.get("n", 1)
    parser = EventParser()
    async with client.stream("POST", COMPLETIONS, json={**body, "stream": True}) as response:
        if response.status_code != httpx.codes.OK:
            raise AssertionError(f"{response.status_code}: {(await response.aread())[:200]!r}")
        async for chunk in response.aiter_raw():
            for data in parser.feed(chunk):
                if data == b"[DONE]":
                    return texts
                event = json.loads(data)
                assert "error" not in event, event
                for choice in event["choices"]:
                    texts[choice["index"]] += choice["text"]
                if parts is not None and (parts := parts - 1) < 0:
                    return None
    raise AssertionError("a stream without [DONE]")


class Soak:
    """The phases, in the order in which they run."""

    def __init__(self, command: Sequence[object], slots: int, streams: int, seed: int) -> None:
        self.command = command
        self.slots, self.streams, self.rng = slots, streams, random.Random(seed)
        self.figures: list[Figure] = []
        self.solo: dict[tuple[str, str], Sequence[str]] = {}

    def add(self, name: str, measured: float, bound: float, unit: str = "", *, exact: bool = False) -> None:
        self.figures.append(figure := Figure(name, measured, bound, unit, exact))
        print(figure, file=sys.stderr, flush=True)

    def client(self, server: ServerProcess) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        return httpx.AsyncClient(base_url=server.base_url, limits=limits, timeout=300)

    async def alone(self, server: ServerProcess) -> None:
        """Every answer without neighbours."""
        async with self.client(server) as client:
            for prompt in PROMPTS:
                for kind, fields in KINDS.items():
                    texts = await answer(client, {"prompt": prompt, **fields})
                    assert texts is not None
                    self.solo[prompt, kind] = texts
                    if kind == "grammar":
                        jsonschema.validate(json.loads(texts[0]), SCHEMA)

    async def load(self, server: ServerProcess, seconds: float) -> Tally:
        """All streams for a while."""
        tally = Tally()
        deadline = time.monotonic() + seconds
        async with self.client(server) as client:

            async def one() -> None:
                dice, prompt, kind = self.rng.random(), self.rng.choice(PROMPTS), self.rng.choice(list(KINDS))
                if dice < 0.05:
                    tally.requests["invalid"] += 1
                    response = await client.post(COMPLETIONS, json=self.rng.choice(INVALID))
                    assert response.status_code == httpx.codes.BAD_REQUEST, (
                        f"{response.status_code}: {response.text[:200]}"
                    )
                    return
                parts = self.rng.randrange(4) if dice < 0.15 else None
                tally.requests["hang up" if parts is not None else kind] += 1
                texts = await answer(client, {"prompt": prompt, **KINDS[kind]}, parts)
                if texts is not None and texts != self.solo[prompt, kind]:
                    tally.faults.append(f"{kind}: {prompt!r}: {texts} differs from {self.solo[prompt, kind]}")

            async def stream() -> None:
                while time.monotonic() < deadline:
                    try:
                        await one()
                    except (AssertionError, httpx.HTTPError) as err:
                        tally.faults.append(f"{type(err).__name__} {err}")

            with probing(server, tally.health):
                await asyncio.gather(*(stream() for _ in range(self.streams)))
        return tally

    async def overload(self, server: ServerProcess, queue: int) -> None:
        """Four times as many requests as there is room for: the first fill it, the others are refused."""
        room = self.slots + queue
        body = {"prompt": "x", **FIXED, "max_tokens": 480}
        waits = defaultdict[int, list[float]](list)
        async with self.client(server) as client:
            holders = [asyncio.create_task(answer(client, body)) for _ in range(room)]
            while (found := Api(server.base_url).metrics())["llmq:num_requests_waiting"] < queue:
                assert not any(task.done() for task in holders), found
                await asyncio.sleep(0.05)
            await asyncio.to_thread(self._ask_in_vain, server, body, 3 * room, waits)
            for task in holders:
                task.cancel()
            await asyncio.gather(*holders, return_exceptions=True)
        few = len(waits[httpx.codes.OK])  # found room because an answer had ended
        self.add("requests over the queue answered 429", len(waits[429]) + few, 3 * room, exact=True)
        self.add("429 at four times capacity, p99", 1000 * float(np.percentile(waits[429], 99)), 100, "ms")

    def _ask_in_vain(
        self, server: ServerProcess, body: dict[str, Any], num: int, waits: dict[int, list[float]]
    ) -> None:
        with httpx.Client(base_url=server.base_url, timeout=300) as client:
            for _ in range(num):
                began = time.perf_counter()
                response = client.post(COMPLETIONS, json=body)
                waits[response.status_code].append(time.perf_counter() - began)
                assert response.is_success or "retry-after" in response.headers

    def hang_up(self, server: ServerProcess) -> None:
        """How long a slot is held for a client that has left."""
        api = Api(server.base_url)
        worst = 0.0
        for _ in range(10):
            with api.streaming(COMPLETIONS, prompt="x", max_tokens=400, **FIXED) as lines:
                next(lines)
            began = time.perf_counter()
            while api.slots_free() < self.slots and time.perf_counter() - began < 5:
                time.sleep(0.005)
            worst = max(worst, time.perf_counter() - began)
        self.add("slot free after a disconnect, worst of 10", 1000 * worst, 300, "ms")

    async def drain(self, server: ServerProcess) -> None:
        """SIGTERM with live streams."""
        async with self.client(server) as client:
            tasks = [
                asyncio.create_task(answer(client, {"prompt": PROMPTS[0], **KINDS["long greedy"]}))
                for _ in range(self.slots)
            ]
            await asyncio.sleep(0.3)
            server.signal(signal.SIGTERM)
            await asyncio.sleep(0.1)
            try:
                late = (await client.post(COMPLETIONS, json={"prompt": "x"})).status_code
            except httpx.TransportError:
                late = 0
            texts = await asyncio.gather(*tasks, return_exceptions=True)
        self.add("status of a request while draining", late, 503, exact=True)
        whole = sum(text == self.solo[PROMPTS[0], "long greedy"] for text in texts)
        self.add("live streams that were whole after SIGTERM", whole, self.slots, exact=True)
        self.add("exit status after SIGTERM", server.wait(60), 0, exact=True)

    async def kill(self) -> None:
        """SIGKILL, and the same port again; a second server on a port that is taken."""
        port = free_port()
        with running(*self.command, port=port) as server:
            server.signal(signal.SIGKILL)
            server.wait()
        with running(*self.command, port=port) as server:
            async with self.client(server) as client:
                texts = await answer(client, {"prompt": PROMPTS[0], **KINDS["greedy"]})
            self.add("answers after SIGKILL and a restart", texts == self.solo[PROMPTS[0], "greedy"], True, exact=True)
            with running(*self.command, port=port, ready=False) as second:
                status = second.wait(60)
                lines = [line for line in second.output().splitlines() if "port" in line]
            self.add("exit status where the port is taken", status, 2, exact=True)
            self.add("lines that say so", len(lines), 1, exact=True)

    async def lose_device(self) -> None:
        """The scripted model fails at a step: whoever waits is told, and the process ends."""
        with running(*self.command, "--fault", "decode:20") as server:
            async with self.client(server) as client:
                found = await asyncio.gather(
                    *(answer(client, {"prompt": "x", **KINDS["long greedy"]}) for _ in range(self.slots)),
                    return_exceptions=True,
                )
            told = sum(isinstance(text, AssertionError) and "error" in str(text) for text in found)
            self.add("live streams that were told of a lost device", told, self.slots, exact=True)
            self.add("exit status after it", server.wait(30), 1, exact=True)


@contextmanager
def probing(server: ServerProcess, waits: list[float]) -> Iterator[None]:
    """Ask ``/health`` twenty times a second meanwhile."""
    stop = threading.Event()

    def probe() -> None:
        with httpx.Client(base_url=server.base_url, timeout=30) as client:
            while not stop.wait(0.05):
                began = time.perf_counter()
                client.get("/health").raise_for_status()
                waits.append(time.perf_counter() - began)

    thread = threading.Thread(target=probe)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def footprint(server: ServerProcess) -> dict[str, int]:
    """Open files, threads and resident memory of a server."""
    proc = Path("/proc") / str(server.process.pid)
    status = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines() if ":" in line)
    return {
        "files": len(list((proc / "fd").iterdir())),
        "threads": int(status["Threads"]),
        "bytes": int(status["VmRSS"].split()[0]) * 1024,
    }


def settle(check: Callable[[], bool], seconds: float = 10) -> None:
    """Wait until something holds, or until there is no sense in waiting."""
    deadline = time.monotonic() + seconds
    while not check() and time.monotonic() < deadline:
        time.sleep(0.1)


def soak(test: Soak, seconds: float, queue: int, *, fake: bool) -> None:
    """Run all phases."""
    with running(*test.command) as server:
        api = Api(server.base_url)
        asyncio.run(test.alone(server))
        asyncio.run(test.load(server, min(10, seconds / 2)))  # buffers and pools grow to their size
        settle(lambda: api.slots_free() == test.slots)
        before, compiled = footprint(server), api.metrics()["llmq:compile_total"]
        tally = asyncio.run(test.load(server, seconds))
        settle(lambda: api.slots_free() == test.slots)
        settle(lambda: footprint(server)["files"] <= before["files"])
        after = footprint(server)
        total = tally.requests.total()
        print(f"{total} requests: {dict(tally.requests)}", file=sys.stderr)
        for fault in tally.faults[:5]:
            print(f"fault: {fault}", file=sys.stderr)
        test.add("answers that were errors, cut or not their own", len(tally.faults), 0, exact=True)
        test.add("slots free afterwards", api.slots_free(), test.slots, exact=True)
        test.add("files left open", max(0, after["files"] - before["files"]), 0, exact=True)
        test.add("threads left", max(0, after["threads"] - before["threads"]), 0, exact=True)
        test.add("resident memory grown by", (after["bytes"] - before["bytes"]) / 1e6, 20, "MB")
        test.add("functions compiled under load", api.metrics()["llmq:compile_total"] - compiled, 0, exact=True)
        test.add("/health under load, p99", 1000 * float(np.percentile(tally.health, 99)), 200, "ms")
        test.hang_up(server)
        asyncio.run(test.overload(server, queue))
        settle(lambda: api.slots_free() == test.slots)
        test.add("slots free after the overload", api.slots_free(), test.slots, exact=True)
        asyncio.run(test.drain(server))
    asyncio.run(test.kill())
    if fake:
        asyncio.run(test.lose_device())


def main() -> int:
    """Run the phases and say which figures were missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="What llmq serve opens.")
    parser.add_argument("--fake", action="store_true", help="Serve a scripted model.")
    parser.add_argument("--backend", default="gpu")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--queue", type=int, default=96)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.fake == (args.model is not None):
        parser.error("give a MODEL or --fake")
    size = ("--max-num-seqs", args.slots, "--max-model-len", 512, "--max-queue", args.queue)
    command = (
        (*FAKE, "--step-seconds", 0.02, *size)
        if args.fake
        else (*REAL, args.model, "--backend", args.backend, "--device", "cpu", *size)
    )
    test = Soak(command, args.slots, args.streams, args.seed)
    soak(test, args.seconds, args.queue, fake=args.fake)
    missed = [figure.name for figure in test.figures if not figure.met]
    if args.json:
        about = {"llmq": version("llmq"), "machine": platform.machine(), "command": [str(part) for part in command]}
        print(json.dumps({**about, "figures": [vars(figure) for figure in test.figures]}, indent=2))
    print(f"missed: {', '.join(missed)}" if missed else "every figure was met", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
