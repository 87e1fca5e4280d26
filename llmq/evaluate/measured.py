"""What a measurement over windows of text adds to a result file."""

from typing import Literal, NamedTuple

import numpy as np

from llmq.errors import BackendError
from llmq.evaluate.results import Metric
from llmq.evaluate.statistics import ratio_stderr

#: A mean loss in nats that no working model reaches; its exponential is still a number.
_ABSURD = 500.0


class Measured(NamedTuple):
    """Parts of a `results.Results`, under the same names."""

    metrics: dict[str, Metric]
    items: dict[str, list[float]]
    item_ids: dict[str, list[str]]
    counts: dict[str, int]


def mean_over_windows(
    name: str,
    sums: np.ndarray,
    sizes: np.ndarray,
    *,
    higher_is_better: bool = False,
    link: Literal["identity", "exp"] = "identity",
) -> tuple[Metric, list[float]]:
    """A mean of something that is known in sums over windows: ``m = sum(sums) / sum(sizes)``, or ``exp(m)``.

    Args:
        name: Of the metric, for errors.
        sums: float64 `[n]`, one for each window.
        sizes: `[n]`, tokens, words or bytes in each.
        higher_is_better: Which way is up.
        link: Whether the metric is the mean or its exponential.

    Returns:
        The metric, its standard error that of the ratio, by the delta method for ``exp``; and for
        each window ``sums * n / sum(sizes)``, items whose plain mean is m.

    Raises:
        BackendError: The mean is not a number, or beyond what a model can lose.
    """
    mean = float(sums.sum() / sizes.sum())
    if not abs(mean) < _ABSURD:
        raise BackendError(
            f"{name}: the mean over the windows is {mean:.3g} nats, so the model does not compute anything useful; "
            "check its weights with llmq inspect --verify."
        )
    value, slope = (float(np.exp(mean)),) * 2 if link == "exp" else (mean, 1.0)
    error = ratio_stderr(sums, sizes)
    metric = Metric(
        value=value, stderr=None if error is None else slope * error, higher_is_better=higher_is_better, link=link
    )
    return metric, (sums * len(sums) / sizes.sum()).tolist()
