"""Choosing scale, zero and codes, and going back: the one implementation.

    weight[o, i]  ~=  values[o, i] * scale[o, g] + zero[o, g]        g = i // group_size

Written against the array API standard, so NumPy, torch and jitted JAX run these very lines and
give identical bits. Two facts carry that promise. A code has at most 8 significant bits and a
bfloat16 scale has 8, so ``values * scale`` is *exact* in float32 and a fused multiply-add cannot
change the sum. And no code depends on a division: whichever way a platform divides, its guess is
corrected by the exact residual.

Suffixes: O output features, I input features, G groups a row, g features a group.
"""

from typing import Any

import array_api_compat as aac
import ml_dtypes
import numpy as np

from llmq.config import Scheme
from llmq.quant.qtensor import Array, QTensor

#: A group whose scale would be smaller is constant: from here on, flushing subnormals to zero
#: (as XLA does) cannot change a code.
MIN_SCALE = 2.0**-118

#: Smallest normal float32; anything nearer to zero counts as zero, on every platform alike.
MIN_NORMAL = 2.0**-126

#: Largest magnitude of a weight. Beyond it ``values * scale`` could overflow float32.
MAX_WEIGHT = 2.0**120


def quantize(weight_OI: Array, scheme: Scheme) -> QTensor:
    """Round a matrix to the nearest points of its grid.

    Args:
        weight_OI: `[O, I]` in bfloat16, float16 or float32, finite and at most `MAX_WEIGHT` in
            magnitude. Leading axes are allowed.
        scheme: The grid; its `group_size` must divide I (None: the whole row).

    Returns:
        The codes, in the framework of the argument.

    Raises:
        ValueError: The group size does not divide I.
    """
    xp = aac.array_namespace(weight_OI)
    num_features = weight_OI.shape[-1]
    group_size = scheme.group_size or num_features
    if num_features % group_size:
        raise ValueError(f"group_size={group_size}: must divide the {num_features} input features.")
    weight_OGg = xp.reshape(
        xp.astype(weight_OI, xp.float32), (*weight_OI.shape[:-1], num_features // group_size, group_size)
    )
    weight_OGg = flush(xp, weight_OGg)
    low_OG, high_OG = xp.min(weight_OGg, axis=-1), xp.max(weight_OGg, axis=-1)
    scale_OG, zero_OG, constant_OG = choose_scale_zero(low_OG, high_OG, scheme)
    values_OGg = choose_codes(weight_OGg, scale_OG, zero_OG, scheme)
    values_OGg = xp.where(constant_OG[..., None], xp.zeros_like(values_OGg), values_OGg)
    scale_dtype = dtype_of(xp, scheme.scale_dtype)
    return QTensor(
        values=xp.astype(xp.reshape(values_OGg, weight_OI.shape), xp.int8),
        scale=xp.astype(scale_OG, scale_dtype),
        zero=None if zero_OG is None else xp.astype(zero_OG, scale_dtype),
        num_bits=scheme.num_bits,
    )


def dequantize(qtensor: QTensor, dtype: str = "float32") -> Array:
    """The matrix the codes stand for.

    Args:
        qtensor: Codes of shape `[O, I]`.
        dtype: Name of the compute type: the float32 result is rounded to it once.

    Returns:
        `[O, I]` in `dtype`, in the framework of the codes.
    """
    xp = aac.array_namespace(qtensor.values)
    grouped = (*qtensor.scale.shape, qtensor.group_size)
    values_OGg = xp.reshape(xp.astype(qtensor.values, xp.float32), grouped)
    weight_OGg = values_OGg * xp.astype(qtensor.scale, xp.float32)[..., None]
    if qtensor.zero is not None:
        weight_OGg = weight_OGg + xp.astype(qtensor.zero, xp.float32)[..., None]
    return xp.astype(xp.reshape(weight_OGg, qtensor.shape), dtype_of(xp, dtype))


def fake_quantize(weight_OI: Array, scheme: Scheme) -> Array:
    """``dequantize(quantize(w))`` in the type of `w`: what training sees of a weight.

    Args:
        weight_OI: As for `quantize`.
        scheme: The grid.

    Returns:
        `[O, I]` in the type of the argument. A framework adds its straight-through gradient.
    """
    xp = aac.array_namespace(weight_OI)
    return xp.astype(dequantize(quantize(weight_OI, scheme)), weight_OI.dtype)


def choose_scale_zero(low_OG: Array, high_OG: Array, scheme: Scheme) -> tuple[Array, Array | None, Array]:
    """The grid of each group, already rounded to the type it is stored in.

    The scale is rounded first, the zero is computed from the rounded scale and rounded, and only
    then are codes chosen: a grid rounded afterwards would not be the one the codes were chosen
    for. The range is not forced to contain 0.

    Args:
        low_OG: float32 `[O, G]`, the smallest weight of each group.
        high_OG: The largest.
        scheme: Width, symmetry and scale type.

    Returns:
        float32 `scale_OG`, `zero_OG` (None when symmetric) and `constant_OG`, which is true where
        the group is stored as scale 1, codes 0 and zero = its minimum.

    Source:
        Symmetric: absmax over half the code range, as torchao's 8da4w. Asymmetric: tinygemm's
        map with its codes shifted to signed.
    """
    xp = aac.array_namespace(low_OG)
    low_OG, high_OG = flush(xp, low_OG), flush(xp, high_OG)
    num_steps = scheme.qmax - scheme.qmin
    if scheme.symmetric:
        scale_OG = xp.where(high_OG > -low_OG, high_OG, -low_OG) * _float32(2.0 / num_steps)
    else:
        scale_OG = (high_OG - low_OG) * _float32(1.0 / num_steps)
    constant_OG = scale_OG < MIN_SCALE
    scale_OG = round_scale(xp, xp.where(constant_OG, xp.ones_like(scale_OG), scale_OG), scheme)
    if scheme.symmetric:
        return scale_OG, None, constant_OG
    zero_OG = xp.where(constant_OG, low_OG, low_OG - scheme.qmin * scale_OG)
    return scale_OG, round_scale(xp, flush(xp, zero_OG), scheme), constant_OG


def choose_codes(weight_OGg: Array, scale_OG: Array, zero_OG: Array | None, scheme: Scheme) -> Array:
    """The grid point nearest to each weight, ties to even, decided exactly.

    ``weight * (1 / scale)`` may be one off near a tie, and platforms divide differently; the
    residual ``d - q * scale`` tells on which side of the tie the weight truly lies.

    Args:
        weight_OGg: float32 `[..., g]`.
        scale_OG: float32 `[...]`, representable in the type it is stored in.
        zero_OG: Likewise; None when symmetric.
        scheme: Width of the codes.

    Returns:
        Codes like `weight_OGg`, as floats.
    """
    xp = aac.array_namespace(weight_OGg)
    offset = weight_OGg if zero_OG is None else weight_OGg - zero_OG[..., None]
    scale = scale_OG[..., None]
    guess = xp.clip(xp.round(offset * (1.0 / scale)), scheme.qmin, scheme.qmax)
    residual = offset - guess * scale
    guess = guess + step(xp, guess, residual, scale * 0.5)
    return xp.clip(guess, scheme.qmin, scheme.qmax)


def step(xp: Any, guess: Array, residual: Array, half: Array) -> Array:
    """Where the nearest code lies from a guess that is at most one off.

    Args:
        xp: The arrays' namespace.
        guess: Integers, as floats.
        residual: What the guess leaves of the weight, exact.
        half: Half the scale.

    Returns:
        +1, 0 or -1: towards the residual where it exceeds half a step, or equals it at an odd guess.
    """
    odd = guess - 2.0 * xp.floor(guess * 0.5) == 1.0
    away = (xp.abs(residual) > half) | ((xp.abs(residual) == half) & odd)
    ones = xp.ones_like(residual)
    towards = xp.where(residual > 0.0, ones, -ones)  # not `sign`, whose care for NaN cannot be traced in torch
    return xp.where(away, towards, xp.zeros_like(residual))


def flush(xp: Any, array: Array) -> Array:
    """Subnormals as zero, which is what accelerators make of them.

    Args:
        xp: The array's namespace.
        array: float32.

    Returns:
        `array` without subnormals.
    """
    return xp.where(xp.abs(array) < MIN_NORMAL, xp.zeros_like(array), array)


def round_scale(xp: Any, array: Array, scheme: Scheme) -> Array:
    """A scale or zero as it is stored.

    Args:
        xp: The array's namespace.
        array: float32.
        scheme: Its `scale_dtype` is rounded to, half to even.

    Returns:
        float32.
    """
    return xp.astype(xp.astype(array, dtype_of(xp, scheme.scale_dtype)), xp.float32)


def _float32(value: float) -> float:
    return float(np.float32(value))


def dtype_of(xp: Any, name: str) -> Any:
    """A framework's dtype by name; NumPy borrows bfloat16 from ml_dtypes.

    Args:
        xp: An array namespace.
        name: ``float32``, ``float16``, ``bfloat16``, ...

    Returns:
        The dtype object of that framework.
    """
    if aac.is_numpy_namespace(xp) and name == "bfloat16":
        return np.dtype(ml_dtypes.bfloat16)
    return getattr(xp, name)
