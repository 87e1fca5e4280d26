"""int8 vectors, one scale each: keys and values by token and head, inputs of linears by token.

    x[..., h]  ~=  values[..., h] * scale[...]        scale = max |x| / 127

Nothing that comes later changes them. The scales of keys multiply the scores, those of values the
probabilities; the dequantized cache is never built.
"""

import array_api_compat as aac

from llmq.quant.qtensor import Array

_INVERSE = 1.0 / 127.0


def quantize_vectors(x: Array) -> tuple[Array, Array]:
    """Quantize vectors along their last axis, rounding half to even.

    Args:
        x: `[..., h]`, keys after the rotation, or values.

    Returns:
        int8 `[..., h]` in [-127, 127], and the float32 scale `[...]`. A zero vector stays zero.
    """
    xp = aac.array_namespace(x)
    x32 = xp.astype(x, xp.float32)
    scale = xp.max(xp.abs(x32), axis=-1) * _INVERSE
    divisor = xp.where(scale == 0, xp.ones_like(scale), scale)
    values = xp.clip(xp.round(x32 / divisor[..., None]), -127, 127)
    return xp.astype(values, xp.int8), scale


def fake_quantize_vectors(x: Array) -> Array:
    """What `quantize_vectors` leaves of vectors.

    Args:
        x: `[..., h]`.

    Returns:
        ``values * scale``, rounded to the type of `x`. No value is clipped: a vector's largest has the largest code.
    """
    xp = aac.array_namespace(x)
    values, scale = quantize_vectors(x)
    return xp.astype(xp.astype(values, xp.float32) * scale[..., None], x.dtype)
