"""What a request may ask for, and the random numbers of its answer.

Random numbers come from a counter: the n-th token of a choice of a request sees the same number on
every backend, whatever else is running.
"""

import secrets
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from llmq.backends.base import MAX_TOP_LOGPROBS, SlotSampling
from llmq.config import Frozen

#: Beyond these a request is a mistake or an attack.
MAX_CHOICES = 128
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1024
MAX_BIASES = 1024

Finite = Field(allow_inf_nan=False)
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]


class Grammar(Frozen):
    """What an answer must match.

    Attributes:
        kind: Language of `source`: a JSON schema, a regular expression, or llguidance's Lark dialect.
        source: The grammar.
    """

    kind: Literal["json_schema", "regex", "lark"]
    source: str


class SamplingParams(Frozen):
    """How to choose tokens, and when to stop.

    Attributes:
        max_tokens: Tokens to generate at most; 0 only evaluates the prompt.
        min_tokens: Before this many nothing but `max_tokens` ends an answer.
        n: Answers to one prompt, each with random numbers of its own.
        temperature: Divides the logits; 0 takes the most likely token.
        top_p: Keep the smallest set of tokens whose probabilities add up to this.
        top_k: Keep this many tokens; 0 keeps all.
        min_p: Keep tokens at least this likely, relative to the most likely one.
        presence_penalty: Subtracted once from the logits of tokens that the answer holds.
        frequency_penalty: Subtracted for every time that the answer holds a token.
        repetition_penalty: Divides positive and multiplies negative logits of tokens seen before.
        logit_bias: Added to the logits of tokens.
        seed: Of the random numbers; None takes one from the operating system.
        stop: Texts that end an answer and are not part of it.
        stop_token_ids: Tokens that end an answer and are not part of it.
        ignore_eos: Go on after the model's own end tokens.
        logprobs: Report each token's log-probability and those of this many alternatives; None reports nothing.
        prompt_logprobs: The same for the tokens of the prompt.
        grammar: What the answer must match.
    """

    max_tokens: Annotated[int, Field(ge=0)] = 256
    min_tokens: Annotated[int, Field(ge=0)] = 0
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    temperature: Annotated[float, Field(ge=0, le=1e6), Finite] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1), Finite] = 1.0
    top_k: Annotated[int, Field(ge=0, lt=1 << 31)] = 0
    min_p: Annotated[float, Field(ge=0, le=1), Finite] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2), Finite] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2), Finite] = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100), Finite] = 1.0
    logit_bias: Mapping[TokenId, Annotated[float, Field(ge=-100, le=100), Finite]] = Field(
        default_factory=lambda: MappingProxyType({}), max_length=MAX_BIASES
    )
    seed: Annotated[int, Field(ge=0, lt=1 << 64)] | None = None
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)], ...], Field(max_length=MAX_STOPS)
    ] = ()
    stop_token_ids: Annotated[tuple[TokenId, ...], Field(max_length=MAX_STOPS)] = ()
    ignore_eos: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    grammar: Grammar | None = None

    def for_slot(self) -> SlotSampling:
        """The part of it that a backend applies."""
        return SlotSampling(
            logit_bias=self.logit_bias,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
        )


def resolve_seed(params: SamplingParams) -> SamplingParams:
    """`params` with a seed: its own, or one from the operating system.

    Args:
        params: What was asked for.

    Returns:
        The same with `seed` set.
    """
    return params if params.seed is not None else params.model_copy(update={"seed": secrets.randbits(63)})


def uniform(seed: int, choice: int, index: int) -> float:
    """The random number that chooses one token.

    Args:
        seed: Of the request.
        choice: Which of its answers.
        index: How many tokens of the answer came before.

    Returns:
        In [0, 1), exact in float32.
    """
    return uniforms(seed, choice, index, 1)[0]


def uniforms(seed: int, choice: int, index: int, count: int) -> list[float]:
    """The random numbers that choose a run of tokens, much cheaper than one at a time.

    Args:
        seed: Of the request.
        choice: Which of its answers.
        index: How many tokens of the answer come before the run.
        count: How many tokens it has.

    Returns:
        `uniform` of each.
    """
    # The generator makes blocks of four words and counts them in the lowest part of its counter.
    words = np.random.Philox(key=seed, counter=[index, choice, 0, 0]).random_raw(4 * count)[::4]
    return ((words >> np.uint64(40)) * 2.0**-24).tolist()
