"""Every refusal in OpenAI's shape; `answer_of` is the table."""

import reprlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from llmq.errors import (
    CheckpointError,
    ConfigError,
    DrainingError,
    EngineDeadError,
    LlmqError,
    QueueFullError,
    QueueTimeoutError,
)

#: Seconds after which a client may try again.
RETRY_AFTER = "1"


class ApiError(Exception):
    """A request that is answered with an error.

    Args:
        status: HTTP status.
        message: A sentence.
        kind: OpenAI's ``type``.
        param: The field at fault.
        code: OpenAI's ``code``.
        headers: Of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


#: The answer to whatever nobody expected.
FAILED = ApiError(500, "The server failed; its log tells why.", kind="server_error", code="internal_error")

#: Error -> status, type, code.
_ANSWERS: Mapping[type[LlmqError], tuple[int, str, str]] = MappingProxyType(
    {
        QueueFullError: (429, "rate_limit_error", "queue_full"),
        QueueTimeoutError: (503, "server_error", "queue_timeout"),
        DrainingError: (503, "server_error", "shutting_down"),
        EngineDeadError: (503, "server_error", "engine_dead"),
    }
)


def answer_of(err: BaseException) -> ApiError:
    """How an exception is answered.

    Args:
        err: Whatever a request ran into.

    Returns:
        The answer; 500, without details, for what nobody expected.
    """
    if isinstance(err, ApiError):
        return err
    if isinstance(err, ConfigError | CheckpointError):
        return invalid(str(err), param_of(str(err)))
    for kind, (status, name, code) in _ANSWERS.items():
        if isinstance(err, kind):
            headers = {"Retry-After": RETRY_AFTER} if status in (429, 503) else {}
            return ApiError(status, str(err), kind=name, code=code, headers=headers)
    return FAILED


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that breaks a rule.

    Args:
        message: A sentence.
        param: The field at fault.
        code: OpenAI's ``code``.

    Returns:
        A 400.
    """
    return ApiError(400, message, param=param, code=code)


def context_exceeded(num_prompt: str, max_tokens: int, context: int, param: str) -> ApiError:
    """A prompt, with what it asks for, that is longer than the context.

    Args:
        num_prompt: Tokens of the prompt, in words.
        max_tokens: Tokens asked for.
        context: Positions of a slot.
        param: The field at fault.

    Returns:
        A 400.
    """
    message = (
        f"The prompt has {num_prompt} tokens and max_tokens is {max_tokens}; the context holds {context} tokens. "
        "Shorten the prompt or lower max_tokens."
    )
    return invalid(message, param, "context_length_exceeded")


def broken_rule(err: ValidationError) -> ApiError:
    """The first broken rule of a body.

    Args:
        err: What pydantic found.

    Returns:
        A 400 with the field as ``param``.
    """
    # Of the branches of a union, the one that got furthest is the one that was meant.
    first = max(err.errors(include_url=False, include_context=False), key=lambda error: len(error["loc"]))
    place = [part for part in first["loc"] if _is_field(part)]
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")
    if first["type"] == "missing":
        return invalid(f"{param}: is missing.", param)
    rule = first["msg"].removeprefix("Value error, ")
    value = reprlib.repr(first["input"]).encode("utf-8", "replace").decode()  # of a bounded size, however large it is
    return invalid(f"{param}={value}: {rule[0].lower()}{rule[1:]}.", param or None)


_BRANCHES = frozenset({"str", "int", "float", "bool", "none"})


def _is_field(part: Any) -> bool:
    """Not one of pydantic's names for the branches of a union."""
    return isinstance(part, int) or (part.isidentifier() and part.islower() and part not in _BRANCHES)


def param_of(message: str) -> str | None:
    """The field that one of our sentences begins with.

    Args:
        message: As in ``prompt: has no tokens`` or ``n=9: must be at most 8``.

    Returns:
        Its name; None when the sentence begins otherwise.
    """
    name = message.split(":")[0].split("=")[0]
    return name if name.replace("_", "").replace(".", "").isalnum() and " " not in name else None
