"""The rule of `affine` at the speed of memory: NumPy, rows in cache-sized pieces, on threads.

The converter spends its time here. The arithmetic is `affine.quantize` operation for operation,
with three liberties, each bit-neutral and held to it by tests: buffers are reused, the exact
residual is computed only where the guess lies near a tie or was clipped, and subnormals are
flushed only in pieces with groups so small that a subnormal could matter.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from llmq.config import Scheme
from llmq.quant.affine import MAX_WEIGHT, MIN_NORMAL, choose_scale_zero, dtype_of, step
from llmq.quant.fidelity import Fidelity, fidelity
from llmq.quant.packing import pack_int4
from llmq.quant.qtensor import QTensor

#: Elements of a piece. Smaller ones fit a nearer cache, but threads then wait for each other.
PIECE_ELEMENTS = 1 << 19

#: From this scale on, float32 cannot tell a weight below `MIN_NORMAL` from zero once the group's
#: zero is subtracted.
_SUBNORMALS_MATTER_BELOW = 2.0**-100


#: A guess is ``offset * (1 / scale)``, two roundings away from the quotient: at most 2^-22 of 256
#: steps. Nearer to its code than this, it cannot be on the wrong side of a tie.
_CERTAIN = np.float32(0.4999)


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


def finite(weight: np.ndarray) -> np.ndarray:
    """A weight in float32.

    Args:
        weight: From the source.

    Returns:
        float32.

    Raises:
        NonFiniteWeightError: It is NaN, infinite or far too large somewhere.
    """
    wide = weight.astype(np.float32)
    if not np.abs(wide).max() <= MAX_WEIGHT:  # NaN compares false
        raise NonFiniteWeightError
    return wide


def pack_matrix(weight_OI: np.ndarray, qtensor: QTensor) -> PackedMatrix:
    """Codes chosen elsewhere, as they lie in a file.

    Args:
        weight_OI: What they stand for, to measure them against.
        qtensor: The codes.

    Returns:
        Bytes ready to write.
    """
    values = pack_int4(qtensor.values) if qtensor.num_bits == 4 else qtensor.values
    return PackedMatrix(values, qtensor.scale, qtensor.zero, fidelity(weight_OI, qtensor))


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
    starts = np.arange(0, weight.size, weight.shape[-1])  # reduceat: twice as fast as reducing a short last axis
    low_OG, high_OG = (
        extreme.reduceat(weight.reshape(-1), starts).reshape(weight.shape[:-1]) for extreme in (np.minimum, np.maximum)
    )
    scale_OG, zero_OG, constant_OG = choose_scale_zero(low_OG, high_OG, scheme)
    if scale_OG.min() < _SUBNORMALS_MATTER_BELOW:
        weight[np.abs(weight) < MIN_NORMAL] = 0.0
    offset = weight if zero_OG is None else np.subtract(weight, zero_OG[..., None], out=weight)

    steps = np.multiply(offset, 1.0 / scale_OG[..., None])
    codes = np.rint(steps)
    np.clip(codes, scheme.qmin, scheme.qmax, out=codes)
    if constant_OG.any():
        codes[constant_OG] = 0.0
    error = np.subtract(steps, codes, out=steps)  # in units of the scale
    doubtful = np.flatnonzero(np.abs(error) > _CERTAIN)
    if doubtful.size:
        half_OG = np.where(constant_OG, np.float32(np.inf), scale_OG * np.float32(0.5))
        _settle(offset.reshape(-1), codes.reshape(-1), error.reshape(-1), doubtful, scale_OG, half_OG, scheme)
    squared_OG = np.einsum("OGg,OGg->OG", error, error)
    part = Fidelity(
        squared_error=float(np.vdot(squared_OG, scale_OG * scale_OG)),
        squared_weight=squared_weight,
        max_steps=float(max(error.max(), -error.min())),
    )
    return codes, scale_OG, zero_OG, part


def _settle(
    offset: np.ndarray,
    codes: np.ndarray,
    error: np.ndarray,
    doubtful: np.ndarray,
    scale_OG: np.ndarray,
    half_OG: np.ndarray,
    scheme: Scheme,
) -> None:
    """Step the doubtful codes by the exact residual, in place, and their errors with them."""
    group = doubtful // (codes.size // scale_OG.size)
    guess = codes[doubtful]
    residual = offset[doubtful] - guess * scale_OG.ravel()[group]
    settled = np.clip(guess + step(np, guess, residual, half_OG.ravel()[group]), scheme.qmin, scheme.qmax)
    error[doubtful] += guess - settled
    codes[doubtful] = settled


def _pack_int4(codes_OI: np.ndarray) -> np.ndarray:
    """`packing.pack_int4` on whole 16-bit words instead of strided bytes."""
    pairs = codes_OI.view("<u2")
    return ((pairs & 0x0F) | ((pairs >> 4) & 0xF0)).astype(np.uint8)
