"""Start, drain and end. Shutdown is ours: uvicorn's own closes the listener first and cuts streams.

SIGTERM, SIGINT   new requests get 503, live ones finish, or an error after the drain timeout; exit 0
the second one    ends at once; exit 1
engine's death    live requests get an error, /health answers 503 for a moment; exit 1
"""

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager

import uvicorn

from llmq.engine.service import EngineService
from llmq.errors import ConfigError
from llmq.serve.app import Server

#: Seconds for live requests to get their last words.
_FAREWELL_SECONDS = 2.0

#: Seconds that a dead server answers on, so that whoever watches /health sees why.
_DEATH_SECONDS = 1.0

_log = logging.getLogger("llmq.serve")


def listen(host: str, port: int) -> socket.socket:
    """Take a port, before the long work of loading a model.

    Args:
        host: Address to listen on.
        port: 0 takes a free one.

    Returns:
        A socket that is bound, but does not listen yet.

    Raises:
        ConfigError: The address cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as err:
        raise ConfigError(
            f"host={host!r}, port={port}: cannot be listened on ({err.strerror or err}); choose another --port."
        ) from err
    return bound


class _Uvicorn(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Signals are handled here."""
        yield


async def serve(
    server: Server, service: EngineService, sock: socket.socket, *, drain_timeout: float, on_ready: Callable[[], None]
) -> int:
    """Serve until a signal or the engine's death.

    Args:
        server: What answers.
        service: Its engine, not started yet.
        sock: Where to listen.
        drain_timeout: Seconds that live requests get to finish.
        on_ready: Called when requests can be sent.

    Returns:
        The process's exit status.
    """
    loop = asyncio.get_running_loop()
    ending: asyncio.Queue[str] = asyncio.Queue()

    def died(_err: BaseException) -> None:
        loop.call_soon_threadsafe(ending.put_nowait, "death")

    service.on_death = died
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.put_nowait, "signal")
    config = uvicorn.Config(
        server.app,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        http="h11",
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=1,
    )
    http = _Uvicorn(config)
    gc.collect()
    gc.freeze()  # what is there stays: collections while serving need not look at it
    service.start()
    serving = asyncio.create_task(http.serve(sockets=[sock]))
    serving.add_done_callback(lambda _task: ending.put_nowait("signal"))  # it could not listen
    try:
        announcing = asyncio.create_task(_announce(http, service, on_ready))
        status = await _end(server, service, ending, drain_timeout)
        announcing.cancel()
        http.force_exit = status != 0
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        http.should_exit = True
        await serving
        if not service.stop():
            _log.warning("the engine did not stop in time")
    return status


async def _announce(http: _Uvicorn, service: EngineService, on_ready: Callable[[], None]) -> None:
    while not http.started or service.state == "starting":
        await asyncio.sleep(0.01)
    if service.state == "ready":
        on_ready()


async def _end(server: Server, service: EngineService, ending: "asyncio.Queue[str]", drain_timeout: float) -> int:
    reason = await ending.get()
    if reason == "death":
        _log.error("the engine failed: %r", service.failure, exc_info=service.failure)
        await asyncio.gather(server.live.wait_idle(_FAREWELL_SECONDS), asyncio.sleep(_DEATH_SECONDS))
        return 1
    service.drain()
    _log.info("draining: %d requests are live; a second signal ends them at once", server.live.count)
    idle = asyncio.create_task(server.live.wait_idle(drain_timeout))
    again = asyncio.create_task(ending.get())
    await asyncio.wait({idle, again}, return_when=asyncio.FIRST_COMPLETED)
    second = again.done()
    for task in (idle, again):
        task.cancel()
    if second:
        return 1
    if server.live.count:
        server.live.cut()
        await server.live.wait_idle(_FAREWELL_SECONDS)
    return 0
