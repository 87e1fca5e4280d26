"""A model whose answers can be told from the tokens before: it scores by a hash of them.

It holds slots to the contract of `base.InferenceModel`, and notes its calls. `traced` tells for each
call which runs wrote the rows before it: two calls alike there compute the same bits on any backend.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from llmq.backends.base import Caps, Run, Scores


def exact_logprob(tokens: Sequence[int], target: int) -> float:
    """What the model answers for a token behind others."""
    digest = hashlib.sha256(",".join(map(str, [*tokens, target])).encode()).digest()
    return -(1 + digest[0]) / 16


class ExactModel:
    """The model; its state is what its slot holds: tokens, and for each the run that wrote it and its place in it."""

    def __init__(self, max_len: int) -> None:
        self.caps = Caps("", "float32", "float32", 1, max_len, 64, 1000, ())
        self.extended: list[tuple[int, int]] = []
        self.calls: list[tuple[int, list[tuple[int, int | None]]]] = []
        self.traced: list[Any] = []

    def init_state(self) -> Any:
        return []

    def extend(self, state: list[Any], slot: int, tokens: np.ndarray, start: int) -> tuple[list[Any], None]:
        assert slot == 0
        assert len(tokens)
        assert start <= len(state)
        assert start + len(tokens) <= self.caps.max_len
        self.extended.append((start, len(tokens)))
        return [*state[:start], *_written(state[:start], tokens)], None

    def score(
        self, state: list[Any], slot: int, shared: int, runs: Sequence[Run]
    ) -> tuple[list[Any], list[Scores | None]]:
        assert slot == 0
        assert shared <= len(state)
        assert shared + sum(len(run.tokens) for run in runs) <= self.caps.max_len
        self.calls.append((shared, [(len(run.tokens), run.parent) for run in runs]))
        self.traced.append((state[:shared], [(run.tokens.tolist(), run.parent) for run in runs]))
        held = [token for token, *_ in state[:shared]]
        scores: list[Scores | None] = []
        for index, run in enumerate(runs):
            before = held
            if run.parent is not None:
                assert run.parent < index
                assert runs[run.parent].parent is None
                before = [*before, *runs[run.parent].tokens.tolist()]
            scores.append(_score(before, run))
        return [*state[:shared], *_written(state[:shared], runs[0].tokens)], scores


def _written(before: list[Any], tokens: np.ndarray) -> list[Any]:
    """Rows that a run writes. What they hold depends on the rows before and on all of the run's tokens."""
    digest = hashlib.sha256(repr((before, tokens.tolist())).encode()).hexdigest()
    return [(token, digest, at) for at, token in enumerate(tokens.tolist())]


def _score(before: list[int], run: Run) -> Scores | None:
    assert len(run.tokens)
    if run.targets is None:
        return None
    assert len(run.targets) == len(run.tokens)
    tokens = [*before, *run.tokens.tolist()]
    logprobs = [exact_logprob(tokens[: len(before) + 1 + at], target) for at, target in enumerate(run.targets.tolist())]
    return Scores(np.array(logprobs, np.float32), np.array(logprobs) > -8)
