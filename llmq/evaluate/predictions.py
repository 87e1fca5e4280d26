"""What a model predicts along a text: all of it, or the most likely tokens and the mass of the rest.

The equations are in `llmq.evaluate.divergence`.

Shape letters: T positions of a window, V vocabulary, k kept tokens.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from llmq.backends.base import InferenceModel
from llmq.evaluate.windows import Window

#: Rows of logits worked on at once in float64; of whole windows there is one a model in memory.
_ROWS = 64

#: Stands in for a mass of 0 in a logarithm.
_TINY = np.finfo(np.float64).tiny


class Divergence(NamedTuple):
    """A baseline P against a model Q at some positions.

    Attributes:
        kl: `[T]` KL(P || Q) in nats, or its lower bound.
        slack: `[T]`, how much at most that lacks.
        target_logprobs: `[T]`, P's of the tokens that follow.
    """

    kl: np.ndarray
    slack: np.ndarray
    target_logprobs: np.ndarray


class Reader:
    """A model that goes through the windows of a text, in order.

    Args:
        model: Has room for a window.
    """

    def __init__(self, model: InferenceModel) -> None:
        self._model = model
        self._state = model.init_state()

    def logits(self, part: Window) -> np.ndarray:
        """The model's output for the next window.

        Args:
            part: The window.

        Returns:
            float32 logits `[T, V]` at every position of its run.
        """
        num_context = len(part.context)
        if num_context > part.num_cached:
            fresh = part.context[part.num_cached :]
            self._state, _ = self._model.extend(self._state, 0, fresh, part.num_cached)
        self._state, logits_TV = self._model.extend(self._state, 0, part.run, num_context, want_logits=True)
        assert logits_TV is not None
        return logits_TV


class Whole:
    """All of a baseline's predictions for a window.

    Args:
        logits_TV: Its output.
        targets: `[T]`, the tokens that follow.

    Attributes:
        favorites: `[T]`, the most likely tokens, the lowest id of a tie.
    """

    def __init__(self, logits_TV: np.ndarray, targets: np.ndarray) -> None:
        self._logits_TV = logits_TV
        self._targets = targets
        self.favorites = logits_TV.argmax(axis=-1)

    def divergence(self, rows: slice, log_q_TV: np.ndarray) -> Divergence:
        """Compare with a model, exactly.

        Args:
            rows: Positions of the window.
            log_q_TV: The model's log-probabilities there.

        Returns:
            What they differ by.
        """
        log_p_TV = log_softmax(self._logits_TV[rows])
        kl = (np.exp(log_p_TV) * (log_p_TV - log_q_TV)).sum(axis=-1)
        return Divergence(kl, np.zeros_like(kl), pick(log_p_TV, self._targets[rows]))


@dataclass(frozen=True, slots=True)
class Kept:
    """The most likely tokens of a baseline's predictions for a window, and the mass of the rest.

    Attributes:
        ids: uint32 `[T, k]`, the most likely first.
        logprobs: float32 `[T, k]`.
        rest: float32 `[T]`, probability of all other tokens.
        target_logprobs: float32 `[T]`, of the tokens that follow.
    """

    ids: np.ndarray
    logprobs: np.ndarray
    rest: np.ndarray
    target_logprobs: np.ndarray

    @classmethod
    def of(cls, logits_TV: np.ndarray, targets: np.ndarray, top_k: int) -> "Kept":
        """Choose what to keep.

        Args:
            logits_TV: The baseline's output.
            targets: `[T]`, the tokens that follow.
            top_k: How many tokens, at most V.

        Returns:
            The `top_k` most likely tokens of every position, lower ids first among equals.
        """
        parts = [_keep(log_softmax(logits_TV[rows]), targets[rows], top_k) for rows in row_chunks(len(targets))]
        return cls(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    @property
    def favorites(self) -> np.ndarray:
        """`[T]`, the most likely tokens."""
        return self.ids[:, 0]

    def divergence(self, rows: slice, log_q_TV: np.ndarray) -> Divergence:
        """Compare with a model, all tokens that were not kept taken as one.

        Args:
            rows: Positions of the window.
            log_q_TV: The model's log-probabilities there.

        Returns:
            What they differ by at least, and what that may lack.
        """
        ids, log_p, rest_p = self.ids[rows], self.logprobs[rows].astype(np.float64), self.rest[rows].astype(np.float64)
        log_q = np.take_along_axis(log_q_TV, ids, axis=-1)
        others_TV = _others(log_q_TV.shape, ids)
        rest_q = np.exp(log_q_TV).sum(axis=-1, where=others_TV)
        lost = np.log(np.maximum(rest_p, _TINY)) - np.log(np.maximum(rest_q, _TINY))
        kl = (np.exp(log_p) * (log_p - log_q)).sum(axis=-1) + rest_p * lost
        least_q = log_q_TV.min(axis=-1, where=others_TV, initial=0.0)
        slack = np.maximum(rest_p * (log_p[:, -1] - least_q - lost), 0.0)
        return Divergence(kl, slack, self.target_logprobs[rows])


def row_chunks(num_rows: int) -> list[slice]:
    """Rows in pieces that fit in memory in float64.

    Args:
        num_rows: How many there are.

    Returns:
        Slices that cover them, in order.
    """
    return [slice(start, start + _ROWS) for start in range(0, num_rows, _ROWS)]


def log_softmax(logits_TV: np.ndarray) -> np.ndarray:
    """Normalize a few rows.

    Args:
        logits_TV: Of any float type.

    Returns:
        float64 log-probabilities.
    """
    shifted_TV = logits_TV.astype(np.float64)
    shifted_TV -= shifted_TV.max(axis=-1, keepdims=True)
    shifted_TV -= np.log(np.exp(shifted_TV).sum(axis=-1, keepdims=True))
    return shifted_TV


def pick(values_TV: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """One value of each row.

    Args:
        values_TV: The rows.
        ids: `[T]`, which column.

    Returns:
        `[T]`.
    """
    return np.take_along_axis(values_TV, ids[:, None], axis=-1)[:, 0]


def _keep(log_p_TV: np.ndarray, targets: np.ndarray, top_k: int) -> tuple[np.ndarray, ...]:
    """The fields of a `Kept`."""
    ids = np.sort(np.argpartition(log_p_TV, -top_k, axis=-1)[:, -top_k:], axis=-1)
    order = np.argsort(-np.take_along_axis(log_p_TV, ids, axis=-1), axis=-1, kind="stable")
    ids = np.take_along_axis(ids, order, axis=-1)
    rest = np.exp(log_p_TV).sum(axis=-1, where=_others(log_p_TV.shape, ids))
    floats = (np.take_along_axis(log_p_TV, ids, axis=-1), rest, pick(log_p_TV, targets))
    return ids.astype(np.uint32), *(array.astype(np.float32) for array in floats)


def _others(shape: tuple[int, ...], ids: np.ndarray) -> np.ndarray:
    """True `[T, V]` for every token but those in `ids`."""
    others_TV = np.ones(shape, bool)
    np.put_along_axis(others_TV, ids, False, axis=-1)
    return others_TV
