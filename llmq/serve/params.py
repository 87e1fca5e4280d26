"""From a body's sampling fields to `SamplingParams`, over the model's own defaults."""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from llmq.config import first_error
from llmq.engine.sampling import Grammar, SamplingParams
from llmq.errors import ConfigError
from llmq.serve.errors import broken_rule, context_exceeded, invalid
from llmq.serve.protocol import ResponseFormat, SamplingBody

#: OpenAI's, where a model recommends nothing.
DEFAULTS: Mapping[str, float] = MappingProxyType({"temperature": 1.0, "top_p": 1.0})

#: Fields that are the same in a body and in `SamplingParams`.
_SAME = (
    "min_tokens", "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "stop_token_ids", "ignore_eos",
)  # fmt: skip


def sampling_defaults(recommended: Mapping[str, float]) -> dict[str, float]:
    """Sampling of requests that do not say.

    Args:
        recommended: From the model's ``generation_config.json``.

    Returns:
        Field -> value.

    Raises:
        ConfigError: A recommended value breaks a rule.
    """
    known: dict[str, Any] = {name: value for name, value in recommended.items() if name in SamplingParams.model_fields}
    try:
        SamplingParams(**known)
    except ValidationError as err:
        raise ConfigError(f"generation_config.json: {first_error(err)}; correct the file.") from err
    return {**DEFAULTS, **known}


def sampling_params(
    body: SamplingBody,
    defaults: Mapping[str, float],
    vocab_size: int,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    grammar: Grammar | None = None,
) -> SamplingParams:
    """What a body asks for.

    Args:
        body: The request.
        defaults: For what it does not say.
        vocab_size: Of the model.
        max_tokens: Tokens to generate at most.
        logprobs: Alternatives to report per token; None reports nothing.
        prompt_logprobs: The same for the prompt.
        grammar: What the answer must match.

    Returns:
        The parameters.

    Raises:
        ApiError: One breaks a rule.
    """
    given = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    if given.get("top_k") == -1:  # another spelling of all
        given["top_k"] = 0
    if body.seed is not None:
        given["seed"] = body.seed % (1 << 64)
    if body.stop is not None:
        given["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    merged: dict[str, Any] = {**defaults, **given}
    try:
        params = SamplingParams(
            **merged,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=grammar,
        )
    except ValidationError as err:
        raise broken_rule(err) from err
    for name, tokens in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        outside = next((token for token in tokens if token >= vocab_size), None)
        if outside is not None:
            raise invalid(f"{name}: token {outside} is not in the vocabulary of {vocab_size}.", name)
    return params


def room(num_prompt: int, max_tokens: int | None, default: int, context: int, param: str) -> int:
    """How many tokens a request may generate.

    Args:
        num_prompt: Tokens of the prompt.
        max_tokens: What it asks for.
        default: What it gets when it does not say, at most the rest of the context.
        context: Positions of a slot.
        param: Name of the field that holds the prompt.

    Returns:
        A count.

    Raises:
        ApiError: The prompt and `max_tokens` exceed the context.
    """
    if max_tokens is not None and max_tokens < 0:
        raise invalid(f"max_tokens={max_tokens}: must be at least 0.", "max_tokens")
    rest = context - num_prompt
    wanted = max(1, min(default, rest)) if max_tokens is None else max_tokens
    if wanted > rest:
        raise context_exceeded(str(num_prompt), wanted, context, "max_tokens" if num_prompt < context else param)
    return wanted


def grammar_of(wanted: ResponseFormat | None) -> Grammar | None:
    """The grammar behind a ``response_format``.

    Args:
        wanted: The field.

    Returns:
        None for plain text.

    Raises:
        ApiError: The schema is missing.
    """
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return json_grammar({"type": "object"})
    if wanted.json_schema is None:
        raise invalid("response_format.json_schema: is missing.", "response_format.json_schema")
    return json_grammar(wanted.json_schema.schema_)


def json_grammar(schema: Mapping[str, Any]) -> Grammar:
    """A grammar of the values that match a schema.

    Args:
        schema: JSON schema.

    Returns:
        The grammar.

    Raises:
        ApiError: It is nested too deeply.
    """
    try:
        return Grammar(kind="json_schema", source=json.dumps(schema))
    except RecursionError as err:
        raise invalid("The schema is nested too deeply.", "response_format") from err
