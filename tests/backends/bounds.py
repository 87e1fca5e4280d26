"""The only error a backend's matmul may have: the order of accumulation, and its compute type.

A float32 sum of n terms in any order errs by at most (n - 1) * 2^-24 of the sum of magnitudes in
the worst case, and by 4 * sqrt(n) * 2^-24 with roundings that do not conspire (Higham and Mary
2019). An output is a sum of I products, G scaled groups and G zeros, so n = I + 2 * G. In bfloat16
the weight and the result are each rounded once more, by 2^-9 of what is rounded; in float16 by 2^-12,
or by 2^-25 where that is more, below its normal numbers. The magnitudes are those that are really added: |x| * (|values| * scale + |zero|).
"""

import numpy as np

from llmq.backends.reference import reference_weight
from llmq.quant import QTensor


def magnitudes(weight: np.ndarray | QTensor) -> np.ndarray:
    """What is added up for each weight, float64 `[O, I]`."""
    if not isinstance(weight, QTensor):
        return np.abs(reference_weight(weight))
    added = np.abs(weight.values.astype(np.float64)).reshape(*weight.scale.shape, -1)
    added *= weight.scale.astype(np.float64)[..., None]
    if weight.zero is not None:
        added += np.abs(weight.zero.astype(np.float64))[..., None]
    return added.reshape(weight.shape)


def assert_accumulation_only(
    y: np.ndarray,
    x: np.ndarray,
    weight: np.ndarray | QTensor,
    bias: np.ndarray | None = None,
    bfloat16: bool = False,
    float16: bool = False,
) -> None:
    """Hold ``y = x @ weight.T + bias`` against float64."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    added = 0.0 if bias is None else bias.astype(np.float64)
    exact = x @ reference_weight(weight).T + added
    magnitude = np.abs(x) @ magnitudes(weight).T + np.abs(added)
    num_terms = weight.shape[-1] + (2 * weight.scale.shape[-1] if isinstance(weight, QTensor) else 0)
    bound = 4 * np.sqrt(num_terms) * 2.0**-24 + (2.0**-8 if bfloat16 else 2.0**-11 if float16 else 0.0)
    smallest = 2.0**-25 * (np.abs(x).sum(axis=1, keepdims=True) + 1) if float16 else 0.0
    allowed = bound * magnitude + smallest
    assert (np.abs(y - exact) <= allowed).all(), np.max(np.abs(y - exact) / allowed)
