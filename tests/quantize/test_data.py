"""Datasets to text, text to sequences: where text may come from, and that none of it is padding."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmq.errors import ConfigError
from llmq.model.tokenizer import Tokenizer
from llmq.quantize.data import calibration_sequences, hold_out, read_dataset
from tests.tiny import byte_tokenizer_files, tiny_config

datasets = pytest.importorskip("datasets")

ROWS = ["short", "a longer row of text", "x" * 50]


@pytest.fixture
def tokenizer() -> Tokenizer:
    from llmq.model.config import ModelConfig

    return Tokenizer.from_files(byte_tokenizer_files(), ModelConfig.from_dict(tiny_config()))


def write_lines(path: Path, rows: list[str], column: str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"id": i, column: row}) + "\n" for i, row in enumerate(rows)))
    return path


def write_parquet(path: Path, rows: list[str], column: str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_dict({column: rows}).to_parquet(path)
    return path


@pytest.mark.parametrize("column", ["text", "page"])
@pytest.mark.parametrize(("write", "file"), [(write_lines, "train.jsonl"), (write_parquet, "train.parquet")])
def test_a_directory_is_loaded_like_a_dataset_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[..., Path], file: str, column: str
) -> None:
    write(tmp_path / "owner" / "name" / file, ROWS, column)
    assert read_dataset(str(tmp_path / "owner" / "name"), 1000) == "\n".join(ROWS)
    monkeypatch.chdir(tmp_path)
    assert read_dataset("owner/name", 1000) == "\n".join(ROWS)


def test_a_hub_id_is_streamed_and_no_further_than_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def rows() -> Iterator[dict[str, str]]:
        for number in range(10**9):
            asked.append(number)
            yield {"text": "word " * 20}

    def load_dataset(*args: Any, **options: Any) -> Iterator[dict[str, str]]:
        asked.append((args, options))
        return rows()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    text = read_dataset("owner/name", 100)
    assert asked[0] == (("owner/name",), {"split": "train", "streaming": True})
    assert len(text) in range(800, 901)
    assert asked[-1] == 7


def test_what_cannot_be_loaded_is_told_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_lines(tmp_path / "other" / "train.jsonl", ROWS, "body")
    with pytest.raises(ConfigError, match=r"other: has the columns id, body, and none of text or page with text; give"):
        read_dataset(str(tmp_path / "other"), 10)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"empty: cannot be loaded \(.*\); give a file, a directory or a hub id\.$"):
        read_dataset(str(tmp_path / "empty"), 10)

    def load_dataset(*_: Any, **__: Any) -> None:
        raise ConnectionError("offline\nand more")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ConfigError, match=r"^dataset=owner/name: cannot be loaded \(offline\); give"):
        read_dataset("owner/name", 10)
    with pytest.raises(ConfigError, match=r"missing\.txt: cannot be read as UTF-8 text"):
        read_dataset(str(tmp_path / "missing.txt"), 10)


@pytest.mark.parametrize("wide", [False, True])
def test_rows_of_different_lengths_are_one_text_without_padding(
    tmp_path: Path, tokenizer: Tokenizer, *, wide: bool
) -> None:
    """The same words in short rows and in long ones give the same tokens, and each once."""
    words = [f"w{number:03}" for number in range(300)]
    rows = [" ".join(words[i : i + 7]) for i in range(0, 300, 7)] if wide else words
    text = read_dataset(str(write_lines(tmp_path / "rows.jsonl", rows)), 10)
    sequences = calibration_sequences(tokenizer, text, 20, 40, seed=0)
    assert {len(sequence) for sequence in sequences} == {40}
    new = 40 - int(tokenizer.adds_bos)
    ids = np.array(tokenizer.encode(text)[int(tokenizer.adds_bos) :])
    starts = [
        int(np.flatnonzero((ids.reshape(-1)[: len(ids) // new * new].reshape(-1, new) == s[-new:]).all(axis=1))[0])
        for s in sequences
    ]
    assert starts == sorted(set(starts))


def test_too_few_tokens_are_counted(tokenizer: Tokenizer) -> None:
    with pytest.raises(
        ConfigError, match=r"^dataset=t: has 500 tokens, 3 samples of 201 take 60[03]; lower --num-samp"
    ):
        calibration_sequences(tokenizer, "x" * 500, 3, 201, seed=0, name="t")
    assert len(calibration_sequences(tokenizer, "x" * 500, 2, 201, seed=0)) == 2


def test_what_is_held_out_is_nowhere_else() -> None:
    text = "".join(chr(97 + i % 26) for i in range(1234))
    kept, held = hold_out(text)
    assert kept + held == text
    assert len(held) == 124
