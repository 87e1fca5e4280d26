"""Choosing the next token from logits, reproducibly.

Random numbers come from a counter: the n-th token of a request with a given seed sees the same
number on every backend, whatever else is running.
"""

import secrets
from typing import Annotated

import numpy as np
from pydantic import Field

from llmq.config import Frozen
from llmq.errors import BackendError


class SamplingParams(Frozen):
    """How to choose tokens.

    Attributes:
        max_tokens: Tokens to generate at most.
        temperature: Divides the logits; 0 takes the most likely token.
        top_p: Keep the smallest set of tokens whose probabilities add up to this.
        top_k: Keep this many tokens; 0 keeps all.
        seed: Of the random numbers; None takes one from the operating system.
    """

    max_tokens: Annotated[int, Field(ge=1)] = 256
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    seed: Annotated[int, Field(ge=0, lt=1 << 64)] | None = None


def resolve_seed(params: SamplingParams) -> SamplingParams:
    """`params` with a seed: its own, or one from the operating system.

    Args:
        params: What was asked for.

    Returns:
        The same with `seed` set.
    """
    return params if params.seed is not None else params.model_copy(update={"seed": secrets.randbits(63)})


def sample(logits_V: np.ndarray, params: SamplingParams, index: int) -> int:
    """Choose one token.

    Args:
        logits_V: float32 logits.
        params: With a seed unless greedy.
        index: How many tokens of the request came before.

    Returns:
        The token's id. Ties go to the lower id.

    Raises:
        BackendError: The logits are not finite.
    """
    best = int(np.argmax(logits_V))  # a NaN, if there is one
    if not np.isfinite(logits_V[best]):
        raise BackendError("logits: are not finite; the weights are damaged, or overflow in this compute type.")
    if params.temperature == 0:
        return best
    with np.errstate(over="ignore"):
        scaled_V = (logits_V.astype(np.float64) - logits_V[best]) / params.temperature
    order = np.argsort(-scaled_V, kind="stable")
    if params.top_k:
        order = order[: params.top_k]
    probs = np.exp(scaled_V[order] - scaled_V[order[0]])
    probs /= probs.sum()
    cumulative = np.cumsum(probs)
    kept = int(np.searchsorted(cumulative, params.top_p)) + 1 if params.top_p < 1 else len(order)
    cumulative = cumulative[:kept]
    assert params.seed is not None
    uniform = np.random.Generator(np.random.Philox(key=params.seed, counter=index)).random()
    return int(order[np.searchsorted(cumulative, uniform * cumulative[-1], side="right").clip(0, len(cumulative) - 1)])
