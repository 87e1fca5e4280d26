"""Choosing tokens: distributions, limits, reproducibility."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmq.config import validated
from llmq.engine.sampling import SamplingParams, resolve_seed, sample
from llmq.errors import BackendError, ConfigError

LOGITS = np.log(np.array([0.5, 0.2, 0.15, 0.1, 0.05], np.float32))


def draws(params: SamplingParams, count: int = 4000) -> np.ndarray:
    return np.array([sample(LOGITS, params, index) for index in range(count)])


def test_temperature_0_takes_the_most_likely_and_the_lower_id_of_a_tie() -> None:
    assert sample(LOGITS, SamplingParams(), 0) == 0
    assert sample(np.array([1.0, 3.0, 3.0], np.float32), SamplingParams(), 0) == 1


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_tempered_distribution(temperature: float) -> None:
    probs = np.exp(LOGITS.astype(np.float64) / temperature)
    probs /= probs.sum()
    counts = np.bincount(draws(SamplingParams(temperature=temperature, seed=7)), minlength=5)
    assert np.abs(counts / counts.sum() - probs).max() < 4 * np.sqrt(0.25 / counts.sum())


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.7}, {0, 1}),  # the smallest set that reaches it
        ({"top_p": 0.71}, {0, 1, 2}),
        ({"top_p": 1e-9}, {0}),
        ({"top_k": 100}, {0, 1, 2, 3, 4}),
        ({"top_k": 4, "top_p": 0.9}, {0, 1, 2, 3}),
    ],
)
def test_limits(params: dict, allowed: set[int]) -> None:
    assert set(draws(SamplingParams(temperature=1.0, seed=3, **params)).tolist()) == allowed


@pytest.mark.parametrize("temperature", [1e-320, 1e-30, 1e300])
def test_extreme_temperatures_end_in_a_token(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=0)
    tokens = {sample(LOGITS, params, index) for index in range(20)}
    assert tokens == {0} if temperature < 1 else len(tokens) > 1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_told(bad: float, temperature: float) -> None:
    logits = LOGITS.copy()
    logits[3] = bad
    with pytest.raises(BackendError, match="logits: are not finite"):
        sample(logits, SamplingParams(temperature=temperature, seed=1), 0)


@given(st.integers(0, 2**64 - 1), st.integers(0, 10_000))
def test_a_token_depends_on_seed_and_index_alone(seed: int, index: int) -> None:
    params = SamplingParams(temperature=1.0, seed=seed)
    assert sample(LOGITS, params, index) == sample(LOGITS, params, index)


def test_seeds_differ_and_one_is_found_where_none_was_given() -> None:
    params = SamplingParams(temperature=1.0)
    assert not np.array_equal(
        draws(params.model_copy(update={"seed": 1}), 50), draws(params.model_copy(update={"seed": 2}), 50)
    )
    assert resolve_seed(params).seed != resolve_seed(params).seed
    assert resolve_seed(SamplingParams(seed=5)).seed == 5


@pytest.mark.parametrize(
    "field",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"max_tokens": 0},
        {"seed": -1},
    ],
)
def test_bad_parameters(field: dict) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(field))}="):
        validated(SamplingParams, **field)
