"""int4 codes in bytes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmq.quant import QTensor, pack_int4, unpack_int4


def test_nibble_order_by_hand() -> None:
    values = np.array([[0, 1, -8, 7, -1, -2, 3, 4]], np.int8)
    np.testing.assert_array_equal(pack_int4(values), np.array([[0x10, 0x78, 0xEF, 0x43]], np.uint8))


@given(st.lists(st.integers(-8, 7), min_size=2, max_size=64).filter(lambda codes: len(codes) % 2 == 0))
def test_unpacking_undoes_packing_in_every_framework(codes: list[int]) -> None:
    values = np.array([codes], np.int8)
    np.testing.assert_array_equal(unpack_int4(pack_int4(values)), values)
    tensor = torch.from_numpy(values)
    assert torch.equal(unpack_int4(pack_int4(tensor)), tensor)
    np.testing.assert_array_equal(pack_int4(tensor).numpy(), pack_int4(values))


def test_odd_widths_are_refused() -> None:
    with pytest.raises(ValueError, match="3 input features"):
        pack_int4(np.zeros((1, 3), np.int8))


@pytest.mark.parametrize(
    ("values", "scale", "zero", "num_bits", "message"),
    [
        ((2, 64), (2, 3), None, 4, "I a multiple of G"),
        ((2, 64), (3, 1), None, 4, "must be \\[O, I\\] and \\[O, G\\]"),
        ((2, 64), (2, 2), (2, 1), 4, "must have the same shape"),
        ((2, 64), (2, 2), None, 3, "num_bits=3: must be 4 or 8"),
    ],
)
def test_a_qtensor_keeps_its_invariants(
    values: tuple, scale: tuple, zero: tuple | None, num_bits: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        QTensor(np.zeros(values, np.int8), np.ones(scale), None if zero is None else np.zeros(zero), num_bits)
