"""Checkpoint to artifact without data: read, round to the grid, write, tensor by tensor.

No model is built and at most three tensors are in memory: the one being read, the one being
quantized, and the one being written, which are codes by then. Everything that can be refused is refused in `plan_conversion`, from headers alone.
"""

import hashlib
import importlib.metadata
import math
import os
import platform
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from llmq.checkpoint import layout
from llmq.checkpoint.coverage import Action, TensorPlan, check_strict, plan_coverage
from llmq.checkpoint.loader import ModelWeights, is_artifact
from llmq.checkpoint.reader import CheckpointReader, Progress, no_progress, open_checkpoint, refuse_quantized
from llmq.checkpoint.record import Calibration, CoverageRow, Record, Source, SourceFile
from llmq.checkpoint.trained import check_trained, trained_config
from llmq.checkpoint.writer import ArtifactWriter, check_target, plan_shards, planned_bytes, stage, to_json
from llmq.config import QuantizationConfig
from llmq.errors import AlreadyQuantizedError, ArtifactError, CheckpointError
from llmq.model.config import ModelConfig
from llmq.quant.fidelity import Fidelity
from llmq.quant.qtensor import QTensor
from llmq.quant.rows import NonFiniteWeightError, PackedMatrix, finite, quantize_rows

#: Makes what is stored of a tensor: codes where the row has a scheme, else an array.
Encoder = Callable[[TensorPlan, np.ndarray, ThreadPoolExecutor], "PackedMatrix | np.ndarray"]


def round_to_nearest(row: TensorPlan, tensor: np.ndarray, workers: ThreadPoolExecutor) -> PackedMatrix | np.ndarray:
    """The encoder that uses no data.

    Args:
        row: What to make of it.
        tensor: From the source.
        workers: Threads.

    Returns:
        The nearest codes, or the tensor as it is.

    Raises:
        NonFiniteWeightError: A weight to quantize is NaN, infinite or far too large.
    """
    return tensor if row.scheme is None else quantize_rows(tensor, row.scheme, workers)


@dataclass(frozen=True, slots=True)
class ConversionPlan:
    """What a conversion will do.

    Attributes:
        model: The source as the user named it.
        reader: The source.
        config: What was asked for.
        coverage: One row per tensor.
        shards: Weight file -> its tensors.
    """

    model: str
    reader: CheckpointReader
    config: QuantizationConfig
    coverage: Sequence[TensorPlan]
    shards: Mapping[str, Mapping[str, layout.Entry]]

    @property
    def source_bytes(self) -> int:
        """Bytes of all tensors in the source."""
        return sum(row.source_bytes for row in self.coverage)

    @property
    def artifact_bytes(self) -> int:
        """Bytes of the artifact's directory; weights exactly, the record to a few digits."""
        side = self.side_files()
        unknown = "0" * 64
        record = self.record({}, dict.fromkeys(self.reader.files, unknown), unknown, dict.fromkeys(side, unknown), [])
        return planned_bytes(self.shards) + sum(map(len, side.values())) + len(_record_json(record))

    def side_files(self) -> dict[str, bytes]:
        """Every file beside the weights and the record: the source's own, and ``config.json``."""
        config = {**self.reader.config, "quantization_config": layout.quantization_dict(self.config)}
        return {**self.reader.side_files(), "config.json": to_json(config)}

    def record(
        self,
        fidelities: Mapping[str, Fidelity],
        source_hashes: Mapping[str, str],
        weights_sha256: str,
        files: Mapping[str, str],
        command: Sequence[str],
        calibration: Calibration | None = None,
    ) -> Record:
        """Where the artifact comes from and what became of every tensor.

        Args:
            fidelities: Tensor name -> what quantization cost it.
            source_hashes: Source file -> sha256.
            weights_sha256: Hash of the stored tensors.
            files: sha256 of every other file.
            command: The command line.
            calibration: How codes were chosen, unless by rounding alone.

        Returns:
            The contents of ``llmq.json``.
        """
        packages = ("numpy", "ml_dtypes", "array-api-compat", "gguf")
        sizes = {name: path.stat().st_size for name, path in self.reader.files.items()}
        return Record(
            llmq_version=importlib.metadata.version("llmq"),
            format_version=layout.FORMAT_VERSION,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            command=tuple(command),
            source=Source(
                model=self.model,
                format=self.reader.format,
                files={name: SourceFile(sha256=source_hashes[name], bytes=size) for name, size in sizes.items()},
            ),
            quantization=self.config,
            weights_sha256=weights_sha256,
            files=dict(files),
            versions={"python": platform.python_version()} | {p: importlib.metadata.version(p) for p in packages},
            coverage=tuple(coverage_row(row, fidelities.get(row.name)) for row in self.coverage),
            calibration=calibration,
        )


def coverage_row(row: TensorPlan, fidelity: Fidelity | None = None) -> CoverageRow:
    """A row of the plan as it stands in the record.

    Args:
        row: The plan.
        fidelity: What quantization cost, once it is known.

    Returns:
        The row.
    """
    return CoverageRow(
        name=row.name,
        kind=row.kind,
        shape=row.shape,
        action=row.action,
        scheme=row.scheme,
        reason=row.reason,
        source_bytes=row.source_bytes,
        stored_bytes=row.stored_bytes,
        sqnr_db=round(fidelity.sqnr_db, 3) if fidelity and math.isfinite(fidelity.sqnr_db) else None,
        relative_error=round(fidelity.relative_error, 6) if fidelity else None,
        max_error_steps=round(fidelity.max_steps, 4) if fidelity else None,
    )


def _record_json(record: Record) -> bytes:
    return to_json(record.model_dump(mode="json"))


def plan_conversion(model: str, config: QuantizationConfig, *, strict: bool = False) -> ConversionPlan:
    """Decide everything a conversion will do, reading headers only.

    Args:
        model: A local checkpoint or a hub id.
        config: What to do.
        strict: Refuse tensors that would not be quantized as asked.

    Returns:
        The plan.

    Raises:
        CheckpointError: The source is missing, damaged, incomplete, unknown or already quantized.
        ConfigError: The configuration does not fit the model, or the model was trained for another.
        CoverageError: `strict`, and a tensor deviates.
    """
    reader = open_checkpoint(model)
    if is_artifact(reader.config):
        raise AlreadyQuantizedError(f"{model}: is an artifact of llmq already; give the checkpoint it was made from.")
    refuse_quantized(reader.config, reader.tensors, reader.path)
    check_trained(trained_config(reader.config), config.model_dump())
    coverage = plan_coverage(reader.tensors, ModelConfig.from_dict(reader.config), config)
    if strict:
        check_strict(coverage)
    stored = {name: entry for row in coverage for name, entry in row.stored.items()}
    return ConversionPlan(model, reader, config, coverage, plan_shards(stored))


def convert(
    plan: ConversionPlan,
    output: Path,
    *,
    force: bool = False,
    command: Sequence[str] = (),
    num_threads: int | None = None,
    progress: Progress = no_progress,
    encode: Encoder = round_to_nearest,
    calibration: Calibration | None = None,
) -> Record:
    """Write the artifact a plan describes, completely or not at all.

    Args:
        plan: From `plan_conversion`.
        output: Directory to create.
        force: Replace an existing one.
        command: The command line, for the record.
        num_threads: Threads that quantize; None takes every core. No byte depends on it.
        progress: Told of every tensor.
        encode: Chooses the codes.
        calibration: How, for the record.

    Returns:
        The record written to ``llmq.json``.

    Raises:
        OutputError: The artifact cannot be written there.
        CheckpointError: A weight is NaN or infinite, or the source cannot be read.
    """
    check_target(output, plan.reader.path, force=force)
    fidelities: dict[str, Fidelity] = {}
    with (
        stage(output, plan.shards) as writer,  # outermost: on an error, no thread writes into what it removes
        _threads(num_threads or os.cpu_count()) as workers,
        _threads(1) as hashing,
        _threads(1) as reading,
        _threads(1) as writing,
    ):
        hashes = {name: hashing.submit(_sha256, path) for name, path in plan.reader.files.items()}
        done = 0
        written: Future[None] | None = None
        for row, tensor in _read_ahead(plan, reading):
            progress(row.name, done, plan.source_bytes)
            parts = _store(row, tensor, encode, fidelities, workers)
            if written:
                written.result()
            written = writing.submit(_write, writer, parts)
            done += row.source_bytes
        if written:
            written.result()
        progress("", plan.source_bytes, plan.source_bytes)
        weights_sha256 = writer.finish()
        for name, contents in plan.side_files().items():
            writer.write_file(name, contents)
        source_hashes = {name: future.result() for name, future in hashes.items()}
        record = plan.record(fidelities, source_hashes, weights_sha256, writer.files, command, calibration)
        writer.write_file(layout.RECORD, _record_json(record))
        _check_written(plan, writer)
    return record


@contextmanager
def _threads(count: int | None) -> Generator[ThreadPoolExecutor]:
    """A pool that, when it is left, finishes what it is doing and drops what it has not begun."""
    pool = ThreadPoolExecutor(count)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _read_ahead(plan: ConversionPlan, pool: ThreadPoolExecutor) -> Iterator[tuple[TensorPlan, np.ndarray]]:
    rows = [row for row in plan.coverage if row.action is not Action.DROP]
    pending = pool.submit(_read, plan.reader, rows[0].name)
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        tensor = pending.result()
        if following:
            pending = pool.submit(_read, plan.reader, following.name)
        yield row, tensor


def _read(reader: CheckpointReader, name: str) -> np.ndarray:
    try:
        return reader.read(name)
    except OSError as err:
        raise CheckpointError(f"{reader.path}: tensor {name} cannot be read ({err.strerror or err}).") from err


def _store(
    row: TensorPlan,
    tensor: np.ndarray,
    encode: Encoder,
    fidelities: dict[str, Fidelity],
    workers: ThreadPoolExecutor,
) -> dict[str, np.ndarray]:
    """What a tensor becomes in the file; its fidelity is noted."""
    if row.scheme is None and not np.isfinite(tensor.astype(np.float32)).all():
        raise damaged(row.name)
    try:
        encoded = encode(row, tensor, workers)
    except NonFiniteWeightError as err:
        raise damaged(row.name) from err
    if not isinstance(encoded, PackedMatrix):
        return {row.name: encoded}
    fidelities[row.name] = encoded.fidelity
    parts = {layout.VALUES: encoded.values, layout.SCALE: encoded.scale, layout.ZERO: encoded.zero}
    return {row.name + suffix: array for suffix, array in parts.items() if array is not None}


def _write(writer: ArtifactWriter, parts: Mapping[str, np.ndarray]) -> None:
    for name, array in parts.items():
        writer.write(name, array)


def damaged(name: str) -> CheckpointError:
    """The error for a weight that cannot be a number.

    Args:
        name: Of the tensor.

    Returns:
        What to raise.
    """
    return CheckpointError(
        f"{name}: holds NaN, infinity or a value beyond 2^120; the checkpoint is damaged, nothing was written."
    )


def finite_weight(name: str, weight: np.ndarray | QTensor) -> np.ndarray:
    """A linear's weight in float32.

    Args:
        name: Of the tensor, for messages.
        weight: From the source, not quantized yet.

    Returns:
        float32.

    Raises:
        CheckpointError: It is NaN, infinite or far too large somewhere.
    """
    assert not isinstance(weight, QTensor), name
    try:
        return finite(weight)
    except NonFiniteWeightError as err:
        raise damaged(name) from err


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_written(plan: ConversionPlan, writer: ArtifactWriter) -> None:
    """Re-open what was written and count: a report must not claim what the files do not hold."""
    written = ModelWeights(open_checkpoint(str(writer.directory)))
    planned = {row.name for row in plan.coverage if row.action is Action.QUANTIZE}
    found = {name for name in written if written.is_quantized(name)}
    if planned != found:
        raise ArtifactError(
            f"{len(planned ^ found)} tensors are not stored as planned, {min(planned ^ found)} among them; nothing was written."
        )
