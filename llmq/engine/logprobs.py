"""Log-probabilities of a prompt, from the logits of its chunks.

Shape letters: T tokens of a chunk, V vocabulary, K alternatives.
"""

from collections.abc import Sequence

import numpy as np

from llmq.engine.request import TokenLogprobs


def token_logprobs(logits_TV: np.ndarray, targets: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """How likely each token was, and what was likelier.

    Args:
        logits_TV: float32; row t predicts `targets` t. Finite.
        targets: The tokens that came.
        num_top: Alternatives to report.

    Returns:
        One for each target; alternatives best first, ties by lower id.
    """
    shifted_TV = logits_TV - logits_TV.max(axis=-1, keepdims=True)
    logprobs_TV = shifted_TV - np.log(np.exp(shifted_TV).sum(axis=-1, keepdims=True, dtype=np.float32))
    target_logprobs = np.take_along_axis(logprobs_TV, np.asarray(targets)[:, None], axis=-1)[:, 0].tolist()
    tops = [_top(row_V, num_top) for row_V in logprobs_TV]
    return [TokenLogprobs(*row) for row in zip(targets, target_logprobs, tops, strict=True)]


def _top(logprobs_V: np.ndarray, num_top: int) -> tuple[tuple[int, float], ...]:
    if num_top == 0:
        return ()
    num_top = min(num_top, len(logprobs_V))
    least = np.partition(logprobs_V, -num_top)[-num_top]
    ids_K = np.flatnonzero(logprobs_V >= least)  # ascending, and all of a tie at the edge
    ids_K = ids_K[np.argsort(-logprobs_V[ids_K], kind="stable")][:num_top]
    return tuple(zip(ids_K.tolist(), logprobs_V[ids_K].tolist(), strict=True))
