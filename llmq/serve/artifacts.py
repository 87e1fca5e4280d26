"""Artifacts made on the way to serving, kept in ``$XDG_CACHE_HOME/llmq/artifacts``."""

import hashlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from llmq.checkpoint.loader import ModelWeights, load_weights
from llmq.checkpoint.reader import CheckpointReader, Progress
from llmq.checkpoint.writer import to_json
from llmq.config import QuantizationConfig
from llmq.convert import convert, plan_conversion
from llmq.errors import ConfigError


def cache_directory() -> Path:
    """Where artifacts are kept; it may be deleted while nothing is served from it.

    Returns:
        A directory; it need not exist.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llmq" / "artifacts"


def quantized(
    weights: ModelWeights,
    model: str,
    config: QuantizationConfig,
    progress: Callable[[], AbstractContextManager[Progress]],
) -> ModelWeights:
    """A checkpoint as an artifact: the one in the cache, or a new one.

    Args:
        weights: The checkpoint; an artifact stays as it is.
        model: As the user named it.
        config: How to quantize it.
        progress: Entered while tensors are converted; what it gives is told of each.

    Returns:
        The artifact's weights.

    Raises:
        ConfigError: `weights` is an artifact that was made otherwise.
    """
    if weights.quantization is not None:
        _check_same(weights.quantization, config, model)
        return weights
    key = _key(weights.reader, config)
    target = cache_directory() / f"{Path(model).stem}-{config.scheme}-{key[:16]}"
    if not target.exists():  # it is there as a whole or not at all: the writer renames
        target.parent.mkdir(parents=True, exist_ok=True)
        with progress() as report:
            convert(plan_conversion(model, config), target, progress=report)
    return load_weights(str(target))


def _check_same(made: QuantizationConfig, asked: QuantizationConfig, model: str) -> None:
    for name in sorted(asked.model_fields_set):
        has, wants = getattr(made, name), getattr(asked, name)
        if wants is not None and has != wants:
            raise ConfigError(f"{name}={wants}: {model} is an artifact with {name}={has}; leave the option out.")


def _key(reader: CheckpointReader, config: QuantizationConfig) -> str:
    """A hash over everything that the artifact's bytes depend on."""
    digest = hashlib.sha256(to_json(config.model_dump(mode="json")) + to_json(dict(reader.config)))
    for name, contents in sorted(reader.side_files().items()):
        digest.update(f"{name} {hashlib.sha256(contents).hexdigest()}\n".encode())
    for name, path in sorted(reader.files.items()):
        with path.open("rb") as file:
            digest.update(f"{name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()
