"""int4 codes in bytes: two to a byte along I, low nibble first, two's complement."""

import array_api_compat as aac

from llmq.quant.qtensor import Array


def pack_int4(values_OI: Array) -> Array:
    """Pack codes.

    Args:
        values_OI: int8 `[..., I]` in [-8, 7], I even.

    Returns:
        uint8 `[..., I / 2]`: feature 2j in the low nibble of byte j, 2j + 1 in the high one.

    Raises:
        ValueError: I is odd.
    """
    xp = aac.array_namespace(values_OI)
    if values_OI.shape[-1] % 2:
        raise ValueError(f"{values_OI.shape[-1]} input features: int4 codes are packed in pairs, so it must be even.")
    nibbles = xp.astype(values_OI, xp.uint8) & 0x0F
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def unpack_int4(packed_OB: Array) -> Array:
    """Undo `pack_int4`.

    Args:
        packed_OB: uint8 `[..., I / 2]`.

    Returns:
        int8 `[..., I]` in [-8, 7].
    """
    xp = aac.array_namespace(packed_OB)
    nibbles = xp.stack((packed_OB & 0x0F, packed_OB >> 4), axis=-1)
    signed = xp.astype(nibbles ^ 8, xp.int8) - 8
    return xp.reshape(signed, (*packed_OB.shape[:-1], 2 * packed_OB.shape[-1]))
