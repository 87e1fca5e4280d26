"""``/v1/completions``: prompts, and what continues them, in OpenAI's shape."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmq.engine.request import Event, PromptDone
from llmq.engine.sampling import SamplingParams
from llmq.serve.answer import Usage
from llmq.serve.logprobs import LegacyLogprobs, joined
from llmq.serve.params import grammar_of, room, sampling_params
from llmq.serve.prompts import Prompt, Prompts
from llmq.serve.protocol import CompletionBody

#: OpenAI's default.
MAX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class CompletionCall:
    """A completion request, ready for the engine.

    Attributes:
        prompts: What to continue.
        params: How, for each prompt.
        echo: Repeat the prompts in front of the answers.
    """

    prompts: Sequence[Prompt]
    params: Sequence[SamplingParams]
    echo: bool


def prepare_completion(body: CompletionBody, prompts: Prompts, defaults: Mapping[str, float]) -> CompletionCall:
    """Read a completion request.

    Args:
        body: The request.
        prompts: Makes token ids.
        defaults: Sampling of requests that do not say.

    Returns:
        What to give to the engine.

    Raises:
        ApiError: It breaks a rule.
    """
    echo = bool(body.echo)
    scored = echo and body.logprobs is not None
    found = prompts.plain(body.prompt, with_text=echo)
    params = [
        sampling_params(
            body,
            defaults,
            prompts.caps.vocab_size,
            max_tokens=room(len(prompt.tokens), body.max_tokens, MAX_TOKENS, prompts.caps.max_len, "prompt"),
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if scored else None,
            grammar=grammar_of(body.response_format),
        )
        for prompt in found
    ]
    if scored:
        # Who scores a prompt takes the last row for the one token that was generated (lm-eval does):
        # it must be there even if it is an end token.
        params = [one.model_copy(update={"min_tokens": max(one.min_tokens, min(1, one.max_tokens))}) for one in params]
    return CompletionCall(found, params, echo)


@dataclass(slots=True)
class _Choice:
    rows: LegacyLogprobs
    text: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None


class CompletionAnswer:
    """See `answer.Answer`.

    Args:
        call: What was asked.
        prompts: Knows the tokens' texts.
        model: Name to answer with.
        ident: Names the answer.

    Attributes:
        usage: What it used.
    """

    def __init__(self, call: CompletionCall, prompts: Prompts, model: str, ident: str) -> None:
        self.usage = Usage(sum(len(prompt.tokens) for prompt in call.prompts))
        self._call = call
        self._n = call.params[0].n
        self._with_logprobs = call.params[0].logprobs is not None
        self._choices = [
            _Choice(LegacyLogprobs(prompts.tokenizer, prompt.text)) for prompt in call.prompts for _ in range(self._n)
        ]
        self._head = {"id": ident, "object": "text_completion", "created": int(time.time()), "model": model}

    def envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """See `answer.Answer`."""
        return {**self._head, "choices": choices}

    def chunks(self, prompt: int, event: Event) -> list[dict[str, Any]]:
        """See `answer.Answer`."""
        if isinstance(event, PromptDone):
            return self._echo(prompt, event) if self._call.echo else []
        index = prompt * self._n + event.choice
        choice = self._choices[index]
        choice.text.append(event.text)
        choice.finish_reason = event.finish_reason
        rows = choice.rows.answer(event.logprobs) if event.logprobs else None
        if rows:
            choice.logprobs.append(rows)
        if not (event.text or rows or event.finish_reason):
            return []
        return [self.envelope([_json(index, event.text, rows, event.finish_reason)])]

    def _echo(self, prompt: int, event: PromptDone) -> list[dict[str, Any]]:
        source = self._call.prompts[prompt]
        chunks = []
        for index in range(prompt * self._n, (prompt + 1) * self._n):
            choice = self._choices[index]
            choice.text.append(source.text)
            rows = choice.rows.prompt(source.tokens, event.logprobs) if event.logprobs else None
            if rows:
                choice.logprobs.append(rows)
            chunks.append(self.envelope([_json(index, source.text, rows, None)]))
        return chunks

    def result(self) -> dict[str, Any]:
        """See `answer.Answer`."""
        choices = [
            _json(i, "".join(c.text), joined(c.logprobs) if self._with_logprobs else None, c.finish_reason)
            for i, c in enumerate(self._choices)
        ]
        return {**self.envelope(choices), "usage": self.usage.json()}


def _json(index: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
