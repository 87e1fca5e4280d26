"""Perplexity against plain NumPy on the reference's logits."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llmq.backends.base import ModelOptions
from llmq.backends.reference import ReferenceBackend, ReferenceModel, forward
from llmq.backends.registry import load_backend
from llmq.checkpoint.loader import ModelWeights, load_weights
from llmq.errors import BackendError, ConfigError
from llmq.evaluate.perplexity import measure_perplexity
from llmq.evaluate.windows import cut, read_text
from llmq.model.tokenizer import Tokenizer
from tests.tiny import byte_tokenizer_files, write_tiny

TEXT = "The cat sat on the mat.\nIt was a fine — if lazy — day for a cat, and for the mat as well."


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> ModelWeights:
    return load_weights(str(write_tiny(tmp_path_factory.mktemp("perplexity") / "tiny", num_hidden_layers=2)))


@pytest.fixture(scope="module")
def model(weights: ModelWeights) -> ReferenceModel:
    return ReferenceBackend().open_model(weights, ModelOptions(max_len=64))


def byte_tokenizer(weights: ModelWeights, *, bos: bool) -> Tokenizer:
    files = byte_tokenizer_files()
    settings = {**json.loads(files["tokenizer_config.json"]), "add_bos_token": bos}
    return Tokenizer.from_files({**files, "tokenizer_config.json": json.dumps(settings).encode()}, weights.config)


def losses(weights: ModelWeights, tokens: list[int], num_scored: int) -> np.ndarray:
    """Nats of the last tokens of a sequence."""
    logits = forward(weights, tokens)[:-1]
    log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return -log_p[np.arange(len(log_p)), tokens[1:]][-num_scored:]


def text_ids(tokenizer: Tokenizer) -> list[int]:
    ids = tokenizer.encode(TEXT)
    return ids[1:] if tokenizer.adds_bos else ids


def test_windows_without_overlap(weights: ModelWeights, model: ReferenceModel) -> None:
    tokenizer = byte_tokenizer(weights, bos=False)
    ids = text_ids(tokenizer)
    found = measure_perplexity(model, tokenizer, TEXT, window=20)
    num = len(ids) // 20
    expected = np.array([losses(weights, ids[20 * i : 20 * i + 20], 19) for i in range(num)])
    token = found.metrics["perplexity/token"]
    assert token.value == pytest.approx(math.exp(expected.mean()), rel=1e-6)
    error = expected.mean(axis=1).std(ddof=1) / math.sqrt(num)
    assert token.stderr == pytest.approx(token.value * error, rel=1e-5)
    assert found.items["perplexity/token"] == pytest.approx(expected.mean(axis=1), rel=1e-6)
    assert found.item_ids["perplexity/token"] == [f"{20 * i + 1}:{20 * i + 20}" for i in range(num)]
    assert found.counts["perplexity/tokens"] == 19 * num
    assert found.counts["perplexity/tokens_left_out"] == len(ids) - 20 * num
    assert (token.higher_is_better, token.link) == (False, "exp")

    texts = [TEXT.encode()[20 * i + 1 : 20 * i + 20] for i in range(num)]
    num_bytes, num_words = sum(map(len, texts)), sum(len(text.split()) for text in texts)
    assert found.counts["perplexity/words"] == num_words
    assert found.metrics["perplexity/word"].value == pytest.approx(math.exp(expected.sum() / num_words), rel=1e-6)
    bits = found.metrics["perplexity/bits_per_byte"].value
    assert bits == pytest.approx(expected.sum() / math.log(2) / num_bytes, rel=0.05)  # dashes may be cut in two
    for name, metric in found.metrics.items():
        mean = np.mean(found.items[name])
        assert metric.value == pytest.approx(math.exp(mean) if metric.link == "exp" else mean)


def test_a_bos_opens_every_window(weights: ModelWeights, model: ReferenceModel) -> None:
    tokenizer = byte_tokenizer(weights, bos=True)
    ids = text_ids(tokenizer)
    found = measure_perplexity(model, tokenizer, TEXT, window=20)
    expected = [losses(weights, [1, *ids[19 * i : 19 * i + 19]], 19) for i in range(len(ids) // 19)]
    assert found.metrics["perplexity/token"].value == pytest.approx(math.exp(np.mean(expected)), rel=1e-6)
    assert found.item_ids["perplexity/token"][:2] == ["0:19", "19:38"]


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("stride", [1, 6, 19])
def test_with_a_stride_every_token_is_scored_once(
    weights: ModelWeights, model: ReferenceModel, stride: int, bos: bool
) -> None:
    tokenizer = byte_tokenizer(weights, bos=bos)
    ids = text_ids(tokenizer)[:50]
    found = measure_perplexity(model, tokenizer, TEXT, window=20, stride=stride, max_tokens=50)
    prefix = [1] if bos else []
    expected: list[float] = []
    while len(expected) < len(ids) - (not bos):
        first = len(ids) - (len(ids) - (not bos) - len(expected))
        end = min((first // stride + 1) * stride, len(ids))
        start = max(0, end - (20 - len(prefix)))
        expected += losses(weights, [*prefix, *ids[start:end]], end - first).tolist()
    assert found.counts["perplexity/tokens"] == len(expected)
    assert found.metrics["perplexity/token"].value == pytest.approx(math.exp(np.mean(expected)), rel=1e-6)
    parts = cut(tokenizer, TEXT, window=20, stride=stride, max_tokens=50)
    assert np.concatenate([part.targets for part in parts.windows]).tolist() == ids[not bos :]
    assert all(len(part.context) + len(part.run) <= 19 for part in parts.windows)
    full = [part for part in parts.windows if int(part.name.split(":")[1]) > 20]
    assert all(len(part.context) + 1 >= 20 - stride for part in full)
    if stride == 6:
        assert any(part.num_cached for part in parts.windows)


def test_torch_agrees_with_the_reference(weights: ModelWeights, model: ReferenceModel) -> None:
    torch_model = load_backend("gpu").open_model(weights, ModelOptions(device="cpu", dtype="float32", max_len=64))
    tokenizer = byte_tokenizer(weights, bos=False)
    for stride in (None, 6):
        one, other = (measure_perplexity(m, tokenizer, TEXT, window=20, stride=stride) for m in (torch_model, model))
        for name, metric in one.metrics.items():
            assert metric.value == pytest.approx(other.metrics[name].value, rel=1e-5)


def test_only_the_tokens_asked_for_are_made(weights: ModelWeights) -> None:
    tokenizer = byte_tokenizer(weights, bos=False)
    asked: list[int] = []

    class Counting:
        adds_bos, bos_token_id = False, None

        def encode(self, text: str) -> list[int]:
            asked.append(len(text))
            return tokenizer.encode(text)

    parts = cut(Counting(), TEXT * 10_000, window=20, max_tokens=60)
    assert parts.ids.tolist() == tokenizer.encode(TEXT)[:60]
    assert asked == [8 * (60 + 64)]
    many = cut(Counting(), "🙂" * 500, window=20, max_tokens=900)
    assert len(many.ids) == 900
    assert parts.num_left_out == 0


def test_progress_is_told_in_tokens(weights: ModelWeights, model: ReferenceModel) -> None:
    told: list[tuple[str, int, int]] = []
    tokenizer = byte_tokenizer(weights, bos=False)
    measure_perplexity(model, tokenizer, TEXT, window=20, max_tokens=40, progress=lambda *args: told.append(args))
    assert told == [("1:20", 0, 38), ("21:40", 19, 38)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 1}, "window=1: must be at least 2"),
        ({"window": 20, "stride": 20}, "stride=20: must be positive and smaller than the window, 20"),
        ({"window": 20, "stride": 0}, "stride=0: must be positive"),
        ({"window": 20, "max_tokens": 19}, "max_tokens=19: must fill a window, 20 tokens"),
        ({"window": 65}, "window=65: must be at most the model's context, 64"),
        ({"window": 60, "text": "short"}, "window=60: the text has only 5 tokens; give a longer text or a --window of at most 5."),
    ],
)  # fmt: skip
def test_options_out_of_range(weights: ModelWeights, model: ReferenceModel, options: dict, message: str) -> None:
    tokenizer = byte_tokenizer(weights, bos=False)
    text = options.pop("text", TEXT)
    with pytest.raises(ConfigError) as caught:
        measure_perplexity(model, tokenizer, text, **options)
    assert str(caught.value).startswith(message)


def test_a_model_that_computes_nan_is_an_error(weights: ModelWeights) -> None:
    class Broken(ReferenceModel):
        def score(self, *args: object) -> tuple:
            state, scores = super().score(*args)
            return state, [replace(score, logprobs=score.logprobs * np.nan) for score in scores]

    broken = Broken(weights, ModelOptions(max_len=64))
    with pytest.raises(BackendError, match=r"perplexity/token: .* does not compute anything useful"):
        measure_perplexity(broken, byte_tokenizer(weights, bos=False), TEXT, window=20)


def test_reading_texts(tmp_path: Path) -> None:
    plain, pages, rows = tmp_path / "a.txt", tmp_path / "b.jsonl", tmp_path / "c.jsonl"
    plain.write_text('{"text": 1}\nas it is\n')
    pages.write_text('{"page": " = A = \\n"}\n\n{"page": " = B = \\n"}\n')
    rows.write_text('{"text": "one", "more": 1}\n{"text": "two"}\n')
    assert read_text(plain) == '{"text": 1}\nas it is\n'
    assert read_text(pages) == " \n = A = \n\n = B = \n"
    assert read_text(rows) == "one\ntwo"


@pytest.mark.parametrize(
    ("name", "contents", "message"),
    [
        ("missing.txt", None, "cannot be read as UTF-8 text (No such file or directory)."),
        ("binary.txt", b"\xff\xfe", "cannot be read as UTF-8 text ("),
        ("empty.txt", b" \n", "is empty; give a text of some thousand words."),
        ("empty.jsonl", b"\n", "is empty; give a text of some thousand words."),
        ("broken.jsonl", b'{"page": "a"}\n\n{"page"', 'line 3 must be a JSON object with its text in "page".'),
        ("other.jsonl", b'{"body": "a"}', 'line 1 must be a JSON object with its text in "page" or "text".'),
        ("list.jsonl", b"[1]", 'line 1 must be a JSON object with its text in "page" or "text".'),
        ("number.jsonl", b'{"text": 1}', 'line 1 must be a JSON object with its text in "text".'),
    ],
)
def test_texts_that_cannot_be_read(tmp_path: Path, name: str, contents: bytes | None, message: str) -> None:
    path = tmp_path / name
    if contents is not None:
        path.write_bytes(contents)
    with pytest.raises(ConfigError) as caught:
        read_text(path)
    assert str(caught.value).startswith(f"{path}: {message}")


@pytest.mark.slow
def test_smollm2_on_wikitext2(smollm2: ModelWeights, wikitext2: Path) -> None:
    model = load_backend("gpu").open_model(smollm2, ModelOptions(device="cpu", dtype="bfloat16", max_len=1024))
    tokenizer = Tokenizer.from_files(smollm2.reader.side_files(), smollm2.config)
    found = measure_perplexity(model, tokenizer, read_text(wikitext2), max_tokens=16 * 1024)
    assert found.counts["perplexity/tokens"] == 16_368
    # transformers: 22.749 in float32, 22.769 in bfloat16, where it rounds more often.
    assert found.metrics["perplexity/token"].value == pytest.approx(22.75, abs=0.015)
