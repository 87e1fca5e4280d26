"""What a model says differently from a baseline, on the same text.

At every position the baseline predicts the distribution P over the vocabulary, the model Q:

    KL(P || Q) = sum_v p_v (log p_v - log q_v)      nats

Beside it: whether both find the same token most likely, and the ratio of their perplexities.

The baseline is open too, and KL is exact; or its predictions come from a file that holds its k most
likely tokens at every position. Then all other tokens count as one, of mass r_P and r_Q:

    KL_k = sum_{v in top k} p_v (log p_v - log q_v) + r_P (log r_P - log r_Q)
    KL_k <= KL <= KL_k + r_P (log p_k - log q_min - log r_P + log r_Q)

with p_k the least of the kept probabilities, which none of the others exceeds, and q_min the
model's least one outside them. The lower bound is the log-sum inequality; the upper bound is far
from tight (see `llmq.evaluate.baseline.TOP_K` for what is missing in practice). Both are reported.

Shape letters: T positions of a window, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from llmq.backends.base import InferenceModel
from llmq.checkpoint.reader import Progress, no_progress
from llmq.errors import ConfigError
from llmq.evaluate.baseline import BaselineFile
from llmq.evaluate.journal import Journal
from llmq.evaluate.measured import Measured, mean_over_windows
from llmq.evaluate.predictions import Kept, Reader, Whole, log_softmax, pick, row_chunks
from llmq.evaluate.results import Metric
from llmq.evaluate.statistics import bootstrap_stderr
from llmq.evaluate.windows import Window, Windows, check_fits, cut, num_known
from llmq.model.tokenizer import Tokenizer


def measure_divergence(
    model: InferenceModel,
    baseline: InferenceModel | BaselineFile,
    tokenizer: Tokenizer,
    text: str,
    *,
    window: int = 1024,
    stride: int | None = None,
    max_tokens: int | None = None,
    group: str = "divergence",
    journal: Journal | None = None,
    progress: Progress = no_progress,
) -> Measured:
    """Measure what a model says differently from a baseline.

    Args:
        model: Has room for a window.
        baseline: Another model with the same tokenizer, or its predictions.
        tokenizer: Of both.
        text: The text.
        window: Tokens the models see at once.
        stride: Tokens to score per window; None cuts the text without overlap.
        max_tokens: Take only so many tokens from the start; None takes all.
        group: Stands before the names of the metrics.
        journal: Holds what finished windows of the same text and baseline came to.
        progress: Told of every window, in tokens.

    Returns:
        Mean, median and 99 % quantile of the KL divergence in nats, the share of positions with the
        same most likely token, and the ratio of perplexities. With a file also
        ``kl_mean_at_most``, see the module. Windows are the items of the means; the
        errors of median and quantile are bootstrapped over windows.

    Raises:
        ConfigError: An option is out of range, the text is shorter than one window, or the baseline
            has another vocabulary or is of another text.
        BackendError: A model computes nothing useful.
    """
    check_fits(model, window)
    parts = cut(tokenizer, text, window=window, stride=stride, max_tokens=max_tokens)
    ours, predict = Reader(model), _predictor(baseline, parts, model.caps.vocab_size, window)
    journal = Journal(None, {}) if journal is None else journal
    known = num_known(parts.windows, lambda part: journal.get(f"{group} {part.name}") is not None)
    found = [_WindowSums.known(journal.get(f"{group} {part.name}")) for part in parts.windows[:known]]
    done = sum(len(part.targets) for part in parts.windows[:known])
    for index, part in enumerate(parts.windows[known:], known):
        progress(part.name, done, parts.num_targets)
        found.append(_compare(part, ours, predict(index)))
        journal.add({f"{group} {part.name}": found[-1].kept()})
        done += len(part.targets)

    kls = [row.kl for row in found]
    sizes = np.array([len(kl) for kl in kls])
    kl_sums = np.array([kl.sum() for kl in kls])
    agreed = np.array([row.num_agreed for row in found], np.float64)
    losses = np.array([row.loss for row in found])
    kl, top1, ratio = (f"{group}/{name}" for name in ("kl_mean", "top1_agreement", "perplexity_ratio"))
    figures = {
        kl: mean_over_windows(kl, kl_sums, sizes),
        top1: mean_over_windows(top1, agreed, sizes, higher_is_better=True),
        ratio: mean_over_windows(ratio, losses, sizes, link="exp"),
    }
    if isinstance(baseline, BaselineFile):
        name = f"{kl}_at_most"
        figures[name] = mean_over_windows(name, kl_sums + np.array([row.slack for row in found]), sizes)
    return Measured(
        metrics={
            **{name: metric for name, (metric, _) in figures.items()},
            f"{group}/kl_median": _quantile(kls, 0.5),
            f"{group}/kl_99": _quantile(kls, 0.99),
        },
        items={name: items for name, (_, items) in figures.items()},
        item_ids={name: [part.name for part in parts.windows] for name in figures},
        counts={f"{group}/windows": len(kls), f"{group}/tokens": done},
    )


class _WindowSums(NamedTuple):
    """What is left of a window: KL `[T]`, and sums of the bound, of agreements and of the losses' difference."""

    kl: np.ndarray
    slack: float
    num_agreed: int
    loss: float

    @classmethod
    def known(cls, kept: Any) -> "_WindowSums":
        kl, *rest = kept
        return cls(np.array(kl), *rest)

    def kept(self) -> tuple[list[float], float, int, float]:
        return self.kl.tolist(), self.slack, self.num_agreed, self.loss


def _predictor(
    baseline: InferenceModel | BaselineFile, parts: Windows, vocab_size: int, window: int
) -> Callable[[int], Whole | Kept]:
    if isinstance(baseline, BaselineFile):
        baseline.check(parts)
        return baseline.read
    check_fits(baseline, window)
    if baseline.caps.vocab_size != vocab_size:
        raise ConfigError(
            f"reference: has {baseline.caps.vocab_size} tokens and the model {vocab_size}; compare models of one "
            "tokenizer."
        )
    reader = Reader(baseline)
    return lambda index: Whole(reader.logits(parts.windows[index]), parts.windows[index].targets)


def _compare(part: Window, model: Reader, theirs: Whole | Kept) -> _WindowSums:
    # The logits die with this call, before those of the next window are computed.
    logits_TV = model.logits(part)
    kls: list[np.ndarray] = []
    slack = loss = 0.0
    for rows in row_chunks(len(logits_TV)):
        log_q_TV = log_softmax(logits_TV[rows])
        found = theirs.divergence(rows, log_q_TV)
        kls.append(found.kl)
        slack += float(found.slack.sum())
        loss += float((found.target_logprobs - pick(log_q_TV, part.targets[rows])).sum())
    num_agreed = int((logits_TV.argmax(axis=-1) == theirs.favorites).sum())
    return _WindowSums(np.concatenate(kls), slack, num_agreed, loss)


def _quantile(kls: list[np.ndarray], level: float) -> Metric:
    def statistic(values: np.ndarray) -> float:
        return float(np.quantile(values, level))

    return Metric(value=statistic(np.concatenate(kls)), stderr=bootstrap_stderr(kls, statistic), higher_is_better=False)
