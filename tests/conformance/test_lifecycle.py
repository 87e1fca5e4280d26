"""From start to end: a full queue, draining, being killed, a port that is taken, a device that is lost."""

import concurrent.futures
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.conformance.api import COMPLETIONS, FIXED, Api, eventually, parse_events, parse_json, refused
from tests.conformance.conftest import KEY, start
from tests.conformance.servers import FAKE, ServerProcess, free_port, running

pytestmark = pytest.mark.slow  # each starts a server


@pytest.fixture(autouse=True)
def _started_here(kind: str) -> None:
    if kind == "given":
        pytest.skip("only servers that are started here are ended")
    if kind == "jax":
        pytest.skip("starting and ending is the same with every backend")


@contextmanager
def a_server(kind: str, request: pytest.FixtureRequest, *options: object) -> Iterator[tuple[ServerProcess, Api]]:
    slow = ("--step-seconds", 0.02) if kind == "fake" else ()
    with start(kind, request, *slow, *options) as process, closing(Api(process.base_url)) as api:
        yield process, api


def long(api: Api, fields: dict | None = None) -> dict:
    return {"prompt": "x", "max_tokens": min(200, api.context - 10), **FIXED, **(fields or {})}


@contextmanager
def streams(api: Api, count: int) -> Iterator[list[concurrent.futures.Future[httpx.Response]]]:
    """Requests under way, each with a slot or in the queue."""
    body = {"model": api.model, "stream": True, **long(api)}
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        posts = [pool.submit(api.http.post, COMPLETIONS, json=body) for _ in range(count)]
        eventually(lambda: _busy(api) == count, 10)
        yield posts


def _busy(api: Api) -> float:
    found = api.metrics()
    return found["llmq:num_requests_running"] + found["llmq:num_requests_waiting"]


class TestQueue:
    def test_full(self, kind: str, request: pytest.FixtureRequest) -> None:
        """The ones over the queue are told at once, and when to come again."""
        with a_server(kind, request, "--max-queue", 2) as (_, api):
            free = int(api.slots_free())
            with streams(api, free + 2) as posts:
                began = time.monotonic()
                for _ in range(5):
                    response = api.post(COMPLETIONS, **long(api))
                    refused(response, 429)
                    assert int(response.headers["retry-after"]) >= 1
                assert time.monotonic() - began < 2.5
            for post in posts:
                assert parse_events(post.result().text).finish_reasons() == ["length"]
            eventually(lambda: api.slots_free() == free, 5)

    def test_timeout(self, kind: str, request: pytest.FixtureRequest) -> None:
        with a_server(kind, request, "--queue-timeout", 0.3) as (_, api), streams(api, int(api.slots_free())):
            refused(api.post(COMPLETIONS, **long(api)), 503)


class TestDraining:
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_live_streams_finish(self, kind: str, request: pytest.FixtureRequest, number: signal.Signals) -> None:
        """vllm#24885: shutdown hung, or cut what was under way."""
        with a_server(kind, request, "--drain-timeout", 200) as (process, api):
            alone = api.complete(**long(api))["choices"][0]["text"]
            with streams(api, int(api.slots_free())) as posts:
                process.signal(number)
                eventually(lambda: not httpx.get(f"{api.base_url}/ready").is_success, 2)
                refused(api.post(COMPLETIONS, prompt="x"), 503)
                assert httpx.get(f"{api.base_url}/health").status_code == 200, "it drains, it is not dead"
            assert [parse_events(post.result().text).text() for post in posts] == [alone] * len(posts)
            assert process.wait(200) == 0, process.output()

    def test_what_does_not_finish_is_told(self, kind: str, request: pytest.FixtureRequest) -> None:
        with a_server(kind, request, "--drain-timeout", 0.2) as (process, api):
            with streams(api, 2) as posts:
                process.signal()
            for post in posts:
                events = [
                    block.removeprefix("data: ")
                    for block in post.result().text.split("\n\n")
                    if block.startswith("data:")
                ]
                assert events[-1] == "[DONE]"
                assert parse_json(events[-2])["error"]["message"]
            assert process.wait() == 0, process.output()

    def test_a_second_signal_ends_at_once(self, kind: str, request: pytest.FixtureRequest) -> None:
        with a_server(kind, request) as (process, api), streams(api, 1) as posts:
            process.signal()
            time.sleep(0.2)
            process.signal()
            began = time.monotonic()
            assert process.wait() != 0
            assert time.monotonic() - began < 5
            with pytest.raises((httpx.TransportError, AssertionError)):
                assert not parse_events(posts[0].result().text).finish_reasons()

    def test_idle(self, kind: str, request: pytest.FixtureRequest) -> None:
        with a_server(kind, request) as (process, _):
            began = time.monotonic()
            process.signal()
            assert process.wait() == 0
            assert time.monotonic() - began < 10


class TestPorts:
    def test_taken(self, kind: str, request: pytest.FixtureRequest) -> None:
        port = free_port()
        with start(kind, request, port=port), start(kind, request, port=port, ready=False) as second:
            assert second.wait(60) != 0
            lines = [line for line in second.output().splitlines() if line.strip()]
            assert len(lines) == 1, second.output()
            assert str(port) in lines[0]

    def test_of_a_server_that_was_killed(self, kind: str, request: pytest.FixtureRequest) -> None:
        port = free_port()
        with (
            start(kind, request, port=port) as process,
            closing(Api(process.base_url)) as api,
            streams(api, 1) as posts,
        ):
            process.signal(signal.SIGKILL)
            process.wait()
            with pytest.raises(httpx.TransportError):
                posts[0].result()
        with start(kind, request, port=port) as process, closing(Api(process.base_url)) as api:
            assert api.complete("x", max_tokens=2, **FIXED)["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("fault", ["decode:10", "extend:1", "fetch:7"])
def test_a_lost_device_ends_everything(kind: str, fault: str) -> None:
    """mlx-lm#1129: HTTP was up, and the engine's thread was dead."""
    if kind != "fake":
        pytest.skip("a real device cannot be lost on purpose")
    with running(*FAKE, "--fault", fault, "--step-seconds", 0.02) as process, closing(Api(process.base_url)) as api:
        seen: set[int] = set()
        watcher = threading.Thread(target=_watch, args=(api.base_url, seen))
        watcher.start()
        bodies: list[str] = []

        def ask() -> None:
            for _ in range(20):  # until the engine has died
                try:
                    with httpx.Client() as client:
                        response = client.post(
                            api.base_url + COMPLETIONS, json={"stream": True, **long(api, {"prompt": "y" * 40})}
                        )
                    bodies.append(response.text)
                except httpx.TransportError:
                    return

        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            for post in [pool.submit(ask) for _ in range(2)]:
                post.result()
        assert process.wait() != 0
        watcher.join()
        assert any('"error"' in body for body in bodies)
        assert 503 in seen


def _watch(url: str, seen: set[int]) -> None:
    try:
        while True:
            seen.add(httpx.get(f"{url}/health", timeout=5).status_code)
            time.sleep(0.01)
    except httpx.TransportError:
        pass


def test_the_key_is_in_no_log_and_no_argument(kind: str, key_file: Path, request: pytest.FixtureRequest) -> None:
    with start(kind, request, "--api-key-file", key_file) as process, closing(Api(process.base_url, KEY)) as api:
        api.complete("a text nobody should log", max_tokens=2)
        refused(httpx.get(f"{api.base_url}/v1/models", headers={"authorization": "Bearer sk-almost"}), 401)
        api.raw(COMPLETIONS, b"{")
        arguments = (Path("/proc") / str(process.process.pid) / "cmdline").read_bytes()
        assert KEY.encode() not in arguments
        process.signal()
        process.wait()
        for secret in (KEY, "sk-almost", "a text nobody should log"):
            assert secret not in process.output()
