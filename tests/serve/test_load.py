"""The load generator against a server whose timing is known."""

import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmq.errors import BackendError, ConfigError
from llmq.serve.load import LoadOptions, arrival_times, read_dataset, run_load
from llmq.serve.load_client import EventParser
from llmq.serve.load_summary import summarize
from tests.commands.test_cli import llmq, refused

KEY = "key of the test"


class Scripted(ThreadingHTTPServer):
    """One answer at a time: `first` seconds, then a token every `gap` seconds."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.first, self.gap, self.key = 0.0, 0.0, None
        self.failures: list[str] = []
        self.bodies: list[dict] = []
        self.in_flight = self.most_in_flight = 0
        self.serial = threading.Lock()
        self.counting = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Scripted

    def log_message(self, *_: object) -> None:
        pass

    def reply(self, status: int, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.server.key and self.headers["Authorization"] != f"Bearer {self.server.key}":
            self.reply(401, {})
        elif self.path == "/v1/models":
            self.reply(200, {"data": [{"id": "small"}, {"id": "other"}]})
        elif self.path == "/version":
            self.reply(200, {"version": "7", "device": "abacus"})
        else:
            self.reply(404, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            self.reply(200, {"tokens": [0, *range(100, 160)]})
            return
        with self.server.counting:
            self.server.bodies.append({"path": self.path, **body})
            failure = self.server.failures.pop(0) if self.server.failures else None
            self.server.in_flight += 1
            self.server.most_in_flight = max(self.server.most_in_flight, self.server.in_flight)
        try:
            if failure == "429":
                self.ends()
                self.reply(429, {"error": {}})
            elif failure == "hang up":
                self.ends()
                self.close_connection = True
            else:
                with self.server.serial:
                    self.stream(body, failure)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def ends(self) -> None:
        """Before the last bytes: a client that has them may send its next request at once."""
        with self.server.counting:
            self.server.in_flight -= 1

    def stream(self, body: dict, failure: str | None) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        time.sleep(self.server.first)
        for index in range(body["max_tokens"]):
            if index:
                time.sleep(self.server.gap)
            self.event({"choices": [{"text": f"word\u2028{index}"}]})
        if failure == "error":
            self.event({"error": {"message": "device lost"}})
        usage = {"prompt_tokens": len(body.get("prompt", "")), "completion_tokens": body["max_tokens"]}
        self.event({"choices": [], "usage": usage})
        self.ends()
        if failure != "no end":
            self.chunk(b"data: [DONE]\n\n")
        self.chunk(b"")

    def event(self, value: object) -> None:
        self.chunk(b": ping\n\ndata: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n")

    def chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()


@pytest.fixture
def server() -> Iterator[Scripted]:
    with Scripted() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def load(server: Scripted, **options: object):
    return run_load(LoadOptions(url=server.url, **options))


@given(data=st.data(), ends=st.sampled_from(["\n", "\r\n"]))
def test_events_do_not_depend_on_how_bytes_are_cut(data: st.DataObject, ends: str) -> None:
    events = data.draw(st.lists(st.text(st.characters(exclude_characters="\n\r", codec="utf-8"), min_size=1)))
    stream = "".join(f": ping{ends}{ends}id: 1{ends}data: {event}{ends}{ends}" for event in events).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)))))
    parser = EventParser()
    pieces = [stream[a:b] for a, b in itertools.pairwise([0, *cuts, len(stream)])]
    assert [found.decode() for piece in pieces for found in parser.feed(piece)] == events


def test_arrivals_are_a_poisson_process() -> None:
    """Gaps are exponential: their mean and standard deviation are both 1 / rate (20,000 gaps: 0.7 % error)."""
    times = list(itertools.islice(arrival_times(50.0, seed=3), 20_000))
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(1 / 50, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(1 / 50, rel=0.04)
    assert times == list(itertools.islice(arrival_times(50.0, seed=3), 20_000))
    assert times != list(itertools.islice(arrival_times(50.0, seed=4), 20_000))


def test_times_are_the_servers(server: Scripted) -> None:
    server.first, server.gap = 0.1, 0.03
    found = summarize(load(server, concurrency=1, num_requests=3, prompt_tokens=9, max_tokens=5))
    assert (found["num_complete"], found["prompt_tokens"], found["output_tokens"]) == (3, 27, 15)
    assert found["server"] == {"version": "7", "device": "abacus"}
    for name, least in [("first_token", 0.1), ("inter_token", 0.03), ("per_output_token", 0.03), ("end_to_end", 0.22)]:
        assert 0.95 * least < found["latency"][name]["p50"] < least + 0.25, name
    assert found["seconds"] > 3 * 0.22
    assert found["requests_per_second"] == pytest.approx(3 / found["seconds"])


def test_a_closed_loop_keeps_its_concurrency_and_never_more(server: Scripted) -> None:
    server.first = 0.02
    load(server, concurrency=4, num_requests=20, max_tokens=1)
    assert server.most_in_flight == 4
    assert len(server.bodies) == 20


def test_an_open_loop_counts_from_when_a_request_was_due(server: Scripted) -> None:
    """Arrivals come twice as fast as answers: the wait of the k-th grows with k, and is not omitted."""
    server.first = 0.05
    found = load(server, rate=40.0, num_requests=24, max_tokens=1)
    assert server.most_in_flight > 8, "an open loop does not wait for answers"
    due = list(itertools.islice(arrival_times(40.0, 0), 24))
    assert sorted(outcome.scheduled for outcome in found.outcomes) == due
    wait = [outcome.ended - outcome.scheduled for outcome in found.outcomes]
    assert max(wait) > 24 * 0.05 - due[-1]
    assert summarize(found)["latency"]["end_to_end"]["max"] == max(wait)


def test_prompts_are_of_the_asked_length_and_follow_the_seed(server: Scripted) -> None:
    for seed in (1, 1, 2):
        load(server, concurrency=1, num_requests=2, prompt_tokens=31, max_tokens=1, seed=seed)
    first, again, other = (server.bodies[i : i + 2] for i in (0, 2, 4))
    assert first == again != other
    assert [len(body["prompt"]) for body in server.bodies] == [31] * 6
    assert 0 not in {token for body in server.bodies for token in body["prompt"]}


def test_errors_are_counted_by_kind(server: Scripted) -> None:
    server.failures = ["429", "error", "no end", "hang up", "429"]
    found = summarize(load(server, concurrency=1, num_requests=6, max_tokens=1))
    assert found["num_complete"] == 1
    assert found["errors"] == {
        "HTTP 429": 2,
        "error in stream": 1,
        "stream without [DONE]": 1,
        "RemoteProtocolError": 1,
    }


def test_a_duration_ends_the_sending(server: Scripted) -> None:
    server.first = 0.1
    found = load(server, concurrency=2, duration=0.35, max_tokens=1)
    assert all(outcome.scheduled < 0.35 for outcome in found.outcomes)
    assert all(outcome.error is None for outcome in found.outcomes)
    assert found.num_cut == 0


def test_a_dataset_takes_the_place_of_prompts(server: Scripted, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one", "max_tokens": 2}\n\n{"messages": [], "max_tokens": 3}\n')
    load(server, dataset=path, concurrency=1, num_requests=4)
    asked = sorted((body["path"], body["max_tokens"]) for body in server.bodies)
    assert asked == [("/v1/chat/completions", 3)] * 2 + [("/v1/completions", 2)] * 2


@pytest.mark.parametrize("text", ["{", "[1]", '{"text": "x"}', ""])
def test_a_dataset_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_text(text)
    with pytest.raises(ConfigError, match="dataset="):
        read_dataset(tmp_path / "x")


def test_an_address_without_a_server_a_model_it_lacks_and_a_wrong_key(server: Scripted) -> None:
    with pytest.raises(ConfigError, match="model='big': the server has small, other"):
        load(server, model="big", num_requests=1)
    server.key = KEY
    with pytest.raises(BackendError, match="answers 401"):
        load(server, num_requests=1)
    server.server_close()
    with pytest.raises(BackendError, match="no server answers there"):
        run_load(LoadOptions(url="http://127.0.0.1:9", num_requests=1))


class TestCommand:
    def test_prints_a_table_for_people_and_json_for_programs(self, server: Scripted, tmp_path: Path) -> None:
        server.key, out = KEY, tmp_path / "out.json"
        (tmp_path / "key").write_text(KEY + "\n")
        options = ("--api-key-file", tmp_path / "key", "--num-requests", 3, "--max-tokens", 2)
        done = llmq("bench", "serve", f"{server.url}/v1", *options, "--json", "--output", out)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["num_complete"] == 3
        assert found["config"]["model"] == "small"
        assert found["client"]["versions"]["llmq"]
        assert json.loads(out.read_text()) == found
        assert "closed loop, 8 requests in flight" in done.stderr
        assert "3 of 3 requests complete" in done.stderr
        assert KEY not in done.stdout + done.stderr

    def test_ctrl_c_prints_what_was_measured_so_far(self, server: Scripted) -> None:
        server.first = 0.05
        command = [sys.executable, "-m", "llmq", "bench", "serve", server.url, "--duration", "60", "--json"]
        process = subprocess.Popen(
            [*command, "--concurrency", "2", "--max-tokens", "1"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "LLMQ_API_KEY": ""},
        )  # fmt: skip
        try:
            deadline = time.monotonic() + 60
            while len(server.bodies) < 4 and time.monotonic() < deadline:
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            stdout, stderr = process.communicate(timeout=50)  # of the 60 seconds it was told
        finally:
            process.kill()
        assert process.returncode == 0, stderr
        found = json.loads(stdout)
        assert found["num_complete"] >= 2
        assert found["num_cut"] >= 1
        assert found["num_requests"] == found["num_complete"] + found["num_cut"]

    @pytest.mark.parametrize(
        ("args", "message"),
        [
            (("ftp://x",), "must begin with http"),
            (("http://127.0.0.1:9",), "no server answers there"),
            (("http://x", "--rate", "0"), "rate=0.0: input should be greater than 0"),
            (("http://x", "--concurrency", "0"), "concurrency=0"),
            (("http://x", "--api-key-file", "./none"), "api_key_file=none: cannot be read"),
            (("http://x", "--output", "./none/x.json"), "its directory does not exist"),
        ],
    )
    def test_refused(self, args: tuple[str, ...], message: str) -> None:
        assert message in refused("bench", "serve", *args)
