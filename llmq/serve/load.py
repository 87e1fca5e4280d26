"""Load on a server, and how it bears it: the work behind ``llmq bench serve``.

A *closed* loop keeps a number of requests in flight; each answer makes room for the next request,
so a slow server is asked less often. An *open* loop sends at times drawn beforehand, a Poisson process
of a given rate, whether or not earlier answers are there. Its latencies count from the time a request was
due, not from when it was sent: a server, or a client, that falls behind cannot hide it
(coordinated omission).
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

import httpx
import orjson
from pydantic import Field, model_validator

from llmq.config import Frozen
from llmq.errors import BackendError, ConfigError
from llmq.serve.load_client import Outcome, Prompt, send

#: Words whose tokens random prompts are drawn from.
_WORDS = (
    "time year people way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work number night point home water "
    "room mother area money story fact month lot right study book eye job word business issue side kind"
)

#: After these a server that takes no connections is not there.
_CONNECT_SECONDS = 10.0


class LoadOptions(Frozen):
    """What load to put on a server.

    Attributes:
        url: Of the server, without ``/v1``.
        model: As in ``/v1/models``; None takes the first one there.
        concurrency: Requests in flight in a closed loop.
        rate: Requests a second in an open loop; None makes the loop closed.
        num_requests: Stop sending after this many.
        duration: Stop sending after this many seconds; what is under way then is awaited.
        prompt_tokens: Length of the random prompts.
        max_tokens: Length of every answer; end tokens are ignored.
        dataset: JSON lines with a ``prompt`` or ``messages`` each, in place of random prompts.
        seed: Of prompts and arrivals.
        timeout: Seconds without a byte after which a request has failed.
    """

    url: str
    model: str | None = None
    concurrency: Annotated[int, Field(ge=1, le=4096)] = 8
    rate: Annotated[float, Field(gt=0, le=1e5)] | None = None
    num_requests: Annotated[int, Field(ge=1)] | None = None
    duration: Annotated[float, Field(gt=0)] | None = None
    prompt_tokens: Annotated[int, Field(ge=1)] = 128
    max_tokens: Annotated[int, Field(ge=1)] = 64
    dataset: Path | None = None
    seed: Annotated[int, Field(ge=0)] = 0
    timeout: Annotated[float, Field(gt=0)] = 300.0

    @model_validator(mode="after")
    def _ends(self) -> Self:
        if self.num_requests is None and self.duration is None:
            raise ValueError("must end: give a number of requests or a duration")
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url={self.url!r} must begin with http:// or https://")
        return self

    @property
    def arrivals(self) -> str:
        """The arrival process, in words."""
        if self.rate is None:
            return f"closed loop, {self.concurrency} requests in flight"
        return f"open loop, Poisson process of {self.rate:g} requests/s, seed {self.seed}"


@dataclass(frozen=True, slots=True)
class Load:
    """What a run measured.

    Attributes:
        options: What it was asked to do, with `LoadOptions.model` filled in.
        server: Body of ``/version``; empty where there is none.
        outcomes: One for each request that ended, in the order in which they ended.
        num_cut: Requests that were under way when the run was interrupted.
        seconds: From the first request to the end of the last.
        cpu_seconds: Processor time that the client spent in them.
    """

    options: LoadOptions
    server: Mapping[str, Any]
    outcomes: Sequence[Outcome]
    num_cut: int
    seconds: float
    cpu_seconds: float


def run_load(options: LoadOptions, key: str | None = None, ended: Callable[[Outcome], None] = lambda _: None) -> Load:
    """Put load on a server until it has been asked enough, or until Ctrl-C.

    Args:
        options: What load.
        key: The server's API key; None sends none.
        ended: Told of every request that ended.

    Returns:
        What was measured; after Ctrl-C, what was measured until then.

    Raises:
        BackendError: The server cannot be reached, or refuses the key.
        ConfigError: It does not have the model, or the dataset cannot be read.
    """
    return asyncio.run(_run(options, key, ended))


async def _run(options: LoadOptions, key: str | None, ended: Callable[[Outcome], None]) -> Load:
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    # A pool that makes requests wait for a connection would slow an open loop down to the server's pace.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    timeout = httpx.Timeout(options.timeout, connect=_CONNECT_SECONDS)
    async with httpx.AsyncClient(base_url=options.url, headers=headers, limits=limits, timeout=timeout) as client:
        options, server = await _ask(client, options)
        prompts = await _prompts(client, options)
        outcomes: list[Outcome] = []
        free = asyncio.Semaphore(options.concurrency)
        num_sent = 0
        began, cpu_began = time.perf_counter(), time.process_time()

        async def one(prompt: Prompt, scheduled: float) -> None:
            outcomes.append(outcome := await send(client, prompt, scheduled, began))
            free.release()
            ended(outcome)

        with suppress(asyncio.CancelledError):  # Ctrl-C: asyncio.run cancels this task once
            async with asyncio.TaskGroup() as requests:
                async for scheduled in _schedule(options, began, free):
                    requests.create_task(one(next(prompts), scheduled))
                    num_sent += 1
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
        return Load(options, server, outcomes, num_sent - len(outcomes), seconds, cpu_seconds)


async def _schedule(options: LoadOptions, began: float, free: asyncio.Semaphore) -> AsyncIterator[float]:
    """When requests are due, in seconds since `began`, each yielded when it is time."""
    times = arrival_times(options.rate, options.seed) if options.rate else None
    num_sent = 0
    while options.num_requests is None or num_sent < options.num_requests:
        if times is None:
            await free.acquire()
            due = time.perf_counter() - began
        else:
            due = next(times)
        if options.duration is not None and due >= options.duration:
            return
        await asyncio.sleep(max(0.0, due - (time.perf_counter() - began)))
        yield due
        num_sent += 1


def arrival_times(rate: float, seed: int) -> Iterator[float]:
    """A Poisson process.

    Args:
        rate: Arrivals a second.
        seed: The same seed gives the same times.

    Yields:
        Seconds since the beginning, without end.
    """
    rng = random.Random(seed)  # noqa: S311
    due = 0.0
    while True:
        due += rng.expovariate(rate)
        yield due


async def _ask(client: httpx.AsyncClient, options: LoadOptions) -> tuple[LoadOptions, Mapping[str, Any]]:
    """Which model there is, and what the server says of itself."""
    try:
        response = await client.get("/v1/models")
        if not response.is_success:
            raise BackendError(f"url={options.url}: /v1/models answers {response.status_code}; check address and key.")
        names = [model["id"] for model in response.json()["data"]]
        version = await client.get("/version")
        server = version.json() if version.is_success else {}
    except httpx.HTTPError as err:
        raise BackendError(f"url={options.url}: no server answers there ({type(err).__name__}).") from err
    except (ValueError, KeyError, TypeError) as err:
        raise BackendError(f"url={options.url}: does not speak OpenAI's protocol; check the address.") from err
    if options.model not in (None, *names):
        raise ConfigError(f"model={options.model!r}: the server has {', '.join(names)}.")
    return options.model_copy(update={"model": options.model or names[0]}), server


async def _prompts(client: httpx.AsyncClient, options: LoadOptions) -> Iterator[Prompt]:
    common = {
        "model": options.model, "max_tokens": options.max_tokens, "stream": True,
        "stream_options": {"include_usage": True}, "temperature": 0, "ignore_eos": True,
    }  # fmt: skip
    if options.dataset is not None:
        return _cycle(read_dataset(options.dataset), common, options.seed)
    response = await client.post("/tokenize", json={"model": options.model, "prompt": _WORDS})
    if not response.is_success:
        raise BackendError(
            f"url={options.url}: /tokenize answers {response.status_code}, which random prompts need; give a --dataset."
        )
    return _random_prompts(response.json()["tokens"][1:], options, common)


def _random_prompts(tokens: Sequence[int], options: LoadOptions, common: Mapping[str, Any]) -> Iterator[Prompt]:
    rng = random.Random(options.seed)  # noqa: S311
    while True:
        yield Prompt({**common, "prompt": rng.choices(tokens, k=options.prompt_tokens)})


def _cycle(rows: Sequence[Mapping[str, Any]], common: Mapping[str, Any], seed: int) -> Iterator[Prompt]:
    rng = random.Random(seed)  # noqa: S311
    while True:
        for row in rng.sample(rows, len(rows)):
            yield Prompt({**common, **row}, "/v1/chat/completions" if "messages" in row else "/v1/completions")


def read_dataset(path: Path) -> Sequence[Mapping[str, Any]]:
    """Requests from a file.

    Args:
        path: JSON lines; ``prompt`` or ``messages``, and whatever else a request may hold.

    Returns:
        The lines' objects.

    Raises:
        ConfigError: The file cannot be read, or a line is not such an object.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        rows = [orjson.loads(line) for line in lines]
    except (OSError, ValueError) as err:
        raise ConfigError(f"dataset={path}: cannot be read as JSON lines ({err}).") from err
    if not rows or not all(isinstance(row, dict) and ("prompt" in row or "messages" in row) for row in rows):
        raise ConfigError(f"dataset={path}: every line must be an object with a prompt or messages.")
    return rows
