"""``llmq serve`` in a process of its own."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tests.conformance.api import FIXED, Api
from tests.conformance.servers import REAL, ServerProcess, free_port, running
from tests.tiny import byte_tokenizer_files, write_tiny

ON_CPU = ("--backend", "cpu", "--max-num-seqs", 2, "--max-model-len", 128)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_tiny(tmp_path_factory.mktemp("tiny") / "model")
    for name, contents in byte_tokenizer_files().items():
        (path / name).write_bytes(contents)
    (path / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6, "top_k": 20}')
    return path


@contextmanager
def serving(model: object, *options: object) -> Iterator[tuple[ServerProcess, Api]]:
    with running(*REAL, model, *options) as process:
        api = Api(process.base_url)
        try:
            yield process, api
        finally:
            api.http.close()


def refused(model: object, *options: object, variables: dict[str, str] | None = None) -> str:
    """The one line of a server that does not start."""
    command: Sequence[str] = [*REAL, str(model), *map(str, options)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env={**os.environ, **(variables or {})}
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


@pytest.mark.slow
def test_two_processes_answer_as_one(model: Path) -> None:
    """Requests that overlap, so that steps of several slots and prompts that come between them are shared out."""
    options = (model, "--backend", "cpu", "--dtype", "float32", "--max-num-seqs", 3, "--max-model-len", 128)
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2, "--master-port", free_port())
    answers = []
    for command in (REAL, (*launcher, "-m", "llmq", "serve", "--tp", 2)):
        with running(*command, *options) as process, closing(Api(process.base_url)) as api:

            def answer(size: int, api: Api = api) -> str:
                return api.complete("ab " * size, max_tokens=30 - size, **FIXED)["choices"][0]["text"]

            with ThreadPoolExecutor(5) as clients:
                answers.append([*clients.map(answer, range(1, 11))])
            process.signal(signal.SIGTERM)  # killed, the launcher would leave the others behind
            assert process.wait(60) is not None
    assert answers[0] == answers[1]
    assert len(set(answers[0])) == 10


@pytest.mark.slow
def test_a_checkpoint_answers_and_says_what_it_is(model: Path) -> None:
    with serving(model, *ON_CPU, "--served-model-name", "a", "--served-model-name", "b") as (process, api):
        assert [row["id"] for row in api.models] == ["a", "b"]
        assert api.complete("x", max_tokens=3)["usage"]["completion_tokens"] <= 3
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
        output = process.output()
    assert "2 slots of 128 tokens" in output
    assert "temperature=0.6, top_p=1.0, top_k=20" in output
    assert f"{api.base_url}/v1" in output
    assert "warning" not in output


@pytest.mark.slow
def test_a_scheme_quantizes_once(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = (*ON_CPU, "--scheme", "int8_per_channel", "--host", "0.0.0.0")
    for _ in range(2):
        with serving(model, *options) as (process, api):
            assert api.complete("x", max_tokens=1)
            assert "int8_per_channel" in process.output()
            assert "warning   everybody who reaches 0.0.0.0" in process.output()
    (artifact,) = (tmp_path / "llmq" / "artifacts").iterdir()
    assert "scheme=int4_blockwise" in refused(artifact, *ON_CPU, "--scheme", "int4_blockwise")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--max-model-len", 100_000), "max_model_len=100000: must be positive and at most the model's context, 512"),
        (("--max-num-seqs", 10**9), "max_num_seqs=1000000000"),
        (("--port", 70_000), "port=70000"),
        (("--warmup", "some"), "warmup='some'"),
        (("--kv-cache-dtype", "int3"), "kv_cache_dtype='int3'"),
        (("--api-key-file", "/nowhere/key"), "api_key_file=/nowhere/key: cannot be read"),
        (("--groupsize", 32), "need --scheme"),
        (("--scheme", "int5"), "scheme='int5'"),
        (("--host", "no.such.host.invalid"), "cannot be listened on"),
    ],
)
def test_what_cannot_be_served(model: Path, options: tuple[object, ...], says: str) -> None:
    assert says in refused(model, "--backend", "cpu", "--port", 0, *options)


def test_a_port_in_use(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        message = refused(model, "--port", taken.getsockname()[1])
    assert "Address already in use" in message


def test_an_empty_key_in_the_environment_is_no_key(model: Path) -> None:
    assert "LLMQ_API_KEY: holds no key" in refused(model, variables={"LLMQ_API_KEY": ""})


def test_help_imports_no_server() -> None:
    code = "import sys, llmq.cli; print([m for m in ('uvicorn', 'starlette', 'numpy', 'torch') if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )
