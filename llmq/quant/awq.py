"""Scales of input features that make room on the grid for those that matter.

    W x = (W diag(s)) (diag(s)^-1 x)        s = a^r / geometric mean of the extremes,  a = root mean square of x

A feature with large activations gets s > 1: its weights grow, and with them the share of the grid that
they get. ``diag(s)^-1`` is folded into whatever makes x, so the artifact needs nothing at run time.

Shape letters: O output features, I input features; where heads share what makes their input, K of
what is shared, R heads that share it, h features of a head.

Source:
    arXiv:2306.00978, section 3.2; activations are weighted by their root mean square, and candidates are
    judged by the error of the output, from its second moments.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from llmq.config import Scheme
from llmq.quant.affine import dequantize
from llmq.quant.search import on_grid, search_grid

#: Exponents r that are tried; 0 leaves everything as it is.
_EXPONENTS = tuple(step / 10 for step in range(10))

#: No feature is scaled further than this.
_MAX_SCALE = 64.0


def choose_scales(
    linears: Sequence[tuple[np.ndarray, Scheme]],
    moments_II: np.ndarray,
    sharing: tuple[int, int, int],
    method: str,
    pool: ThreadPoolExecutor,
) -> np.ndarray:
    """The scales with the least error of the outputs.

    Args:
        linears: Weights that read the same input, float32 `[O, I]`, and their grids.
        moments_II: float64, sum of x x^T over tokens.
        sharing: The features as an array of this shape; those along its middle axis share a scale.
        method: How their grids are found, see `llmq.quant.search`.
        pool: Threads. Their number does not change a bit of the result.

    Returns:
        float32 `[I]`, positive.
    """
    mean_square_KRh = np.diag(moments_II).reshape(sharing)
    mean_square_I = np.broadcast_to(mean_square_KRh.mean(axis=1, keepdims=True), sharing).reshape(-1)
    if not mean_square_I.max() > 0.0:
        return np.ones(len(moments_II), np.float32)
    size_I = np.sqrt(np.maximum(mean_square_I / mean_square_I.max(), 1e-12))
    moments_II = (moments_II / mean_square_I.mean()).astype(np.float32)
    best_I, least = np.ones(len(size_I), np.float32), np.inf
    for exponent in _EXPONENTS:
        scale_I = size_I**exponent
        scale_I = np.clip(scale_I / np.sqrt(scale_I.max() * scale_I.min()), 1.0 / _MAX_SCALE, _MAX_SCALE)
        scale_I = scale_I.astype(np.float32)
        loss = 0.0
        for weight_OI, scheme in linears:
            scaled_OI = weight_OI * scale_I
            found = on_grid(scaled_OI, *search_grid(scaled_OI, scheme, method, pool), scheme)
            error_OI = weight_OI - dequantize(found) / scale_I
            loss += float(np.vdot(error_OI @ moments_II, error_OI))
        if loss < least:
            best_I, least = scale_I, loss
    return best_I
