"""What a run leaves: a float checkpoint that carries the grids it was trained for.

Weights are float32 master weights: rounded to nearest on those grids they give the codes of the last
quantized forward pass, which weights rounded to bfloat16 would not.
"""

import hashlib
import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from llmq.backends.base import Trainer
from llmq.checkpoint import layout
from llmq.checkpoint.layout import Entry
from llmq.checkpoint.loader import ModelWeights
from llmq.checkpoint.writer import plan_shards, stage, to_json
from llmq.config import Scheme
from llmq.evaluate.training import METRICS
from llmq.qat.recipe import Recipe
from llmq.quant import QTensor, unpack_int4
from llmq.quant.rows import quantize_rows


def write_checkpoint(
    output: Path,
    trainer: Trainer,
    weights: ModelWeights,
    recipe: Recipe,
    schemes: Mapping[str, Scheme],
    metrics: bytes,
    result: Mapping[str, Any],
    command: Sequence[str],
) -> dict[str, Any]:
    """Write a Hugging Face directory, completely or not at all.

    Args:
        output: Directory to create, or to replace where the caller has checked that.
        trainer: Holds the finished weights.
        weights: What training began with.
        recipe: What was trained.
        schemes: Weight name -> its grid.
        metrics: Contents of `METRICS`.
        result: Figures for the record.
        command: The command line.

    Returns:
        The record, as it stands in ``llmq.json``.

    Raises:
        OutputError: It cannot be written there.
    """
    entries: dict[str, Entry] = {name: (np.dtype(np.float32), shape) for name, shape in weights.shapes.items()}
    with ThreadPoolExecutor() as workers, stage(output, plan_shards(entries)) as writer:
        changed = {}
        for name in weights.shapes:
            finished = trainer.weight(name)
            writer.write(name, finished)
            if name in schemes:
                changed[name] = _num_changed(weights[name], finished, schemes[name], workers)
        weights_sha256 = writer.finish()
        for name, contents in {**weights.reader.side_files(), METRICS: metrics}.items():
            writer.write_file(name, contents)
        writer.write_file("config.json", to_json(_config(weights.reader.config, recipe)))
        record = {
            "llmq_version": importlib.metadata.version("llmq"),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": list(command),
            "source": {"model": recipe.model, "files": {n: _sha256(p) for n, p in weights.reader.files.items()}},
            "recipe": recipe.model_dump(mode="json"),
            "result": {**result, "codes": _num_codes(weights, schemes), "codes_changed": sum(changed.values())},
            "codes_changed": changed,
            "weights_sha256": weights_sha256,
            "files": dict(writer.files),
            "versions": {"python": platform.python_version(), "numpy": importlib.metadata.version("numpy")},
        }
        writer.write_file(layout.RECORD, to_json(record))
    return record


def _config(raw: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    """The source's ``config.json``, its type corrected and the grids added."""
    types = [field for field in ("dtype", "torch_dtype") if field in raw] or ["torch_dtype"]
    return {
        **raw,
        **dict.fromkeys(types, "float32"),
        layout.TRAINED: layout.quantization_dict(recipe.quantization),
    }


def _num_changed(
    before: np.ndarray | QTensor, finished_OI: np.ndarray, scheme: Scheme, workers: ThreadPoolExecutor
) -> int:
    """Codes that training has changed."""
    assert isinstance(before, np.ndarray)
    old, new = (quantize_rows(weight, scheme, workers).values for weight in (before, finished_OI))
    if scheme.num_bits == 4:
        old, new = unpack_int4(old), unpack_int4(new)
    return int(np.count_nonzero(old != new))


def _num_codes(weights: ModelWeights, schemes: Mapping[str, Scheme]) -> int:
    return sum(int(np.prod(weights.shapes[name])) for name in schemes)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
