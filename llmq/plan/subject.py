"""What is planned for: a checkpoint's headers, an artifact's, or a ``config.json`` alone."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from llmq.checkpoint.coverage import Action, TensorPlan, plan_coverage
from llmq.checkpoint.huggingface import holds_weights
from llmq.checkpoint.inspect import stored_scheme
from llmq.checkpoint.layout import entries, quantization_dict
from llmq.checkpoint.loader import ModelWeights, load_weights
from llmq.checkpoint.outline import Outline
from llmq.checkpoint.reader import TensorInfo, find_config, read_json
from llmq.config import QuantizationConfig
from llmq.errors import AlreadyQuantizedError
from llmq.model.config import ModelConfig
from llmq.model.names import expected_tensors

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True, slots=True)
class Subject:
    """A model, by its headers.

    Attributes:
        model: As the user named it.
        raw: Its ``config.json``, without what it says of a quantization.
        config: Its description.
        tensors: Name -> what the checkpoint stores; for an artifact, what a checkpoint would.
        artifact: What became of every tensor; None for what is not quantized.
        quantization: How; None as well.
    """

    model: str
    raw: Mapping[str, Any]
    config: ModelConfig
    tensors: Mapping[str, TensorInfo]
    artifact: Sequence[TensorPlan] | None = None
    quantization: QuantizationConfig | None = None

    def quantized(self, config: QuantizationConfig) -> Sequence[TensorPlan]:
        """What a conversion would make of it.

        Args:
            config: How.

        Returns:
            One row a tensor.

        Raises:
            ConfigError: The configuration does not fit the model.
        """
        return plan_coverage(self.tensors, self.config, config)

    def unquantized(self) -> Sequence[TensorPlan]:
        """Every tensor in bfloat16, one row each."""
        return [
            TensorPlan(
                name=name,
                kind=row.kind,
                shape=row.shape,
                action=Action.KEEP,
                source_bytes=self.tensors[name].num_bytes,
                stored={name: (_BFLOAT16, row.shape)},
            )
            for name, row in expected_tensors(self.config).items()
        ]

    def outline(self, rows: Sequence[TensorPlan], quantization: QuantizationConfig | None) -> ModelWeights:
        """The weights that rows tell of, all zero.

        Args:
            rows: What becomes of every tensor.
            quantization: How they were made; None for a checkpoint.

        Returns:
            Weights of the right types and shapes.
        """
        made = {"quantization_config": quantization_dict(quantization)} if quantization else {}
        stored = {name: entry for row in rows if row.kind for name, entry in row.stored.items()}
        return ModelWeights(Outline({**self.raw, **made}, stored))


def read_subject(model: str) -> Subject:
    """Read the headers of a model; of a hub id its ``config.json`` alone is fetched.

    Args:
        model: A path, or a hub id.

    Returns:
        The subject.

    Raises:
        CheckpointError: It cannot be read, or is incomplete.
        AlreadyQuantizedError: Another quantizer made it.
    """
    file = find_config(model)
    if file is not None and not holds_weights(file.parent):
        return _described(model, file)
    weights = load_weights(model)
    raw = {key: value for key, value in weights.reader.config.items() if key != "quantization_config"}
    if weights.quantization is None:
        return Subject(model, raw, weights.config, weights.reader.tensors)
    rows = []
    for name, expected in expected_tensors(weights.config).items():
        scheme = stored_scheme(name, weights.entries) if weights.is_quantized(name) else None
        rows.append(
            TensorPlan(
                name=name,
                kind=expected.kind,
                shape=expected.shape,
                action=Action.QUANTIZE if scheme else Action.KEEP,
                source_bytes=_BFLOAT16.itemsize * math.prod(expected.shape),
                scheme=scheme,
                stored=entries(name, expected.shape, scheme) if scheme else {name: weights.entries[name]},
            )
        )
    return Subject(model, raw, weights.config, _unwritten(weights.config), rows, weights.quantization)


def _described(model: str, file: Path) -> Subject:
    raw = read_json(file)
    if method := (raw.get("quantization_config") or {}).get("quant_method"):
        raise AlreadyQuantizedError(
            f"{model}: is already quantized with {method} and has no weights here to look at; "
            "give the unquantized checkpoint's config.json."
        )
    config = ModelConfig.from_dict(raw)
    return Subject(model, raw, config, _unwritten(config))


def _unwritten(config: ModelConfig) -> dict[str, TensorInfo]:
    """The tensors of a checkpoint in bfloat16 that is not at hand."""
    return {
        name: TensorInfo(row.shape, _BFLOAT16, _BFLOAT16.itemsize * math.prod(row.shape), "")
        for name, row in expected_tensors(config).items()
    }
