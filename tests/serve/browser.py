"""A browser through chromedriver's WebDriver protocol: no more than the page's test needs."""

import base64
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from tests.conformance.servers import free_port

PROGRAMS = ("chromedriver", "chromium")


def is_installed() -> bool:
    return all(shutil.which(program) for program in PROGRAMS)


class Browser:
    """One window."""

    def __init__(self, driver: httpx.Client, session: str) -> None:
        self._driver = driver
        self._path = f"/session/{session}"

    def _do(self, method: str, path: str, **body: Any) -> Any:
        response = self._driver.request(method, self._path + path, json=body if method == "POST" else None)
        value = response.json()["value"]
        assert response.is_success, value
        return value

    def open(self, url: str) -> None:
        self._do("POST", "/url", url=url)

    def run(self, script: str) -> Any:
        return self._do("POST", "/execute/sync", script=script, args=[])

    def find(self, selector: str) -> str:
        return next(iter(self._do("POST", "/element", using="css selector", value=selector).values()))

    def type(self, selector: str, text: str) -> None:
        self._do("POST", f"/element/{self.find(selector)}/value", text=text)

    def click(self, selector: str) -> None:
        self._do("POST", f"/element/{self.find(selector)}/click")

    def resize(self, width: int, height: int) -> None:
        """Of the viewport."""
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    def command(self, name: str, **params: Any) -> Any:
        """Of the DevTools protocol."""
        return self._do("POST", "/goog/cdp/execute", cmd=name, params=params)

    def screenshot(self) -> bytes:
        return base64.b64decode(self._do("GET", "/screenshot"))

    def log(self) -> list[dict[str, Any]]:
        """What the console has said since the last time."""
        return self._do("POST", "/se/log", type="browser")

    def until(self, script: str, seconds: float = 10) -> Any:
        """The value of a script as soon as it is true."""
        return until(lambda: self.run(script), seconds)


def until(value: Callable[[], Any], seconds: float = 10) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := value()):
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.05)
    return found


@contextmanager
def browser(profile: str) -> Iterator[Browser]:
    """A headless Chromium for the time of a block."""
    port = free_port()
    process = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    arguments = [
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-gpu",
        f"--user-data-dir={profile}",
    ]
    wanted = {"goog:chromeOptions": {"args": arguments}, "goog:loggingPrefs": {"browser": "ALL"}}
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as driver:
            until(lambda: _is_up(driver), 20)
            made = driver.post("/session", json={"capabilities": {"alwaysMatch": wanted}}).json()["value"]
            assert "sessionId" in made, json.dumps(made)[:2000]
            try:
                yield Browser(driver, made["sessionId"])
            finally:
                driver.delete(f"/session/{made['sessionId']}")
    finally:
        process.terminate()
        process.wait(10)


def _is_up(driver: httpx.Client) -> bool:
    try:
        return driver.get("/status").is_success
    except httpx.TransportError:
        return False
