"""What goes into the engine and what comes out.

A request's answer is a stream of events: one `PromptDone`, then `Delta`s of its choices, the last of
each with a finish reason.
"""

import uuid
from dataclasses import dataclass, field
from typing import Literal

from llmq.engine.sampling import SamplingParams

#: ``stop``: an end token, a stop token or a stop text; ``length``: `max_tokens`; ``abort``: nobody
#: waits for it any more; ``error``: the logits were not finite, or the grammar allowed nothing.
FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to be answered.

    Attributes:
        prompt: Token ids, at least one.
        params: How.
        salt: A cached prefix is reused only among requests with the same one.
        id: Names the request.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    salt: str = ""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely a token was, before any bias, mask, penalty or temperature.

    Attributes:
        token: Its id.
        logprob: Natural logarithm of its probability.
        top: The most likely tokens in its place, best first, and their log-probabilities.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class PromptDone:
    """The prompt is in the cache.

    Attributes:
        cached_tokens: How many of its tokens were there before.
        logprobs: For every token of the prompt, None for the first; empty unless asked for.
    """

    cached_tokens: int
    logprobs: tuple[TokenLogprobs | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """What one choice has grown by.

    Attributes:
        choice: Which answer, from 0.
        text: Text that became certain. A stop text is never part of it.
        tokens: Tokens chosen since the last delta; their text may come later. An end or
            stop token is not among them; the token that completed a stop text is.
        logprobs: One for each of `tokens`; empty unless asked for.
        finish_reason: None while the answer goes on.
        stop: The stop text or the token that ended it.
    """

    choice: int
    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop: str | int | None = None


Event = PromptDone | Delta
