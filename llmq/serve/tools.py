"""Tool calls in a model's text.

Two formats are known; which one a model writes is told by its chat template:

    hermes    text <tool_call>{"name": ..., "arguments": {...}}</tool_call> <tool_call>...   (Hermes, Qwen)
    llama     {"name": ..., "parameters": {...}}; {...}                                      (Llama 3.1 and later)

What looks like a call and is none (unknown name, broken JSON) stays text. A call that must be made
is forced by a grammar; the answer is then the JSON object alone.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import orjson

from llmq.engine.sampling import Grammar
from llmq.serve.errors import invalid
from llmq.serve.params import json_grammar
from llmq.serve.protocol import ChatBody, NamedTool, Tool

Format = Literal["hermes", "llama"]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class Call:
    """A call that a model makes.

    Attributes:
        name: Of the function.
        arguments: JSON.
        id: Names the call.
    """

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


class Parser(Protocol):
    """Splits text that arrives in pieces into what to show and what to call."""

    def push(self, text: str) -> tuple[str, list[Call]]:
        """Take more text.

        Args:
            text: What follows.

        Returns:
            Text that is certainly none of a call, and the calls completed.
        """
        ...

    def finish(self) -> tuple[str, list[Call]]:
        """The text is over.

        Returns:
            As `push`, of what was still kept back.
        """
        ...


class PlainParser:
    """All of it is text."""

    def push(self, text: str) -> tuple[str, list[Call]]:
        """See `Parser.push`."""
        return text, []

    def finish(self) -> tuple[str, list[Call]]:
        """See `Parser.finish`."""
        return "", []


class HermesParser:
    """Calls between tags.

    Args:
        names: Functions there are.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._held = ""
        self._called = False

    def push(self, text: str) -> tuple[str, list[Call]]:
        """See `Parser.push`."""
        self._held += text
        shown, calls = "", []
        while self._held:
            begin = self._held.find(_OPEN)
            if begin < 0:
                keep = _overlap(self._held, _OPEN)
                shown += self._held[: len(self._held) - keep]
                self._held = self._held[len(self._held) - keep :]
                break
            end = self._held.find(_CLOSE, begin)
            if end < 0:
                shown, self._held = shown + self._held[:begin], self._held[begin:]
                break
            shown += self._held[:begin]
            call = parse_call(self._held[begin + len(_OPEN) : end], self._names)
            if call:
                calls.append(call)
            else:
                shown += self._held[begin : end + len(_CLOSE)]
            self._held = self._held[end + len(_CLOSE) :]
        return self._visible(shown, calls), calls

    def finish(self) -> tuple[str, list[Call]]:
        """See `Parser.finish`. A tag left open at the end of an answer counts as closed."""
        held, self._held = self._held, ""
        call = parse_call(held.removeprefix(_OPEN), self._names) if held.startswith(_OPEN) else None
        return ("", [call]) if call else (self._visible(held, []), [])

    def _visible(self, shown: str, calls: list[Call]) -> str:
        """Without the line breaks around calls."""
        if calls:
            shown = shown.rstrip()
            self._called = True
        return "" if self._called and not shown.strip() else shown


class WholeParser:
    """Answers that are calls as a whole: kept back while they begin with a brace.

    Args:
        names: Functions there are.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._held = ""
        self._plain = False

    def push(self, text: str) -> tuple[str, list[Call]]:
        """See `Parser.push`."""
        if self._plain:
            return text, []
        self._held += text
        begin = self._held.lstrip()
        if not begin or begin.startswith("{"):
            return "", []
        self._plain = True
        held, self._held = self._held, ""
        return held, []

    def finish(self) -> tuple[str, list[Call]]:
        """See `Parser.finish`."""
        held, self._held = self._held, ""
        calls = [parse_call(part, self._names) for part in _objects(held)]
        found = [call for call in calls if call]
        return ("", found) if found and len(found) == len(calls) else (held, [])


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request says of tools.

    Attributes:
        tools: Shown to the model; None shows none.
        grammar: Forces a call; None does not.
        format: How to read calls; None when there can be none.
        names: Functions there are.
    """

    tools: Sequence[Tool] | None = None
    grammar: Grammar | None = None
    format: Format | None = None
    names: frozenset[str] = frozenset()

    def parser(self) -> Parser:
        """For one answer."""
        if self.grammar:
            return WholeParser(self.names)
        return _PARSERS[self.format](self.names) if self.format else PlainParser()


_PARSERS: Mapping[Format, type[HermesParser | WholeParser]] = {"hermes": HermesParser, "llama": WholeParser}


def tool_use(body: ChatBody, template: str | None) -> ToolUse:
    """Read the tools of a request.

    Args:
        body: The request.
        template: The model's chat template.

    Returns:
        What to show, force and read.

    Raises:
        ApiError: The model cannot use tools, or the choice names one that is not there.
    """
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none", "auto"):
            raise invalid("tool_choice: needs tools; send some.", "tool_choice")
        return ToolUse()
    if "tools" not in (template or ""):
        raise invalid("tools: the model's chat template does not take any.", "tools")
    if choice == "none":
        return ToolUse(body.tools)
    if body.response_format and body.response_format.type != "text":
        raise invalid(
            "response_format: excludes tools, since a call does not match it; set tool_choice to none.",
            "response_format",
        )
    names = frozenset(tool.function.name for tool in body.tools)
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise invalid(f"tool_choice: {choice.function.name} is not among the tools.", "tool_choice")
    forced = [
        tool
        for tool in body.tools
        if choice == "required" or (isinstance(choice, NamedTool) and tool.function.name == choice.function.name)
    ]
    grammar = json_grammar(_call_schema(forced)) if forced else None
    return ToolUse(body.tools, grammar, "hermes" if _OPEN in (template or "") else "llama", names)


def parse_call(text: str, names: frozenset[str]) -> Call | None:
    """A call from its JSON.

    Args:
        text: The object.
        names: Functions there are.

    Returns:
        None when it is no call of one of them.
    """
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(value, dict) or value.get("name") not in names:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    try:
        return Call(value["name"], orjson.dumps(arguments).decode()) if isinstance(arguments, dict) else None
    except orjson.JSONEncodeError:  # nested too deeply
        return None


def _call_schema(tools: Sequence[Tool]) -> dict[str, Any]:
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                "arguments": tool.function.parameters or {"type": "object", "properties": {}},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    definitions = {  # a reference inside one tool's schema starts from the root of the whole
        name: schema for tool in tools for name, schema in ((tool.function.parameters or {}).get("$defs") or {}).items()
    }
    one = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return {**one, "$defs": definitions} if definitions else one


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of `text` that begins `tag`."""
    return next((n for n in range(min(len(text), len(tag) - 1), 0, -1) if tag.startswith(text[-n:])), 0)


def _objects(text: str) -> list[str]:
    """JSON objects with semicolons or white space between them, each as text."""
    objects, depth, quoted, escaped, begin = [], 0, False, False, 0
    for i, char in enumerate(text):
        if quoted:
            quoted = escaped or char != '"'
            escaped = char == "\\" and not escaped
        elif char == '"':
            quoted = True
        elif char == "{":
            begin, depth = (i if depth == 0 else begin), depth + 1
        elif char == "}":
            depth -= 1
            if depth == 0:
                objects.append(text[begin : i + 1])
    return objects
