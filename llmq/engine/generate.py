"""One conversation on one slot: prompt in, text out as it comes.

All but the last prompt token are written into the cache; decoding starts with the last one, so
every sampled token comes off the same path. The slot remembers its tokens: a prompt that begins
like the last one computes only what is new.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from llmq.backends.base import InferenceModel
from llmq.engine.sampling import SamplingParams, resolve_seed, sample
from llmq.errors import CheckpointError, ConfigError
from llmq.model.tokenizer import Tokenizer


@dataclass(slots=True)
class Completion:
    """What a request came to; filled in while it streams.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        cached_tokens: Of these, how many were in the slot already.
        tokens: Generated ids, without the token that ended it.
        finish_reason: ``stop`` for an end-of-sequence token, ``length`` for `max_tokens`.
        prefill_seconds: Until the cache held the prompt.
        decode_seconds: From then on.
        seed: The seed used.
    """

    prompt_tokens: int
    cached_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    finish_reason: str = ""
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    seed: int | None = None


def check_prompt(prompt: Sequence[int], params: SamplingParams, max_len: int, vocab_size: int) -> None:
    """Refuse a request that a model cannot answer.

    Args:
        prompt: Token ids.
        params: Uses `max_tokens`.
        max_len: Positions of a slot.
        vocab_size: Rows of the embedding.

    Raises:
        ConfigError: The prompt is empty, or it and `max_tokens` exceed `max_len`.
        CheckpointError: The tokenizer gives ids that the model does not have.
    """
    num_tokens = len(prompt)
    if num_tokens == 0:
        raise ConfigError("prompt: has no tokens; give some text.")
    outside = next((token for token in prompt if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise CheckpointError(
            f"token {outside}: the tokenizer gives it, but the model's vocabulary has {vocab_size}; they do not belong together."
        )
    if num_tokens + params.max_tokens > max_len:
        raise ConfigError(
            f"prompt of {num_tokens} tokens and max_tokens={params.max_tokens}: exceed the context of {max_len}; "
            "shorten the prompt, lower --max-tokens or raise --max-model-len."
        )


class Session:
    """A conversation.

    Args:
        model: Opened with at least one slot.
        tokenizer: Of the same model.
        slot: Which slot to use.

    Attributes:
        last: The latest completion.
    """

    def __init__(self, model: InferenceModel, tokenizer: Tokenizer, slot: int = 0) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._slot = slot
        self._state = model.init_state()
        self._held: list[int] = []
        self.last = Completion(0)

    def generate(self, prompt: Sequence[int], params: SamplingParams) -> Iterator[str]:
        """Answer a prompt.

        Args:
            prompt: Token ids.
            params: How to choose tokens.

        Yields:
            Text as it becomes certain; `last` holds the rest once it ends.

        Raises:
            ConfigError: The prompt is empty, or it and `max_tokens` exceed the context.
            CheckpointError: The prompt holds ids that the model does not have.
        """
        check_prompt(prompt, params, self._model.caps.max_len, self._model.caps.vocab_size)
        params = resolve_seed(params)
        start = time.perf_counter()
        self.last = done = Completion(len(prompt), self._prefill(prompt), seed=params.seed)
        done.prefill_seconds = time.perf_counter() - start

        stream = self._tokenizer.stream(prompt)
        token = prompt[-1]
        while not done.finish_reason:
            token = sample(self._decode(token), params, len(done.tokens))
            if token in self._tokenizer.eos_token_ids:
                done.finish_reason = "stop"
            else:
                done.tokens.append(token)
                if len(done.tokens) == params.max_tokens:
                    done.finish_reason = "length"
                piece = stream.push(token)
                if piece:
                    yield piece
            done.decode_seconds = time.perf_counter() - start - done.prefill_seconds
        rest = stream.finish()
        if rest:
            yield rest

    def _prefill(self, prompt: Sequence[int]) -> int:
        """Write all but the last token; returns how many were there already."""
        last = len(prompt) - 1
        known = next((i for i, (a, b) in enumerate(zip(self._held, prompt, strict=False)) if a != b), len(self._held))
        cached = min(known, last)
        if cached < last:
            run = np.asarray(prompt[cached:last], np.int32)
            self._state, _ = self._model.extend(self._state, self._slot, run, cached)
        self._held = list(prompt[:last])
        return cached

    def _decode(self, token: int) -> np.ndarray:
        """Write a token, predict the next: float32 `[V]`."""
        num_slots = self._model.caps.num_slots
        tokens, positions = np.zeros(num_slots, np.int32), np.full(num_slots, -1, np.int32)
        tokens[self._slot], positions[self._slot] = token, len(self._held)
        self._state, logits_SV = self._model.decode(self._state, tokens, positions)
        self._held.append(token)
        return logits_SV[self._slot]
