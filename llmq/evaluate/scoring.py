"""Scoring continuations on one slot of a model, pack by pack; `packs` says which tokens those are."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from llmq.backends.base import InferenceModel, Run, Scores
from llmq.evaluate.packs import Group, Limits, Request, num_shared, plan


class Answer(NamedTuple):
    """How likely a continuation is.

    Attributes:
        logprob: Natural logarithm of its probability after the context.
        is_greedy: Whether each of its tokens was the most likely one.
    """

    logprob: float
    is_greedy: bool


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
        """Score requests, pack by pack.

        Args:
            requests: Each fits the model, see `fit`. Equal ones are scored once.
            known: Answers to leave out; a pack that lacks one is scored whole.

        Yields:
            The answers of a pack.
        """
        for prefix, groups in plan(requests, self._limits, self._max_len):
            self._slot.hold(prefix)
            packed = [Request(context, tokens) for context, continuations in groups for tokens in continuations]
            if known and all(request in known for request in packed):
                continue
            yield dict(zip(packed, self._score(len(prefix), groups), strict=True))

    def _score(self, num_held: int, groups: tuple[Group, ...]) -> Iterator[Answer]:
        """Score the groups' continuations behind what the slot holds."""
        runs: list[Run] = []
        for context, continuations in groups:
            rest = np.asarray(context[num_held:-1], np.int32)
            parent = len(runs) if len(rest) else None
            if len(rest):
                runs.append(Run(rest))
            runs += [
                Run(np.asarray((context[-1], *tokens[:-1]), np.int32), np.asarray(tokens, np.int32), parent)
                for tokens in continuations
            ]
        for start, end in self._calls(num_held, runs):
            for logprobs, is_greedy in self._slot.score(runs[start:end]):
                yield Answer(float(np.sum(logprobs, dtype=np.float64)), bool(is_greedy.all()))

    def _calls(self, num_held: int, runs: Sequence[Run]) -> Iterator[tuple[int, int]]:
        """Where to cut runs into calls, as ranges; a run too long for any call is alone."""
        if any(run.parent is not None for run in runs):
            yield 0, len(runs)  # they fit, see `plan`
            return
        room = min(self._limits.tokens, self._max_len - num_held)
        most = self._limits.runs or len(runs)
        start, filled = 0, 0
        for end, run in enumerate(runs):
            if end > start and (filled + len(run.tokens) > room or end - start == most):
                yield start, end
                start, filled = end, 0
            filled += len(run.tokens)
        yield start, len(runs)


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

    def hold(self, tokens: tuple[int, ...]) -> None:
        """Hold `tokens` from position 0 on; what they share with those held before stays."""
        shared = num_shared(self._held, tokens)
        self._pending = [(start, run) for start, run in self._pending if start < shared]
        self._pending += [
            (start, np.asarray(tokens[start : start + self._tokens_per_call], np.int32))
            for start in range(shared, len(tokens), self._tokens_per_call)
        ]
        self._held = tokens

    def score(self, runs: Sequence[Run]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Log-probability and greediness `[n]` of each run's targets; a run too long for a call comes in parts."""
        for start, tokens in self._pending:
            self._state, _ = self._model.extend(self._state, 0, tokens, start)
        self._pending = []
        held = len(self._held)
        if len(runs) > 1:
            self._state, scores = self._model.score(self._state, 0, held, runs)
            yield from ((score.logprobs, score.is_greedy) for score in scores if score)
            return
        tokens, targets = runs[0].tokens, runs[0].targets
        assert targets is not None
        parts: list[Scores] = []
        for start in range(0, len(tokens), self._tokens_per_call):
            part = slice(start, start + self._tokens_per_call)
            self._state, scores = self._model.score(self._state, 0, held + start, [Run(tokens[part], targets[part])])
            parts += [score for score in scores if score]
        yield np.concatenate([part.logprobs for part in parts]), np.concatenate([part.is_greedy for part in parts])
