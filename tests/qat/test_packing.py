"""Rows hold every learned token once, whatever the lengths; steps are the same after a resume."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmq.errors import ConfigError
from llmq.qat.data import Example
from llmq.qat.packing import Row, Steps, batch, cut, pack


@st.composite
def examples(draw: st.DrawFn) -> list[Example]:
    """Examples whose tokens are all different, some of them not to be learned."""
    sizes = draw(st.lists(st.integers(2, 40), min_size=1, max_size=30))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    found, start = [], 0
    for size in sizes:
        learned = rng.random(size) < 0.7
        learned[0], learned[-1] = False, True
        found.append(Example(np.arange(start, start + size, dtype=np.int32), learned))
        start += size
    return found


@given(examples(), st.integers(2, 20), st.booleans())
def test_every_learned_token_is_predicted_once_from_the_one_before(
    found: list[Example], seq_len: int, packed: bool
) -> None:
    pieces = cut(found, seq_len)
    rows: list[Row] = pack(pieces, seq_len) if packed else [[piece] for piece in pieces]
    laid = batch(rows, seq_len, packed=packed)
    expected = np.concatenate([example.tokens[example.learned] for example in found])
    np.testing.assert_array_equal(np.sort(laid.targets[laid.learned]), expected)
    np.testing.assert_array_equal(laid.tokens[laid.learned] + 1, laid.targets[laid.learned])
    assert laid.tokens.shape[1] <= seq_len
    assert laid.learned.any(axis=1).all()
    assert not laid.learned[laid.documents == 0].any()
    for row in range(len(rows)):
        for number in range(1, laid.documents[row].max() + 1):
            at = laid.documents[row] == number
            np.testing.assert_array_equal(laid.positions[row][at], np.arange(at.sum()))
            np.testing.assert_array_equal(np.diff(laid.tokens[row][at]), 1)  # one piece of one example


@given(examples(), st.integers(2, 20))
def test_packing_wastes_little(found: list[Example], seq_len: int) -> None:
    rows = pack(cut(found, seq_len), seq_len)
    sizes = [sum(len(piece.tokens) for piece in row) for row in rows]
    assert all(one + other > seq_len for i, one in enumerate(sizes) for other in sizes[i + 1 :])


def steps_of(num_rows: int, **options: object) -> Steps:
    found = [Example(np.array([i, i + 1000], np.int32), np.array([False, True])) for i in range(num_rows)]
    rows: list[Row] = [[piece] for piece in cut(found, 8)]
    return Steps(rows, 8, **{"packed": False, "batch_size": 2, "grad_accum": 2, "seed": 3, **options})


def first_tokens(steps: Steps, step: int) -> list[int]:
    return [int(token) for part in steps[step] for token in part.tokens[:, 0]]


def test_a_pass_takes_every_row_once_and_the_next_one_in_another_order() -> None:
    steps = steps_of(12)
    assert steps.per_epoch == 3
    passes = [[token for step in range(first, first + 3) for token in first_tokens(steps, step)] for first in (0, 3)]
    assert sorted(passes[0]) == sorted(passes[1]) == list(range(12))
    assert passes[0] != passes[1]
    assert [len(part.tokens) for part in steps[0]] == [2, 2]


def test_a_step_follows_from_its_number_and_the_seed_alone() -> None:
    steps, again, other = steps_of(12), steps_of(12), steps_of(12, seed=4)
    assert [first_tokens(again, step) for step in (7, 2, 5)] == [first_tokens(steps, step) for step in (7, 2, 5)]
    assert [first_tokens(other, step) for step in range(3)] != [first_tokens(steps, step) for step in range(3)]


def test_too_few_rows_for_a_step() -> None:
    with pytest.raises(ConfigError, match="makes 3 rows of 8 tokens, a step takes 4; give more data or lower"):
        steps_of(3)
