"""A model under test: what it is, and where it runs."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from llmq.backends.base import Backend, InferenceModel, ModelOptions
from llmq.backends.registry import select_backend
from llmq.checkpoint.loader import ModelWeights, load_weights
from llmq.checkpoint.record import Record, read_record
from llmq.errors import ConfigError
from llmq.evaluate.results import EvaluatedModel
from llmq.model.tokenizer import Tokenizer

#: Context unless the user names one, or the model's own where that is shorter: figures of models with
#: different contexts are comparable, and a slot stays small.
DEFAULT_MAX_LENGTH = 2048


@dataclass(frozen=True)
class Subject:
    """A model under test; `open_subject` makes one.

    Attributes:
        name: As the user named it.
        weights: Not in memory yet.
        tokenizer: The model's.
        plugin: The backend to run it on.
        options: How to open it.
    """

    name: str
    weights: ModelWeights
    tokenizer: Tokenizer
    plugin: Backend
    options: ModelOptions

    @cached_property
    def _record(self) -> Record | None:
        return read_record(self.weights.reader.path) if self.weights.quantization else None

    @cached_property
    def weights_sha256(self) -> str:
        """Names the weights: the hash in an artifact's record, or else one over the weight files."""
        return self._record.weights_sha256 if self._record else files_sha256(self.weights.reader.files)

    def describe(self) -> EvaluatedModel:
        """The model as results tell of it."""
        weights, record = self.weights, self._record
        return EvaluatedModel(
            name=self.name,
            format="llmq artifact" if weights.quantization else weights.reader.format,
            weights_sha256=self.weights_sha256,
            num_bytes=weights.num_bytes,
            quantization=weights.quantization.model_dump(mode="json") if weights.quantization else None,
            coverage=[row.model_dump(mode="json") for row in record.coverage] if record else [],
            sensitivity=record.calibration.sensitivity if record and record.calibration else {},
        )

    def open(self, num_slots: int = 1) -> InferenceModel:
        """Load the weights.

        Args:
            num_slots: Sequences held at once.

        Returns:
            The model.
        """
        return self.plugin.open_model(self.weights, replace(self.options, num_slots=num_slots))


def find_subject(model: str, *, backend: str, device: str | None, max_length: int | None, **more: Any) -> Subject:
    """Find a model and the backend to run it on.

    Args:
        model: An artifact, a checkpoint, or a hub id of either.
        backend: As in ``--backend``.
        device: As in ``--device``.
        max_length: Context in tokens; None takes the model's own, at most `DEFAULT_MAX_LENGTH`.
        **more: Of `ModelOptions`.

    Returns:
        The model, not opened yet.

    Raises:
        ConfigError: The context is longer than the model's.
        CheckpointError: The model cannot be read.
        BackendError: The backend cannot be used.
    """
    weights = load_weights(model)
    tokenizer = Tokenizer.from_files(weights.reader.side_files(), weights.config)
    context = weights.config.max_positions
    if max_length is not None and max_length > context:
        raise ConfigError(f"max_model_len={max_length}: must be at most the context of {model}, {context}.")
    plugin, chosen = select_backend(backend, device)
    max_len = max_length or min(context, DEFAULT_MAX_LENGTH)
    return Subject(model, weights, tokenizer, plugin, ModelOptions(device=chosen, max_len=max_len, **more))


def files_sha256(files: Mapping[str, Path]) -> str:
    """A hash over the names and contents of files.

    Args:
        files: By name.

    Returns:
        Hexadecimal.
    """
    digest = hashlib.sha256()
    for name in sorted(files):
        with files[name].open("rb") as file:
            digest.update(f"{name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()
