"""What one consumer has not read yet. All of it runs on the consumer's event loop."""

import asyncio
from collections.abc import Sequence

from llmq.engine.request import Delta, Event


class Mailbox:
    """Events of one request. A slow reader gets fewer, larger ones; nothing ever waits for it.

    Args:
        loop: The reader's.

    Attributes:
        loop: As given.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._events: list[Event] = []
        self._error: BaseException | None = None
        self._arrival = asyncio.Event()

    def put(self, event: Event) -> None:
        """Deliver.

        Args:
            event: The next one.
        """
        self._events.append(event)
        self._arrival.set()

    def fail(self, error: BaseException) -> None:
        """Deliver an error, after the events.

        Args:
            error: For `take` to raise.
        """
        self._error = error
        self._arrival.set()

    async def take(self) -> list[Event]:
        """Wait for something to read.

        Returns:
            All there is, with the deltas of each choice joined.

        Raises:
            BaseException: What `fail` was given, once the events are read.
        """
        await self._arrival.wait()
        self._arrival.clear()
        if not self._events and self._error is not None:
            raise self._error
        events, self._events = self._events, []
        if self._error is not None:
            self._arrival.set()
        return coalesce(events)


def coalesce(events: Sequence[Event]) -> list[Event]:
    """Join the deltas of each choice.

    Args:
        events: Of one request, in order.

    Returns:
        At most one delta for each choice, in the order in which the choices came first.
    """
    others = [event for event in events if not isinstance(event, Delta)]
    by_choice: dict[int, list[Delta]] = {}
    for event in events:
        if isinstance(event, Delta):
            by_choice.setdefault(event.choice, []).append(event)
    return [*others, *(_joined(deltas) for deltas in by_choice.values())]


def _joined(deltas: list[Delta]) -> Delta:
    if len(deltas) == 1:
        return deltas[0]
    last = deltas[-1]
    return Delta(
        last.choice,
        "".join(delta.text for delta in deltas),
        tuple(token for delta in deltas for token in delta.tokens),
        tuple(row for delta in deltas for row in delta.logprobs),
        last.finish_reason,
        last.stop,
    )
