"""Start, overload, drain, kill and death of a server."""

import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conformance.api import CHAT, COMPLETIONS, FIXED, Api, eventually, parse_events, parse_json, refused
from tests.conformance.servers import FAKE, running
from tests.serve.conftest import fake

#: A request that takes about ten seconds.
SLOW = ("--step-seconds", 0.02)
LONG = {"prompt": "x", "max_tokens": 500, **FIXED}


class Asking(threading.Thread):
    """A request in the background."""

    def __init__(self, api: Api, **body: Any) -> None:
        super().__init__(daemon=True)
        self._api, self._body = api, body
        self.status = 0
        self.text = ""
        self.seconds = 0.0
        self.start()

    def run(self) -> None:
        began = time.monotonic()
        with httpx.Client(base_url=self._api.base_url, timeout=60) as client:
            try:
                response = client.post(COMPLETIONS, json=self._body)
            except httpx.TransportError:  # the server was killed at the end of the test
                return
        self.status, self.text, self.seconds = response.status_code, response.text, time.monotonic() - began


def running_requests(api: Api, count: int) -> None:
    eventually(lambda: api.metrics()["llmq:num_requests_running"] == count, 5)


class TestDisconnects:
    """A slot is free 300 ms after its client has gone; scraping takes a part of that."""

    @pytest.mark.parametrize("stream", [True, False])
    @pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
    def test_while_answering(self, path: str, stream: bool) -> None:
        body: dict[str, Any] = {**LONG, "stream": stream}
        if path == CHAT:
            body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
        with fake(*SLOW) as (_, api):
            if stream:
                with api.streaming(path, **body) as lines:
                    next(lines)
                    running_requests(api, 1)
            else:
                with pytest.raises(httpx.ReadTimeout), httpx.Client(base_url=api.base_url) as client:
                    client.post(path, json=body, timeout=0.5)
            seconds = eventually(lambda: api.slots_free() == 4, 0.3)
            print(f"slot free after {seconds:.3f} s")

    @pytest.mark.parametrize("stream", [True, False])
    def test_while_queued(self, stream: bool) -> None:
        with fake(*SLOW, "--max-num-seqs", 1) as (_, api):
            first = Asking(api, **{**LONG, "max_tokens": 200})
            running_requests(api, 1)
            with pytest.raises(httpx.ReadTimeout), httpx.Client(base_url=api.base_url) as client:
                client.post(COMPLETIONS, json={**LONG, "stream": stream}, timeout=0.5)
            eventually(lambda: api.metrics()["llmq:num_requests_waiting"] == 0, 0.3)
            assert first.is_alive(), "the one before goes on"
            first.join()
            assert first.status == 200


class TestOverload:
    def test_a_full_queue_is_429_at_once(self) -> None:
        with fake(*SLOW, "--max-num-seqs", 1, "--max-queue", 1) as (_, api):
            live = [Asking(api, **{**LONG, "max_tokens": 100})]
            running_requests(api, 1)
            live.append(Asking(api, **{**LONG, "max_tokens": 1}))
            eventually(lambda: api.metrics()["llmq:num_requests_waiting"] == 1, 5)
            began = time.monotonic()
            response = api.post(COMPLETIONS, **LONG)
            assert time.monotonic() - began < 1  # of the seconds that a place in the queue would take
            refused(response, 429, kind="rate_limit_error")
            assert int(response.headers["retry-after"]) >= 1
            refused(api.post(COMPLETIONS, **LONG, stream=True), 429)
            for one in live:
                one.join()
                assert one.status == 200

    @pytest.mark.parametrize("stream", [True, False])
    def test_a_long_wait_is_503(self, stream: bool) -> None:
        with fake(*SLOW, "--max-num-seqs", 1, "--queue-timeout", 0.3) as (_, api):
            Asking(api, **LONG)
            running_requests(api, 1)
            refused(api.post(COMPLETIONS, **LONG, stream=stream), 503, code="queue_timeout")

    def test_a_body_with_more_prompts_than_the_queue_holds(self) -> None:
        with fake("--max-num-seqs", 2, "--max-queue", 1) as (_, api):
            answer = api.complete([f"{i}" for i in range(20)], max_tokens=2, temperature=0)
        assert [choice["index"] for choice in answer["choices"]] == list(range(20))
        assert [choice["text"] for choice in answer["choices"]] == [f"{i}"[:2] for i in range(20)]

    def test_a_request_that_takes_too_long(self) -> None:
        with fake(*SLOW, "--request-timeout", 0.5) as (_, api):
            refused(api.post(COMPLETIONS, **LONG), 504, code="timeout")
            events = parse_events(api.post(COMPLETIONS, **LONG, stream=True).text)
            assert events.chunks[-1]["error"]["code"] == "timeout"
            eventually(lambda: api.slots_free() == 4, 0.3)


class TestDrain:
    def test_live_requests_finish_and_new_ones_are_503(self) -> None:
        with fake("--step-seconds", 0.01) as (process, api):
            live = [Asking(api, **{**LONG, "max_tokens": 150, "stream": stream}) for stream in (True, False)]
            running_requests(api, 2)
            process.signal(signal.SIGTERM)
            eventually(lambda: api.post(COMPLETIONS, prompt="x").status_code == 503, 2)
            assert api.http.get("/ready").status_code == 503
            assert api.http.get("/health").json() == {"status": "draining"}
            assert process.wait() == 0
            for one in live:
                one.join()
            assert parse_events(live[0].text).finish_reasons() == ["length"]
            assert parse_json(live[1].text)["usage"]["completion_tokens"] == 150

    def test_the_timeout_ends_them_with_an_error(self) -> None:
        with fake(*SLOW, "--drain-timeout", 0.5) as (process, api):
            live = [Asking(api, **LONG, stream=stream) for stream in (True, False)]
            running_requests(api, 2)
            began = time.monotonic()
            process.signal(signal.SIGTERM)
            assert process.wait() == 0
            assert time.monotonic() - began < 3
            for one in live:
                one.join()
            assert parse_events(live[0].text).chunks[-1]["error"]["code"] == "shutting_down"
            assert live[1].status == 503

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_a_second_signal_is_immediate(self, number: signal.Signals) -> None:
        with fake(*SLOW) as (process, api), api.streaming(COMPLETIONS, **LONG) as lines:
            next(lines)
            process.signal(number)
            eventually(lambda: "draining" in process.output(), 2)
            began = time.monotonic()
            process.signal(number)
            assert process.wait() == 1
            assert time.monotonic() - began < 1.5

    def test_idle(self) -> None:
        with fake() as (process, _):
            process.signal(signal.SIGTERM)
            assert process.wait(5) == 0
            assert "Traceback" not in process.output()


def test_a_killed_server_starts_again_on_its_port() -> None:
    with fake(*SLOW) as (process, api):
        port = int(api.base_url.rsplit(":", 1)[1])
        with api.streaming(COMPLETIONS, **LONG) as lines:
            next(lines)
            process.signal(signal.SIGKILL)
            process.wait()
    with running(*FAKE, port=port) as again:
        assert httpx.get(f"{again.base_url}/ready").status_code == 200


def test_a_port_in_use_is_one_line() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        running(*FAKE, port=taken.getsockname()[1], ready=False) as process,
    ):
        assert process.wait() == 2
        output = process.output()
    assert output.count("\n") == 1
    assert "cannot be listened on" in output


@pytest.mark.parametrize("method", ["decode:5", "fetch:5", "extend:1"])
def test_a_failing_device_ends_everything(method: str) -> None:
    """mlx-lm#1129: HTTP up, engine dead."""
    prompt = "long enough for several runs of the prompt"
    with fake("--fault", method, "--step-seconds", 0.01) as (process, api):
        live = [Asking(api, **{**LONG, "prompt": prompt, "stream": stream}) for stream in (True, False)]
        eventually(lambda: httpx.get(f"{api.base_url}/health").status_code == 503, 3)
        refused(api.post(COMPLETIONS, prompt="x"), 503, code="engine_dead")
        assert process.wait() == 1
        for one in live:
            one.join()
        assert live[1].status == 503
        last = live[0].text if live[0].status == 200 else f"data: {live[0].text}\n\ndata: [DONE]\n\n"
        assert parse_events(last).chunks[-1]["error"]["code"] == "engine_dead"
        assert "DeviceLostError" in process.output()


def test_a_queued_stream_is_pinged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """After a ping the status is sent, so that a later error is an event."""
    script = tmp_path / "quick.py"
    script.write_text(
        "import sys\nfrom llmq.serve import stream\nstream.PING_SECONDS = 0.1\n"
        "from tests.serve.fake_server import main\nsys.exit(main())\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    command = (*FAKE[:1], script, *SLOW, "--max-num-seqs", 1, "--queue-timeout", 0.5)
    with running(*command) as process:
        api = Api(process.base_url)
        Asking(api, **LONG)
        running_requests(api, 1)
        text = api.post(COMPLETIONS, **LONG, stream=True).text
        api.http.close()
    assert text.startswith(": ping\n\n")
    assert parse_events(text).chunks[-1]["error"]["code"] == "queue_timeout"
