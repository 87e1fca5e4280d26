"""Scale and zero of each group by search: less error than the extremes give, still without data.

Every candidate is rounded to the type it is stored in before it is judged, and the grid of
`affine.choose_scale_zero` is among them, so that no group gets worse by its own measure.

Shape letters: O output features, I input features, G groups a row, g features of a group.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from llmq.config import Scheme
from llmq.quant.affine import choose_codes, choose_scale_zero, dtype_of, round_scale
from llmq.quant.qtensor import QTensor

#: Rows searched together: small enough for a cache.
_PIECE_ELEMENTS = 1 << 16

Grid = tuple[np.ndarray, "np.ndarray | None"]


def search_grid(weight_OI: np.ndarray, scheme: Scheme, method: str, pool: ThreadPoolExecutor) -> Grid:
    """Choose the grid of every group.

    Args:
        weight_OI: float32, finite.
        scheme: Its group size is settled.
        method: ``nearest`` takes the extremes, ``mse`` the least squared error, ``hqq`` few large errors.
        pool: Threads to use. Their number does not change a bit of the result.

    Returns:
        float32 scale and zero `[O, G]` as they would be stored; zero is None when symmetric.
    """
    size = scheme.group_size or weight_OI.shape[1]
    num_rows = max(1, _PIECE_ELEMENTS // weight_OI.shape[1])
    weight_OGg = weight_OI.reshape(len(weight_OI), -1, size)
    pieces = [weight_OGg[first : first + num_rows] for first in range(0, len(weight_OI), num_rows)]
    scales, zeros = zip(*pool.map(lambda piece: _METHODS[method](piece, scheme), pieces), strict=True)
    return np.concatenate(scales), None if scheme.symmetric else np.concatenate(zeros)


def on_grid(weight_OI: np.ndarray, scale_OG: np.ndarray, zero_OG: np.ndarray | None, scheme: Scheme) -> QTensor:
    """The nearest codes on a given grid.

    Args:
        weight_OI: float32.
        scale_OG: float32, as it will be stored.
        zero_OG: Likewise; None when symmetric.
        scheme: Width and types.

    Returns:
        The codes.
    """
    weight_OGg = weight_OI.reshape(*scale_OG.shape, -1)
    codes_OGg = choose_codes(weight_OGg, scale_OG, zero_OG, scheme)
    stored = dtype_of(np, scheme.scale_dtype)
    return QTensor(
        values=codes_OGg.reshape(weight_OI.shape).astype(np.int8),
        scale=scale_OG.astype(stored),
        zero=None if zero_OG is None else zero_OG.astype(stored),
        num_bits=scheme.num_bits,
    )


def _nearest(weight_OGg: np.ndarray, scheme: Scheme) -> Grid:
    scale_OG, zero_OG, _ = choose_scale_zero(weight_OGg.min(axis=-1), weight_OGg.max(axis=-1), scheme)
    return scale_OG, zero_OG


#: Ranges that are tried, relative to that of the weights.
_RANGES = np.linspace(0.6, 1.05, 19, dtype=np.float32)


def _least_squares(weight_OGg: np.ndarray, scheme: Scheme) -> Grid:
    scale_OG, zero_OG = _nearest(weight_OGg, scheme)
    loss_OG = _squared_error(weight_OGg, scale_OG, zero_OG, scheme)
    for candidate_OG, shift_OG in _candidates(weight_OGg, scheme):
        candidate_OG = np.where(candidate_OG > 0.0, candidate_OG, scale_OG)
        found_OG = _squared_error(weight_OGg, candidate_OG, shift_OG, scheme)
        better_OG = found_OG < loss_OG
        loss_OG = np.where(better_OG, found_OG, loss_OG)
        scale_OG = np.where(better_OG, candidate_OG, scale_OG)
        if zero_OG is not None and shift_OG is not None:
            zero_OG = np.where(better_OG, shift_OG, zero_OG)
    return scale_OG, zero_OG


def _candidates(weight_OGg: np.ndarray, scheme: Scheme) -> Iterator[Grid]:
    num_steps = scheme.qmax - scheme.qmin
    low_OG, high_OG = weight_OGg.min(axis=-1), weight_OGg.max(axis=-1)
    for share in _RANGES:
        if scheme.symmetric:
            widest_OG = np.maximum(-low_OG, high_OG)
            yield round_scale(np, widest_OG * (share * np.float32(2.0 / num_steps)), scheme), None
            continue
        scale_OG = round_scale(np, (high_OG - low_OG) * (share / np.float32(num_steps)), scheme)
        middle_OG = (high_OG + low_OG) * np.float32(0.5)
        yield scale_OG, round_scale(np, middle_OG + scale_OG * np.float32(0.5), scheme)


def _squared_error(
    weight_OGg: np.ndarray, scale_OG: np.ndarray, zero_OG: np.ndarray | None, scheme: Scheme
) -> np.ndarray:
    """Of the nearest codes but for ties, which have the same error."""
    offset_OGg = weight_OGg if zero_OG is None else weight_OGg - zero_OG[..., None]
    steps_OGg = offset_OGg / scale_OG[..., None]
    error_OGg = steps_OGg - np.clip(np.rint(steps_OGg), scheme.qmin, scheme.qmax)
    return np.square(error_OGg).sum(axis=-1) * scale_OG * scale_OG


def _half_quadratic(weight_OGg: np.ndarray, scheme: Scheme) -> Grid:
    raise NotImplementedError


_METHODS: dict[str, Callable[[np.ndarray, Scheme], Grid]] = {
    "nearest": _nearest,
    "mse": _least_squares,
    "hqq": _half_quadratic,
}
