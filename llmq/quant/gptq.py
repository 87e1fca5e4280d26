"""Codes that lose little of a linear's *output*, given the second moments of its input.

    loss(Q) = sum over tokens |W x - Q x|^2 = tr((W - Q) H (W - Q)^T)        H = sum over tokens x x^T

`round_with_feedback` chooses codes one input feature at a time and passes each error on to the
features that follow, `descend` then improves codes, scales and zeros in turn, each step exact and
none raising the loss. Scales and zeros are rounded to the type they are stored in before any code is
chosen for them, and every code is the nearest one by the exact rule of `affine`.

Rows of W do not interact, so a caller may solve them in pieces, on threads of its own; it must keep BLAS at one.

Shape letters: O output features, I input features, G groups a row, g features a group.

Source:
    arXiv:2210.17323, algorithm 1, with features in the order of falling diag(H), its option
    "act-order", on grids that are chosen before the order; coordinate descent as in arXiv:2309.01885.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import scipy.linalg

from llmq.config import Scheme
from llmq.quant.affine import choose_codes, dtype_of, round_scale
from llmq.quant.qtensor import QTensor

#: Added to the diagonal of H, relative to its mean. On SmolLM2 anything from 0.003 to 0.03 is alike.
DAMPING = 0.01

#: Features whose errors are passed on together.
_BLOCK = 128


@dataclass(frozen=True, slots=True)
class Moments:
    """Second moments of a linear's input, factored once for all linears that read it.

    Attributes:
        damped_II: float32, H with a heavier diagonal; positive definite.
        order_I: Features by falling diag(H).
        factor_II: float32, upper triangular, in that order: its square is the inverse of `damped_II`.
    """

    damped_II: np.ndarray
    order_I: np.ndarray
    factor_II: np.ndarray

    @classmethod
    def of(cls, moments_II: np.ndarray, damping: float = DAMPING) -> Self:
        """Damp and factor.

        Args:
            moments_II: float64, sum of x x^T. It may be singular; features that never were anything but
                0 count as independent of all others.
            damping: See `DAMPING`.

        Returns:
            The moments.
        """
        damped_II = damp(moments_II, damping)
        order_I = np.argsort(-np.diag(damped_II), kind="stable")
        # With H = R R^T, R upper triangular, the inverse of R is the wanted factor.
        reverse_I = order_I[::-1]
        root_II = np.linalg.cholesky(damped_II[np.ix_(reverse_I, reverse_I)])[::-1, ::-1]
        (invert,) = scipy.linalg.get_lapack_funcs(("trtri",), (root_II,))
        factor_II, _ = invert(root_II)  # of a Cholesky factor, whose diagonal is positive
        return cls(damped_II.astype(np.float32), order_I, np.ascontiguousarray(factor_II, dtype=np.float32))

    def divide(self, left_OI: np.ndarray) -> np.ndarray:
        """``X H^-1``, with the damped H.

        Args:
            left_OI: float32, X.

        Returns:
            float32 `[O, I]`.
        """
        divided_OI = np.empty_like(left_OI)
        divided_OI[:, self.order_I] = left_OI[:, self.order_I] @ self.factor_II.T @ self.factor_II
        return divided_OI


def damp(moments_II: np.ndarray, damping: float = DAMPING) -> np.ndarray:
    """Second moments that can be inverted.

    Args:
        moments_II: float64, sum of x x^T.
        damping: Share of the mean diagonal to add to it.

    Returns:
        float64 of unit mean diagonal before the damping.
    """
    mean = np.trace(moments_II) / len(moments_II)
    if mean <= 0.0:
        return np.eye(len(moments_II))
    damped_II = moments_II / mean
    dead_I = np.diag(damped_II) <= 0.0
    damped_II[dead_I, dead_I] = 1.0
    damped_II[np.diag_indices_from(damped_II)] += damping
    return damped_II


def solve(
    weight_OI: np.ndarray,
    scale_OG: np.ndarray,
    zero_OG: np.ndarray | None,
    moments: Moments,
    scheme: Scheme,
    num_sweeps: int = 2,
) -> QTensor:
    """Quantize a matrix for the inputs it will see.

    Args:
        weight_OI: float32.
        scale_OG: float32, the grid to start from, as it would be stored.
        zero_OG: Likewise; None when symmetric.
        moments: Of its input.
        scheme: The grid's width and types.
        num_sweeps: Of `descend`.

    Returns:
        The codes and their grid.
    """
    weight_IO, scale_GO = np.ascontiguousarray(weight_OI.T), np.ascontiguousarray(scale_OG.T)
    zero_GO = None if zero_OG is None else np.ascontiguousarray(zero_OG.T)
    codes_IO = round_with_feedback(weight_IO, scale_GO, zero_GO, moments, scheme)
    found = descend(weight_IO, codes_IO, scale_GO, zero_GO, moments.damped_II, scheme, num_sweeps)
    codes_OI, scale_OG, *zero = (part.T for part in found)
    stored = dtype_of(np, scheme.scale_dtype)
    return QTensor(
        values=np.ascontiguousarray(codes_OI, dtype=np.int8),
        scale=np.ascontiguousarray(scale_OG, dtype=stored),
        zero=np.ascontiguousarray(zero[0], dtype=stored) if zero else None,
        num_bits=scheme.num_bits,
    )


def round_with_feedback(
    weight_IO: np.ndarray, scale_GO: np.ndarray, zero_GO: np.ndarray | None, moments: Moments, scheme: Scheme
) -> np.ndarray:
    """Choose codes feature by feature; those still to come make up for the errors made.

    Args:
        weight_IO: float32.
        scale_GO: Grid of each group.
        zero_GO: None when symmetric.
        moments: Of the input.
        scheme: Width of the codes.

    Returns:
        Codes, as floats.
    """
    order_I, factor_II = moments.order_I, moments.factor_II
    num_features = len(weight_IO)
    group_I = order_I // (num_features // len(scale_GO))
    rest_IO = weight_IO[order_I]
    codes_IO = np.empty_like(rest_IO)
    for first in range(0, num_features, _BLOCK):
        last = min(first + _BLOCK, num_features)
        error_IO = np.empty((last - first, weight_IO.shape[1]), np.float32)
        for i in range(first, last):
            scale_O, zero_O = scale_GO[group_I[i]], None if zero_GO is None else zero_GO[group_I[i]]
            weight_O = rest_IO[i] - factor_II[first:i, i] @ error_IO[: i - first]
            codes_IO[i] = nearest_codes(weight_O, scale_O, zero_O, scheme)
            error_O = weight_O - codes_IO[i] * scale_O
            if zero_O is not None:
                error_O -= zero_O
            error_IO[i - first] = error_O / factor_II[i, i]
        rest_IO[last:] -= factor_II[first:last, last:].T @ error_IO
    result_IO = np.empty_like(codes_IO)
    result_IO[order_I] = codes_IO
    return result_IO


def descend(
    weight_IO: np.ndarray,
    codes_IO: np.ndarray,
    scale_GO: np.ndarray,
    zero_GO: np.ndarray | None,
    moments_II: np.ndarray,
    scheme: Scheme,
    num_sweeps: int,
) -> tuple[np.ndarray, ...]:
    """Lower the loss one group at a time: its scale and zero for its codes, then each code for the rest.

    Args:
        weight_IO: float32.
        codes_IO: Where to start, as floats.
        scale_GO: Grid of each group.
        zero_GO: None when symmetric.
        moments_II: float32, damped.
        scheme: Width of the codes and types of the grid.
        num_sweeps: How often each group is visited.

    Returns:
        Codes as floats, scale and, unless symmetric, zero; all new.
    """
    size = len(weight_IO) // len(scale_GO)
    codes_IO, scale_GO = codes_IO.copy(), scale_GO.copy()
    zero_GO = None if zero_GO is None else zero_GO.copy()
    grid_IO = codes_IO * np.repeat(scale_GO, size, axis=0)
    if zero_GO is not None:
        grid_IO += np.repeat(zero_GO, size, axis=0)
    slope_IO = moments_II @ (weight_IO - grid_IO)  # half of how fast the loss falls along each weight
    for _ in range(num_sweeps):
        for group in range(len(scale_GO)):
            mine = slice(group * size, (group + 1) * size)
            zero_O = None if zero_GO is None else zero_GO[group]
            part = _Group(codes_IO[mine], scale_GO[group], zero_O, slope_IO[mine].copy(), moments_II[mine, mine])
            part.fit_grid(scheme)
            part.fit_codes(scheme)
            slope_IO -= moments_II[:, mine] @ part.change_IO
    return (codes_IO, scale_GO) if zero_GO is None else (codes_IO, scale_GO, zero_GO)


def nearest_codes(weight_O: np.ndarray, scale_O: np.ndarray, zero_O: np.ndarray | None, scheme: Scheme) -> np.ndarray:
    """`affine.choose_codes` with a true division, which only errs where its result looks like a tie.

    Args:
        weight_O: float32, one weight of each row.
        scale_O: Its scale.
        zero_O: Its zero; None when symmetric.
        scheme: Width of the codes.

    Returns:
        Codes, as floats.
    """
    steps_O = (weight_O if zero_O is None else weight_O - zero_O) / scale_O
    codes_O = np.rint(steps_O)
    if np.abs(steps_O - codes_O).max() == 0.5:
        return choose_codes(weight_O[:, None], scale_O, zero_O, scheme)[:, 0]
    return _clipped(codes_O, scheme)


class _Group:
    """One group of every row, and what changing it does to the loss; arrays change in place.

    Args:
        codes_IO: Its codes.
        scale_O: Their scale.
        zero_O: Their zero, or None.
        slope_IO: ``H (W - Q)`` of its features.
        moments_II: H among its features.
    """

    def __init__(
        self,
        codes_IO: np.ndarray,
        scale_O: np.ndarray,
        zero_O: np.ndarray | None,
        slope_IO: np.ndarray,
        moments_II: np.ndarray,
    ) -> None:
        self.codes_IO, self.scale_O, self.zero_O = codes_IO, scale_O, zero_O
        self.slope_IO, self.moments_II = slope_IO, moments_II
        self.change_IO = np.zeros_like(codes_IO)

    def fit_grid(self, scheme: Scheme) -> None:
        """Least squares for scale and zero, kept where they lower the loss after they were rounded."""
        along_IO = self.moments_II @ self.codes_IO
        cc_O, cs_O = (self.codes_IO * along_IO).sum(axis=0), (self.codes_IO * self.slope_IO).sum(axis=0)
        if self.zero_O is None:
            step_O = _rounded(self.scale_O, cs_O / np.maximum(cc_O, _TINY), scheme)
            gain_O = step_O * (2.0 * cs_O - step_O * cc_O)
            step_O = np.where((gain_O > 0.0) & (self.scale_O + step_O > 0.0), step_O, 0.0)
            self._move(self.codes_IO * step_O, along_IO * step_O)
            self.scale_O += step_O
            return
        ones_I1 = self.moments_II.sum(axis=1, keepdims=True)
        c1_O, s1_O, m11 = along_IO.sum(axis=0), self.slope_IO.sum(axis=0), ones_I1.sum()
        det_O = np.maximum(cc_O * m11 - c1_O * c1_O, _TINY)
        step_O = _rounded(self.scale_O, (cs_O * m11 - s1_O * c1_O) / det_O, scheme)
        shift_O = _rounded(self.zero_O, (s1_O - step_O * c1_O) / m11, scheme)
        gain_O = step_O * (2.0 * cs_O - step_O * cc_O) + shift_O * (2.0 * (s1_O - step_O * c1_O) - shift_O * m11)
        better_O = (gain_O > 0.0) & (self.scale_O + step_O > 0.0)
        step_O, shift_O = np.where(better_O, step_O, 0.0), np.where(better_O, shift_O, 0.0)
        self._move(self.codes_IO * step_O + shift_O, along_IO * step_O + ones_I1 * shift_O)
        self.scale_O += step_O
        self.zero_O += shift_O

    def fit_codes(self, scheme: Scheme) -> None:
        """Each code in turn: the grid point nearest to where the loss is least along its weight."""
        inverse_O = np.float32(1.0) / self.scale_O
        for first in range(0, len(self.codes_IO), _BLOCK):
            mine = slice(first, first + _BLOCK)
            moments_II, codes_IO = self.moments_II[mine, mine], self.codes_IO[mine]
            change_IO = np.empty_like(codes_IO)
            for i, codes_O in enumerate(codes_IO):
                slope_O = self.slope_IO[first + i] - moments_II[i, :i] @ change_IO[:i]
                chosen_O = _clipped(np.rint(codes_O + slope_O * (inverse_O / moments_II[i, i])), scheme)
                change_IO[i] = (chosen_O - codes_O) * self.scale_O
                codes_O[:] = chosen_O
            self.change_IO[mine] += change_IO
            if len(change_IO) < len(self.slope_IO):
                self.slope_IO -= self.moments_II[:, mine] @ change_IO

    def _move(self, change_IO: np.ndarray, along_IO: np.ndarray) -> None:
        self.change_IO += change_IO
        self.slope_IO -= along_IO


#: Keeps a quotient finite whose numerator is 0 as well.
_TINY = np.float32(1e-30)


def _clipped(codes_O: np.ndarray, scheme: Scheme) -> np.ndarray:
    return codes_O.clip(np.float32(scheme.qmin), np.float32(scheme.qmax))  # half the cost of `np.clip` for few codes


def _rounded(value_O: np.ndarray, step_O: np.ndarray, scheme: Scheme) -> np.ndarray:
    """The step to a value that can be stored."""
    return round_scale(np, value_O + step_O, scheme) - value_O
