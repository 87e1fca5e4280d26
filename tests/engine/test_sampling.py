"""What a request may ask for, and its random numbers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmq.config import validated
from llmq.engine.sampling import SamplingParams, resolve_seed, uniform, uniforms
from llmq.errors import ConfigError

SEEDS = st.integers(0, 2**64 - 1)


@given(SEEDS, st.integers(0, 127), st.integers(0, 1 << 20), st.integers(1, 40))
def test_a_run_of_random_numbers_is_the_numbers_one_by_one(seed: int, choice: int, index: int, count: int) -> None:
    run = uniforms(seed, choice, index, count)
    assert run == [uniform(seed, choice, index + i) for i in range(count)]
    assert all(0 <= number < 1 and float(np.float32(number)) == number for number in run)


def test_random_numbers_are_spread_evenly_and_differ_by_seed_choice_and_index() -> None:
    numbers = np.array([uniforms(seed, choice, 0, 500) for seed in range(4) for choice in range(4)])
    assert len(np.unique(numbers)) > 0.999 * numbers.size
    counts = np.histogram(numbers, 10, (0, 1))[0]
    assert np.abs(counts - 800).max() < 5 * np.sqrt(800)


def test_random_numbers_never_change() -> None:
    """They are part of what a seed means: other numbers would change every seeded answer."""
    assert uniforms(1, 0, 0, 2) == [0.3035680055618286, 0.9002684354782104]


def test_a_seed_is_found_where_none_was_given() -> None:
    params = SamplingParams(temperature=1.0)
    assert resolve_seed(params).seed != resolve_seed(params).seed
    assert resolve_seed(SamplingParams(seed=5)).seed == 5


@pytest.mark.parametrize(
    "field",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_p": 1.5},
        {"max_tokens": -1},
        {"n": 0},
        {"n": 1 << 40},
        {"seed": -1},
        {"presence_penalty": 3},
        {"frequency_penalty": float("nan")},
        {"repetition_penalty": 0},
        {"logit_bias": {5: 101}},
        {"logit_bias": {-1: 1}},
        {"logit_bias": {5: float("nan")}},
        {"logit_bias": dict.fromkeys(range(1025), 1.0)},
        {"stop": ("",)},
        {"stop": ("x",) * 65},
        {"stop_token_ids": (-1,)},
        {"logprobs": 21},
        {"prompt_logprobs": -1},
    ],
)
def test_bad_parameters(field: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(field))):
        validated(SamplingParams, **field)


def test_the_bias_of_a_request_is_its_own() -> None:
    assert SamplingParams().logit_bias == {}
    assert SamplingParams(logit_bias={3: 1.5}).for_slot().logit_bias == {3: 1.5}
