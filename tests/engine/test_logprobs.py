"""Log-probabilities of prompts against float64."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from llmq.engine.logprobs import is_usable, token_logprobs

LOGITS = arrays(np.float32, (3, 40), elements=st.floats(-30, 30, width=16))


@given(LOGITS, st.lists(st.integers(0, 39), min_size=3, max_size=3), st.integers(0, 20))
def test_equal_float64_and_the_order_of_a_sort(logits: np.ndarray, targets: list[int], num_top: int) -> None:
    wide = logits.astype(np.float64)
    expected = (
        wide - np.log(np.exp(wide - wide.max(-1, keepdims=True)).sum(-1, keepdims=True)) - wide.max(-1, keepdims=True)
    )
    for row, target, right, values in zip(
        token_logprobs(logits, targets, num_top), targets, expected, logits, strict=True
    ):
        assert row.token == target
        assert abs(row.logprob - right[target]) <= 4e-6 * max(1, abs(right[target]))
        assert [i for i, _ in row.top] == np.argsort(-values, kind="stable")[:num_top].tolist()
        assert all(abs(value - right[i]) <= 4e-6 * max(1, abs(right[i])) for i, value in row.top)


def test_usable_is_what_has_a_most_likely_token() -> None:
    logits = np.zeros((2, 5), np.float32)
    assert is_usable(logits)
    for value, usable in ((np.nan, False), (np.inf, False), (-np.inf, True)):
        changed = logits.copy()
        changed[1, 3] = value
        assert is_usable(changed) is usable
    logits[0] = -np.inf
    assert not is_usable(logits)


def test_a_vocabulary_smaller_than_what_is_asked() -> None:
    (row,) = token_logprobs(np.zeros((1, 3), np.float32), [2], 20)
    assert [i for i, _ in row.top] == [0, 1, 2]
