"""Divergence against plain NumPy on the reference's logits, exact and from a file."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from llmq.backends.base import ModelOptions
from llmq.backends.reference import ReferenceBackend, ReferenceModel, forward
from llmq.backends.registry import load_backend
from llmq.checkpoint.loader import ModelWeights, load_weights
from llmq.config import QuantizationConfig
from llmq.convert import convert, plan_conversion
from llmq.errors import ConfigError, OutputError
from llmq.evaluate.baseline import BaselineFile, open_baseline, write_baseline
from llmq.evaluate.divergence import measure_divergence
from llmq.evaluate.measured import Measured
from llmq.evaluate.perplexity import measure_perplexity
from llmq.model.tokenizer import Tokenizer
from tests.tiny import byte_tokenizer_files, write_tiny

TEXT = "The cat sat on the mat. It was a fine day for a cat, and for the mat as well, all things considered."
WINDOW = 24
MADE_BY = {"weights": "abc", "backend": "reference", "dtype": "float32"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelWeights, ModelWeights]:
    """A model, and the same in int4."""
    path = tmp_path_factory.mktemp("divergence")
    source = write_tiny(path / "tiny", num_hidden_layers=2)
    convert(plan_conversion(str(source), QuantizationConfig(scheme="int4_blockwise", group_size=64)), path / "int4")
    return load_weights(str(source)), load_weights(str(path / "int4"))


@pytest.fixture(scope="module")
def opened(pair: tuple[ModelWeights, ModelWeights]) -> tuple[ReferenceModel, ReferenceModel]:
    baseline, model = (ReferenceBackend().open_model(weights, ModelOptions(max_len=64)) for weights in pair)
    return baseline, model


@pytest.fixture(scope="module")
def tokenizer(pair: tuple[ModelWeights, ModelWeights]) -> Tokenizer:
    return Tokenizer.from_files(byte_tokenizer_files(), pair[0].config)


@pytest.fixture(scope="module")
def exact(opened: tuple[ReferenceModel, ReferenceModel], tokenizer: Tokenizer) -> Measured:
    baseline, model = opened
    return measure_divergence(model, baseline, tokenizer, TEXT, window=WINDOW)


def kept(path: Path, baseline: ReferenceModel, tokenizer: Tokenizer, top_k: int) -> BaselineFile:
    write_baseline(path, baseline, tokenizer, TEXT, made_by=MADE_BY, window=WINDOW, top_k=top_k)
    return open_baseline(path, made_by=MADE_BY, vocab_size=320)


def windows_by_hand(weights: ModelWeights, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities `[windows, 23, V]` of windows of BOS and 23 bytes, and their targets."""
    ids = tokenizer.encode(TEXT)[1:]
    rows, targets = [], []
    for start in range(0, len(ids) - 22, 23):
        logits = forward(weights, [1, *ids[start : start + 23]])[:-1]
        rows.append(logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True)))
        targets.append(ids[start : start + 23])
    return np.array(rows), np.array(targets)


def test_exact_figures(pair: tuple[ModelWeights, ModelWeights], tokenizer: Tokenizer, exact: Measured) -> None:
    log_p, targets = windows_by_hand(pair[0], tokenizer)
    log_q, _ = windows_by_hand(pair[1], tokenizer)
    kl = (np.exp(log_p) * (log_p - log_q)).sum(axis=-1)
    num = len(kl)
    mean = exact.metrics["divergence/kl_mean"]
    assert mean.value == pytest.approx(kl.mean(), rel=1e-4)
    assert mean.value > 0.001
    assert mean.stderr == pytest.approx(kl.mean(axis=1).std(ddof=1) / math.sqrt(num), rel=1e-4)
    assert exact.items["divergence/kl_mean"] == pytest.approx(kl.mean(axis=1), rel=1e-4)
    assert exact.metrics["divergence/kl_median"].value == pytest.approx(np.median(kl), rel=1e-4)
    assert exact.metrics["divergence/kl_99"].value == pytest.approx(np.quantile(kl, 0.99), rel=1e-4)
    assert 0 < exact.metrics["divergence/kl_99"].stderr < kl.max()
    agreement = (log_p.argmax(-1) == log_q.argmax(-1)).mean()
    assert exact.metrics["divergence/top1_agreement"].value == pytest.approx(agreement)
    assert exact.metrics["divergence/top1_agreement"].higher_is_better
    loss = np.take_along_axis(log_p - log_q, targets[..., None], -1).mean()
    assert exact.metrics["divergence/perplexity_ratio"].value == pytest.approx(math.exp(loss), rel=1e-4)
    assert exact.counts == {"divergence/windows": num, "divergence/tokens": kl.size}
    assert "divergence/kl_mean_at_most" not in exact.metrics


def test_the_ratio_is_that_of_the_perplexities(
    opened: tuple[ReferenceModel, ReferenceModel], tokenizer: Tokenizer
) -> None:
    baseline, model = opened
    options = {"window": WINDOW, "stride": 7, "max_tokens": 60}
    before, after = (measure_perplexity(m, tokenizer, TEXT, **options).metrics for m in opened)
    found = measure_divergence(model, baseline, tokenizer, TEXT, **options)
    ratio = after["perplexity/token"].value / before["perplexity/token"].value
    assert found.metrics["divergence/perplexity_ratio"].value == pytest.approx(ratio, rel=1e-5)
    assert found.counts["divergence/tokens"] == 60


def test_a_model_does_not_differ_from_itself(
    opened: tuple[ReferenceModel, ReferenceModel], tokenizer: Tokenizer
) -> None:
    found = measure_divergence(opened[0], opened[0], tokenizer, TEXT, window=WINDOW).metrics
    assert [found[f"divergence/{name}"].value for name in ("kl_mean", "kl_99")] == [0, 0]
    assert found["divergence/top1_agreement"].value == found["divergence/perplexity_ratio"].value == 1


@pytest.mark.parametrize("top_k", [1, 8, 64, 320, 1000])
def test_the_bounds_of_a_file_hold(
    opened: tuple[ReferenceModel, ReferenceModel], tokenizer: Tokenizer, exact: Measured, tmp_path: Path, top_k: int
) -> None:
    baseline = kept(tmp_path / "baseline.safetensors", opened[0], tokenizer, top_k)
    found = measure_divergence(opened[1], baseline, tokenizer, TEXT, window=WINDOW)
    true = np.array(exact.items["divergence/kl_mean"])
    low = np.array(found.items["divergence/kl_mean"])
    high = np.array(found.items["divergence/kl_mean_at_most"])
    slack = 1e-5 * true  # the file is in float32
    assert (low <= true + slack).all()
    assert (true <= high + slack).all()
    if top_k >= 320:
        np.testing.assert_allclose(low, true, rtol=1e-5)
        np.testing.assert_allclose(high, true, rtol=1e-5)
    for name in ("divergence/top1_agreement", "divergence/perplexity_ratio"):
        assert found.metrics[name].value == pytest.approx(exact.metrics[name].value, rel=1e-6)


def test_more_kept_tokens_lose_less(
    opened: tuple[ReferenceModel, ReferenceModel], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    found = []
    for top_k in (1, 8, 64, 256):
        baseline = kept(tmp_path / f"{top_k}.safetensors", opened[0], tokenizer, top_k)
        metrics = measure_divergence(opened[1], baseline, tokenizer, TEXT, window=WINDOW).metrics
        found.append((metrics["divergence/kl_mean"].value, -metrics["divergence/kl_mean_at_most"].value))
    assert found == sorted(found)


def test_a_file_is_plain_safetensors(
    opened: tuple[ReferenceModel, ReferenceModel], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "baseline.safetensors"
    kept(path, opened[0], tokenizer, 8)
    tensors = safetensors.numpy.load_file(path)
    assert tensors["windows.0.ids"].shape == (23, 8)
    assert np.exp(tensors["windows.0.logprobs"]).sum(axis=-1) + tensors["windows.0.rest"] == pytest.approx(1)
    assert (np.diff(tensors["windows.0.logprobs"]) <= 0).all()
    assert sorted(file.name for file in tmp_path.iterdir()) == [path.name]


def test_equal_logits_are_kept_by_the_lowest_id(tokenizer: Tokenizer, pair: tuple[ModelWeights, ModelWeights]) -> None:
    class Flat(ReferenceModel):
        def extend(self, *args: Any, want_logits: bool = False) -> tuple[Any, np.ndarray | None]:
            state, logits = super().extend(*args, want_logits=want_logits)
            return state, None if logits is None else np.zeros_like(logits)

    flat = Flat(pair[0], ModelOptions(max_len=64))
    found = measure_divergence(flat, flat, tokenizer, TEXT, window=WINDOW).metrics
    assert found["divergence/top1_agreement"].value == 1


def test_an_interrupted_run_leaves_no_file(
    opened: tuple[ReferenceModel, ReferenceModel], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    def stop(_name: str, done: int, _total: int) -> None:
        if done:
            raise KeyboardInterrupt

    path = tmp_path / "baseline.safetensors"
    with pytest.raises(KeyboardInterrupt):
        write_baseline(path, opened[0], tokenizer, TEXT, made_by=MADE_BY, window=WINDOW, progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_torch_agrees_with_the_reference(
    pair: tuple[ModelWeights, ModelWeights], tokenizer: Tokenizer, exact: Measured
) -> None:
    gpu = load_backend("gpu")
    baseline, model = (gpu.open_model(w, ModelOptions(device="cpu", dtype="float32", max_len=64)) for w in pair)
    found = measure_divergence(model, baseline, tokenizer, TEXT, window=WINDOW)
    for name, metric in found.metrics.items():
        assert metric.value == pytest.approx(exact.metrics[name].value, rel=1e-3)


def test_a_file_of_something_else_is_refused(
    opened: tuple[ReferenceModel, ReferenceModel], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "baseline.safetensors"
    baseline = kept(path, opened[0], tokenizer, 8)
    expected = {
        "another model": lambda: open_baseline(path, made_by={**MADE_BY, "weights": "def"}, vocab_size=320),
        "a model of another vocabulary": lambda: open_baseline(path, made_by=MADE_BY, vocab_size=300),
        "another text, tokenizer or number of tokens": lambda: measure_divergence(
            opened[1], baseline, tokenizer, TEXT.upper(), window=WINDOW
        ),
        "another window or stride": lambda: measure_divergence(
            opened[1], baseline, tokenizer, TEXT, window=WINDOW, stride=12, max_tokens=23 * (len(TEXT) // 23)
        ),
    }
    for told, refused in expected.items():
        with pytest.raises(ConfigError) as caught:
            refused()
        assert str(caught.value) == f"{path}: holds the predictions for {told}; remove it, and it is made anew."


def test_damaged_predictions_are_refused(
    opened: tuple[ReferenceModel, ReferenceModel], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "baseline.safetensors"
    kept(path, opened[0], tokenizer, 8)
    good = safetensors.numpy.load_file(path)
    with safetensors.safe_open(path, "np") as file:
        metadata = file.metadata()
    ids, logprobs = good["windows.1.ids"], good["windows.1.logprobs"]
    fingerprint = json.loads(metadata["llmq_baseline_fingerprint"])
    changes = {
        "windows.1.rest is missing or misshapen": {"windows.1.rest": None},
        "windows.1.ids is missing or misshapen": {"windows.1.ids": ids[:, :7]},
        "windows.1.logprobs is missing or misshapen": {"windows.1.logprobs": logprobs.astype(np.float64)},
        "the predictions for window 1 are damaged": {"windows.1.ids": ids + np.uint32(300)},
        "the predictions for window 1 are damaged;": {"windows.1.logprobs": logprobs * np.nan},
    }
    for told, changed in changes.items():
        tensors = {name: value for name, value in {**good, **changed}.items() if value is not None}
        safetensors.numpy.save_file(tensors, path, metadata)
        baseline = open_baseline(path, made_by=MADE_BY, vocab_size=320)
        with pytest.raises(ConfigError) as caught:
            measure_divergence(opened[1], baseline, tokenizer, TEXT, window=WINDOW)
        assert str(caught.value) == f"{path}: {told.rstrip(';')}; remove it, and it is made anew."
    for edited in ("[]", "{}", "x", "3", "null", *(json.dumps({**fingerprint, "top_k": k}) for k in ("0", "x", None))):
        safetensors.numpy.save_file(good, path, {**metadata, "llmq_baseline_fingerprint": edited})
        with pytest.raises(ConfigError, match="is not a file of baseline predictions"):
            open_baseline(path, made_by=MADE_BY, vocab_size=320)


def test_a_file_that_cannot_be_written(
    opened: tuple[ReferenceModel, ReferenceModel], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with pytest.raises(OutputError, match=r"baseline\.safetensors: cannot be written"):
        kept(tmp_path / "missing" / "baseline.safetensors", opened[0], tokenizer, 8)


@pytest.mark.parametrize("contents", [b"", b"not safetensors at all", b"\x02\0\0\0\0\0\0\0{}"])
def test_other_files_are_no_baselines(tmp_path: Path, contents: bytes) -> None:
    path = tmp_path / "file.safetensors"
    path.write_bytes(contents)
    with pytest.raises(ConfigError, match=r"is not a file of baseline predictions; remove it, and it is made anew\.$"):
        open_baseline(path, made_by=MADE_BY, vocab_size=320)
    with pytest.raises(ConfigError, match="cannot be read"):
        open_baseline(tmp_path / "missing", made_by=MADE_BY, vocab_size=320)


def test_models_of_other_vocabularies_are_refused(
    opened: tuple[ReferenceModel, ReferenceModel], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    other = load_weights(str(write_tiny(tmp_path / "other", num_hidden_layers=1, vocab_size=300)))
    baseline = ReferenceBackend().open_model(other, ModelOptions(max_len=64))
    with pytest.raises(ConfigError, match=r"^reference: has 300 tokens and the model 320;"):
        measure_divergence(opened[1], baseline, tokenizer, TEXT, window=WINDOW)
    with pytest.raises(ConfigError, match=r"^top_k=0: must be positive"):
        write_baseline(tmp_path / "x", opened[0], tokenizer, TEXT, made_by=MADE_BY, window=WINDOW, top_k=0)
