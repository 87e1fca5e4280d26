"""Errors and verdicts, on examples worked by hand and on simulated data."""

import math

import numpy as np
import pytest

from llmq.evaluate.statistics import (
    Recovery,
    Sample,
    Verdict,
    bootstrap_stderr,
    compare,
    mcnemar_p,
    mean_stderr,
    ratio_stderr,
    recovered,
    t_quantile,
)


def sample(items: list[float] | np.ndarray, ids: tuple[str, ...] | None = None) -> Sample:
    items = np.asarray(items, float)
    names = tuple(str(i) for i in range(len(items))) if ids is None else ids
    return Sample(float(items.mean()), mean_stderr(items), items, names)


def figure(value: float, stderr: float | None) -> Sample:
    return Sample(value, stderr, np.empty(0), ())


def test_the_error_of_a_mean() -> None:
    assert mean_stderr(np.array([1.0, 2.0, 3.0, 4.0])) == pytest.approx(math.sqrt(5 / 12))
    assert mean_stderr(np.array([1.0])) is None


def test_the_error_of_a_ratio() -> None:
    # The ratio is 3, so the residuals are 1 and -1.
    assert ratio_stderr(np.array([4.0, 5.0]), np.array([1.0, 2.0])) == pytest.approx(2 / 3)
    sums = np.random.default_rng(0).normal(size=50)
    assert ratio_stderr(sums, np.full(50, 7)) == pytest.approx(mean_stderr(sums / 7))
    assert ratio_stderr(sums[:1], np.array([7])) is None


@pytest.mark.parametrize(
    ("degrees", "quantile", "within"),
    [
        (1, 12.706, 1e-4),
        (2, 4.3027, 1e-4),
        (3, 3.1824, 8e-3),
        (8, 2.3060, 2e-4),
        (15, 2.1314, 5e-5),
        (99, 1.9842, 5e-5),
    ],
)
def test_quantiles_of_t(degrees: int, quantile: float, within: float) -> None:
    assert t_quantile(degrees) == pytest.approx(quantile, rel=within)


@pytest.mark.parametrize(("better", "worse", "p"), [(0, 0, 1.0), (5, 0, 0.0625), (0, 6, 0.03125), (2, 8, 0.109375)])
def test_mcnemar_counts_coin_flips(better: int, worse: int, p: float) -> None:
    assert mcnemar_p(better, worse) == mcnemar_p(worse, better) == p


def test_a_published_table_is_inside_the_noise() -> None:
    scores = [figure(value, 0.0165) for value in (0.4806, 0.4914, 0.4872)]
    for one in scores:
        for other in scores:
            found = compare(one, other, higher_is_better=True)
            assert found.verdict is Verdict.NOISE
            assert found.stderr == pytest.approx(0.0165 * math.sqrt(2))
            assert found.num_pairs == 0


@pytest.mark.parametrize(("higher", "verdict"), [(True, Verdict.BETTER), (False, Verdict.WORSE)])
def test_a_verdict_knows_which_way_is_up(higher: bool, verdict: Verdict) -> None:
    assert compare(figure(0.60, 0.01), figure(0.50, 0.01), higher_is_better=higher).verdict is verdict
    assert compare(figure(0.60, None), figure(0.50, 0.01), higher_is_better=higher).verdict is Verdict.UNKNOWN
    assert compare(figure(0.60, 0.0), figure(0.60, 0.0), higher_is_better=higher).verdict is Verdict.NOISE


def test_pairs_see_what_overlapping_bars_hide() -> None:
    hard = np.random.default_rng(1).normal(3, 1, 200)
    baseline, model = sample(hard), sample(hard + 0.05 + np.random.default_rng(2).normal(0, 0.1, 200))
    found = compare(model, baseline, higher_is_better=False)
    assert (found.verdict, found.num_pairs) == (Verdict.WORSE, 200)
    assert found.stderr == pytest.approx(mean_stderr(model.items - baseline.items))
    other_items = sample(model.items, tuple(f"other {i}" for i in range(200)))
    assert compare(other_items, baseline, higher_is_better=False).verdict is Verdict.NOISE


def test_right_and_wrong_answers_go_to_the_exact_test() -> None:
    baseline = sample([1.0] * 50 + [0.0] * 50)
    five_lost = sample([0.0] * 5 + [1.0] * 45 + [0.0] * 50)
    six_lost = sample([0.0] * 6 + [1.0] * 44 + [0.0] * 50)
    found = compare(five_lost, baseline, higher_is_better=True)
    assert found.difference == pytest.approx(-0.05)
    assert abs(found.difference / found.stderr) > 1.96  # what a normal distribution would call worse
    assert found.verdict is Verdict.NOISE
    assert compare(six_lost, baseline, higher_is_better=True).verdict is Verdict.WORSE


def test_equal_models_differ_in_one_of_twenty_comparisons() -> None:
    rng = np.random.default_rng(3)
    verdicts = []
    for _ in range(2000):
        hard = rng.normal(0, 3, 12)
        one, other = (sample(hard + rng.normal(0, 1, 12)) for _ in range(2))
        verdicts.append(compare(one, other, higher_is_better=True).verdict)
    assert 0.04 < np.mean([verdict is not Verdict.NOISE for verdict in verdicts]) < 0.06


def test_the_bootstrap_agrees_with_the_formula_and_with_itself() -> None:
    rng = np.random.default_rng(4)
    clusters = [rng.normal(rng.normal(), 1, 20) for _ in range(60)]
    error = bootstrap_stderr(clusters, lambda values: float(values.mean()))
    assert error == pytest.approx(mean_stderr(np.array([c.mean() for c in clusters])), rel=0.1)
    assert error == bootstrap_stderr(clusters, lambda values: float(values.mean()))
    assert bootstrap_stderr(clusters[:1], lambda values: float(values.mean())) is None


def test_bootstrapped_errors_of_a_median_cover_it() -> None:
    rng = np.random.default_rng(5)
    hits = 0
    for trial in range(100):
        clusters = list(rng.exponential(size=(30, 10)))
        median = float(np.median(clusters))
        error = bootstrap_stderr(clusters, lambda values: float(np.median(values)), num_resamples=200, seed=trial)
        assert error is not None
        hits += abs(median - math.log(2)) < 1.96 * error
    assert 88 <= hits <= 100


def test_the_share_of_a_loss_that_came_back() -> None:
    baseline, ptq, qat = sample([1.0, 2.0, 3.0]), sample([3.0, 4.0, 5.1]), sample([2.0, 3.0, 4.05])
    found = recovered(baseline, ptq, qat, higher_is_better=False)
    assert found.share == pytest.approx(1.0166667 / 2.0333333, abs=1e-6)
    assert found.verdict is Recovery.GAIN
    residuals = np.array([1.0, 1.0, 1.05]) - found.share * np.array([2.0, 2.0, 2.1])
    assert found.stderr == pytest.approx(mean_stderr(residuals) / 2.0333333, rel=1e-6)


def test_a_share_from_errors_alone_follows_from_its_derivatives() -> None:
    b, p, q = (0.60, 0.01), (0.40, 0.02), (0.52, 0.03)
    found = recovered(figure(*b), figure(*p), figure(*q), higher_is_better=True)
    assert found.share == pytest.approx(0.6)
    draws = np.random.default_rng(6).normal([b[0], p[0], q[0]], [b[1], p[1], q[1]], (200_000, 3))
    shares = (draws[:, 2] - draws[:, 1]) / (draws[:, 0] - draws[:, 1])
    assert found.stderr == pytest.approx(shares.std(), rel=0.05)


@pytest.mark.parametrize(
    ("ptq", "qat", "verdict"),
    [
        (0.59, 0.60, Recovery.NO_LOSS),
        (0.40, 0.41, Recovery.NO_GAIN),
        (0.40, 0.55, Recovery.GAIN),
        (0.40, 0.30, Recovery.FURTHER_LOSS),
    ],
)
def test_no_gain_is_called_none(ptq: float, qat: float, verdict: Recovery) -> None:
    found = recovered(figure(0.60, 0.01), figure(ptq, 0.01), figure(qat, 0.01), higher_is_better=True)
    assert found.verdict is verdict
    assert (found.share is None) == (verdict is Recovery.NO_LOSS)


def test_a_share_without_errors_says_so() -> None:
    found = recovered(figure(1.0, None), figure(0.5, None), figure(0.75, None), higher_is_better=True)
    assert (found.share, found.stderr, found.verdict) == (0.5, None, Recovery.UNKNOWN)
    assert recovered(figure(1.0, None), figure(1.0, None), figure(1.0, None), higher_is_better=True).share is None
