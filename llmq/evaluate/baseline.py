"""A baseline's predictions on a text, in a file: made once, compared with many models.

Safetensors with four tensors a window, see `llmq.evaluate.predictions.Kept`. Its metadata says what it was made
from and how; a file that does not fit is refused, never patched.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmq.backends.base import InferenceModel
from llmq.checkpoint.layout import Entry
from llmq.checkpoint.reader import Progress, no_progress
from llmq.checkpoint.safetensors import StoredTensor, encode_header, flush_to_disk, read_header, write_array
from llmq.errors import CheckpointError, ConfigError, OutputError
from llmq.evaluate.predictions import Kept, Reader
from llmq.evaluate.windows import Windows, check_fits, cut
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
        vocab_size: Tokens of the baseline.
        top_k: Tokens kept at every position.
    """

    path: Path
    tensors: Mapping[str, StoredTensor]
    fingerprint: Mapping[str, Any]
    vocab_size: int
    top_k: int

    def check(self, parts: Windows) -> None:
        """Refuse predictions for another text or other windows.

        Args:
            parts: What is to be measured on.

        Raises:
            ConfigError: They differ, or some are missing.
        """
        _check_fingerprint(self, _text_fingerprint(parts))
        for index, part in enumerate(parts.windows):
            for name, entry in _entries(index, len(part.targets), self.top_k).items():
                found = self.tensors.get(name)
                if found is None or (found.dtype, found.shape) != entry:
                    raise ConfigError(f"{self.path}: {name} is missing or misshapen; {_MAKE_ANEW}.")

    def read(self, index: int) -> Kept:
        """The predictions for a window.

        Args:
            index: Its place.

        Returns:
            What the file holds of it.

        Raises:
            ConfigError: It is damaged.
        """
        kept = Kept(*(self.tensors[_name(index, part)].read() for part in _PARTS))
        floats = (kept.logprobs, kept.rest, kept.target_logprobs)
        if not all(np.isfinite(part).all() for part in floats) or kept.ids.max() >= self.vocab_size:
            raise ConfigError(f"{self.path}: the predictions for window {index} are damaged; {_MAKE_ANEW}.")
        return kept


def write_baseline(
    path: Path,
    model: InferenceModel,
    tokenizer: Tokenizer,
    text: str,
    *,
    made_by: Mapping[str, str],
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
        made_by: The hash of the baseline's ``weights``, the ``backend`` and the ``dtype`` it is computed in;
            `open_baseline` asks for them again.
        window: Tokens the model sees at once.
        stride: Tokens to score per window; None cuts the text without overlap.
        max_tokens: Take only so many tokens from the start; None takes all.
        top_k: Tokens to keep at every position.
        progress: Told of every window, in tokens.

    Raises:
        ConfigError: An option is out of range, or the text is shorter than one window.
        OutputError: The file cannot be written.
    """
    if top_k < 1:
        raise ConfigError(f"top_k={top_k}: must be positive; {TOP_K} is the default.")
    check_fits(model, window)
    parts = cut(tokenizer, text, window=window, stride=stride, max_tokens=max_tokens)
    top_k = min(top_k, model.caps.vocab_size)
    entries: dict[str, Entry] = {}
    for index, part in enumerate(parts.windows):
        entries |= _entries(index, len(part.targets), top_k)
    fingerprint = {**made_by, "vocab_size": str(model.caps.vocab_size), "top_k": str(top_k), **_text_fingerprint(parts)}
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
    except OSError as err:
        raise OutputError(f"{path}: cannot be written ({err.strerror or err}).") from err
    finally:
        staged.unlink(missing_ok=True)


def open_baseline(path: Path, *, made_by: Mapping[str, str], vocab_size: int) -> BaselineFile:
    """Open a file of `write_baseline`.

    Args:
        path: The file.
        made_by: As for `write_baseline`.
        vocab_size: Of the model that is to be measured.

    Returns:
        Its predictions; none is in memory yet.

    Raises:
        ConfigError: It is not such a file, or holds the predictions of another model.
    """
    try:
        tensors, metadata = read_header(path)
        version, fingerprint = int(metadata[_VERSION]), dict(json.loads(metadata[_FINGERPRINT]))
        top_k = int(fingerprint["top_k"])
        if top_k < 1:
            raise ValueError(top_k)
    except OSError as err:
        raise ConfigError(f"{path}: cannot be read ({err.strerror or err}).") from err
    except (CheckpointError, KeyError, ValueError, TypeError, RecursionError) as err:
        raise ConfigError(f"{path}: is not a file of baseline predictions; {_MAKE_ANEW}.") from err
    if version > FORMAT_VERSION:
        raise ConfigError(
            f"{path}: has format_version {version}, this llmq reads up to {FORMAT_VERSION}; {_MAKE_ANEW}."
        )
    baseline = BaselineFile(path, tensors, fingerprint, vocab_size, top_k)
    _check_fingerprint(baseline, {**made_by, "vocab_size": str(vocab_size)})
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
    "weights": "another model",
    "vocab_size": "a model of another vocabulary",
    "tokens": "another text, tokenizer or number of tokens",
    "windows": "another window or stride",
}


def _name(index: int, part: str) -> str:
    return f"windows.{index}.{part}"


def _entries(index: int, num_targets: int, top_k: int) -> dict[str, Entry]:
    """The tensors of a window."""
    return {
        _name(index, name): (np.dtype(dtype), (num_targets, top_k) if is_row else (num_targets,))
        for name, (dtype, is_row) in _PARTS.items()
    }


def _text_fingerprint(parts: Windows) -> dict[str, str]:
    names = " ".join(f"{len(part.context)}+{part.name}" for part in parts.windows)
    return {
        "tokens": hashlib.sha256(parts.ids.astype("<i4").tobytes()).hexdigest(),
        "windows": hashlib.sha256(names.encode()).hexdigest(),
    }


def _check_fingerprint(baseline: BaselineFile, expected: Mapping[str, str]) -> None:
    for field, value in expected.items():
        found = baseline.fingerprint.get(field)
        if found != value:
            meaning = _MEANINGS.get(field, f"{field}={found}, now it is {value}")
            raise ConfigError(f"{baseline.path}: holds the predictions for {meaning}; {_MAKE_ANEW}.")
