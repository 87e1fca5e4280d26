"""A run of ``llmq quantize``: the plan of a conversion, with codes chosen by an algorithm."""

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llmq.backends.base import ModelOptions
from llmq.backends.registry import select_backend
from llmq.checkpoint.coverage import TensorPlan
from llmq.checkpoint.loader import load_weights
from llmq.checkpoint.reader import Progress, no_progress
from llmq.checkpoint.record import Calibration, Record
from llmq.checkpoint.writer import check_target
from llmq.convert import ConversionPlan, Encoder, convert, round_to_nearest
from llmq.errors import ConfigError
from llmq.model.names import Kind, layer_prefix
from llmq.model.tokenizer import Tokenizer
from llmq.quant import QTensor
from llmq.quant.affine import MAX_WEIGHT
from llmq.quant.rows import NonFiniteWeightError, PackedMatrix, pack_matrix
from llmq.quant.search import on_grid, search_grid
from llmq.quantize.blocks import QuantizedBlock, quantize_blocks
from llmq.quantize.data import calibration_sequences
from llmq.quantize.journal import Journal
from llmq.quantize.options import ALGORITHMS, QuantizeOptions

#: Told of every finished block.
Told = Callable[[QuantizedBlock], None]


@dataclass(frozen=True, slots=True)
class Run:
    """How a run is carried out; nothing here changes a byte of the result.

    Attributes:
        force: Replace an existing output.
        resume: Go on where an interrupted run to the same output stopped.
        command: The command line, for the record.
        num_threads: None takes every core.
        progress: Told of blocks, then of bytes written.
        tell: Told of every finished block.
    """

    force: bool = False
    resume: bool = False
    command: Sequence[str] = ()
    num_threads: int | None = None
    progress: Progress = no_progress
    tell: Told = lambda _: None


def quantize(plan: ConversionPlan, options: QuantizeOptions, output: Path, run: Run = Run()) -> Record:
    """Quantize a model and write the artifact, completely or not at all.

    Args:
        plan: From `llmq.convert.plan_conversion`: what becomes of each tensor.
        options: How codes are chosen.
        output: Directory to create.
        run: How the run is carried out.

    Returns:
        The record written to ``llmq.json``.

    Raises:
        LlmqError: The options do not fit the model or each other, the data, or the output.
    """
    check_algorithm(plan, options)
    check_target(output, plan.reader.path, force=run.force)
    if not ALGORITHMS[options.algorithm].needs_data:
        encode = round_to_nearest if options.algorithm == "rtn" else _searched(ALGORITHMS[options.algorithm].grid)
        return _write(plan, output, run, encode, Calibration(algorithm=options.algorithm))
    return _calibrated(plan, options, output, run)


def check_algorithm(plan: ConversionPlan, options: QuantizeOptions) -> None:
    """Refuse an algorithm that cannot make a scheme of the plan.

    Args:
        plan: What becomes of each tensor.
        options: The algorithm.

    Raises:
        ConfigError: There is such a scheme.
    """
    if ALGORITHMS[options.algorithm].grid == "hqq":
        for row in plan.coverage:
            if row.kind is Kind.LINEAR and row.scheme and row.scheme.symmetric:
                raise ConfigError(
                    f"algorithm={options.algorithm}: moves the zero of a grid, and {row.scheme} of {row.name} has none; "
                    "add --asym or choose mse."
                )


def _write(plan: ConversionPlan, output: Path, run: Run, encode: Encoder, calibration: Calibration) -> Record:
    return convert(
        plan,
        output,
        force=run.force,
        command=run.command,
        num_threads=run.num_threads,
        progress=lambda _, done, total: run.progress("bytes", done, total),
        encode=encode,
        calibration=calibration,
    )


def _searched(method: str) -> Encoder:
    def encode(row: TensorPlan, tensor: np.ndarray, workers: ThreadPoolExecutor) -> PackedMatrix | np.ndarray:
        if row.kind is not Kind.LINEAR or row.scheme is None:
            return round_to_nearest(row, tensor, workers)
        weight_OI = checked(tensor)
        grid = search_grid(weight_OI, row.scheme, method, workers)
        return pack_matrix(weight_OI, on_grid(weight_OI, *grid, row.scheme))

    return encode


def checked(weight: np.ndarray) -> np.ndarray:
    """A weight in float32.

    Args:
        weight: From the source.

    Returns:
        float32.

    Raises:
        NonFiniteWeightError: It is NaN, infinite or far too large somewhere.
    """
    wide = weight.astype(np.float32)
    if not np.abs(wide).max() <= MAX_WEIGHT:
        raise NonFiniteWeightError
    return wide


def _calibrated(plan: ConversionPlan, options: QuantizeOptions, output: Path, run: Run) -> Record:
    assert options.dataset is not None
    weights = load_weights(plan.model)
    if options.seq_len > weights.config.max_positions:
        raise ConfigError(
            f"seq_len={options.seq_len}: must be at most the model's context, {weights.config.max_positions}."
        )
    tokenizer = Tokenizer.from_files(weights.reader.side_files(), weights.config)
    sequences, _ = calibration_sequences(tokenizer, options.dataset, options.num_samples, options.seq_len, options.seed)
    tokens_sha256 = hashlib.sha256(np.concatenate(sequences).astype("<i4").tobytes()).hexdigest()
    plugin, device = select_backend(options.backend, options.device)
    num_threads = run.num_threads or len(os.sched_getaffinity(0))
    model_options = ModelOptions(device=device, dtype=options.dtype, max_len=options.seq_len)
    schemes = {row.name: row.scheme for row in plan.coverage if row.kind is Kind.LINEAR and row.scheme}
    settings = {
        **options.model_dump(mode="json"),
        "backend": plugin.name,
        "tokens": tokens_sha256,
        "model": plan.model,
        "source_bytes": {name: path.stat().st_size for name, path in plan.reader.files.items()},
        "schemes": {name: str(scheme) for name, scheme in schemes.items()},
    }
    place = output.resolve()
    journal = Journal(place.with_name(f".{place.name}.llmq-quantize"), settings, resume=run.resume)
    errors: dict[str, float] = {}
    with ThreadPoolExecutor(num_threads) as pool:
        calibrator = plugin.open_calibrator(weights, model_options, num_threads)
        algorithm = ALGORITHMS[options.algorithm]
        for block in quantize_blocks(calibrator, weights, schemes, sequences, algorithm, pool, journal.get):
            journal.add(block)
            errors.update({layer_prefix(block.index) + name: error for name, error in block.errors.items()})
            run.progress("blocks", block.index + 1, weights.config.num_layers)
            run.tell(block)
    calibration = Calibration(
        algorithm=options.algorithm,
        dataset=options.dataset,
        tokens_sha256=tokens_sha256,
        num_samples=options.num_samples,
        seq_len=options.seq_len,
        seed=options.seed,
        backend=plugin.name,
        output_errors=errors,
    )
    record = _write(plan, output, run, _from_journal(journal), calibration)
    journal.remove()
    return record


def _from_journal(journal: Journal) -> Encoder:
    """Codes chosen before; a block's file is read once."""
    at: dict[str, QuantizedBlock] = {}

    def encode(row: TensorPlan, tensor: np.ndarray, workers: ThreadPoolExecutor) -> PackedMatrix | np.ndarray:
        if not row.name.startswith("model.layers."):
            return round_to_nearest(row, tensor, workers)
        index = row.name.split(".")[2]
        if index not in at:
            at.clear()
            block = journal.get(int(index))
            assert block
            at[index] = block
        found = at[index].tensors.get(row.name.removeprefix(layer_prefix(int(index))))
        if found is None:
            return round_to_nearest(row, tensor, workers)
        return (
            pack_matrix(tensor.astype(np.float32), found) if isinstance(found, QTensor) else found.astype(tensor.dtype)
        )

    return encode
