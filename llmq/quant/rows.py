"""The rule of `affine` at the speed of memory: NumPy, rows in cache-sized pieces, on threads.

The converter spends its time here. The arithmetic is `affine.quantize` operation for operation,
with three liberties, each bit-neutral and held to it by tests: buffers are reused, the exact
residual decides only where it lies at half a step or beyond, and subnormals are flushed only in
matrices with groups so small that a subnormal could matter.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from llmq.config import Scheme
from llmq.quant.affine import MAX_WEIGHT, MIN_NORMAL, MIN_SCALE, choose_scale_zero, dtype_of
from llmq.quant.fidelity import Fidelity

#: Elements of a piece: its float32 buffers stay in a core's second-level cache.
PIECE_ELEMENTS = 1 << 18

#: From this scale on, float32 cannot tell a weight below `MIN_NORMAL` from zero once the group's
#: zero is subtracted.
_SUBNORMALS_MATTER_BELOW = 2.0**-100


class NonFiniteWeightError(ValueError):
    """A weight is NaN, infinite, or beyond `MAX_WEIGHT`."""


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A quantized matrix as it lies in a file.

    Attributes:
        values: uint8 `[O, I / 2]` for int4 (see `packing`), int8 `[O, I]` for int8.
        scale: `[O, G]`.
        zero: `[O, G]`, or None when symmetric.
        fidelity: Against the source.
    """

    values: np.ndarray
    scale: np.ndarray
    zero: np.ndarray | None
    fidelity: Fidelity


def quantize_rows(weight_OI: np.ndarray, scheme: Scheme, pool: ThreadPoolExecutor) -> PackedMatrix:
    """Quantize and pack a matrix, measuring what it cost.

    Args:
        weight_OI: `[O, I]` in bfloat16, float16 or float32; `scheme.group_size` divides I.
        scheme: The grid.
        pool: Threads to use. Their number does not change a byte of the result.

    Returns:
        Bytes ready to write.

    Raises:
        NonFiniteWeightError: The matrix holds NaN, infinity or a value beyond `MAX_WEIGHT`.
    """
    num_rows, num_features = weight_OI.shape
    num_groups = num_features // (scheme.group_size or num_features)
    scale_dtype = dtype_of(np, scheme.scale_dtype)
    packed = scheme.num_bits == 4
    values = np.empty((num_rows, num_features // 2 if packed else num_features), np.uint8 if packed else np.int8)
    scale = np.empty((num_rows, num_groups), scale_dtype)
    zero = None if scheme.symmetric else np.empty((num_rows, num_groups), scale_dtype)

    def work(rows: slice) -> Fidelity:
        codes_OGg, scale_OG, zero_OG, part = _quantize_piece(weight_OI[rows], num_groups, scheme)
        codes_OI = codes_OGg.astype(np.int8).reshape(-1, num_features)
        values[rows] = _pack_int4(codes_OI) if packed else codes_OI
        scale[rows] = scale_OG
        if zero is not None:
            zero[rows] = zero_OG
        return part

    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        parts = list(pool.map(work, _pieces(num_rows, num_features)))
    return PackedMatrix(values, scale, zero, sum(parts, Fidelity()))


def _pieces(num_rows: int, num_features: int) -> Iterator[slice]:
    step = max(1, PIECE_ELEMENTS // num_features)
    return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))


def _quantize_piece(
    weight_OI: np.ndarray, num_groups: int, scheme: Scheme
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, Fidelity]:
    weight = weight_OI.astype(np.float32).reshape(len(weight_OI), num_groups, -1)
    squared_weight = float(np.vdot(weight, weight))
    if not squared_weight < MAX_WEIGHT and not np.max(np.abs(weight)) <= MAX_WEIGHT:  # NaN compares false
        raise NonFiniteWeightError
    scale_OG, zero_OG, constant_OG = choose_scale_zero(weight, scheme)
    scale = scale_OG[..., None]
    if scale_OG.min() < _SUBNORMALS_MATTER_BELOW:
        weight[np.abs(weight) < MIN_NORMAL] = 0.0
    offset = weight if zero_OG is None else np.subtract(weight, zero_OG[..., None], out=weight)

    codes = np.multiply(offset, 1.0 / scale)
    np.rint(codes, out=codes)
    np.clip(codes, scheme.qmin, scheme.qmax, out=codes)
    if constant_OG.any():
        codes[constant_OG] = 0.0
    buffer = np.multiply(codes, scale)
    residual = np.subtract(offset, buffer, out=offset)
    np.abs(residual, out=buffer)
    half = np.where(constant_OG, np.float32(np.inf), scale_OG * np.float32(0.5))[..., None]
    doubtful = np.nonzero((buffer >= half).ravel())[0]
    if doubtful.size:
        _settle(codes.reshape(-1), residual.reshape(-1), doubtful, scale_OG.ravel(), scheme)
        np.abs(residual, out=buffer)
    worst_OG = buffer.max(axis=-1) / scale_OG
    part = Fidelity(float(np.vdot(residual, residual)), squared_weight, float(worst_OG.max()))
    return codes, scale_OG, zero_OG, part


def _settle(codes: np.ndarray, residual: np.ndarray, doubtful: np.ndarray, scale: np.ndarray, scheme: Scheme) -> None:
    """Step the doubtful codes by the exact rule, in place, and their residuals with them."""
    step_size = scale[doubtful // (codes.size // scale.size)]
    guess, left = codes[doubtful], residual[doubtful]
    half = step_size * np.float32(0.5)
    odd = guess - 2.0 * np.floor(guess * np.float32(0.5)) == 1.0
    away = (np.abs(left) > half) | ((np.abs(left) == half) & odd)
    settled = np.clip(guess + np.where(away, np.sign(left), np.float32(0.0)), scheme.qmin, scheme.qmax)
    residual[doubtful] = left + (guess - settled) * step_size
    codes[doubtful] = settled


def _pack_int4(codes_OI: np.ndarray) -> np.ndarray:
    """`packing.pack_int4` on whole 16-bit words instead of strided bytes."""
    pairs = codes_OI.view("<u2")
    return ((pairs & 0x0F) | ((pairs >> 4) & 0xF0)).astype(np.uint8)
