"""The server that is held against the suite."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conformance.api import Api
from tests.conformance.servers import FAKE, REAL, ServerProcess, running

KEY = "sk-of-the-conformance-suite"

#: Options of the real server. float32, so that computing a token in a batch or in a prompt gives the same to 1e-3.
_OPTIONS = ("--max-num-seqs", "4", "--max-model-len", "512", "--dtype", "float32")

#: Server -> arguments of ``llmq serve``.
BACKENDS = {"torch": ("--backend", "gpu", "--device", "cpu"), "jax": ("--backend", "tpu", "--device", "cpu")}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--base-url", help="Hold this server against the suite, instead of starting some.")
    parser.addoption("--api-key-file", type=Path, help="A file with the key of the server at --base-url.")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "server" in metafunc.fixturenames:
        given = metafunc.config.getoption("--base-url", default=None)
        names = ["given"] if given else ["fake", *(pytest.param(name, marks=pytest.mark.slow) for name in BACKENDS)]
        metafunc.parametrize("server", names, indirect=True, scope="session")


@pytest.fixture(scope="session")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The key of the servers that are started here."""
    path = tmp_path_factory.mktemp("key") / "key"
    path.write_text(KEY + "\n")
    path.chmod(0o600)
    return path


@contextmanager
def start(
    name: str, request: pytest.FixtureRequest, *options: object, ready: bool = True, port: int | None = None
) -> Iterator[ServerProcess]:
    """Start the fake server, or a real one."""
    if name == "fake":
        command = (*FAKE, *options)
    else:
        command = (*REAL, request.getfixturevalue("smollm2_int4"), *BACKENDS[name], *_OPTIONS, *options)
    with running(*command, ready=ready, port=port) as server:
        yield server


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest) -> Iterator[Api]:
    """A server; the tests leave it as it was."""
    if request.param == "given":
        path = request.config.getoption("--api-key-file", default=None)
        key = path.read_text().partition("\n")[0].strip() if path else None
        yield Api(request.config.getoption("--base-url").rstrip("/"), key)
        return
    with start(request.param, request, "--api-key-file", request.getfixturevalue("key_file")) as process:
        yield Api(process.base_url, KEY)
