"""The allocation against every combination."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmq.quantize.allocate import Allocation, Choice

CHOICES = st.lists(
    st.builds(Choice, st.just(""), st.integers(1, 30).map(lambda n: 3 * n), st.integers(0, 50).map(float)),
    min_size=1,
    max_size=4,
)


def total(units: list[list[Choice]], indices: list[int] | tuple[int, ...]) -> tuple[int, float]:
    picked = [choices[i] for choices, i in zip(units, indices, strict=True)]
    return sum(c.num_bytes for c in picked), sum(c.loss for c in picked)


@given(units=st.lists(CHOICES, min_size=1, max_size=4), budget=st.integers(0, 400), bound=st.integers(0, 200))
def test_no_combination_is_better(units: list[list[Choice]], budget: int, bound: int) -> None:
    combinations = [total(units, indices) for indices in product(*(range(len(choices)) for choices in units))]
    allocation = Allocation(units)
    fitting = [(loss, size) for size, loss in combinations if size <= budget]
    found = allocation.within_bytes(budget)
    assert (found is None) == (not fitting)
    if found is not None:
        size, loss = total(units, found)
        assert (loss, size) == min(fitting)
    good = [size for size, loss in combinations if loss <= bound]
    found = allocation.within_loss(float(bound))
    assert (found is None) == (not good)
    if found is not None:
        size, loss = total(units, found)
        assert (size, loss <= bound) == (min(good), True)


def test_equal_choices_take_the_first() -> None:
    units = [[Choice("a", 2, 1.0), Choice("b", 2, 1.0)]] * 3
    assert Allocation(units).within_bytes(6) == [0, 0, 0]
    assert Allocation(units).within_bytes(5) is None
    assert Allocation(units).within_loss(3.0) == [0, 0, 0]
    assert Allocation(units).within_loss(2.9) is None


@pytest.mark.parametrize("num_units", [120])
def test_a_real_model_is_quick(num_units: int) -> None:
    units = [[Choice("", 1152 * (240 + 16 * i + u % 7), 1.0 / (i + 1)) for i in range(5)] for u in range(num_units)]
    found = Allocation(units).within_bytes(1152 * 270 * num_units)
    assert found is not None
    assert total(units, found)[0] <= 1152 * 270 * num_units
