"""A run of ``llmq quantize``: the plan of a conversion, with codes chosen by an algorithm."""

import hashlib
import json
import os
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmq.backends.base import Calibrator, ModelOptions
from llmq.backends.registry import select_backend
from llmq.checkpoint.loader import ModelWeights, load_weights
from llmq.checkpoint.reader import Progress, no_progress
from llmq.checkpoint.record import Calibration, Record
from llmq.checkpoint.writer import check_target, to_json
from llmq.convert import ConversionPlan, convert, round_to_nearest
from llmq.errors import ConfigError
from llmq.model.names import Kind, layer_prefix
from llmq.model.tokenizer import Tokenizer
from llmq.quantize.blocks import QuantizedBlock, quantize_blocks
from llmq.quantize.data import calibration_sequences, hold_out, read_dataset
from llmq.quantize.encode import from_journal, searched
from llmq.quantize.journal import Journal
from llmq.quantize.options import ALGORITHMS, QuantizeOptions
from llmq.quantize.sensitivity import TABLE, Sensitivity, measure_sensitivity
from llmq.quantize.sensitivity_page import page
from llmq.quantize.targets import expected_kl, plan_for_target

#: Held-out sequences that sensitivity is measured on.
_HELDOUT_SAMPLES = 2


@dataclass(frozen=True, slots=True)
class Run:
    """How a run is carried out; nothing here changes a byte of the result.

    Attributes:
        force: Replace an existing output.
        resume: Go on where an interrupted run to the same output stopped.
        command: The command line, for the record.
        num_threads: None takes every core.
        progress: Told of stages and blocks, then of bytes written.
        tell: Told of every finished block.
    """

    force: bool = False
    resume: bool = False
    command: Sequence[str] = ()
    num_threads: int | None = None
    progress: Progress = no_progress
    tell: Callable[[QuantizedBlock], None] = lambda _: None


@dataclass(frozen=True, slots=True)
class _Setup:
    """What calibration needs.

    Attributes:
        weights: The source.
        sequences: To calibrate on.
        heldout: Others, to measure on; empty without a target.
        calibrator: Runs blocks.
        pool: Threads of the solver.
        facts: What identifies all this, as JSON values.
    """

    weights: ModelWeights
    sequences: list[np.ndarray]
    heldout: list[np.ndarray]
    calibrator: Calibrator
    pool: ThreadPoolExecutor
    facts: dict[str, Any]


def quantize(plan: ConversionPlan, options: QuantizeOptions, output: Path, run: Run = Run()) -> Record:
    """Quantize a model and write the artifact, completely or not at all.

    Args:
        plan: What becomes of each tensor: from `llmq.convert.plan_conversion`, or `mixed_plan`.
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
    algorithm = ALGORITHMS[options.algorithm]
    if not algorithm.needs_data:
        encode = round_to_nearest if options.algorithm == "rtn" else searched(algorithm.grid)
        calibration = Calibration(algorithm=options.algorithm)
        return convert(plan, output, encode=encode, calibration=calibration, **_conversion(run))
    schemes = {row.name: row.scheme for row in plan.coverage if row.kind is Kind.LINEAR and row.scheme}
    place = output.resolve()
    errors: dict[str, float] = {}
    with _open(plan, options, run) as setup:
        settings = {**setup.facts, "algorithm": options.algorithm}
        settings["schemes"] = {name: str(scheme) for name, scheme in schemes.items()}
        journal = Journal(place.with_name(f".{place.name}.llmq-quantize"), settings, resume=run.resume)
        blocks = quantize_blocks(
            setup.calibrator, setup.weights, schemes, setup.sequences, algorithm, setup.pool, journal.get
        )
        for block in blocks:
            journal.add(block)
            errors.update({layer_prefix(block.index) + name: error for name, error in block.errors.items()})
            run.progress("blocks", block.index + 1, setup.weights.config.num_layers)
            run.tell(block)
        calibration = Calibration(
            algorithm=options.algorithm,
            dataset=options.dataset,
            tokens_sha256=setup.facts["tokens"],
            num_samples=options.num_samples,
            seq_len=options.seq_len,
            seed=options.seed,
            backend=setup.facts["backend"],
            output_errors=errors,
        )
    record = convert(plan, output, encode=from_journal(journal), calibration=calibration, **_conversion(run))
    journal.remove()
    return record


def check_algorithm(plan: ConversionPlan, options: QuantizeOptions) -> None:
    """Refuse an algorithm that cannot make a scheme of the plan.

    Args:
        plan: What becomes of each tensor.
        options: The algorithm.

    Raises:
        ConfigError: There is such a scheme.
    """
    if ALGORITHMS[options.algorithm].grid != "hqq":
        return
    for row in plan.coverage:
        if row.kind is Kind.LINEAR and row.scheme and row.scheme.symmetric:
            raise ConfigError(
                f"algorithm={options.algorithm}: moves the zero of a grid, and {row.scheme} of {row.name} has none; "
                "add --asym or choose mse."
            )


def plan_mixed(
    plan: ConversionPlan, options: QuantizeOptions, output: Path, run: Run = Run()
) -> tuple[ConversionPlan, float]:
    """Measure what schemes cost, and choose them to meet the target.

    Args:
        plan: With the configuration's own schemes.
        options: The target, and data to measure on.
        output: The table is kept beside it, unless the options name a file.
        run: How it is carried out.

    Returns:
        The plan, or the one given where there is no target; and the divergence to expect of it.

    Raises:
        LlmqError: The options do not fit the model or the data, or no choice meets the target.
    """
    place = output.resolve()
    cache = options.sensitivity or place.with_name(f"{place.name}.sensitivity.json")
    table = _sensitivity(plan, options, cache, run)
    cache.with_suffix(".html").write_text(page(table), encoding="utf-8")
    if not options.target:
        return plan, expected_kl(plan, table)
    return plan_for_target(plan, table, options.target)


def _sensitivity(plan: ConversionPlan, options: QuantizeOptions, cache: Path, run: Run) -> list[Sensitivity]:
    """The table, measured unless the file holds it for the same inputs."""
    with _open(plan, options, run) as setup:
        config = plan.config
        facts = {**setup.facts, "symmetric": config.symmetric, "scale_dtype": config.scale_dtype}
        try:
            kept = json.loads(cache.read_bytes())
            if kept["facts"] == json.loads(to_json(facts)):
                return TABLE.validate_python(kept["table"])
        except (OSError, ValueError, TypeError, KeyError):
            pass  # there is none, or it is of no use: it is made anew
        table = measure_sensitivity(
            setup.calibrator, setup.weights, config, setup.sequences, setup.heldout, setup.pool, run.progress
        )
    cache.parent.mkdir(parents=True, exist_ok=True)
    cache.write_bytes(to_json({"facts": facts, "table": TABLE.dump_python(table, mode="json")}))
    return table


@contextmanager
def _open(plan: ConversionPlan, options: QuantizeOptions, run: Run) -> Generator[_Setup]:
    assert options.dataset is not None
    weights = load_weights(plan.model)
    if options.seq_len > weights.config.max_positions:
        raise ConfigError(
            f"seq_len={options.seq_len}: must be at most the model's context, {weights.config.max_positions}."
        )
    tokenizer = Tokenizer.from_files(weights.reader.side_files(), weights.config)
    text, rest = read_dataset(options.dataset), ""
    if options.holds_out:
        text, rest = hold_out(text)
    sequences = calibration_sequences(tokenizer, text, options.num_samples, options.seq_len, options.seed)
    heldout = calibration_sequences(tokenizer, rest, _HELDOUT_SAMPLES, options.seq_len, options.seed) if rest else []
    plugin, device = select_backend(options.backend, options.device)
    num_threads = run.num_threads or len(os.sched_getaffinity(0))
    opened = ModelOptions(device=device, dtype=options.dtype, max_len=options.seq_len)
    tokens = np.concatenate(sequences + heldout).astype("<i4").tobytes()
    facts = {
        "model": plan.model,
        "files": {name: path.stat().st_size for name, path in plan.reader.files.items()},
        "tokens": hashlib.sha256(tokens).hexdigest(),
        "seq_len": options.seq_len,
        "backend": plugin.name,
        "device": device,
        "dtype": options.dtype,
    }
    with ThreadPoolExecutor(num_threads) as pool:
        calibrator = plugin.open_calibrator(weights, opened, num_threads)
        yield _Setup(weights, sequences, heldout, calibrator, pool, facts)


def _conversion(run: Run) -> dict[str, Any]:
    return {
        "force": run.force,
        "command": run.command,
        "num_threads": run.num_threads,
        "progress": lambda _, done, total: run.progress("bytes", done, total),
    }
