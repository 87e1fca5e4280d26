"""Server-sent events: an answer as it grows."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llmq.serve.errors import ClientGoneError, answer_of
from llmq.serve.live import Live

#: Seconds without news after which a queued client is told that the server lives.
PING_SECONDS = 15.0

#: Seconds to get a last error to a client that reads slowly.
_LAST_WORDS = 1.0

_log = logging.getLogger("llmq.serve")


class EventStream(Response):
    """A response that is sent while it is made.

    The status is sent with the first event or ping, so that what fails before is an ordinary error.
    After that an error is an event, followed by ``[DONE]`` like everything else.

    Args:
        live: The requests being answered.
        chunks: What to send, as JSON.
    """

    def __init__(self, live: Live, chunks: AsyncGenerator[Any]) -> None:
        super().__init__(
            media_type="text/event-stream", headers={"cache-control": "no-cache", "x-accel-buffering": "no"}
        )
        del self.headers["content-length"]
        self._live = live
        self._chunks = chunks
        self._started = False

    async def __call__(
        self,
        scope: Scope,  # noqa: ARG002 - the ASGI interface
        receive: Receive,
        send: Send,
    ) -> None:
        """Answer; the ASGI interface."""
        try:
            await self._live.run(receive, self._send_all(send))
        except ClientGoneError:
            return
        except Exception as err:
            if not self._started:
                raise
            answer = answer_of(err)
            if answer.status == 500:
                _log.exception("a stream failed")
            async with asyncio.timeout(_LAST_WORDS):
                await self._write(send, _event(answer.body) + b"data: [DONE]\n\n", more=False)

    async def _send_all(self, send: Send) -> None:
        coming = asyncio.ensure_future(anext(self._chunks, None))
        try:
            while not (await asyncio.wait({coming}, timeout=PING_SECONDS))[0]:
                await self._write(send, b": ping\n\n")
            chunk = coming.result()
            while chunk is not None:
                await self._write(send, _event(chunk))
                chunk = await anext(self._chunks, None)
            await self._write(send, b"data: [DONE]\n\n", more=False)
        finally:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)
            await self._chunks.aclose()

    async def _write(self, send: Send, body: bytes, *, more: bool = True) -> None:
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": body, "more_body": more})


def _event(value: Any) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"
