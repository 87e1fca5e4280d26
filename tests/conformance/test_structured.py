"""Answers that match: JSON schemas, JSON objects, calls of tools."""

import json
from typing import Any

import jsonschema
import pytest

from tests.conformance.api import CHAT, COMPLETIONS, Api, parse_json, refused

USER = [{"role": "user", "content": "What is the weather in Paris?"}]

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "rain": {"type": "boolean"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "rain", "days"],
    "additionalProperties": False,
}

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "Weather of a city.", "parameters": SCHEMA},
}
TIME = {
    "type": "function",
    "function": {
        "name": "local_time",
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    },
}


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


class TestSchemas:
    @pytest.mark.parametrize(
        "options", [{"temperature": 0}, {"temperature": 1, "seed": 3}, {"temperature": 1.5, "seed": 4}]
    )
    def test_a_complete_answer_matches(self, server: Api, options: dict) -> None:
        """llama.cpp#19349: a grammar that was silently ignored."""
        for answer in (
            server.chat(USER, response_format=schema_format(SCHEMA), max_tokens=200, **options)["choices"][0],
            server.complete("Answer: ", response_format=schema_format(SCHEMA), max_tokens=200, **options)["choices"][0],
        ):
            said = answer["message"]["content"] if "message" in answer else answer["text"]
            assert answer["finish_reason"] == "stop", said
            jsonschema.validate(parse_json(said), SCHEMA)

    def test_streaming_says_the_same(self, server: Api) -> None:
        options = {"response_format": schema_format(SCHEMA), "max_tokens": 200, "temperature": 1, "seed": 9}
        whole = server.chat(USER, **options)["choices"][0]["message"]["content"]
        assert server.stream(CHAT, messages=USER, **options).text() == whole

    def test_choices_each_match(self, server: Api) -> None:
        answer = server.chat(USER, response_format=schema_format(SCHEMA), max_tokens=200, n=2, temperature=1, seed=2)
        for choice in answer["choices"]:
            jsonschema.validate(parse_json(choice["message"]["content"]), SCHEMA)

    def test_a_cut_answer_says_so(self, server: Api) -> None:
        answer = server.chat(USER, response_format=schema_format(SCHEMA), max_tokens=2, temperature=0)
        assert answer["choices"][0]["finish_reason"] == "length"

    def test_json_object(self, server: Api) -> None:
        choice = server.chat(USER, response_format={"type": "json_object"}, max_tokens=120, temperature=0)["choices"][0]
        said = choice["message"]["content"]
        assert said.lstrip().startswith("{")
        if choice["finish_reason"] == "stop":
            assert isinstance(parse_json(said), dict)

    def test_text_is_the_default(self, server: Api) -> None:
        plain = server.chat(USER, max_tokens=8, temperature=0)
        asked = server.chat(USER, max_tokens=8, temperature=0, response_format={"type": "text"})
        assert plain["choices"] == asked["choices"]

    @pytest.mark.parametrize(
        "schema",
        [
            {"type": "banana"},
            {"$ref": "#/nowhere"},
            {"$ref": "http://example.com/schema.json"},
            {"type": "string", "pattern": "(("},
            {"type": "integer", "minimum": 5, "maximum": 3},
            {"properties": 5},
            {"anyOf": []},
            {"type": "string", "minLength": 5, "maxLength": 2},
            {"enum": []},
        ],
        ids=json.dumps,
    )
    def test_a_schema_that_nothing_can_match_is_refused(self, server: Api, schema: dict) -> None:
        """vllm#47312: a bad grammar killed the server."""
        for path, prompt in ((CHAT, {"messages": USER}), (COMPLETIONS, {"prompt": "x"})):
            response = server.post(path, **prompt, response_format=schema_format(schema), max_tokens=2)
            refused(response, param="response_format")
        assert server.complete("x", max_tokens=1)

    @pytest.mark.parametrize("schema", [5, "x", [], None])
    def test_a_schema_that_is_none_is_refused(self, server: Api, schema: object) -> None:
        refused(
            server.post(CHAT, messages=USER, response_format=schema_format(schema), max_tokens=2),
            param="response_format",
        )


class TestTools:
    @pytest.mark.parametrize(
        "choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=["required", "named"]
    )
    def test_forced_calls(self, tool_server: Api, choice: object) -> None:
        tools = [WEATHER] if choice == "required" else [TIME, WEATHER]
        answer = tool_server.chat(USER, tools=tools, tool_choice=choice, max_tokens=200, temperature=0)["choices"][0]
        calls = answer["message"]["tool_calls"]
        assert len(calls) >= 1
        assert answer["finish_reason"] in ("tool_calls", "stop")
        assert len({call["id"] for call in calls}) == len(calls)
        for call in calls:
            assert call["type"] == "function"
            assert call["function"]["name"] == "weather"
            jsonschema.validate(parse_json(call["function"]["arguments"]), SCHEMA)

    def test_streamed_calls(self, tool_server: Api) -> None:
        options = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 200, "temperature": 0}
        whole = tool_server.chat(USER, **options)["choices"][0]["message"]["tool_calls"]
        calls: dict[int, dict[str, str]] = {}
        events = tool_server.stream(CHAT, messages=USER, **options)
        for part in events.of(0):
            for piece in part["delta"].get("tool_calls") or ():
                call = calls.setdefault(piece["index"], {"id": "", "name": "", "arguments": ""})
                call["id"] += piece.get("id") or ""
                for name in ("name", "arguments"):
                    call[name] += (piece.get("function") or {}).get(name) or ""
        assert [(c["name"], c["arguments"]) for c in calls.values()] == [
            (c["function"]["name"], c["function"]["arguments"]) for c in whole
        ]
        assert all(call["id"] for call in calls.values())

    def test_auto_is_one_or_the_other(self, tool_server: Api) -> None:
        answer = tool_server.chat(USER, tools=[WEATHER], tool_choice="auto", max_tokens=40, temperature=0)["choices"][0]
        message = answer["message"]
        assert message.get("tool_calls") or message["content"] is not None
        assert "<tool_call>" not in (message["content"] or "") or answer["finish_reason"] == "length"

    def test_none_calls_nothing(self, tool_server: Api) -> None:
        message = tool_server.chat(USER, tools=[WEATHER], tool_choice="none", max_tokens=20, temperature=0)["choices"][
            0
        ]["message"]
        assert not message.get("tool_calls")

    def test_results_go_back(self, tool_server: Api) -> None:
        call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
        turns = [
            *USER,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "dry"},
        ]
        response = tool_server.post(CHAT, messages=turns, tools=[WEATHER], max_tokens=4)
        assert response.status_code in (200, 400), response.text  # some templates have no place for it, and say so

    @pytest.mark.parametrize(
        "body",
        [
            {"tools": 5},
            {"tools": [5]},
            {"tools": [{"type": "function"}]},
            {"tools": [{"type": "spoon", "function": {"name": "x"}}]},
            {"tools": [{"type": "function", "function": {"name": "two words"}}]},
            {
                "tools": [{"type": "function", "function": {"name": "x", "parameters": {"type": "banana"}}}],
                "tool_choice": "required",
            },
            {"tools": [WEATHER], "tool_choice": "sometimes"},
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "nowhere"}}},
            {"tool_choice": "required"},
            {"tools": [], "tool_choice": "required"},
        ],
        ids=lambda body: json.dumps(body)[:60],
    )
    def test_refused(self, tool_server: Api, body: dict) -> None:
        refused(tool_server.post(CHAT, messages=USER, max_tokens=2, **body))
