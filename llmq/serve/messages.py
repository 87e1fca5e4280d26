"""Conversations as chat templates expect them."""

from collections.abc import Sequence
from typing import Any

import orjson

from llmq.serve.errors import invalid
from llmq.serve.protocol import Message, Tool, ToolCall


def template_messages(messages: Sequence[Message], template: str | None) -> list[dict[str, Any]]:
    """The messages of a request for a chat template.

    Args:
        messages: As they were sent.
        template: Jinja source; where it does not know the role ``developer``, that is ``system``.

    Returns:
        Plain dictionaries; contents are text, arguments of calls are objects.

    Raises:
        ApiError: A message holds something other than text, or a call whose arguments are no object.
    """
    knows_developer = "developer" in (template or "")
    turns = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        role = "system" if message.role == "developer" and not knows_developer else message.role
        turn: dict[str, Any] = {"role": role, "content": _text(message, where)}
        if message.name is not None:
            turn["name"] = message.name
        if message.tool_call_id is not None:
            turn["tool_call_id"] = message.tool_call_id
        if message.tool_calls:
            turn["tool_calls"] = [_call(call, f"{where}.tool_calls[{k}]") for k, call in enumerate(message.tool_calls)]
        turns.append(turn)
    return turns


def template_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools for a chat template.

    Args:
        tools: As they were sent.

    Returns:
        Plain dictionaries, ``parameters`` always there.
    """
    return [
        {
            "type": "function",
            "function": {
                "name": tool.function.name,
                "description": tool.function.description or "",
                "parameters": tool.function.parameters or {"type": "object", "properties": {}},
            },
        }
        for tool in tools
    ]


def _text(message: Message, where: str) -> str:
    content = message.content
    if content is None:
        if message.role == "assistant":
            return ""
        raise invalid(f"{where}.content: is missing.", f"{where}.content")
    if isinstance(content, str):
        return content
    texts = []
    for k, part in enumerate(content):
        if part.type != "text" or part.text is None:
            raise invalid(
                f"{where}.content[{k}]: is of type {part.type!r}; the model reads text only.", f"{where}.content[{k}]"
            )
        texts.append(part.text)
    return "".join(texts)


def _call(call: ToolCall, where: str) -> dict[str, Any]:
    try:
        arguments = orjson.loads(call.function.arguments or "{}")
    except orjson.JSONDecodeError:
        arguments = None
    if not isinstance(arguments, dict):
        raise invalid(f"{where}.function.arguments: must be a JSON object, as text.", f"{where}.function.arguments")
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
