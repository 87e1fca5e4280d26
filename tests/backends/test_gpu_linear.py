"""Every linear of the torch backend against the dequantized reference."""

import ml_dtypes
import numpy as np
import pytest
import torch

from llmq.backends.gpu.linear import DenseLinear, Int4Linear, Int8Linear, Linear, make_linear
from llmq.config import SCHEMES, Granularity, Scheme
from llmq.quant import QTensor, dequantize, quantize
from tests.backends.bounds import assert_accumulation_only

CPU = torch.device("cpu")


def codes(scheme: Scheme, num_outputs: int, num_features: int, seed: int = 0) -> QTensor:
    weight = np.random.default_rng(seed).standard_normal((num_outputs, num_features)) / np.sqrt(num_features)
    return quantize(weight.astype(ml_dtypes.bfloat16), scheme)


def apply(linear: Linear, x: np.ndarray, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """The input as the layer sees it, and its output."""
    x_MI = torch.from_numpy(x).to(dtype)
    return x_MI.float().numpy(), linear(x_MI).float().numpy()


GRIDS = [
    scheme.model_copy(update={"symmetric": symmetric, "group_size": group_size})
    for scheme in SCHEMES.values()
    for symmetric in (True, False)
    for group_size in ((32, 64, 96, 128, 192) if scheme.granularity is Granularity.BLOCKWISE else (None,))
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", GRIDS, ids=str)
def test_within_accumulation(scheme: Scheme, dtype: torch.dtype) -> None:
    weight = codes(scheme, 96, 384)
    bias = np.random.default_rng(1).standard_normal(96).astype(ml_dtypes.bfloat16)
    for num_rows in (1, 7, 40):
        x = np.random.default_rng(num_rows).standard_normal((num_rows, 384)).astype(np.float32)
        for b in (None, bias):
            x_seen, y = apply(make_linear(weight, b, CPU, dtype), x, dtype)
            assert_accumulation_only(y, x_seen, weight, b, bfloat16=dtype is torch.bfloat16)


def kernel_of(name: str, num_outputs: int, num_features: int, dtype: torch.dtype, **changes: object) -> Linear:
    scheme = SCHEMES[name].model_copy(update=changes)
    return make_linear(codes(scheme, num_outputs, num_features), None, CPU, dtype)


def test_kernels_are_picked_by_shape_and_type() -> None:
    bf16 = torch.bfloat16
    assert isinstance(kernel_of("int4_blockwise", 64, 576, bf16, group_size=64), Int4Linear)
    assert isinstance(kernel_of("int4_per_channel", 64, 576, bf16), Int4Linear)
    assert isinstance(kernel_of("int8_per_channel", 64, 576, bf16), Int8Linear)
    reasons = {
        "the int4 kernel computes in bfloat16": kernel_of("int4_blockwise", 64, 128, torch.float32, group_size=64),
        "40 outputs: the int4 kernel takes multiples of 16": kernel_of("int4_blockwise", 40, 128, bf16, group_size=64),
        "no group size of the int4 kernel divides 16": kernel_of("int4_blockwise", 64, 128, bf16, group_size=16),
        "the int4 kernel takes bfloat16 scales": kernel_of(
            "int4_blockwise", 64, 128, bf16, group_size=64, scale_dtype="float32"
        ),
        "the int8 kernel takes one scale a row": kernel_of("int8_blockwise", 64, 128, bf16, group_size=64),
        "the int8 kernel is symmetric": kernel_of("int8_per_channel", 64, 128, bf16, symmetric=False),
    }
    for reason, linear in reasons.items():
        assert isinstance(linear, DenseLinear)
        assert linear.kernel.endswith(f"dequantized at load: {reason}")


@pytest.mark.parametrize("num_features", [40, 72, 200, 520, 1000, 33, 100, 1001])
def test_widths_on_which_the_int8_kernel_fails_do_not_reach_it(num_features: int) -> None:
    weight = codes(SCHEMES["int8_per_channel"], 48, num_features)
    linear = make_linear(weight, None, CPU, torch.bfloat16)
    assert isinstance(linear, DenseLinear)
    x, y = apply(linear, np.random.default_rng(0).standard_normal((3, num_features)).astype(np.float32), torch.bfloat16)
    assert_accumulation_only(y, x, weight, bfloat16=True)


def test_int4_takes_four_bits_in_memory() -> None:
    linear = kernel_of("int4_blockwise", 256, 512, torch.bfloat16, group_size=64)
    assert linear.num_bytes == 256 * 512 // 2 + 2 * 2 * 256 * 8


def test_zero_points_of_every_code_reach_the_kernel_unchanged() -> None:
    """All sixteen codes, both extremes of scale and zero, through a one-hot input."""
    values = np.tile(np.arange(-8, 8, dtype=np.int8), (16, 4))
    scale = np.full((16, 1), 0.5, ml_dtypes.bfloat16)
    zero = (np.arange(16).reshape(16, 1) - 7).astype(ml_dtypes.bfloat16)
    weight = QTensor(values, scale, zero, 4)
    linear = make_linear(weight, None, CPU, torch.bfloat16)
    assert isinstance(linear, Int4Linear)
    _, y = apply(linear, np.eye(64, dtype=np.float32), torch.bfloat16)
    np.testing.assert_array_equal(y.T, dequantize(weight))
