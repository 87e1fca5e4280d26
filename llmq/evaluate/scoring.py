"""Scoring many continuations with little computing: what they share is computed once.

Requests with the same context form a group. A group's continuations are scored together, each as

    run = [last context token] + continuation[:-1]        targets = continuation

behind the positions that hold ``context[:-1]``. Groups are taken in the order of their contexts'
token ids, so that each begins like the one before it and only its rest is written: a few-shot
primer is computed once for all items. Calls are cut by tokens, so memory is bounded.

Which tokens are computed together depends on the requests alone, not on which of them are answered
already: a run that was interrupted goes on to the same bits.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from llmq.backends.base import InferenceModel
from llmq.errors import ConfigError

#: `tokens_per_call` at most: more does not go faster.
MAX_TOKENS_PER_CALL = 2048
MIN_TOKENS_PER_CALL = 64

#: Copies of a call's float32 logits alive at once, generously.
_LOGITS_COPIES = 4


class Request(NamedTuple):
    """What to score.

    Attributes:
        context: Token ids, at least one.
        continuation: Token ids, at least one.
    """

    context: tuple[int, ...]
    continuation: tuple[int, ...]


class Answer(NamedTuple):
    """How likely a continuation is.

    Attributes:
        logprob: Natural logarithm of its probability after the context.
        is_greedy: Whether each of its tokens was the most likely one.
    """

    logprob: float
    is_greedy: bool


@dataclass(frozen=True, slots=True)
class Limits:
    """What one call of a backend may hold.

    Attributes:
        tokens: Tokens to compute.
        runs: Continuations; None leaves it to `tokens`.
    """

    tokens: int
    runs: int | None = None


def tokens_per_call(vocab_size: int, memory_bytes: int) -> int:
    """How many tokens to compute at once: their logits may take a sixteenth of the memory.

    Args:
        vocab_size: Logits of a token.
        memory_bytes: Of the machine.

    Returns:
        A power of two, so that small differences between machines change nothing.
    """
    fitting = memory_bytes // 16 // (vocab_size * 4 * _LOGITS_COPIES)
    floor = 1 << max(fitting, 1).bit_length() - 1
    return min(max(floor, MIN_TOKENS_PER_CALL), MAX_TOKENS_PER_CALL)


def fit(request: Request, max_length: int) -> Request:
    """Cut a context from the left until the request fits, as lm-eval does.

    The last token of a continuation is only a target, so context and continuation together may have
    one token more than the model has positions.

    Args:
        request: Of any length.
        max_length: Positions of the model.

    Returns:
        The request, with the end of its context.

    Raises:
        ConfigError: The context or the continuation is empty, or the continuation alone does not fit.
    """
    context, continuation = request
    if not context or not continuation:
        raise ConfigError("prompt: its context or its continuation has no tokens, so there is nothing to score.")
    if len(continuation) > max_length:
        raise ConfigError(
            f"max_model_len={max_length}: a continuation has {len(continuation)} tokens; raise --max-model-len or leave out the task."
        )
    return Request(context[-(max_length + 1 - len(continuation)) :], continuation)


class Scorer:
    """Answers requests on one slot of a model.

    Args:
        model: Opened with at least one slot.
        limits: What one call may hold.
    """

    def __init__(self, model: InferenceModel, limits: Limits) -> None:
        self._slot = _Slot(model, limits.tokens)
        self._limits = limits
        self._max_len = model.caps.max_len

    def answers(
        self, requests: Sequence[Request], known: Mapping[Request, Answer] | None = None
    ) -> Iterator[dict[Request, Answer]]:
        """Score requests, group by group.

        Args:
            requests: Each fits the model, see `fit`. Equal ones are scored once.
            known: Answers to leave out; a group that lacks one is scored whole.

        Yields:
            The answers of a group.
        """
        groups: dict[tuple[int, ...], dict[tuple[int, ...], None]] = {}
        for context, continuation in requests:
            groups.setdefault(context, {})[continuation] = None
        for context in sorted(groups):
            continuations = sorted(groups[context], key=lambda tokens: (-len(tokens), tokens))
            self._slot.hold(context[:-1])
            if known and all(Request(context, continuation) in known for continuation in continuations):
                continue
            scored = self._score(context[-1], continuations)
            yield {
                Request(context, continuation): answer
                for continuation, answer in zip(continuations, scored, strict=True)
            }

    def _score(self, last: int, continuations: list[tuple[int, ...]]) -> Iterator[Answer]:
        """Score continuations, longest first, of what the slot holds and one more token."""
        runs = [np.asarray((last, *tokens[:-1]), np.int32) for tokens in continuations]
        targets = [np.asarray(tokens, np.int32) for tokens in continuations]
        for start, end in self._calls([len(run) for run in runs]):
            for logprobs, is_greedy in self._slot.score(runs[start:end], targets[start:end]):
                yield Answer(float(np.sum(logprobs, dtype=np.float64)), bool(is_greedy.all()))

    def _calls(self, lengths: list[int]) -> Iterator[tuple[int, int]]:
        """Where to cut runs into calls, as ranges; a run too long for any call is alone."""
        room = min(self._limits.tokens, self._max_len - len(self._slot))
        most = self._limits.runs or len(lengths)
        start, filled = 0, 0
        for end, length in enumerate(lengths):
            if end > start and (filled + length > room or end - start == most):
                yield start, end
                start, filled = end, 0
            filled += length
        yield start, len(lengths)


class _Slot:
    """A slot that writes what it must hold only when something is scored behind it.

    Writes that nothing was scored behind are repeated exactly, in full and in their order, unless they
    were overwritten from their start: so what is computed does not depend on what was skipped.
    """

    def __init__(self, model: InferenceModel, tokens_per_call: int) -> None:
        self._model = model
        self._tokens_per_call = tokens_per_call
        self._state = model.init_state()
        self._held: tuple[int, ...] = ()
        self._pending: list[tuple[int, np.ndarray]] = []

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, tokens: tuple[int, ...]) -> None:
        """Hold `tokens` from position 0 on; what they share with those held before stays."""
        pairs = enumerate(zip(self._held, tokens, strict=False))
        shared = next((i for i, (a, b) in pairs if a != b), min(len(self._held), len(tokens)))
        self._pending = [(start, run) for start, run in self._pending if start < shared]
        self._pending += [
            (start, np.asarray(tokens[start : start + self._tokens_per_call], np.int32))
            for start in range(shared, len(tokens), self._tokens_per_call)
        ]
        self._held = tokens

    def score(
        self, runs: Sequence[np.ndarray], targets: Sequence[np.ndarray]
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Log-probability and greediness `[n]` of each run's targets; a run too long for a call comes in parts."""
        for start, run in self._pending:
            self._state, _ = self._model.extend(self._state, 0, run, start)
        self._pending = []
        if len(runs) > 1:
            self._state, scores = self._model.score(self._state, 0, len(self), runs, targets)
            yield from ((score.logprobs, score.is_greedy) for score in scores)
            return
        parts = []
        for start in range(0, len(runs[0]), self._tokens_per_call):
            part = slice(start, start + self._tokens_per_call)
            self._state, scores = self._model.score(
                self._state, 0, len(self) + start, [runs[0][part]], [targets[0][part]]
            )
            parts += scores
        yield np.concatenate([part.logprobs for part in parts]), np.concatenate([part.is_greedy for part in parts])
