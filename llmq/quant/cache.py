"""int8 keys and values: one scale per token and head, so that nothing written later changes it.

    x[..., h]  ~=  values[..., h] * scale[...]        scale = max |x| / 127

The scales of keys multiply the scores, those of values the probabilities; the dequantized cache is
never built.
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
