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
from tight (see `TOP_K` for what is missing in practice). Both are reported.

Shape letters: T positions of a window, V vocabulary.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from llmq.backends.base import InferenceModel
from llmq.checkpoint.layout import Entry
from llmq.checkpoint.reader import Progress, no_progress
from llmq.checkpoint.safetensors import StoredTensor, encode_header, flush_to_disk, read_header, write_array
from llmq.errors import CheckpointError, ConfigError
from llmq.evaluate.measured import Measured, mean_over_windows
from llmq.evaluate.predictions import Kept, Reader, Whole, log_softmax, pick, row_chunks
from llmq.evaluate.results import Metric
from llmq.evaluate.statistics import bootstrap_stderr
from llmq.evaluate.windows import Window, Windows, check_fits, cut
from llmq.model.tokenizer import Tokenizer

#: Tokens kept at every position of a baseline file, 8 bytes each. On SmolLM2-135M and WikiText-2 the
#: mean KL of int8_per_channel and int4_blockwise then lacks 5 % and 4 %, the 99 % quantile 1 %; with
#: 256 it is 12 % and 10 %, with 4096 still 1.5 % and 1 %.
TOP_K = 1024

#: Raised when a reader of the previous version would misread a new baseline file.
FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class BaselineFile:
    """Predictions of a baseline that are on disk; `open_baseline` makes one.

    Attributes:
        path: The file.
        tensors: Where what lies in it.
        fingerprint: What it was made from, and how.
    """

    path: Path
    tensors: Mapping[str, StoredTensor]
    fingerprint: Mapping[str, str]

    def check(self, parts: Windows) -> None:
        """Refuse predictions for another text or other windows.

        Args:
            parts: What is to be measured on.

        Raises:
            ConfigError: They differ.
        """
        _check_fingerprint(self, _text_fingerprint(parts))

    def read(self, index: int) -> Kept:
        """The predictions for a window.

        Args:
            index: Its place.

        Returns:
            What the file holds of it.
        """
        return Kept(*(self.tensors[_name(index, part)].read() for part in _PARTS))


def measure_divergence(
    model: InferenceModel,
    baseline: InferenceModel | BaselineFile,
    tokenizer: Tokenizer,
    text: str,
    *,
    window: int = 1024,
    stride: int | None = None,
    max_tokens: int | None = None,
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
        progress: Told of every window, in tokens.

    Returns:
        Mean, median and 99 % quantile of the KL divergence in nats, the share of positions with the
        same most likely token, and the ratio of perplexities. With a file also
        ``divergence/kl_mean_at_most``, see the module. Windows are the items of the means; the
        errors of median and quantile are bootstrapped over windows.

    Raises:
        ConfigError: An option is out of range, the text is shorter than one window, or the baseline
            has another vocabulary or is of another text.
        BackendError: A model computes nothing useful.
    """
    check_fits(model, window)
    parts = cut(tokenizer, text, window=window, stride=stride, max_tokens=max_tokens)
    ours, predict = Reader(model), _predictor(baseline, parts, model.caps.vocab_size, window)
    found: list[_WindowSums] = []
    done = 0
    for index, part in enumerate(parts.windows):
        progress(part.name, done, parts.num_targets)
        found.append(_compare(part, ours, predict(index)))
        done += len(part.targets)

    kls = [row.kl for row in found]
    sizes = np.array([len(kl) for kl in kls])
    kl_sums = np.array([kl.sum() for kl in kls])
    agreed = np.array([row.num_agreed for row in found], np.float64)
    losses = np.array([row.loss for row in found])
    figures = {
        "divergence/kl_mean": mean_over_windows("divergence/kl_mean", kl_sums, sizes),
        "divergence/top1_agreement": mean_over_windows(
            "divergence/top1_agreement", agreed, sizes, higher_is_better=True
        ),
        "divergence/perplexity_ratio": mean_over_windows("divergence/perplexity_ratio", losses, sizes, link="exp"),
    }
    if isinstance(baseline, BaselineFile):
        name = "divergence/kl_mean_at_most"
        figures[name] = mean_over_windows(name, kl_sums + np.array([row.slack for row in found]), sizes)
    return Measured(
        metrics={
            **{name: metric for name, (metric, _) in figures.items()},
            "divergence/kl_median": _quantile(kls, 0.5),
            "divergence/kl_99": _quantile(kls, 0.99),
        },
        items={name: items for name, (_, items) in figures.items()},
        item_ids={name: [part.name for part in parts.windows] for name in figures},
        counts={"divergence/windows": len(kls), "divergence/tokens": done},
    )


def write_baseline(
    path: Path,
    model: InferenceModel,
    tokenizer: Tokenizer,
    text: str,
    *,
    model_sha256: str,
    window: int = 1024,
    stride: int | None = None,
    max_tokens: int | None = None,
    top_k: int = TOP_K,
    progress: Progress = no_progress,
) -> None:
    """Write a baseline's predictions to a file, window by window.

    Args:
        path: A ``.safetensors`` file, created or replaced when all is computed.
        model: The baseline, with room for a window.
        tokenizer: Its tokenizer.
        text: The text.
        model_sha256: Names the baseline's weights; `open_baseline` asks for it again.
        window: Tokens the model sees at once.
        stride: Tokens to score per window; None cuts the text without overlap.
        max_tokens: Take only so many tokens from the start; None takes all.
        top_k: Tokens to keep at every position.
        progress: Told of every window, in tokens.

    Raises:
        ConfigError: An option is out of range, or the text is shorter than one window.
    """
    if top_k < 1:
        raise ConfigError(f"top_k={top_k}: must be positive; {TOP_K} is the default.")
    check_fits(model, window)
    parts = cut(tokenizer, text, window=window, stride=stride, max_tokens=max_tokens)
    top_k = min(top_k, model.caps.vocab_size)
    entries: dict[str, Entry] = {}
    for index, part in enumerate(parts.windows):
        for name, (dtype, is_row) in _PARTS.items():
            shape = (len(part.targets), top_k) if is_row else (len(part.targets),)
            entries[_name(index, name)] = (np.dtype(dtype), shape)
    fingerprint = {"model": model_sha256, "vocab_size": str(model.caps.vocab_size), **_text_fingerprint(parts)}
    metadata = {_VERSION: str(FORMAT_VERSION), _FINGERPRINT: json.dumps(fingerprint)}
    staged = path.with_name(f".{path.name}.partial")
    try:
        with staged.open("wb") as file:
            file.write(encode_header(entries, metadata))
            reader, done = Reader(model), 0
            for part in parts.windows:
                progress(part.name, done, parts.num_targets)
                kept = Kept.of(reader.logits(part), part.targets, top_k)
                for name in _PARTS:
                    write_array(file, getattr(kept, name))
                done += len(part.targets)
            flush_to_disk(file)
        staged.replace(path)
    finally:
        staged.unlink(missing_ok=True)


def open_baseline(path: Path, *, model_sha256: str, vocab_size: int) -> BaselineFile:
    """Open a file of `write_baseline`.

    Args:
        path: The file.
        model_sha256: Names the baseline's weights.
        vocab_size: Of the model that is to be measured.

    Returns:
        Its predictions; none is in memory yet.

    Raises:
        ConfigError: It is not such a file, or holds the predictions of another model.
    """
    try:
        tensors, metadata = read_header(path)
        version, fingerprint = int(metadata[_VERSION]), json.loads(metadata[_FINGERPRINT])
    except OSError as err:
        raise ConfigError(f"{path}: cannot be read ({err.strerror or err}).") from err
    except (CheckpointError, KeyError, ValueError, TypeError) as err:
        raise ConfigError(f"{path}: is not a file of baseline predictions; {_MAKE_ANEW}.") from err
    if version > FORMAT_VERSION:
        raise ConfigError(
            f"{path}: has format_version {version}, this llmq reads up to {FORMAT_VERSION}; {_MAKE_ANEW}."
        )
    baseline = BaselineFile(path, tensors, fingerprint)
    _check_fingerprint(baseline, {"model": model_sha256, "vocab_size": str(vocab_size)})
    return baseline


_VERSION, _FINGERPRINT = "llmq_baseline_version", "llmq_baseline_fingerprint"

_MAKE_ANEW = "remove it, and it is made anew"

#: Tensors of a window -> their type, and whether they have a row of k for every position.
_PARTS = {
    "ids": (np.uint32, True),
    "logprobs": (np.float32, True),
    "rest": (np.float32, False),
    "target_logprobs": (np.float32, False),
}

#: Field of a fingerprint -> what differs when it does.
_MEANINGS = {
    "model": "another model",
    "vocab_size": "a model of another vocabulary",
    "tokens": "another text, tokenizer or number of tokens",
    "windows": "another window or stride",
}


def _name(index: int, part: str) -> str:
    return f"windows.{index}.{part}"


def _text_fingerprint(parts: Windows) -> dict[str, str]:
    names = " ".join(f"{len(part.context)}+{part.name}" for part in parts.windows)
    return {
        "tokens": hashlib.sha256(parts.ids.astype("<i4").tobytes()).hexdigest(),
        "windows": hashlib.sha256(names.encode()).hexdigest(),
    }


def _check_fingerprint(baseline: BaselineFile, expected: Mapping[str, str]) -> None:
    for field, value in expected.items():
        if baseline.fingerprint.get(field) != value:
            raise ConfigError(f"{baseline.path}: holds the predictions for {_MEANINGS[field]}; {_MAKE_ANEW}.")


class _WindowSums(NamedTuple):
    """What is left of a window: KL `[T]`, and sums of the bound, of agreements and of the losses' difference."""

    kl: np.ndarray
    slack: float
    num_agreed: int
    loss: float


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
