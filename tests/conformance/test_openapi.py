"""Requests made from the OpenAPI document.

With model names left to chance every request is a 404 and the engine does nothing, which proves nothing.
So the document names the models, answers are kept short, and the engine must have worked.
"""

import time
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.core.result import Ok

from tests.conformance.api import COMPLETIONS, Api, parse_events, parse_json

#: Statuses of an answer to a request that was made at random.
EXPECTED = {200, 400, 401, 404, 405, 413}

#: Length of answers and number of choices, so that requests take no time.
CAPS = {"max_tokens": 4, "max_completion_tokens": 4, "n": 2}


def capped(body: Any) -> Any:
    """A body whose answer is short; whatever is not a count stays as it is."""
    if not isinstance(body, dict):
        return body
    body = {"max_tokens": 4, **body}
    return {
        name: min(value, CAPS[name])
        if name in CAPS and isinstance(value, int) and not isinstance(value, bool)
        else value
        for name, value in body.items()
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


@pytest.mark.parametrize("seconds", [6, pytest.param(50, marks=pytest.mark.slow)], ids=["short", "long"])
@pytest.mark.filterwarnings("ignore::hypothesis.errors.NonInteractiveExampleWarning")
def test_any_request_is_answered(server: Api, seconds: float) -> None:
    """No 5xx, errors in the one shape, the key asked for, and the engine still there."""
    before = server.metrics()
    found: Counter[tuple[str, int]] = Counter()
    todo = [(operation, mode) for operation in operations(server) for mode in GenerationMode.all()]

    def check(case: Case) -> None:
        if time.monotonic() > deadline:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            case.body = capped(case.body)
            headers = {"authorization": f"Bearer {server.key}"} if server.key else {}
            response = case.call(base_url=server.base_url, headers=headers)
        found[case.operation.label, response.status_code] += 1
        assert response.status_code in EXPECTED, (
            f"{response.status_code}: {case.as_curl_command()}\n{response.text[:500]}"
        )
        kind = response.headers["content-type"][0].split(";")[0]
        if kind == "text/event-stream":
            parse_events(response.text)
        elif kind == "application/json":
            value = parse_json(response.text)
            assert response.status_code == 200 or {"message", "type", "param", "code"} <= set(value["error"])
        else:
            assert response.status_code == 200, f"an error that is {kind}"

    for position, (operation, mode) in enumerate(todo):
        now = time.monotonic()
        weight = [8 if other.label.startswith("POST") else 1 for other, _ in todo[position:]]
        share = seconds * weight[0] / (sum(8 if o.label.startswith("POST") else 1 for o, _ in todo))
        deadline = now + share
        try:
            strategy = operation.as_strategy(generation_mode=mode)
            run = given(case=strategy)(check)
            settings(
                max_examples=10_000, database=None, deadline=None, derandomize=True,
                phases=(Phase.explicit, Phase.generate), suppress_health_check=list(HealthCheck),
            )(run)()  # fmt: skip
        except Exception as err:
            if type(err).__name__ not in ("Unsatisfiable", "SkipTest"):  # an operation without anything to get wrong
                raise
    after = server.metrics()
    statuses = Counter(status for (_, status), count in found.items() for _ in range(count))
    print(f"{found.total()} requests, by status {dict(statuses)}")
    assert statuses[200] > 10
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        assert found[f"POST {path}", 200], f"no valid request to {path}"
        assert found[f"POST {path}", 400], f"no invalid request to {path}"
    assert after["llmq:generation_tokens_total"] > before["llmq:generation_tokens_total"]
    assert after["llmq:slots_free"] == before["llmq:slots_free"]
    assert server.complete("x", max_tokens=2)["usage"]["prompt_tokens"] > 0
