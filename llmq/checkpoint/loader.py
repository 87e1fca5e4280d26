"""Loading weights for a backend: an artifact, or a checkpoint that was never quantized.

Everything is checked before the first tensor is read: the model's description, the format
version, the index, and that every tensor is there in its right shape.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from llmq.checkpoint import layout
from llmq.checkpoint.reader import (
    QUANT_METHOD,
    CheckpointReader,
    open_checkpoint,
    quantization_of,
    refuse_quantized,
)
from llmq.config import QuantizationConfig
from llmq.errors import ArtifactError
from llmq.model.config import ModelConfig
from llmq.model.names import check_tensors, droppable
from llmq.quant import QTensor


class ModelWeights(Mapping[str, np.ndarray | QTensor]):
    """A model's weights by name, each read when it is asked for.

    Args:
        reader: The open checkpoint.

    Attributes:
        reader: The open checkpoint.
        config: The model's description.
        quantization: How it was quantized; None for a checkpoint that was not.
    """

    def __init__(self, reader: CheckpointReader) -> None:
        self.reader = reader
        self.config = ModelConfig.from_dict(reader.config)
        self.quantization: QuantizationConfig | None = None
        self.entries: dict[str, layout.Entry] = {name: (t.dtype, t.shape) for name, t in reader.tensors.items()}
        names = logical_names(self.entries)
        if is_artifact(reader.config):
            self.quantization = layout.read_quantization(quantization_of(reader.config))
        elif len(names) != len(self.entries):
            raise ArtifactError(
                f"{reader.path}: holds codes, but config.json says nothing of them; the artifact is damaged."
            )
        else:
            refuse_quantized(reader.config, reader.tensors, reader.path)
        shapes = {name: self._shape(name) for name in names}
        if len(shapes) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ArtifactError(f"{twice}: is stored as codes and as a tensor; the artifact is damaged.")
        check_tensors(shapes, self.config)
        self.shapes = {name: shape for name, shape in shapes.items() if not droppable(name, self.config)}

    def _shape(self, name: str) -> tuple[int, ...]:
        return layout.check(name, self.entries) if self.is_quantized(name) else self.entries[name][1]

    def is_quantized(self, name: str) -> bool:
        """Whether a weight is stored as codes.

        Args:
            name: A key.

        Returns:
            True for codes.
        """
        return name + layout.VALUES in self.entries

    def rounds_inputs(self, name: str) -> bool:
        """Whether a linear takes its inputs in int8.

        Args:
            name: Of its weight.

        Returns:
            True where the artifact says so.
        """
        return self.quantization is not None and layout.rounds_inputs(name, self.entries, self.quantization)

    def __getitem__(self, name: str) -> np.ndarray | QTensor:
        if name not in self.shapes:
            raise KeyError(name)
        if self.is_quantized(name):
            return layout.decode(name, self.entries, self.reader.read)
        return self.reader.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    @property
    def num_bytes(self) -> int:
        """Bytes of all stored tensors."""
        return sum(t.num_bytes for t in self.reader.tensors.values())


def load_weights(model: str) -> ModelWeights:
    """Open a model to run it.

    Args:
        model: An artifact, a checkpoint, or a hub id of either.

    Returns:
        Its weights; none is in memory yet.

    Raises:
        CheckpointError: It cannot be read or is incomplete.
        ArtifactError: It breaks the layout or is from a newer llmq.
    """
    return ModelWeights(open_checkpoint(model))


def is_artifact(config: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` is one llmq wrote for a quantized model."""
    return quantization_of(config).get("quant_method") == QUANT_METHOD


def logical_names(stored: Mapping[str, Any]) -> list[str]:
    """Names of the weights behind stored tensors: three entries of a matrix are one weight.

    Args:
        stored: Stored names.

    Returns:
        Names in stored order.
    """
    names = []
    for name in stored:
        base, dot, ending = name.rpartition(".")
        part = dot + ending in (layout.VALUES, layout.SCALE, layout.ZERO) and base + layout.VALUES in stored
        if not part:
            names.append(name)
        elif dot + ending == layout.VALUES:
            names.append(base)
    return names
