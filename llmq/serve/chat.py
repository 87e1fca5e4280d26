"""``/v1/chat/completions``: the request as a prompt, and its answer in OpenAI's shape."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmq.engine.request import Delta, Event, PromptDone, TokenLogprobs
from llmq.engine.sampling import SamplingParams
from llmq.serve.answer import Usage
from llmq.serve.errors import invalid
from llmq.serve.logprobs import chat_logprobs
from llmq.serve.messages import template_messages, template_tools
from llmq.serve.params import grammar_of, room, sampling_params
from llmq.serve.prompts import Prompts
from llmq.serve.protocol import ChatBody
from llmq.serve.tools import Call, Parser, ToolUse, tool_use


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A chat request, ready for the engine.

    Attributes:
        prompt: Token ids.
        params: How to answer.
        tools: How to read the answer.
    """

    prompt: Sequence[int]
    params: SamplingParams
    tools: ToolUse


def prepare_chat(body: ChatBody, prompts: Prompts, defaults: Mapping[str, float]) -> ChatCall:
    """Read a chat request.

    Args:
        body: The request.
        prompts: Makes token ids.
        defaults: Sampling of requests that do not say.

    Returns:
        What to give to the engine.

    Raises:
        ApiError: It breaks a rule.
    """
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs: needs logprobs; set it to true.", "top_logprobs")
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise invalid("max_tokens: contradicts max_completion_tokens; leave it out.", "max_tokens")
    tools = tool_use(body, prompts.template)
    prompt = prompts.chat(
        template_messages(body.messages, prompts.template),
        tools=template_tools(tools.tools) if tools.tools else None,
        options=body.chat_template_kwargs or {},
    )
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    params = sampling_params(
        body,
        defaults,
        prompts.caps.vocab_size,
        max_tokens=room(len(prompt), asked, prompts.caps.max_len, prompts.caps.max_len, "messages"),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        grammar=tools.grammar or grammar_of(body.response_format),
    )
    return ChatCall(prompt, params, tools)


@dataclass(slots=True)
class _Choice:
    parser: Parser
    text: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None


class ChatAnswer:
    """See `answer.Answer`.

    Args:
        call: What was asked.
        prompts: Knows the tokens' texts.
        model: Name to answer with.
        ident: Names the answer.

    Attributes:
        usage: What it used.
    """

    def __init__(self, call: ChatCall, prompts: Prompts, model: str, ident: str) -> None:
        self.usage = Usage(len(call.prompt))
        self._tokenizer = prompts.tokenizer
        self._with_logprobs = call.params.logprobs is not None
        self._choices = [_Choice(call.tools.parser()) for _ in range(call.params.n)]
        self._head = {"id": ident, "created": int(time.time()), "model": model}

    def envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """See `answer.Answer`."""
        return {**self._head, "object": "chat.completion.chunk", "choices": choices}

    def chunks(self, prompt: int, event: Event) -> list[dict[str, Any]]:  # noqa: ARG002 - there is one prompt
        """See `answer.Answer`."""
        if isinstance(event, PromptDone):
            first = {"role": "assistant", "content": ""}
            return [self.envelope([self._choice(i, first)]) for i in range(len(self._choices))]
        choice = self._choices[event.choice]
        begun = len(choice.calls)
        text = self._grow(choice, event)
        delta: dict[str, Any] = {"content": text} if text or event.logprobs else {}
        if calls := choice.calls[begun:]:
            delta["tool_calls"] = [{"index": begun + k, **_call(call)} for k, call in enumerate(calls)]
        if not delta and choice.finish_reason is None:
            return []
        return [self.envelope([self._choice(event.choice, delta, event.logprobs, choice.finish_reason)])]

    def _grow(self, choice: _Choice, event: Delta) -> str:
        text, calls = choice.parser.push(event.text)
        if event.finish_reason:
            rest, last = choice.parser.finish()
            text, calls = text + rest, [*calls, *last]
        choice.text.append(text)
        choice.calls += calls
        choice.logprobs += event.logprobs
        if event.finish_reason:
            ended = event.finish_reason == "stop" and choice.calls
            choice.finish_reason = "tool_calls" if ended else event.finish_reason
        return text

    def _choice(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: Sequence[TokenLogprobs] = (),
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        rows = chat_logprobs(self._tokenizer, logprobs) if logprobs else None
        return {"index": index, "delta": delta, "logprobs": rows, "finish_reason": finish_reason}

    def result(self) -> dict[str, Any]:
        """See `answer.Answer`."""
        choices = []
        for i, choice in enumerate(self._choices):
            text = "".join(choice.text)
            message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
            if choice.calls:
                message["content"] = text or None
                message["tool_calls"] = [_call(call) for call in choice.calls]
            rows = chat_logprobs(self._tokenizer, choice.logprobs) if self._with_logprobs else None
            choices.append({"index": i, "message": message, "logprobs": rows, "finish_reason": choice.finish_reason})
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": self.usage.json()}


def _call(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
