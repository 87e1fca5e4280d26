"""The server that is held against the suite."""

import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.api import Api
from tests.conformance.servers import FAKE, REAL, ServerProcess, running

KEY = "sk-of-the-conformance-suite"

#: A chat template with the parts of Hermes' that matter.
HERMES = (
    "{% if tools %}<|im_start|>system\n<tools>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools>\n"
    "Answer with <tool_call>{...}</tool_call>.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

#: Options of the real server. float32, so that computing a token in a batch or in a prompt gives the same to 1e-3.
_OPTIONS = ("--max-num-seqs", "4", "--max-model-len", "512", "--dtype", "float32")

#: Server -> arguments of ``llmq serve``.
BACKENDS = {"torch": ("--backend", "gpu", "--device", "cpu"), "jax": ("--backend", "tpu", "--device", "cpu")}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--base-url", help="Hold this server against the suite, instead of starting some.")
    parser.addoption("--api-key-file", type=Path, help="A file with the key of the server at --base-url.")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kind" in metafunc.fixturenames:
        given = metafunc.config.getoption("--base-url", default=None)
        names = ["given"] if given else ["fake", *(pytest.param(name, marks=pytest.mark.slow) for name in BACKENDS)]
        metafunc.parametrize("kind", names, scope="session")


@pytest.fixture(scope="session")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The key of the servers that are started here."""
    path = tmp_path_factory.mktemp("key") / "key"
    path.write_text(KEY + "\n")
    path.chmod(0o600)
    return path


@contextmanager
def start(kind: str, request: pytest.FixtureRequest, *options: object, **how: Any) -> Iterator[ServerProcess]:
    """Start the fake server, or a real one."""
    if kind == "fake":
        command = (*FAKE, *options)
    else:
        command = (*REAL, request.getfixturevalue("smollm2_int4"), *BACKENDS[kind], *_OPTIONS, *options)
    with running(*command, **how) as process:
        yield process


@pytest.fixture(scope="session")
def server(kind: str, key_file: Path, request: pytest.FixtureRequest) -> Iterator[Api]:
    """A server; the tests leave it as it was."""
    if kind == "given":
        path = request.config.getoption("--api-key-file", default=None)
        key = path.read_text().partition("\n")[0].strip() if path else None
        with closing(Api(request.config.getoption("--base-url").rstrip("/"), key)) as api:
            yield api
        return
    with start(kind, request, "--api-key-file", key_file) as process, closing(Api(process.base_url, KEY)) as api:
        yield api


@pytest.fixture(scope="session")
def slow_server(kind: str, request: pytest.FixtureRequest) -> Iterator[Api]:
    """A server that takes its time: `server`, unless that is the fake one, whose answers take none."""
    if kind != "fake":
        yield request.getfixturevalue("server")
        return
    with start(kind, request, "--step-seconds", 0.02) as process, closing(Api(process.base_url)) as api:
        yield api


@pytest.fixture(scope="session")
def tool_server(kind: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Api]:
    """A server whose chat template has a place for tools."""
    if kind == "given":
        api = request.getfixturevalue("server")
        if "tools" not in api.tokenizer["chat_template"]:
            pytest.skip("the model's chat template has no place for tools")
        yield api
        return
    directory = tmp_path_factory.mktemp("tools")
    if kind == "fake":
        (directory / "chat_template.jinja").write_text(HERMES)
        command = (*FAKE, "--chat-template", directory / "chat_template.jinja", "--max-model-len", 2048)
    else:
        shutil.copytree(request.getfixturevalue("smollm2_int4"), directory / "model")
        (directory / "model" / "chat_template.jinja").write_text(HERMES)
        command = (*REAL, directory / "model", *BACKENDS[kind], *_OPTIONS)
    with running(*command) as process, closing(Api(process.base_url)) as api:
        yield api
