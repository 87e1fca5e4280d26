"""Request bodies. Types are checked here; `engine.sampling.SamplingParams` has the ranges."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema

from llmq.serve.errors import broken_rule, invalid


class Body(BaseModel):
    """A part of a request: types are not converted, unknown fields are kept to be counted."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


class StreamOptions(Body):
    """How to stream."""

    include_usage: bool | None = None


class SamplingBody(Body):
    """What both ways to complete have in common; None stands for the default."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[Annotated[str, Field(pattern="^[0-9]{1,10}$")], float] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None


class JsonSchema(Body):
    """A schema that an answer must match."""

    name: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """What an answer must look like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


_PROMPT = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
        {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
        {"type": "array", "minItems": 1, "items": {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}},
    ]
}  # fmt: skip


class CompletionBody(SamplingBody):
    """``POST /v1/completions``."""

    prompt: Annotated[Any, WithJsonSchema(_PROMPT)]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None


_NAME = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")


class FunctionCall(Body):
    """A call the model made before."""

    name: Annotated[str, _NAME]
    arguments: str


class ToolCall(Body):
    """A call the model made before."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ContentPart(Body):
    """A piece of a message; only text can be read."""

    type: str
    text: str | None = None


class Message(Body):
    """A turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=128)] | None = None
    tool_call_id: str | None = None


class Function(Body):
    """A function the model may call."""

    name: Annotated[str, _NAME]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """Something the model may use."""

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    """The function that must be called."""

    name: Annotated[str, _NAME]


class NamedTool(Body):
    """The tool that must be used."""

    type: Literal["function"]
    function: NamedFunction


class ChatBody(SamplingBody):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=8192, fail_fast=True)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


#: Characters of a text to count the tokens of: more than any context, for documents that are scored in windows.
MAX_TEXT = 1 << 20


class TokenizeBody(Body):
    """``POST /tokenize``: a prompt, or a conversation."""

    model: str | None = None
    prompt: Annotated[str, Field(max_length=MAX_TEXT)] | None = None
    add_special_tokens: bool | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=8192, fail_fast=True)] | None = None
    add_generation_prompt: bool | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(Body):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]


#: Known fields that no answer depends on.
WITHOUT_EFFECT = frozenset(
    {
        "user", "metadata", "service_tier", "store", "prompt_cache_key", "prompt_cache_retention",
        "prompt_cache_options", "safety_identifier", "parallel_tool_calls", "strict",
    }
)  # fmt: skip

#: Known fields that are refused -> values that ask for nothing, None always among them.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "audio": (), "modalities": (["text"],), "functions": (), "function_call": (), "prediction": (),
        "web_search_options": (), "reasoning_effort": (), "verbosity": (), "moderation": (), "suffix": ("",),
        "chat_template": (), "documents": (), "continue_final_message": (False,), "add_generation_prompt": (True,),
        "prompt_embeds": (), "prompt_logprobs": (), "use_beam_search": (False,), "length_penalty": (1.0, 1),
        "truncate_prompt_tokens": (), "include_stop_str_in_output": (False,), "skip_special_tokens": (True,),
        "bad_words": ([],), "allowed_token_ids": (), "logits_processors": (), "structured_outputs": (),
        "guided_json": (), "guided_regex": (), "guided_choice": (), "guided_grammar": (), "grammar": (),
    }
)  # fmt: skip

#: Nothing else runs while JSON is parsed, so that what takes over 0.1 s is refused by a glance at the bytes:
#: more lists, objects and keys than this, or more elements of lists.
MAX_VALUES = 100_000
MAX_ELEMENTS = 1_000_000

#: Of the body itself.
MAX_FIELDS = 256

B = TypeVar("B", bound=Body)


def parse(cls: type[B], raw: bytes) -> tuple[B, int]:
    """Read a body.

    Args:
        cls: What it should be.
        raw: JSON.

    Returns:
        The body, and how many of its fields nobody knows.

    Raises:
        ApiError: It is not valid JSON, breaks a rule, or asks for something that is not supported.
    """
    if sum(map(raw.count, (b"[", b"{", b'":'))) > MAX_VALUES or raw.count(b",") > MAX_ELEMENTS:
        raise invalid("The body has too many values; send less at a time.")
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as err:
        raise invalid(f"The body is not valid JSON: {err}.") from err
    if not isinstance(value, dict):
        raise invalid("The body must be a JSON object.")
    if len(value) > MAX_FIELDS:
        raise invalid(f"The body has {len(value)} fields; at most {MAX_FIELDS} are allowed.")
    try:
        body = cls.model_validate(value)
    except ValidationError as err:
        raise broken_rule(err) from err
    return body, _check_extra(body)


def _check_extra(body: Body) -> int:
    extra = body.model_extra or {}
    for name, harmless in UNSUPPORTED.items():
        if name in type(body).model_fields:
            continue
        value = extra.get(name)
        if value is not None and value not in harmless:
            raise invalid(f"{name}: is not supported; leave it out.", name)
    best_of, n = extra.get("best_of"), getattr(body, "n", None)
    if best_of is not None and best_of != (1 if n is None else n):
        raise invalid(f"best_of={best_of!r}: is not supported unless it equals n.", "best_of")
    known = {*WITHOUT_EFFECT, *UNSUPPORTED, "best_of"}
    return sum(name not in known for name in extra)
