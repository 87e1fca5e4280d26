"""A real server in front of a fake model."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from tests.conformance.api import Api
from tests.conformance.servers import FAKE, ServerProcess, running

Start = Callable[..., AbstractContextManager[tuple[ServerProcess, Api]]]


@contextmanager
def fake(*options: object, key: str | None = None) -> Iterator[tuple[ServerProcess, Api]]:
    """A server of its own, for what changes it."""
    with running(*FAKE, *options) as process:
        api = Api(process.base_url, key)
        try:
            yield process, api
        finally:
            api.http.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Api]:
    """A server that the tests of a module share."""
    with fake() as (_, api):
        yield api
