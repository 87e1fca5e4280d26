"""What happens around every request. Plain ASGI: Starlette's own base class hides disconnects."""

import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmq.serve.errors import FAILED, ApiError

#: Needs no key.
OPEN_PATHS = frozenset({"/health"})

#: As nginx says that the client left before the answer.
_NOT_ANSWERED = 499

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")

_access = logging.getLogger("llmq.access")


class RequestLog:
    """Gives every request an id, and writes a line about it: no bodies, no queries, no keys.

    Args:
        app: What answers.
        responded: Told the route and status of every response.
        routes: Known paths; others are not told apart.
        refuse: Makes a response of an error.
    """

    def __init__(
        self,
        app: ASGIApp,
        responded: Callable[[str, int], None],
        routes: frozenset[str],
        refuse: Callable[[ApiError], Response],
    ) -> None:
        self._app = app
        self._responded = responded
        self._routes = routes
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI interface."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        given = Headers(scope=scope).get("x-request-id", "")
        ident = given if _REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        scope["state"] = {**scope.get("state", {}), "request_id": ident}
        status = _NOT_ANSWERED

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = ident
                headers["x-content-type-options"] = "nosniff"
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            _access.exception("%s failed", ident)
            if status == _NOT_ANSWERED:
                await self._refuse(FAILED)(scope, receive, send_with_id)
        finally:
            path = scope["path"] if scope["path"] in self._routes else "other"
            self._responded(path, status)
            seconds = time.perf_counter() - start
            _access.info("%s %s %s %d %.3f s", ident, scope["method"], path, status, seconds)


class KeyCheck:
    """Refuses requests without a valid key, on every path but `OPEN_PATHS`.

    A browser that opens ``/`` cannot send one: it gets the page, which asks for it, with the same status.

    Args:
        app: What answers.
        keys: Valid ones; none lets everybody in.
        page: The response to a browser without a key.
        refuse: Makes a response of an error.
    """

    def __init__(
        self, app: ASGIApp, keys: Sequence[str], page: Callable[[int], Response], refuse: Callable[[ApiError], Response]
    ) -> None:
        self._app = app
        self._digests = [_digest(key) for key in keys]
        self._page = page
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI interface; the salt of what is cached for a key goes with the request."""
        if scope["type"] != "http" or not self._digests or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        scheme, _, key = headers.get("authorization", "").partition(" ")
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if scheme.lower() == "bearer" and any(matches):
            scope["state"] = {**scope.get("state", {}), "salt": digest.hex()}
            await self._app(scope, receive, send)
            return
        if scope["path"] == "/" and scope["method"] == "GET" and "text/html" in headers.get("accept", ""):
            await self._page(401)(scope, receive, send)
            return
        message = "The API key is wrong." if key else "No API key: send it as 'Authorization: Bearer KEY'."
        error = ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        await self._refuse(error)(scope, receive, send)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
