"""What a directory holds, and a check of every byte of it."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from llmq.checkpoint import layout
from llmq.checkpoint.coverage import Action
from llmq.checkpoint.loader import ModelWeights, load_weights
from llmq.checkpoint.reader import Progress, no_progress, read_json
from llmq.checkpoint.record import CoverageRow, Record, read_record
from llmq.checkpoint.writer import hash_tensor
from llmq.config import Granularity, Scheme
from llmq.errors import ArtifactError
from llmq.model.names import expected_tensors


def describe(model: str, *, verify: bool = False, progress: Progress = no_progress) -> dict[str, Any]:
    """Describe a checkpoint or an artifact.

    Args:
        model: A local path or hub id.
        verify: Read every tensor and hold it against the layout and the record.
        progress: Told of every tensor while verifying.

    Returns:
        A JSON object: path, format, architecture, files, num_bytes, quantization, coverage (one
        row per weight) and, for an artifact, its record.

    Raises:
        CheckpointError: It cannot be read or is incomplete.
        ArtifactError: It breaks the layout, or differs from its record.
    """
    weights = load_weights(model)
    path = weights.reader.path
    record = read_record(path) if weights.quantization else None
    if verify:
        _verify(weights, record, progress)
    return {
        "path": str(path),
        "format": "llmq artifact" if weights.quantization else weights.reader.format,
        "architecture": weights.config.architecture,
        "files": {name: file.stat().st_size for name, file in weights.reader.files.items()},
        "num_bytes": weights.num_bytes,
        "quantization": weights.quantization.model_dump(mode="json") if weights.quantization else None,
        "coverage": _coverage(weights, record),
        "record": record.model_dump(mode="json", exclude={"coverage"}) if record else None,
    }


def stored_scheme(name: str, entries: Mapping[str, layout.Entry]) -> Scheme:
    """The grid of a stored matrix, read off its types and shapes.

    Args:
        name: Of the matrix.
        entries: Stored name -> dtype and shape.

    Returns:
        Its scheme. A single group a row is per-channel.
    """
    shape = layout.check(name, entries)
    scale_dtype, grid = entries[name + layout.SCALE]
    blockwise = grid[-1] > 1
    return Scheme(
        num_bits=4 if entries[name + layout.VALUES][0] == np.uint8 else 8,
        granularity=Granularity.BLOCKWISE if blockwise else Granularity.PER_CHANNEL,
        symmetric=name + layout.ZERO not in entries,
        group_size=shape[-1] // grid[-1] if blockwise else None,
        scale_dtype="float32" if scale_dtype == np.float32 else "bfloat16",
    )


def _coverage(weights: ModelWeights, record: Record | None) -> list[dict[str, Any]]:
    """One row per weight as it lies in the files; reasons and fidelity come from the record."""
    noted = {row.name: row for row in record.coverage} if record else {}
    rows = []
    for name, expected in expected_tensors(weights.config).items():
        quantized = weights.is_quantized(name)
        scheme = stored_scheme(name, weights.entries) if quantized else None
        parts = layout.entries(name, expected.shape, scheme) if scheme else {name: weights.entries[name]}
        stored_bytes = sum(layout.entry_bytes(entry) for entry in parts.values())
        note = noted.get(name)
        row = CoverageRow(
            name=name,
            kind=expected.kind,
            shape=expected.shape,
            action=Action.QUANTIZE if quantized else Action.KEEP,
            scheme=scheme,
            reason=note.reason if note else "",
            source_bytes=note.source_bytes if note else stored_bytes,
            stored_bytes=stored_bytes,
            sqnr_db=note.sqnr_db if note else None,
            relative_error=note.relative_error if note else None,
            max_error_steps=note.max_error_steps if note else None,
        )
        rows.append(row.model_dump(mode="json"))
    return rows


def _verify(weights: ModelWeights, record: Record | None, progress: Progress) -> None:
    path = weights.reader.path
    digest = hashlib.sha256()
    done = 0
    for name, info in weights.reader.tensors.items():
        progress(name, done, weights.num_bytes)
        tensor = weights.reader.read(name)
        hash_tensor(digest, name, tensor)
        _check_values(name, tensor)
        done += info.num_bytes
    if record is None:
        if weights.quantization:
            raise ArtifactError(f"{path / layout.RECORD}: is missing, so the weights cannot be held against it.")
        return
    if record.weights_sha256 != digest.hexdigest():
        raise ArtifactError(
            f"{path}: the weights hash to {digest.hexdigest()}, {layout.RECORD} says {record.weights_sha256}; {_CHANGED}."
        )
    for name, expected in record.files.items():
        file = path / name
        if not file.is_file() or hashlib.sha256(file.read_bytes()).hexdigest() != expected:
            raise ArtifactError(f"{file}: is missing or not what {layout.RECORD} says; {_CHANGED}.")
    _check_record(weights, record)
    _check_total(path, weights.num_bytes)


_CHANGED = "the artifact was changed"


def _check_values(name: str, tensor: np.ndarray) -> None:
    if tensor.dtype.kind not in "iu" and not np.isfinite(tensor.astype(np.float32)).all():
        raise ArtifactError(f"{name}: holds NaN or infinity; the file is damaged.")
    if name.endswith(layout.SCALE) and not (tensor.astype(np.float32) > 0).all():
        raise ArtifactError(f"{name}: holds a scale that is not positive; the artifact is damaged.")


def _check_record(weights: ModelWeights, record: Record) -> None:
    rows = {row.name: row for row in record.coverage if row.action is not Action.DROP}
    if record.quantization != weights.quantization or len(rows) != len(weights) or set(rows) != set(weights):
        raise ArtifactError(
            f"{weights.reader.path / layout.RECORD}: tells of another model or quantization; {_CHANGED}."
        )
    for name, row in rows.items():
        parts = layout.entries(name, row.shape, row.scheme) if row.scheme else {name: weights.entries.get(name)}
        same = all(entry is not None and weights.entries.get(part) == entry for part, entry in parts.items())
        size = sum(layout.entry_bytes(entry) for entry in parts.values() if entry)
        if not same or size != row.stored_bytes or (row.action is Action.QUANTIZE) != bool(row.scheme):
            found = stored_scheme(name, weights.entries) if weights.is_quantized(name) else "an unquantized tensor"
            raise ArtifactError(
                f"{name}: is stored as {found}, {layout.RECORD} says {row.scheme or row.action}; {_CHANGED}."
            )


def _check_total(path: Path, num_bytes: int) -> None:
    if (path / layout.INDEX).is_file():
        total = read_json(path / layout.INDEX).get("metadata", {}).get("total_size")
        if total != num_bytes:
            raise ArtifactError(f"{path / layout.INDEX}: says total_size {total}, the tensors have {num_bytes} bytes.")
