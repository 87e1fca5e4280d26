"""int4 codes in bytes, paired for this backend: two halves of a block share its bytes.

Byte j of a block of b codes holds code j in its low and code j + b/2 in its high nibble. Each half
then unpacks to consecutive codes with one shift, and no interleave is needed at run time.
"""

import jax
import numpy as np
from jax import lax

NIBBLE = np.int8(4)


def pack_halves(values: np.ndarray, axis: int) -> np.ndarray:
    """Pack codes.

    Args:
        values: int8 in [-8, 7]; its size along `axis` is even.
        axis: The axis of a block's codes.

    Returns:
        int8, half as large along `axis`.
    """
    low, high = np.split(np.ascontiguousarray(values).view(np.uint8), 2, axis)
    return ((low & 0x0F) | (high << 4)).view(np.int8)


def unpack_halves(packed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Undo `pack_halves`.

    Args:
        packed: int8.

    Returns:
        The first and the second half of each block, int8 of the shape of `packed`.
    """
    low = lax.shift_right_arithmetic(lax.shift_left(packed, NIBBLE), NIBBLE)
    return low, lax.shift_right_arithmetic(packed, NIBBLE)
