"""Where the gradient of a fake-quantized weight passes straight through.

Rounding has no useful derivative, so training takes that of the identity, but not where the code was
clipped: moving such a weight outwards changes nothing. Since the grid spans the smallest and the largest
weight of its group, a code is clipped only at these, where the grid had to be rounded or has one
code less on the positive side.
"""

import array_api_compat as aac

from llmq.quant.affine import flush, step
from llmq.quant.qtensor import Array, QTensor


def is_clipped(weight_OI: Array, qtensor: QTensor) -> Array:
    """Where the nearest point of an unbounded grid lies beyond the codes.

    Args:
        weight_OI: What was quantized.
        qtensor: Its codes.

    Returns:
        bool `[O, I]`.
    """
    xp = aac.array_namespace(qtensor.values)
    grouped = (*qtensor.scale.shape, qtensor.group_size)
    weight_OGg = flush(xp, xp.reshape(xp.astype(weight_OI, xp.float32), grouped))
    values_OGg = xp.reshape(xp.astype(qtensor.values, xp.float32), grouped)
    scale_OG1 = xp.astype(qtensor.scale, xp.float32)[..., None]
    if qtensor.zero is not None:
        weight_OGg = weight_OGg - xp.astype(qtensor.zero, xp.float32)[..., None]
    beyond_OGg = step(xp, values_OGg, weight_OGg - values_OGg * scale_OG1, scale_OG1 * 0.5)
    return xp.reshape(beyond_OGg != 0.0, qtensor.shape)
