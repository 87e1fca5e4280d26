"""Matrices that have broken quantizers: one kind of group a row, mixed at random."""

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from llmq.config import Granularity, Scheme

DTYPES = (ml_dtypes.bfloat16, np.float16, np.float32)

SCHEMES = [
    Scheme(num_bits=bits, granularity=Granularity.BLOCKWISE, symmetric=symmetric, group_size=group_size)
    for bits in (4, 8)
    for symmetric in (True, False)
    for group_size in (32, 64, None)
]


def _on_ties(rng: np.random.Generator, n: int) -> np.ndarray:
    """Half-integers between extremes that give an exact scale of 1: every element is a tie or near one."""
    row = rng.integers(-7, 7, n) + 0.5 + rng.choice([0, 2.0**-20, -(2.0**-20)], n)
    row[:2] = -7.5, 7.5
    return row


KINDS = {
    "gaussian": lambda rng, n: rng.standard_normal(n) * 0.02,
    "zero": lambda _, n: np.zeros(n),
    "negative zero": lambda _, n: np.full(n, -0.0),
    "constant": lambda rng, n: np.full(n, rng.choice([9.0, -9.0, 1000.3, 1e-30])),
    "1e-30": lambda rng, n: rng.standard_normal(n) * 1e-30,
    "near the smallest scale": lambda rng, n: rng.standard_normal(n) * 2.0 ** rng.integers(-120, -112),
    "subnormal": lambda rng, n: rng.standard_normal(n) * 2.0 ** rng.integers(-148, -126),
    "subnormals among small": lambda rng, n: (
        rng.standard_normal(n) * np.where(rng.random(n) < 0.5, 2.0**-127, 2.0**-114)
    ),
    "large": lambda rng, n: rng.standard_normal(n) * 1e30,
    "any magnitude": lambda rng, n: rng.standard_normal(n) * 10.0 ** rng.uniform(-38, 30),
    "offset": lambda rng, n: rng.standard_normal(n) * 0.01 + rng.choice([-3.0, 3.0]),
    "ties": _on_ties,
    "one outlier": lambda rng, n: np.where(np.arange(n) == 0, 100.0, rng.standard_normal(n)),
}


@st.composite
def matrices(draw: st.DrawFn, shapes: tuple[tuple[int, int], ...]) -> np.ndarray:
    """A matrix of one of `shapes` whose groups of 32 are of random `KINDS`, in a random dtype."""
    num_rows, num_features = draw(st.sampled_from(shapes))
    dtype = draw(st.sampled_from(DTYPES))
    num_groups = num_rows * num_features // 32
    kinds = draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=num_groups, max_size=num_groups))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    groups = np.stack([KINDS[kind](rng, 32) for kind in kinds])
    limit = 6e4 if dtype is np.float16 else 2.0**119
    return np.clip(groups, -limit, limit).reshape(num_rows, num_features).astype(np.float32).astype(dtype)
