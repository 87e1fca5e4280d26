"""Requests that are being answered: each ends with its answer, its client, its time or the server."""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from starlette.types import Receive

from llmq.errors import DrainingError
from llmq.serve.errors import ApiError, ClientGoneError

T = TypeVar("T")


class Live:
    """The requests that are being answered.

    Args:
        timeout: Seconds that a request may take; None sets no limit.

    Attributes:
        count: How many there are.
    """

    def __init__(self, timeout: float | None = None) -> None:
        self._timeout = timeout
        self._cut = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self.count = 0

    async def run(self, receive: Receive, work: Coroutine[Any, Any, T]) -> T:
        """Do the work of a request as long as somebody wants its answer.

        Args:
            receive: Of the request, whose body has been read: tells that the client has gone.
            work: Cancelled when the answer is no longer wanted.

        Returns:
            What `work` returns.

        Raises:
            ClientGoneError: The client has gone.
            DrainingError: The server cannot wait any longer.
            ApiError: The request took too long.
        """
        self.count += 1
        self._idle.clear()
        task = asyncio.create_task(work)
        gone = asyncio.create_task(_disconnected(receive))
        cut = asyncio.create_task(self._cut.wait())
        try:
            await asyncio.wait({task, gone, cut}, timeout=self._timeout, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if gone.done():
                raise ClientGoneError
            if cut.done():
                raise DrainingError("The server is shutting down; send the request to another one.")
            raise ApiError(504, f"The request took more than {self._timeout:g} s.", kind="server_error", code="timeout")
        finally:
            for one in (task, gone, cut):
                one.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(task, gone, cut, return_exceptions=True)
            self.count -= 1
            if not self.count:
                self._idle.set()

    async def wait_idle(self, timeout: float) -> bool:
        """Wait until nothing is being answered.

        Args:
            timeout: Seconds.

        Returns:
            False if something still is.
        """
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout)
        return self._idle.is_set()

    def cut(self) -> None:
        """End every request with an error."""
        self._cut.set()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
