"""Errors of figures, and whether two figures differ by more than them.

With items x_1 .. x_n, taken as independent, and their mean m:

    mean      stderr(m)     = sqrt(sum (x_i - m)^2 / (n (n - 1)))
    ratio     stderr(R)     = sqrt(n / (n - 1) * sum (S_i - R D_i)^2) / sum D_i,    R = sum S_i / sum D_i
    function  stderr(f(m))  = |f'(m)| stderr(m)                                     the delta method
    paired    stderr(a - b) = stderr of the mean of a_i - b_i
    unpaired  stderr(a - b) = sqrt(stderr(a)^2 + stderr(b)^2)

Two models answer the same items, so what makes an item hard cancels in a paired difference: its
error is much smaller than the two figures' own errors suggest.

A verdict is at the 95 % level: of twenty comparisons of equal models one is expected to be wrong.

Source: Cochran, Sampling Techniques, 3rd edition, equation 6.13 (ratio); McNemar 1947; Miller 2024,
"Adding Error Bars to Evals", section 4 (paired differences).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

#: Two-sided 95 % quantile of the normal distribution.
Z_95 = 1.959963984540054


class Verdict(StrEnum):
    """What a difference amounts to."""

    BETTER = "better"
    WORSE = "worse"
    NOISE = "inside the noise"
    UNKNOWN = "no error known"


@dataclass(frozen=True, slots=True)
class Sample:
    """A figure with what is known of its error.

    Attributes:
        value: The figure.
        stderr: Its standard error; None where it is not known.
        items: float64 `[n]` with mean `value`; empty where there are none.
        item_ids: Their names; two samples are paired when these are equal.
    """

    value: float
    stderr: float | None
    items: np.ndarray
    item_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A figure against another.

    Attributes:
        difference: The figure minus the other one.
        stderr: Its standard error; None where it is not known.
        verdict: What that amounts to.
        num_pairs: Items the two were compared on one by one; 0 when they were not paired.
    """

    difference: float
    stderr: float | None
    verdict: Verdict
    num_pairs: int


class Recovery(StrEnum):
    """What became of a loss."""

    GAIN = "gain"
    NO_GAIN = "no gain"
    FURTHER_LOSS = "further loss"
    NO_LOSS = "no loss to recover"
    UNKNOWN = "no error known"


@dataclass(frozen=True, slots=True)
class Recovered:
    """The share of a loss that was won back.

    Attributes:
        share: 1 when all of it was; None when there was no loss to speak of.
        stderr: Its standard error; None where it is not known.
        verdict: Whether that is more than noise.
    """

    share: float | None
    stderr: float | None
    verdict: Recovery


def mean_stderr(items: np.ndarray) -> float | None:
    """Standard error of a mean.

    Args:
        items: `[n]`.

    Returns:
        The error; None for fewer than two items, which say nothing about it.
    """
    if len(items) < 2:
        return None
    return float(np.std(items, ddof=1) / math.sqrt(len(items)))


def ratio_stderr(sums: np.ndarray, sizes: np.ndarray) -> float | None:
    """Standard error of ``sum(sums) / sum(sizes)``, a mean over clusters of unequal sizes.

    Args:
        sums: `[n]`, the total of each cluster.
        sizes: `[n]`, what each total is to be divided by.

    Returns:
        The error; None for fewer than two clusters.
    """
    num = len(sums)
    if num < 2:
        return None
    residuals = sums - sums.sum() / sizes.sum() * sizes
    return float(math.sqrt(num / (num - 1) * float(residuals @ residuals)) / sizes.sum())


def bootstrap_stderr(
    clusters: Sequence[np.ndarray], statistic: Callable[[np.ndarray], float], *, num_resamples: int = 400, seed: int = 0
) -> float | None:
    """Standard error of any statistic, by drawing whole clusters again and again.

    Args:
        clusters: Values that hang together, as those of one window: `[n_i]` each.
        statistic: Of all values together.
        num_resamples: How often to draw; 400 know the error to 4 %.
        seed: Of the draws; the same seed gives the same error.

    Returns:
        The error; None for fewer than two clusters.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap, chapter 6.
    """
    if len(clusters) < 2:
        return None
    draws = np.random.default_rng(seed).integers(0, len(clusters), (num_resamples, len(clusters)))
    return float(np.std([statistic(np.concatenate([clusters[i] for i in draw])) for draw in draws], ddof=1))


def compare(sample: Sample, baseline: Sample, *, higher_is_better: bool) -> Comparison:
    """Tell whether a figure differs from another by more than noise.

    Paired items that are right or wrong are held to McNemar's exact test, other paired items to
    Student's t, and figures without common items to the normal distribution.

    Args:
        sample: The figure.
        baseline: The other one.
        higher_is_better: Which way is up.

    Returns:
        Their difference and the verdict on it.
    """
    difference = sample.value - baseline.value
    if sample.item_ids and sample.item_ids == baseline.item_ids:
        pairs = sample.items - baseline.items
        num_pairs, stderr = len(pairs), mean_stderr(pairs)
        significant = stderr is not None and _is_significant(pairs, stderr)
    else:
        num_pairs, stderr = 0, _hypot(sample.stderr, baseline.stderr)
        significant = stderr is not None and abs(difference) >= Z_95 * stderr and difference != 0
    return Comparison(difference, stderr, _verdict(difference, stderr, significant, higher_is_better), num_pairs)


def recovered(baseline: Sample, ptq: Sample, qat: Sample, *, higher_is_better: bool) -> Recovered:
    """The share of a quantization's loss that training won back.

        share = (qat - ptq) / (baseline - ptq) = N / D,   stderr = stderr of N - share D, over |D|

    Args:
        baseline: Before quantization.
        ptq: Quantized without training.
        qat: Quantized with training.
        higher_is_better: Which way is up.

    Returns:
        The share, unless the loss itself is inside the noise.
    """
    loss = compare(ptq, baseline, higher_is_better=higher_is_better)
    if loss.verdict in (Verdict.NOISE, Verdict.BETTER):
        return Recovered(None, None, Recovery.NO_LOSS)
    if loss.difference == 0:
        return Recovered(None, None, Recovery.UNKNOWN)
    gain = compare(qat, ptq, higher_is_better=higher_is_better)
    share = -gain.difference / loss.difference
    if gain.num_pairs and loss.num_pairs:
        residuals = (qat.items - ptq.items) - share * (baseline.items - ptq.items)
        error = mean_stderr(residuals)
    else:
        error = _hypot(qat.stderr, _scaled(1 - share, ptq.stderr), _scaled(share, baseline.stderr))
    stderr = None if error is None else error / abs(loss.difference)
    return Recovered(share, stderr, _RECOVERIES[gain.verdict])


_RECOVERIES = {
    Verdict.BETTER: Recovery.GAIN,
    Verdict.NOISE: Recovery.NO_GAIN,
    Verdict.WORSE: Recovery.FURTHER_LOSS,
    Verdict.UNKNOWN: Recovery.UNKNOWN,
}


def t_quantile(degrees: int) -> float:
    """Two-sided 95 % quantile of Student's t.

    Args:
        degrees: Of freedom, at least 1.

    Returns:
        The quantile; exact for 1 and 2, within 1 % for 3 and 0.02 % from 8 on.

    Source: Abramowitz and Stegun, 26.7.5.
    """
    if degrees <= 2:
        return (12.706204736432095, 4.302652729911275)[degrees - 1]
    z = Z_95
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / degrees**power for power, term in enumerate(terms, 1))


def mcnemar_p(num_better: int, num_worse: int) -> float:
    """How likely equal models disagree at least as unevenly on right-or-wrong items.

    Args:
        num_better: Items only the first got right.
        num_worse: Items only the second got right.

    Returns:
        The two-sided exact p-value, 1 when they never disagree.
    """
    num = num_better + num_worse
    tail = sum(math.comb(num, k) for k in range(min(num_better, num_worse) + 1))
    return min(1.0, 2 * tail / 2**num)


def _is_significant(pairs: np.ndarray, stderr: float) -> bool:
    if np.isin(pairs, (-1, 0, 1)).all():
        return mcnemar_p(int((pairs == 1).sum()), int((pairs == -1).sum())) < 0.05
    return abs(pairs.mean()) > t_quantile(len(pairs) - 1) * stderr


def _verdict(difference: float, stderr: float | None, significant: bool, higher_is_better: bool) -> Verdict:
    if stderr is None:
        return Verdict.UNKNOWN
    if not significant:
        return Verdict.NOISE
    return Verdict.BETTER if (difference > 0) == higher_is_better else Verdict.WORSE


def _hypot(*stderrs: float | None) -> float | None:
    known = [stderr for stderr in stderrs if stderr is not None]
    return math.hypot(*known) if len(known) == len(stderrs) else None


def _scaled(factor: float, stderr: float | None) -> float | None:
    return None if stderr is None else abs(factor) * stderr
