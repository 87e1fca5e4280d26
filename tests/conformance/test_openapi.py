"""Requests made from the OpenAPI document.

With model names left to chance every request is a 404 and the engine does nothing, which proves nothing.
So the document names the models, answers are kept short, and the engine must have worked.
"""

import time
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from unittest import SkipTest

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import Case, GenerationMode
from schemathesis.core.result import Ok

from tests.conformance.api import CHAT, COMPLETIONS, Api, parse_events, parse_json

#: Statuses of an answer to a request that was made at random.
EXPECTED = {200, 400, 401, 404, 405, 413}

#: Length of answers and number of choices, so that requests take no time.
CAPS = {"max_tokens": 4, "max_completion_tokens": 4, "n": 2}

#: Requests of each kind, however slow the machine is.
AT_LEAST = 12

#: Fields without which there is no request.
ESSENTIAL = ("model", "prompt", "messages", "tokens")


def capped(body: Any, *, sparse: bool) -> Any:
    """A body whose answer is short; whatever is not a count stays as it is.

    Of thirty fields drawn within their types one nearly always breaks a rule, such as an id that the vocabulary
    lacks. A sparse body keeps a few.
    """
    if not isinstance(body, dict):
        return body
    kept = body
    if sparse:
        kept = {
            k: v
            for k, v in body.items()
            if k in ESSENTIAL or zlib.crc32(repr((k, v)).encode(errors="replace")) % 8 == 0
        }
        if "messages" in kept and kept.get("prompt") is not None:
            del kept["messages"]  # a text or a conversation, not both
        elif isinstance(kept.get("messages"), list):
            kept["messages"] = kept["messages"][:1]
    return {
        name: min(value, CAPS[name])
        if name in CAPS and isinstance(value, int) and not isinstance(value, bool)
        else value
        for name, value in {"max_tokens": 4, **kept}.items()
    }


def operations(server: Api) -> Iterator[schemathesis.APIOperation]:
    """Every operation of the document."""
    document = server.http.get("/openapi.json").json()
    schema = schemathesis.openapi.from_dict(document)
    for result in schema.get_all_operations():
        assert isinstance(result, Ok), result
        yield result.ok()


def test_the_document_names_the_models(server: Api) -> None:
    document = server.http.get("/openapi.json").json()
    body = document["paths"][COMPLETIONS]["post"]["requestBody"]["content"]["application/json"]["schema"]
    if "$ref" in body:
        body = document["components"]["schemas"][body["$ref"].rsplit("/", 1)[-1]]
    assert body["properties"]["model"]["enum"] == [row["id"] for row in server.models]


class TimeUpError(Exception):
    """Ends the making of requests."""


@pytest.mark.parametrize("seconds", [6, pytest.param(50, marks=pytest.mark.slow)], ids=["short", "long"])
def test_any_request_is_answered(server: Api, seconds: float) -> None:
    """No 5xx, errors in the one shape, and the engine still there."""
    before = server.metrics()
    found: Counter[tuple[str, int]] = Counter()
    faults: list[str] = []
    headers = {"authorization": f"Bearer {server.key}"} if server.key else {}
    deadline, num_made = 0.0, 0

    def check(case: Case) -> None:
        nonlocal num_made
        if time.monotonic() > deadline and num_made >= AT_LEAST:
            raise TimeUpError
        num_made += 1
        case.body = capped(case.body, sparse=mode is GenerationMode.POSITIVE)
        response = case.call(base_url=server.base_url, headers=headers)
        found[case.operation.label, response.status_code] += 1
        if fault := fault_of(response):
            faults.append(f"{fault}: {case.as_curl_command()}\n{response.status_code} {response.text[:300]}")

    todo = [(operation, mode) for operation in operations(server) for mode in GenerationMode]
    weights = [8 if operation.method == "post" else 1 for operation, _ in todo]
    for (operation, mode), weight in zip(todo, weights, strict=True):
        deadline, num_made = time.monotonic() + seconds * weight / sum(weights), 0
        making = settings(
            max_examples=10_000, database=None, deadline=None, derandomize=True, report_multiple_bugs=False,
            phases=(Phase.generate,), suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        with (
            warnings.catch_warnings(),
            suppress(TimeUpError, SkipTest, Unsatisfiable),
        ):  # some have nothing to get wrong
            warnings.simplefilter("ignore")
            making(given(case=operation.as_strategy(generation_mode=mode))(check))()
    after = server.metrics()
    print(f"{found.total()} requests: {dict(found)}")
    assert not faults, f"{len(faults)} faults, as {faults[0]}"
    posts = [f"POST {path}" for path in (COMPLETIONS, CHAT, "/tokenize", "/detokenize")]
    if seconds > 10:
        assert [post for post in posts if not found[post, 200] or not found[post, 400]] == []
    assert sum(found[post, 200] for post in posts) > 5
    assert after["llmq:generation_tokens_total"] > before["llmq:generation_tokens_total"]
    assert after["llmq:slots_free"] == before["llmq:slots_free"]
    assert server.complete("x", max_tokens=2)["usage"]["prompt_tokens"] > 0


def fault_of(response: schemathesis.Response) -> str | None:
    """What is wrong with a response; None if nothing is."""
    if response.status_code not in EXPECTED:
        return "an unexpected status"
    kind = response.headers["content-type"][0].split(";")[0]
    try:
        if kind == "text/event-stream":
            parse_events(response.text)
        elif kind == "application/json":
            value = parse_json(response.text)
            if response.status_code != 200 and set(value["error"]) != {"message", "type", "param", "code"}:
                return "an error of another shape"
        elif response.status_code != 200:
            return f"an error that is {kind}"
    except (AssertionError, ValueError, KeyError, TypeError) as err:
        return f"not a valid body ({err!r})"
    return None
