"""Log-probabilities, from a step or from the logits of a prompt. They are finite: JSON has no infinity.

Shape letters: T tokens of a chunk, V vocabulary, K alternatives.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from llmq.backends.base import StepOut
from llmq.engine.request import TokenLogprobs

#: Stands for the logarithm of a probability of 0.
_LOWEST = float(np.finfo(np.float32).min)


def step_logprobs(out: StepOut, slot: int, num_top: int) -> TokenLogprobs:
    """How likely the token of a step was, and what was likelier.

    Args:
        out: With log-probabilities.
        slot: Whose token.
        num_top: Alternatives to report.

    Returns:
        As the backend computed it.
    """
    assert out.logprobs is not None
    assert out.top_ids is not None
    assert out.top_logprobs is not None
    ids, values = out.top_ids[slot, :num_top].tolist(), out.top_logprobs[slot, :num_top].tolist()
    return _finite(int(out.tokens[slot]), float(out.logprobs[slot]), zip(ids, values, strict=True))


def is_usable(logits_TV: np.ndarray) -> bool:
    """Whether each row has a most likely token, by the rule of `llmq.backends.base.StepOut`.

    Args:
        logits_TV: float32.

    Returns:
        False where a row has NaN or +inf, or nothing but -inf.
    """
    return bool(np.isfinite(logits_TV.max(axis=-1)).all())


def token_logprobs(logits_TV: np.ndarray, targets: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """How likely each token was, and what was likelier.

    Args:
        logits_TV: float32; row t predicts `targets` t. Usable.
        targets: The tokens that came.
        num_top: Alternatives to report.

    Returns:
        One for each target; alternatives best first, ties by lower id.
    """
    shifted_TV = logits_TV - logits_TV.max(axis=-1, keepdims=True)
    logprobs_TV = shifted_TV - np.log(np.exp(shifted_TV).sum(axis=-1, keepdims=True, dtype=np.float32))
    target_logprobs = np.take_along_axis(logprobs_TV, np.asarray(targets)[:, None], axis=-1)[:, 0].tolist()
    ids_TK = [_largest(row_V, num_top) for row_V in logits_TV]  # a logarithm can round two to the same
    tops = [
        zip(ids_K.tolist(), row_V[ids_K].tolist(), strict=True)
        for ids_K, row_V in zip(ids_TK, logprobs_TV, strict=True)
    ]
    return [_finite(*row) for row in zip(targets, target_logprobs, tops, strict=True)]


def _largest(logits_V: np.ndarray, count: int) -> np.ndarray:
    """Ids of the largest logits, largest first, ties by lower id."""
    if count == 0:
        return np.empty(0, np.intp)
    count = min(count, len(logits_V))
    least = np.partition(logits_V, -count)[-count]
    ids_K = np.flatnonzero(logits_V >= least)  # ascending, and all of a tie at the edge
    return ids_K[np.argsort(-logits_V[ids_K], kind="stable")][:count]


def _finite(token: int, logprob: float, top: Iterable[tuple[int, float]]) -> TokenLogprobs:
    return TokenLogprobs(token, max(logprob, _LOWEST), tuple((i, max(value, _LOWEST)) for i, value in top))
