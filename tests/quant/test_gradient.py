"""Where the straight-through gradient stops, against exact arithmetic, in three frameworks."""

import functools
from fractions import Fraction
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmq.backends.gpu.compiler import compiler_refusal
from llmq.backends.gpu.straight import see, see_all, straight_through
from llmq.config import Scheme
from llmq.quant import QTensor, dequantize, quantize
from llmq.quant.gradient import is_clipped
from tests.quant.cases import KINDS, SCHEMES, matrices

SHAPES = ((1, 64), (3, 64), (5, 192), (2, 320))


@functools.cache
def jitted(scheme: Scheme):
    return jax.jit(lambda weight: is_clipped(weight, quantize(weight, scheme)))


def fits(weight: np.ndarray, scheme: Scheme) -> bool:
    return scheme.group_size is None or weight.shape[1] % scheme.group_size == 0


@settings(max_examples=60, deadline=None)
@given(matrices(SHAPES), st.sampled_from(SCHEMES))
def test_frameworks_agree_and_the_fast_path_is_the_rule(weight: np.ndarray, scheme: Scheme) -> None:
    weight = weight.astype(np.float32)
    if not fits(weight, scheme):
        return
    codes = quantize(weight, scheme)
    clipped = is_clipped(weight, codes)
    np.testing.assert_array_equal(clipped, np.asarray(jitted(scheme)(weight)))
    tensor = torch.from_numpy(weight)
    for dtype in ("float32", "bfloat16"):
        seen = see(tensor, scheme, getattr(torch, dtype))
        assert torch.equal(seen.weight_OI, dequantize(quantize(tensor, scheme), dtype))
        indices = np.flatnonzero(clipped) if seen.clipped is not None else np.empty(0)
        np.testing.assert_array_equal(indices, seen.clipped.numpy() if seen.clipped is not None else indices)
        assert clipped.any() == (seen.clipped is not None)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_weights_seen_together_are_seen_as_each_alone(scheme: Scheme) -> None:
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal((rows, 320)).astype(np.float32) for rows in (3, 700, 1, 40)]
    weights[2][:] = 1.0  # nothing is clipped there
    masters = [torch.from_numpy(weight) for weight in weights]
    for weight, seen, alone in zip(
        weights,
        see_all(masters, scheme, torch.bfloat16),
        [see(m, scheme, torch.bfloat16) for m in masters],
        strict=True,
    ):
        assert torch.equal(seen.weight_OI, alone.weight_OI)
        clipped = np.zeros(0) if seen.clipped is None else seen.clipped.numpy()
        np.testing.assert_array_equal(clipped, np.flatnonzero(is_clipped(weight, quantize(weight, scheme))))


@pytest.mark.slow
@pytest.mark.parametrize(("num_bits", "symmetric", "length"), [(4, False, 64), (8, True, 192)])
def test_a_compiled_program_sees_the_same_bits(
    num_bits: int, symmetric: bool, length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason := compiler_refusal(torch.device("cpu")):
        pytest.skip(f"torch.compile {reason}")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    scheme = Scheme(num_bits=num_bits, granularity="blockwise", symmetric=symmetric, group_size=length)
    rng = np.random.default_rng(0)
    ordinary = [kind for kind in KINDS if not kind.startswith(("subnormal", "any"))]
    for kinds in (ordinary, list(KINDS)):  # no program takes weights whose subnormals matter
        groups = [KINDS[kind](rng, 192) for kind in kinds * 40]
        masters = list(torch.from_numpy(np.clip(np.stack(groups), -1e36, 1e36).astype(np.float32)).split(300))
        both = [see_all(masters, scheme, torch.bfloat16, compiled=compiled) for compiled in (False, True)]
        for seen, by_program in zip(*both, strict=True):
            assert torch.equal(seen.weight_OI, by_program.weight_OI)
            assert seen.clipped is not None
            assert by_program.clipped is not None
            assert torch.equal(seen.clipped, by_program.clipped)


def lies_beyond(weight: float, scale: float, zero: float, scheme: Scheme) -> bool:
    """Whether the nearest code, ties to even, is out of range, in exact arithmetic."""
    place = (Fraction(float(np.float32(weight) - np.float32(zero))) if zero else Fraction(weight)) / Fraction(scale)
    return not scheme.qmin <= round(place) <= scheme.qmax


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(SCHEMES), st.sampled_from([0.0, 3.0]))
def test_clipped_is_what_no_code_is_nearest_to(seed: int, scheme: Scheme, offset: float) -> None:
    weight = (np.random.default_rng(seed).standard_normal((2, 64)) * 0.02 + offset).astype(np.float32)
    codes = quantize(weight, scheme)
    size = codes.group_size
    expected = [
        [
            lies_beyond(
                float(weight[o, i]),
                float(codes.scale[o, i // size]),
                0.0 if codes.zero is None else float(codes.zero[o, i // size]),
                scheme,
            )
            for i in range(64)
        ]
        for o in range(2)
    ]
    np.testing.assert_array_equal(is_clipped(weight, codes), expected)


def test_the_largest_positive_weight_of_a_symmetric_grid_is_clipped() -> None:
    scheme = Scheme(num_bits=4, granularity="per_channel", symmetric=True)
    weight = np.array([[7.5, 1.0, -2.0, 0.0], [-7.5, 1.0, 2.0, 0.0]], np.float32)
    np.testing.assert_array_equal(
        is_clipped(weight, quantize(weight, scheme)), [[True, False, False, False], [False] * 4]
    )


def test_constant_groups_learn() -> None:
    weight = np.full((1, 64), 3.3, np.float32)
    codes = quantize(weight, Scheme(num_bits=4, granularity="per_channel", symmetric=False))
    assert isinstance(codes, QTensor)
    assert not is_clipped(weight, codes).any()


def test_gradient_passes_straight_through_but_where_clipped() -> None:
    scheme = Scheme(num_bits=4, granularity="per_channel", symmetric=True)
    rng = np.random.default_rng(0)
    master = torch.from_numpy(rng.standard_normal((8, 64)).astype(np.float32)).requires_grad_()
    seen = see(master.detach(), scheme, torch.float32)
    gradient = torch.from_numpy(rng.standard_normal((8, 64)).astype(np.float32))
    before = gradient.clone()
    straight_through(master, seen).backward(gradient)
    clipped = torch.from_numpy(is_clipped(master.detach().numpy(), quantize(master.detach().numpy(), scheme)))
    assert clipped.any()
    assert master.grad is not None
    assert torch.equal(master.grad, torch.where(clipped, 0.0, gradient))
    assert torch.equal(gradient, before)
