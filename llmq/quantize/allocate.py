"""Spending bits where they matter: one choice for each stage of each block, exact and deterministic.

With the loss l[u, c] and the bytes b[u, c] of choice c for unit u, and the budget B:

    min sum l[u, c(u)]   with   sum b[u, c(u)] <= B

by dynamic programming over bytes in units of their greatest common divisor. The same table answers
the dual question: the fewest bytes for which the loss stays within a bound.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to store a unit.

    Attributes:
        name: What it is.
        num_bytes: What it takes.
        loss: What it costs.
    """

    name: str
    num_bytes: int
    loss: float


class Allocation:
    """The least loss for every number of bytes.

    Args:
        units: The choices of each unit; a unit needs at least one.
    """

    def __init__(self, units: Sequence[Sequence[Choice]]) -> None:
        self._units = units
        self._step = math.gcd(*(choice.num_bytes for choices in units for choice in choices)) or 1
        most = sum(max(choice.num_bytes for choice in choices) for choices in units) // self._step
        least_S = np.full(most + 1, np.inf)
        least_S[0] = 0.0
        self._picked: list[np.ndarray] = []
        for choices in units:
            following_S, picked_S = np.full_like(least_S, np.inf), np.zeros(len(least_S), np.uint8)
            for index, choice in enumerate(choices):
                size = choice.num_bytes // self._step
                reached_S = np.full_like(least_S, np.inf)
                reached_S[size:] = least_S[: len(least_S) - size] + choice.loss
                better_S = reached_S < following_S
                following_S[better_S], picked_S[better_S] = reached_S[better_S], index
            least_S = following_S
            self._picked.append(picked_S)
        self._least_S = least_S

    def within_bytes(self, budget: int) -> list[int] | None:
        """The choices of least loss.

        Args:
            budget: Bytes they may take together.

        Returns:
            An index for each unit, of equal losses the fewest bytes; None when nothing fits.
        """
        reachable_S = self._least_S[: max(0, budget // self._step + 1)]
        if not np.isfinite(reachable_S).any():
            return None
        return self._trace(int(np.argmin(reachable_S)))

    def within_loss(self, bound: float) -> list[int] | None:
        """The choices of fewest bytes.

        Args:
            bound: Loss they may have together.

        Returns:
            An index for each unit; None when nothing is good enough.
        """
        good = np.flatnonzero(self._least_S <= bound)
        return self._trace(int(good[0])) if good.size else None

    def _trace(self, size: int) -> list[int]:
        chosen = []
        for choices, picked_S in zip(reversed(self._units), reversed(self._picked), strict=True):
            index = int(picked_S[size])
            chosen.append(index)
            size -= choices[index].num_bytes // self._step
        assert size == 0
        return chosen[::-1]
