"""One request of a load test: send it, and note when each part of its answer arrived.

Requests go to ``/v1/completions`` as streams, to any server that speaks OpenAI's protocol.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson


@dataclass(frozen=True, slots=True)
class Prompt:
    """What one request asks.

    Attributes:
        body: Fields of the request's JSON, apart from those every request has.
        path: Where it goes.
    """

    body: Mapping[str, Any]
    path: str = "/v1/completions"


@dataclass(slots=True)
class Outcome:
    """What became of one request. Times are in seconds since the load began.

    Attributes:
        scheduled: When it was due: drawn beforehand in an open loop, the moment of sending in a closed one.
        sent: When it was sent.
        arrivals: When each part of the answer that held text arrived.
        ended: When the answer was complete, or given up.
        prompt_tokens: As the server counted them.
        output_tokens: As the server counted them.
        error: Kind of failure; None if the answer is complete.
    """

    scheduled: float
    sent: float
    arrivals: list[float] = field(default_factory=list[float])
    ended: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None


class EventParser:
    """The ``data`` of server-sent events, from bytes cut anywhere."""

    def __init__(self) -> None:
        self._line = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Take what arrived.

        Args:
            chunk: Bytes of the body.

        Yields:
            The data of each event that is now complete. Comments and other fields are left out.
        """
        *lines, self._line = (self._line + chunk).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                yield b"\n".join(self._data)
                self._data.clear()


async def send(client: httpx.AsyncClient, prompt: Prompt, scheduled: float, began: float) -> Outcome:
    """Send a request and read its answer to the end.

    Args:
        client: Knows the server's address and key.
        prompt: What to ask.
        scheduled: When it was due, in seconds since `began`.
        began: When the load began, on the monotonic clock.

    Returns:
        What became of it; failures are outcomes too.
    """
    outcome = Outcome(scheduled, time.perf_counter() - began)
    try:
        async with client.stream("POST", prompt.path, content=orjson.dumps(prompt.body)) as response:
            if response.is_success:
                await _read(response, outcome, began)
            else:
                await response.aread()
                outcome.error = f"HTTP {response.status_code}"
    except httpx.HTTPError as err:
        outcome.error = type(err).__name__
    outcome.ended = time.perf_counter() - began
    return outcome


async def _read(response: httpx.Response, outcome: Outcome, began: float) -> None:
    parser = EventParser()
    async for chunk in response.aiter_raw():
        now = time.perf_counter() - began
        for data in parser.feed(chunk):
            if data == b"[DONE]":
                return
            try:
                event = orjson.loads(data)
            except orjson.JSONDecodeError:
                outcome.error = "malformed event"
                return
            if "error" in event:
                outcome.error = "error in stream"
                return
            if any(_has_text(choice) for choice in event.get("choices") or ()):
                outcome.arrivals.append(now)
            if usage := event.get("usage"):
                outcome.prompt_tokens = usage.get("prompt_tokens", 0)
                outcome.output_tokens = usage.get("completion_tokens", 0)
    outcome.error = "stream without [DONE]"


def _has_text(choice: Mapping[str, Any]) -> bool:
    return bool(choice.get("text") or (choice.get("delta") or {}).get("content"))
