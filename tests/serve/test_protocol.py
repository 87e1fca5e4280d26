"""Bodies and what is refused in them."""

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmq.errors import ConfigError
from llmq.serve.errors import ApiError, param_of
from llmq.serve.params import sampling_defaults, sampling_params
from llmq.serve.protocol import UNSUPPORTED, WITHOUT_EFFECT, ChatBody, CompletionBody, parse

CHAT = {"messages": [{"role": "user", "content": "x"}]}


def refuse(body: object) -> dict:
    with pytest.raises(ApiError) as refused:
        parse(ChatBody, body if isinstance(body, bytes) else orjson.dumps(body))
    assert refused.value.status == 400
    return refused.value.body["error"]


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_fields_are_refused_and_their_defaults_are_not(name: str) -> None:
    for harmless in (None, *UNSUPPORTED[name]):
        assert parse(ChatBody, orjson.dumps({**CHAT, name: harmless}))[1] == 0
    assert refuse({**CHAT, name: "something"})["param"] == name


@pytest.mark.parametrize("name", sorted(WITHOUT_EFFECT))
def test_fields_without_effect_are_not_unknown(name: str) -> None:
    if name not in ChatBody.model_fields:
        assert parse(ChatBody, orjson.dumps({**CHAT, name: "x"}))[1] == 0


def test_unknown_fields_are_counted() -> None:
    assert parse(ChatBody, orjson.dumps({**CHAT, "one": 1, "two": None}))[1] == 2


@pytest.mark.parametrize(("best_of", "n", "fine"), [(1, None, True), (2, 2, True), (3, 2, False), (2, None, False)])
def test_best_of(best_of: int, n: int | None, fine: bool) -> None:
    body = {**CHAT, "best_of": best_of, "n": n}
    assert parse(ChatBody, orjson.dumps(body)) if fine else refuse(body)["param"] == "best_of"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
        ({"temperature": True}, "temperature"),
        ({"stop": [5]}, "stop[0]"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x"),
    ],
)
def test_the_field_at_fault_is_named(change: dict, param: str) -> None:
    assert refuse({**CHAT, **change})["param"] == param


@pytest.mark.parametrize("raw", [b"", b"[]", b"null", b"{", b'{"a": NaN}', b'{"a": "\\ud800"}', b"\xff", b"[" * 5000])
def test_what_is_no_object(raw: bytes) -> None:
    assert refuse(raw)["type"] == "invalid_request_error"


def test_a_message_is_short_however_long_the_value_is() -> None:
    assert len(refuse({**CHAT, "temperature": "x" * 100_000})["message"]) < 200
    deep: object = []
    for _ in range(200):
        deep = [deep]
    assert len(refuse({**CHAT, "temperature": deep})["message"]) < 300


@given(st.recursive(st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=10))  # fmt: skip
def test_anything_is_read_or_refused_in_words_that_json_holds(value: object) -> None:
    try:
        raw = orjson.dumps({**CHAT, "tools": value, "stop": value, "response_format": value})
    except TypeError:  # hypothesis makes half surrogate pairs, orjson does not write them
        return
    try:
        parse(ChatBody, raw)
    except ApiError as err:
        orjson.dumps(err.body)


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [({"top_k": -1}, "top_k", 0), ({"seed": -1}, "seed", (1 << 64) - 1), ({"stop": "x"}, "stop", ("x",)), ({"temperature": None}, "temperature", 0.6)],
)  # fmt: skip
def test_spellings(given: dict, name: str, value: object) -> None:
    body = CompletionBody.model_validate({"prompt": "x", **given})
    params = sampling_params(body, {"temperature": 0.6}, 100, max_tokens=5, logprobs=None)
    assert getattr(params, name) == value


def test_what_the_model_recommends_is_checked() -> None:
    assert sampling_defaults({}) == {"temperature": 1.0, "top_p": 1.0}
    assert sampling_defaults({"temperature": 0.2, "top_k": 40})["temperature"] == 0.2
    with pytest.raises(ConfigError, match=r"generation_config.json: top_p=7"):
        sampling_defaults({"top_p": 7.0})


def test_the_field_of_a_sentence() -> None:
    assert param_of("n=9: must be at most 8.") == "n"
    assert param_of("prompt: has no tokens; give some.") == "prompt"
    assert param_of("The prompt: is wrong.") is None
