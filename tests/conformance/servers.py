"""Servers in processes of their own."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import httpx

FAKE = (sys.executable, "-m", "tests.serve.fake_server")
REAL = (sys.executable, "-m", "llmq", "serve")

#: Loading and warming up a real model on a slow machine.
START_SECONDS = 300.0


def free_port() -> int:
    """A port that nobody listens on at the moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class ServerProcess:
    """A server that was started here.

    Attributes:
        process: The server itself, not a shell around it.
        base_url: Where it listens.
        log: What it prints.
    """

    def __init__(self, command: Sequence[object], port: int, log: IO[bytes]) -> None:
        self.base_url = f"http://127.0.0.1:{port}"
        self.log = log
        self.process = subprocess.Popen(
            [*map(str, command), "--port", str(port)],
            stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=Path(__file__).parents[2],
            env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"},
        )  # fmt: skip

    def wait_ready(self, timeout: float = START_SECONDS) -> None:
        """Return once it answers requests."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.output()}")
            try:
                if httpx.get(f"{self.base_url}/health", timeout=5).is_success:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise AssertionError(f"the server was not ready after {timeout:.0f} s:\n{self.output()}")

    def output(self) -> str:
        """What it has printed."""
        return Path(self.log.name).read_text(errors="replace")

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def wait(self, timeout: float = 30.0) -> int:
        """Its exit status."""
        return self.process.wait(timeout)


@contextmanager
def running(*command: object, port: int | None = None, ready: bool = True) -> Iterator[ServerProcess]:
    """A server for the time of a block; whatever is left of it afterwards is killed."""
    with tempfile.NamedTemporaryFile(prefix="llmq-server-", suffix=".log") as log:
        server = ServerProcess(command, port or free_port(), log)
        try:
            if ready:
                server.wait_ready()
            yield server
        finally:
            if server.process.poll() is None:
                server.process.kill()
            server.process.wait()
