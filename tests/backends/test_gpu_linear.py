"""Every linear of the torch backend against the dequantized reference."""

import ml_dtypes
import numpy as np
import pytest
import torch

from llmq.backends.gpu import tinygemm
from llmq.backends.gpu.linear import (
    DENSE_FROM,
    DenseLinear,
    Int4Linear,
    Int8Linear,
    Linear,
    SideBySide,
    make_joined,
    make_linear,
)
from llmq.config import SCHEMES, Granularity, Scheme
from llmq.errors import BackendError
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


def test_weights_beyond_float16_are_refused() -> None:
    weight = np.full((16, 32), 70000.0, ml_dtypes.bfloat16)
    sentence = "dtype='float16': the model holds weights beyond 65504; use bfloat16 or float32."
    for stored in (weight, quantize(weight, SCHEMES["int8_per_channel"])):
        with pytest.raises(BackendError) as refused:
            make_linear(stored, None, CPU, torch.float16)
        assert str(refused.value) == sentence
    assert torch.isfinite(make_linear(weight, None, CPU, torch.bfloat16)(torch.ones(1, 32, dtype=torch.bfloat16))).all()


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


@pytest.mark.parametrize("group_size", [32, 64, 96, 192, None])
@pytest.mark.parametrize("symmetric", [True, False])
def test_codes_come_back_from_the_kernels_layout(symmetric: bool, group_size: int | None) -> None:
    if not tinygemm.can_unpack("cpu"):
        pytest.skip("the layout of another CPU")
    name = "int4_per_channel" if group_size is None else "int4_blockwise"
    weight = codes(SCHEMES[name].model_copy(update={"symmetric": symmetric, "group_size": group_size}), 192, 1152)
    linear = make_linear(weight, None, CPU, torch.bfloat16)
    assert linear.dense_from <= 1152
    weight_IO = linear(torch.eye(1152, dtype=torch.bfloat16), 1152)
    np.testing.assert_array_equal(weight_IO.T.float().numpy(), dequantize(weight, "bfloat16").astype(np.float32))


@pytest.mark.parametrize("parted", [False, True])
@pytest.mark.parametrize("scheme", ["int4_per_channel", "int4_blockwise", "int8_per_channel"])
def test_both_sides_of_the_crossover(scheme: str, parted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each within accumulation of the same reference; only a run of tokens may cross over."""
    if parted:
        monkeypatch.setattr(tinygemm, "PART", 64 * 384)
    changes = {"group_size": 64} if scheme == "int4_blockwise" else {}
    weight, bias = codes(SCHEMES[scheme].model_copy(update=changes), 192, 384), np.ones(192, ml_dtypes.bfloat16)
    linear = make_linear(weight, bias, CPU, torch.bfloat16)
    least = DENSE_FROM[weight.num_bits]
    x = torch.randn(least, 384, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    as_step, as_run = linear(x), linear(x, least)
    for y in (as_step, as_run):
        assert_accumulation_only(y.float().numpy(), x.float().numpy(), weight, bias, bfloat16=True)
    assert torch.equal(linear(x[1:], least), as_step[1:])
    if weight.num_bits == 8 or tinygemm.can_unpack("cpu"):
        assert not torch.equal(as_step, as_run), "the kernels are told apart by their order of addition"


JOINED = {
    "int4_blockwise": lambda seed: codes(SCHEMES["int4_blockwise"].model_copy(update={"group_size": 64}), 192, 576, seed),
    "int4_per_channel": lambda seed: codes(SCHEMES["int4_per_channel"], 64 * seed, 576, seed),
    "int8_per_channel": lambda seed: codes(SCHEMES["int8_per_channel"], 64 * seed, 576, seed),
    "dense": lambda seed: np.random.default_rng(seed).standard_normal((192, 576)).astype(ml_dtypes.bfloat16),
}  # fmt: skip


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("stored", JOINED)
def test_joining_linears_changes_no_bit(stored: str, with_bias: bool) -> None:
    weights = [JOINED[stored](seed) for seed in (3, 1, 2)]
    rng = np.random.default_rng(0)
    biases = [rng.standard_normal(w.shape[0]).astype(ml_dtypes.bfloat16) if with_bias else None for w in weights]
    joined = make_joined(weights, biases, CPU, torch.bfloat16)
    assert not isinstance(joined, SideBySide)
    alone = [make_linear(w, b, CPU, torch.bfloat16) for w, b in zip(weights, biases, strict=True)]
    assert joined.num_bytes == sum(linear.num_bytes for linear in alone)
    for num_rows in (1, 2, 7, 8, 64):
        x = torch.randn(num_rows, 576, generator=torch.Generator().manual_seed(num_rows)).to(torch.bfloat16)
        assert torch.equal(joined(x), torch.cat([linear(x) for linear in alone], dim=-1))


@pytest.mark.parametrize(
    "other",
    [
        codes(SCHEMES["int8_per_channel"], 48, 128),
        codes(SCHEMES["int4_blockwise"].model_copy(update={"group_size": 32}), 48, 128),
        codes(SCHEMES["int4_blockwise"].model_copy(update={"group_size": 64, "symmetric": True}), 48, 128),
        np.ones((48, 128), ml_dtypes.bfloat16),
    ],
    ids=["bits", "group size", "zero", "kept"],
)
def test_linears_stored_differently_stand_side_by_side(other: QTensor | np.ndarray) -> None:
    first = codes(SCHEMES["int4_blockwise"].model_copy(update={"group_size": 64, "symmetric": False}), 32, 128)
    linear = make_joined([first, other], [None, None], CPU, torch.bfloat16)
    parts = [make_linear(weight, None, CPU, torch.bfloat16) for weight in (first, other)]
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    assert torch.equal(linear(x), torch.cat([part(x) for part in parts], dim=-1))
    assert linear.kernels == tuple(part.kernel for part in parts)
    assert linear.num_bytes == sum(part.num_bytes for part in parts)


@pytest.mark.parametrize("name", ["int4_blockwise", "int8_per_channel", None])
def test_chunks_multiplied_apart_have_the_bits_of_each_alone(name: str | None) -> None:
    """Also the last, which has fewer rows."""
    weight = (
        codes(SCHEMES[name], 960, 576) if name else np.random.default_rng(0).standard_normal((960, 576), np.float32)
    )
    linear = make_linear(weight, None, CPU, torch.bfloat16)
    assert linear.joins_chunks
    linear.joins_chunks = False
    x = torch.randn(3 * 128 + 100, 576, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(linear(x, 128), torch.cat([linear(chunk, 128) for chunk in x.split(128)]))


def sweep(num_features: tuple[int, ...], num_rows: tuple[int, ...], dtype: torch.dtype) -> int:
    """Every grid on every width: within accumulation as a step and as a run, or refused before there is a layer."""
    num_right = 0
    for scheme in SCHEMES.values():
        blockwise = scheme.granularity is Granularity.BLOCKWISE
        for group_size in (32, 64, 128, 256) if blockwise else (None,):
            for symmetric in (True, False):
                grid = scheme.model_copy(update={"symmetric": symmetric, "group_size": group_size})
                for width in num_features:
                    if group_size and width % group_size:
                        with pytest.raises(ValueError, match="group"):
                            codes(grid, 64, width)
                        continue
                    weight = codes(grid, 64, width)
                    linear = make_linear(weight, None, CPU, dtype)
                    for rows in num_rows:
                        x = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows)).to(dtype)
                        for chunk in (0, rows):
                            y = linear(x, chunk).float().numpy()
                            half = {"bfloat16": dtype is torch.bfloat16, "float16": dtype is torch.float16}
                            assert_accumulation_only(y, x.float().numpy(), weight, **half)
                    num_right += 1
    return num_right


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_grid(dtype: torch.dtype) -> None:
    assert sweep((72, 576), (1, 7, 129), dtype) == 16


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_grid_on_every_width_and_number_of_rows(dtype: torch.dtype) -> None:
    assert sweep((64, 72, 576, 1000, 1001, 11008), (1, 2, 7, 8, 33, 129, 512), dtype) == 56
