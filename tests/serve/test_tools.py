"""Calls in a model's text, however it is cut into pieces."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmq.serve.errors import ApiError
from llmq.serve.protocol import ChatBody
from llmq.serve.tools import HermesParser, Parser, WholeParser, tool_use

NAMES = frozenset({"weather", "time"})
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome </tool"}}\n</tool_call>'
HERMES, LLAMA = "{{ tools }} <tool_call>", "{{ tools }}"

cuts = st.lists(st.integers(0, 200), max_size=12)


def read(parser: Parser, text: str, places: list[int]) -> tuple[str, list[tuple[str, dict]]]:
    """The text shown and the calls made when it arrives in pieces."""
    edges = [0, *sorted({place for place in places if place < len(text)}), len(text)]
    results = [parser.push(text[a:b]) for a, b in pairwise(edges)]
    results.append(parser.finish())
    calls = [(call.name, json.loads(call.arguments)) for _, found in results for call in found]
    return "".join(shown for shown, _ in results), calls


@pytest.mark.parametrize(
    ("text", "shown", "calls"),
    [
        ("No call.", "No call.", []),
        ("a < b <tool", "a < b <tool", []),
        (CALL, "", [("weather", {"city": "Rome </tool"})]),
        (f"Let me see. {CALL}\n{CALL}\n", "Let me see.", [("weather", {"city": "Rome </tool"})] * 2),
        (CALL.removesuffix("</tool_call>"), "", [("weather", {"city": "Rome </tool"})]),
        ("<tool_call>nonsense</tool_call>", "<tool_call>nonsense</tool_call>", []),
        ('<tool_call>{"name": "other"}</tool_call> x', '<tool_call>{"name": "other"}</tool_call> x', []),
        ('<tool_call>{"name": "time"}</tool_call>', "", [("time", {})]),
        ('<tool_call>{"name": "time", "arguments": 5}</tool_call>', '<tool_call>{"name": "time", "arguments": 5}</tool_call>', []),
        ("<tool_call>{", "<tool_call>{", []),
    ],
)  # fmt: skip
@given(places=cuts)
def test_hermes(text: str, shown: str, calls: list, places: list[int]) -> None:
    whole, found = read(HermesParser(NAMES), text, places)
    assert found == calls
    assert whole.rstrip() == shown.rstrip() if calls else whole == shown


@given(st.text('<tool_cal>/{}" x', max_size=60), cuts)
def test_text_without_a_call_arrives_whole(text: str, places: list[int]) -> None:
    assert read(HermesParser(NAMES), text, places) == (text, [])
    assert read(WholeParser(NAMES), text, places) == (text, [])


@given(st.text("<tool_cal>/x", max_size=30))
def test_no_more_is_kept_back_than_a_tag_could_begin_with(text: str) -> None:
    shown, _ = HermesParser(NAMES).push(text)
    held = text[len(shown) :]
    assert text.startswith(shown)
    assert "<tool_call>".startswith(held) or held.startswith("<tool_call>")


@pytest.mark.parametrize(
    ("text", "shown", "calls"),
    [
        ('{"name": "time", "parameters": {"zone": "}{"}}', "", [("time", {"zone": "}{"})]),
        ('\n{"name": "time", "parameters": {}}; {"name": "weather", "parameters": {"a": "\\""}}', "", [("time", {}), ("weather", {"a": '"'})]),
        ('{"name": "other", "parameters": {}}', '{"name": "other", "parameters": {}}', []),
        ('{"name": "time"', '{"name": "time"', []),
        ("{}", "{}", []),
        ("It is {five}.", "It is {five}.", []),
    ],
)  # fmt: skip
@given(places=cuts)
def test_llama(text: str, shown: str, calls: list, places: list[int]) -> None:
    assert read(WholeParser(NAMES), text, places) == (shown, calls)


def body(**more: object) -> ChatBody:
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in sorted(NAMES)
    ]
    return ChatBody.model_validate({"messages": [{"role": "user", "content": "x"}], "tools": tools, **more})


def test_the_template_tells_the_format() -> None:
    assert isinstance(tool_use(body(), HERMES).parser(), HermesParser)
    assert isinstance(tool_use(body(), LLAMA).parser(), WholeParser)
    assert tool_use(body(tool_choice="none"), HERMES).format is None


def test_a_forced_call_is_a_grammar() -> None:
    named = {"type": "function", "function": {"name": "time"}}
    grammar = tool_use(body(tool_choice=named), HERMES).grammar
    assert grammar
    assert json.loads(grammar.source)["properties"]["name"] == {"const": "time"}
    anything = tool_use(body(tool_choice="required"), HERMES).grammar
    assert anything
    assert [row["properties"]["name"]["const"] for row in json.loads(anything.source)["anyOf"]] == ["time", "weather"]


@pytest.mark.parametrize(
    ("template", "more", "param"),
    [
        ("no such thing", {}, "tools"),
        (None, {}, "tools"),
        (HERMES, {"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        (HERMES, {"tools": None, "tool_choice": "required"}, "tool_choice"),
        (HERMES, {"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_what_cannot_be(template: str | None, more: dict, param: str) -> None:
    with pytest.raises(ApiError) as refused:
        tool_use(body(**more), template)
    assert refused.value.status == 400
    assert refused.value.body["error"]["param"] == param
