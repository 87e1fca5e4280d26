"""The second-order solver: against a direct float64 solve, and where inputs are degenerate."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmq.config import SCHEMES, Scheme
from llmq.quant import dequantize, quantize
from llmq.quant.affine import choose_codes
from llmq.quant.gptq import Moments, damp, nearest_codes, round_with_feedback, solve
from llmq.quant.search import on_grid, search_grid


@pytest.fixture(scope="module")
def pool():
    with ThreadPoolExecutor(2) as threads:
        yield threads


def scheme(symmetric: bool, group_size: int | None = 32, name: str = "int4_blockwise") -> Scheme:
    return SCHEMES[name].model_copy(update={"symmetric": symmetric, "group_size": group_size})


def random_weight(rows: int = 24, features: int = 96) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((rows, features)).astype(np.float32)


def correlated(features: int, tokens: int, seed: int = 1) -> np.ndarray:
    """Inputs whose features share directions, as those of a model do."""
    rng = np.random.default_rng(seed)
    mixing = rng.standard_normal((features, features)) * rng.random(features) ** 3
    return rng.standard_normal((tokens, features)) @ mixing.T


def output_loss(weight: np.ndarray, quantized: np.ndarray, moments: np.ndarray) -> float:
    error = weight.astype(np.float64) - quantized.astype(np.float64)
    return float(np.vdot(error @ moments, error))


def nearest(weight: np.ndarray, row: Scheme) -> np.ndarray:
    return dequantize(quantize(weight, row))


def solved(weight: np.ndarray, moments: np.ndarray, row: Scheme, pool: ThreadPoolExecutor, **more: int) -> np.ndarray:
    grid = search_grid(weight, row, "nearest", pool)
    return dequantize(solve(weight, *grid, Moments.of(moments), row, **more))


@pytest.mark.parametrize("symmetric", [True, False])
def test_feedback_is_the_direct_solve_in_float64(symmetric: bool) -> None:
    """After each feature is rounded, the rest moves to where the loss is least, solved anew each time."""
    row, weight = scheme(symmetric), random_weight(6, 64)
    inputs = correlated(64, 500)
    damped = damp(inputs.T @ inputs)
    with ThreadPoolExecutor(1) as one:
        scale, zero = search_grid(weight, row, "nearest", one)
    moments = Moments.of(inputs.T @ inputs)
    codes = round_with_feedback(
        np.ascontiguousarray(weight.T), scale.T.copy(), None if zero is None else zero.T.copy(), moments, row
    ).T

    order = moments.order_I
    assert (np.diff(np.diag(damped)[order]) <= 0).all()
    free = weight.astype(np.float64)
    for position, feature in enumerate(order):
        group = feature // 32
        zeros = None if zero is None else zero[:, group]
        expected = choose_codes(free[:, feature, None].astype(np.float32), scale[:, group], zeros, row)[:, 0]
        ours = codes[:, feature] * scale[:, group] + (0 if zeros is None else zeros)
        # A code may only differ where float32 cannot tell on which side of a tie the weight lies.
        doubt = np.abs(free[:, feature] - (ours + codes_step(expected, codes[:, feature], scale[:, group]) / 2))
        assert ((expected == codes[:, feature]) | (doubt < 1e-4 * np.abs(weight).max())).all()
        rest = order[position + 1 :]
        error = free[:, feature] - ours
        if rest.size:
            # argmin over the rest of the loss with this feature's error fixed
            free[:, rest] += np.outer(error, np.linalg.solve(damped[np.ix_(rest, rest)], damped[rest, feature]))


def codes_step(expected: np.ndarray, found: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return (expected - found) * scale


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("features", [64, 96])
def test_with_an_identity_hessian_feedback_rounds_to_nearest(symmetric: bool, features: int, pool) -> None:
    row, weight = scheme(symmetric), random_weight(features=features)
    grid = search_grid(weight, row, "nearest", pool)
    found = solve(weight, *grid, Moments.of(np.eye(features)), row, num_sweeps=0)
    expected = quantize(weight, row)
    assert (found.values == expected.values).all()
    assert (found.scale == expected.scale).all()
    assert symmetric or (found.zero == expected.zero).all()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("name", ["int4_blockwise", "int8_blockwise", "int4_per_channel", "int8_per_channel"])
def test_the_output_is_nearer_than_with_nearest_codes_and_each_step_helps(symmetric: bool, name: str, pool) -> None:
    row = scheme(symmetric, 32 if "blockwise" in name else None, name)
    weight, inputs = random_weight(), correlated(96, 2000)
    moments = inputs.T @ inputs
    losses = [output_loss(weight, nearest(weight, row), moments)]
    losses += [output_loss(weight, solved(weight, moments, row, pool, num_sweeps=n), moments) for n in (0, 1, 3)]
    assert losses[1] < 0.7 * losses[0]
    assert losses[3] < losses[2] < losses[1]


def degenerate() -> dict[str, np.ndarray]:
    inputs = correlated(96, 400)
    dead = inputs * (np.arange(96) % 3 > 0)
    constant = np.ones_like(inputs)
    one_hot = np.zeros_like(inputs)
    one_hot[:, 5] = 1.0
    massive = inputs.copy()
    massive[0] *= 1e6
    return {
        "dead features": dead,
        "no input at all": np.zeros_like(inputs),
        "fewer tokens than features": inputs[:7],
        "a constant input": constant,
        "one feature only": one_hot,
        "a massive token": massive,
        "tiny inputs": inputs * 1e-30,
    }


@pytest.mark.parametrize("case", degenerate())
@pytest.mark.parametrize("symmetric", [True, False])
def test_degenerate_inputs_give_finite_codes_no_worse_than_nearest(case: str, symmetric: bool, pool) -> None:
    row, weight, inputs = scheme(symmetric), random_weight(), degenerate()[case]
    weight[:, 10] = 0.0
    weight[3] = 0.0
    moments = inputs.T @ inputs
    found = solved(weight, moments, row, pool)
    assert np.isfinite(found).all()
    damped = damp(moments)
    assert output_loss(weight, found, damped) <= output_loss(weight, nearest(weight, row), damped)
    assert (found[3] == 0.0).all()


def test_dead_features_are_rounded_to_nearest(pool) -> None:
    row, weight = scheme(True), random_weight()
    inputs = correlated(96, 400) * (np.arange(96) < 64)
    found = solve(weight, *search_grid(weight, row, "nearest", pool), Moments.of(inputs.T @ inputs), row, 0)
    assert (found.values[:, 64:] == quantize(weight, row).values[:, 64:]).all()


@given(
    steps=st.lists(st.floats(-12, 12, width=32), min_size=1, max_size=30),
    ties=st.lists(st.integers(-20, 20), max_size=10),
    exponent=st.integers(-20, 20),
    zero=st.none() | st.integers(-8, 8),
)
def test_nearest_codes_are_exact(steps: list[float], ties: list[int], exponent: int, zero: int | None) -> None:
    row = scheme(zero is None)
    scale = np.float32(1.5 * 2.0**exponent)
    weight = np.array([*steps, *(tie / 2 for tie in ties)], np.float32) * scale
    weight = np.concatenate(
        [weight, np.nextafter(weight, np.float32(np.inf)), np.nextafter(weight, np.float32(-np.inf))]
    )
    scales = np.full_like(weight, scale)
    zeros = None if zero is None else np.full_like(weight, np.float32(zero) * scale)
    expected = choose_codes(weight[:, None], scales, zeros, row)[:, 0]
    assert (nearest_codes(weight, scales, zeros, row) == expected).all()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("method", ["nearest", "mse"])
def test_a_searched_grid_is_stored_as_it_was_judged(symmetric: bool, method: str, pool) -> None:
    row, weight = scheme(symmetric), random_weight()
    codes = on_grid(weight, *search_grid(weight, row, method, pool), row)
    assert codes.symmetric == symmetric
    assert codes.scale.dtype.name == "bfloat16"
    assert (codes.scale.astype(np.float32) > 0).all()
    assert np.isfinite(dequantize(codes)).all()
    assert np.abs(codes.values).max() <= 8
    if method == "nearest":
        assert (codes.values == quantize(weight, row).values).all()
