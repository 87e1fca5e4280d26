"""The numerics contract, line by line."""

import functools
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import jax
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmq.config import SCHEMES as NAMED
from llmq.config import Granularity, Scheme
from llmq.quant import QTensor, dequantize, fake_quantize, pack_int4, quantize
from llmq.quant.fidelity import fidelity
from llmq.quant.rows import NonFiniteWeightError, quantize_rows
from tests.quant.cases import SCHEMES, matrices

SHAPES = ((1, 64), (3, 64), (5, 192), (2, 320))


def bits(array: object) -> np.ndarray:
    """The bytes of any framework's array."""
    if isinstance(array, torch.Tensor):
        array = array.view(torch.int16).numpy() if array.dtype is torch.bfloat16 else array.numpy()
    return np.asarray(array).reshape(-1).view(np.uint8)


def as_torch(array: np.ndarray) -> torch.Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


@functools.cache
def jitted(scheme: Scheme):
    def run(weight: jax.Array) -> tuple:
        q = quantize(weight, scheme)
        return q.values, q.scale, q.zero, dequantize(q), fake_quantize(weight, scheme)

    return jax.jit(run)


def parts(q: QTensor) -> tuple:
    return q.values, q.scale, q.zero, dequantize(q)


@settings(max_examples=300, deadline=None)
@given(matrices(SHAPES), st.sampled_from(SCHEMES))
@pytest.mark.filterwarnings("ignore:divide by zero|overflow encountered|invalid value:RuntimeWarning")
def test_identical_bits_in_numpy_torch_jax_and_the_fast_path(weight: np.ndarray, scheme: Scheme) -> None:
    ours = parts(quantize(weight, scheme))
    *theirs, fake = jitted(scheme)(weight)
    for name, a, b, c in zip(
        ("values", "scale", "zero", "dequantized"), ours, parts(quantize(as_torch(weight), scheme)), theirs, strict=True
    ):
        if a is None:
            assert b is None, name
            assert c is None, name
            continue
        np.testing.assert_array_equal(bits(a), bits(b), err_msg=f"torch {name}")
        np.testing.assert_array_equal(bits(a), bits(c), err_msg=f"jax {name}")
    np.testing.assert_array_equal(bits(fake), bits(fake_quantize(weight, scheme)))

    with ThreadPoolExecutor(2) as pool:
        packed = quantize_rows(weight, scheme, pool)
    np.testing.assert_array_equal(packed.values, pack_int4(ours[0]) if scheme.num_bits == 4 else ours[0])
    np.testing.assert_array_equal(bits(packed.scale), bits(ours[1]))
    assert (packed.zero is None) == (ours[2] is None)
    if packed.zero is not None:
        np.testing.assert_array_equal(bits(packed.zero), bits(ours[2]))


@settings(max_examples=60, deadline=None)
@given(matrices(((1, 64), (2, 64))), st.sampled_from([s for s in SCHEMES if s.num_bits == 4]))
def test_codes_are_the_nearest_grid_points(weight: np.ndarray, scheme: Scheme) -> None:
    """Against exact rational arithmetic: the nearest code to ``w - zero``, ties to even."""
    q = quantize(weight, scheme)
    num_features = weight.shape[1]
    for (o, i), value in np.ndenumerate(q.values):
        g = i // (scheme.group_size or num_features)
        w = np.float32(weight[o, i])
        w = np.float32(0) if abs(w) < 2.0**-126 else w
        zero = np.float32(0) if q.zero is None else np.float32(q.zero[o, g])
        offset, scale = Fraction(float(w - zero)), Fraction(float(q.scale[o, g]))
        group = weight[o, g * q.group_size : (g + 1) * q.group_size].astype(np.float32)
        if is_constant(group, scheme):
            assert value == 0
            continue
        best = min(range(-8, 8), key=lambda code: (abs(offset - code * scale), code % 2))
        assert value == best


def is_constant(group: np.ndarray, scheme: Scheme) -> bool:
    group = np.where(np.abs(group) < 2.0**-126, np.float32(0), group)
    span = 2 * np.abs(group).max() if scheme.symmetric else group.max() - group.min()
    return bool(span * np.float32(1 / 15) < 2.0**-118)


@settings(max_examples=60, deadline=None)
@given(matrices(SHAPES), st.sampled_from(SCHEMES))
def test_nothing_becomes_nan_and_errors_stay_within_a_step(weight: np.ndarray, scheme: Scheme) -> None:
    q = quantize(weight, scheme)
    restored = dequantize(q)
    assert np.isfinite(restored).all()
    assert (q.scale.astype(np.float32) > 0).all()
    steps = np.repeat(q.scale.astype(np.float64), q.group_size, axis=-1)
    # Half a step, or a whole one where a symmetric grid ends below its largest weight; and the
    # rounding of a bfloat16 zero (relative 2^-8) and scale.
    zero = 0 if q.zero is None else np.repeat(np.abs(q.zero.astype(np.float64)), q.group_size, axis=-1)
    assert (np.abs(weight.astype(np.float64) - restored) <= steps * 1.07 + zero * 2.0**-7 + 2.0**-115).all()


@pytest.mark.parametrize("num_bits", [4, 8])
def test_quantizing_a_dequantized_matrix_changes_no_code(num_bits: int) -> None:
    """Wherever both ends of an asymmetric grid are in use, the extremes are on the grid."""
    scheme = Scheme(num_bits=num_bits, granularity=Granularity.BLOCKWISE, symmetric=False, group_size=32)
    weight = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    first = quantize(weight, scheme)
    second = quantize(dequantize(first), scheme)
    codes = [q.values.reshape(*q.scale.shape, -1) for q in (first, second)]
    on_grid = (codes[0].min(axis=-1) == scheme.qmin) & (codes[0].max(axis=-1) == scheme.qmax)
    assert on_grid.mean() > 0.8
    np.testing.assert_array_equal(codes[0][on_grid], codes[1][on_grid])


@pytest.mark.parametrize(
    ("num_bits", "symmetric", "relative_error"),
    [(4, True, 0.1106), (4, False, 0.0995), (8, True, 0.0065), (8, False, 0.0059)],
)
def test_relative_error_of_gaussian_weights_in_groups_of_128(
    num_bits: int, symmetric: bool, relative_error: float
) -> None:
    weight = np.random.default_rng(0).standard_normal((512, 1024)).astype(np.float32)
    scheme = Scheme(num_bits=num_bits, granularity=Granularity.BLOCKWISE, symmetric=symmetric, group_size=128)
    measured = fidelity(weight, quantize(weight, scheme))
    assert measured.relative_error == pytest.approx(relative_error, rel=0.01)
    with ThreadPoolExecutor(2) as pool:
        fast = quantize_rows(weight, scheme, pool).fidelity
    assert fast.relative_error == pytest.approx(measured.relative_error, rel=1e-4)
    assert fast.max_steps == pytest.approx(measured.max_steps, rel=1e-3)
    assert fast.sqnr_db == pytest.approx(measured.sqnr_db, abs=1e-3)


def test_blockwise_beats_per_channel_and_asymmetric_beats_symmetric() -> None:
    weight = np.random.default_rng(0).standard_normal((64, 1024)).astype(np.float32)

    def error(name: str, symmetric: bool) -> float:
        group_size = 64 if NAMED[name].granularity is Granularity.BLOCKWISE else None
        scheme = NAMED[name].model_copy(update={"group_size": group_size, "symmetric": symmetric})
        return fidelity(weight, quantize(weight, scheme)).relative_error

    for width in ("int4", "int8"):
        for symmetric in (True, False):
            assert error(f"{width}_blockwise", symmetric) < error(f"{width}_per_channel", symmetric)
        assert error(f"{width}_blockwise", False) < error(f"{width}_blockwise", True)


@pytest.mark.parametrize("value", [9.0, -9.0])
def test_constant_groups_survive_an_asymmetric_grid(value: float) -> None:
    scheme = SCHEMES[3]
    assert not scheme.symmetric
    q = quantize(np.full((2, 64), value, np.float32), scheme)
    assert (q.values == 0).all()
    np.testing.assert_array_equal(dequantize(q), value)


def test_a_group_of_1e_30_keeps_its_shape() -> None:
    weight = (np.random.default_rng(0).standard_normal((1, 64)) * 1e-30).astype(np.float32)
    for scheme in SCHEMES[:2]:
        assert fidelity(weight, quantize(weight, scheme)).relative_error < 0.12


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2.0**121])
def test_the_fast_path_refuses_what_has_no_grid(bad: float) -> None:
    weight = np.ones((4, 64), np.float32)
    weight[2, 5] = bad
    with ThreadPoolExecutor(1) as pool, pytest.raises(NonFiniteWeightError):
        quantize_rows(weight, SCHEMES[0], pool)


def test_bytes_do_not_depend_on_threads_or_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = np.random.default_rng(0).standard_normal((700, 256)).astype(ml_dtypes.bfloat16)
    results = []
    for num_threads in (1, 2, 5):
        with ThreadPoolExecutor(num_threads) as pool:
            results.append(quantize_rows(weight, SCHEMES[3], pool))
    monkeypatch.setattr("llmq.quant.rows.PIECE_ELEMENTS", 1000)
    with ThreadPoolExecutor(2) as pool:
        pieces = quantize_rows(weight, SCHEMES[3], pool)
    for other in (*results[1:], pieces):
        np.testing.assert_array_equal(results[0].values, other.values)
    assert results[0].fidelity == results[1].fidelity == results[2].fidelity


def test_group_size_must_divide() -> None:
    with pytest.raises(ValueError, match="group_size=64: must divide the 96 input features"):
        quantize(np.zeros((2, 96), np.float32), SCHEMES[1])


def test_fake_quantization_is_quantization_in_every_compute_type() -> None:
    weight = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)
    for scheme in SCHEMES:
        for dtype in ("float32", "bfloat16"):
            cast = torch.from_numpy(weight).to(getattr(torch, dtype))
            assert torch.equal(fake_quantize(cast, scheme), dequantize(quantize(cast, scheme), dtype))
