"""What the answers of both APIs have in common: events of several prompts, and what they used."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from llmq.engine.request import Event, PromptDone, Request
from llmq.engine.service import EngineService
from llmq.errors import ConfigError
from llmq.serve.errors import ApiError, invalid


class Usage:
    """Tokens of a request, over all its prompts and choices."""

    def __init__(self, prompt_tokens: int) -> None:
        self._prompt = prompt_tokens
        self._cached = 0
        self._completion = 0

    def add(self, event: Event) -> None:
        """Count an event.

        Args:
            event: Of the engine.

        Raises:
            ApiError: The engine could not go on with the answer.
        """
        if isinstance(event, PromptDone):
            self._cached += event.cached_tokens
            return
        self._completion += len(event.tokens)
        if event.finish_reason in ("error", "abort"):
            raise ApiError(
                500, "The model gave no usable result; the answer ends here.", kind="server_error", code="engine_error"
            )

    def json(self) -> dict[str, Any]:
        """OpenAI's ``usage``."""
        return {
            "prompt_tokens": self._prompt,
            "completion_tokens": self._completion,
            "total_tokens": self._prompt + self._completion,
            "prompt_tokens_details": {"cached_tokens": self._cached},
        }


class Answer(Protocol):
    """An answer that grows by events, in one of OpenAI's shapes."""

    usage: Usage

    def chunks(self, prompt: int, event: Event) -> list[dict[str, Any]]:
        """Take an event.

        Args:
            prompt: Which prompt it belongs to.
            event: Of the engine.

        Returns:
            What a stream says of it.
        """
        ...

    def envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """A chunk.

        Args:
            choices: What it says.

        Returns:
            JSON.
        """
        ...

    def result(self) -> dict[str, Any]:
        """The whole answer, after its last event."""
        ...


async def collect(answer: Answer, events: AsyncGenerator[tuple[int, Event]]) -> dict[str, Any]:
    """The whole answer at once.

    Args:
        answer: Takes the events.
        events: Of every prompt.

    Returns:
        The body of the response.
    """
    async with aclosing(events):
        async for prompt, event in events:
            answer.usage.add(event)
            answer.chunks(prompt, event)
    return answer.result()


async def growing(
    answer: Answer, events: AsyncGenerator[tuple[int, Event]], *, include_usage: bool
) -> AsyncGenerator[dict[str, Any]]:
    """The answer as chunks.

    Args:
        answer: Takes the events.
        events: Of every prompt.
        include_usage: Say at the end what was used.

    Yields:
        Chunks.
    """
    extra: dict[str, Any] = {"usage": None} if include_usage else {}
    async with aclosing(events):
        async for prompt, event in events:
            answer.usage.add(event)
            for chunk in answer.chunks(prompt, event):
                yield chunk | extra
    if include_usage:
        yield answer.envelope([]) | {"usage": answer.usage.json()}


async def all_events(
    service: EngineService, requests: Sequence[Request], width: int, grammar: str
) -> AsyncGenerator[tuple[int, Event]]:
    """The events of several requests as they come.

    Args:
        service: Answers them.
        requests: At least one.
        width: How many are handed over at a time, so that one body cannot fill the queue.
        grammar: The field that the grammar comes from.

    Yields:
        Which request, and its event.
    """
    if len(requests) == 1:
        async with aclosing(_events(service, requests[0], grammar)) as events:
            async for event in events:
                yield 0, event
        return
    merged: asyncio.Queue[tuple[int, Event | BaseException | None]] = asyncio.Queue()
    turns = asyncio.Semaphore(width)

    async def one(i: int) -> None:
        last: BaseException | None = None
        try:
            async with turns, aclosing(_events(service, requests[i], grammar)) as events:
                async for event in events:
                    merged.put_nowait((i, event))
        except Exception as err:
            last = err
        merged.put_nowait((i, last))

    tasks = [asyncio.create_task(one(i)) for i in range(len(requests))]
    try:
        left = len(tasks)
        while left:
            i, event = await merged.get()
            if isinstance(event, BaseException):
                raise event
            if event is None:
                left -= 1
            else:
                yield i, event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _events(service: EngineService, request: Request, grammar: str) -> AsyncGenerator[Event]:
    async with aclosing(service.generate(request)) as events:
        try:
            async for event in events:
                yield event
        except ConfigError as err:
            if str(err).startswith("grammar:"):
                raise invalid(f"{grammar}{str(err).removeprefix('grammar')}", grammar) from err
            raise
