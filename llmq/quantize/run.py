"""A run of ``llmq quantize``: the plan of a conversion, with codes chosen by an algorithm."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

from llmq.checkpoint.record import Calibration, Record
from llmq.checkpoint.writer import check_target
from llmq.config import Scheme
from llmq.convert import ConversionPlan, convert, round_to_nearest
from llmq.errors import ConfigError
from llmq.model.names import Kind, layer_prefix
from llmq.quantize.blocks import quantize_blocks
from llmq.quantize.encode import from_journal, searched
from llmq.quantize.journal import Journal
from llmq.quantize.options import ALGORITHMS, QuantizeOptions
from llmq.quantize.setup import PLAIN, Run, Setup, set_up


def quantize(
    plan: ConversionPlan,
    options: QuantizeOptions,
    output: Path,
    run: Run = PLAIN,
    sensitivity: Mapping[str, float] = MappingProxyType({}),
) -> Record:
    """Quantize a model and write the artifact, completely or not at all.

    Args:
        plan: What becomes of each tensor: from `llmq.convert.plan_conversion`, or `llmq.quantize.mixed.plan_mixed`.
        options: How codes are chosen.
        output: Directory to create.
        run: How the run is carried out.
        sensitivity: Stage -> what the coarsest scheme costs there alone, for the record.

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
        calibration = Calibration(algorithm=options.algorithm, sensitivity=dict(sensitivity))
        return convert(plan, output, encode=encode, calibration=calibration, **_conversion(run))
    place = output.resolve()
    with ExitStack() as held:
        with set_up(plan, options, run) as setup:
            schemes = {row.name: row.scheme for row in plan.coverage if row.kind is Kind.LINEAR and row.scheme}
            settings = {**setup.facts, "algorithm": options.algorithm}
            settings["schemes"] = {name: str(scheme) for name, scheme in schemes.items()}
            journal = Journal(place.with_name(f".{place.name}.llmq-quantize"), settings, resume=run.resume)
            held.callback(journal.close)
            calibration = _calibrate(setup, schemes, options, journal, run)
            calibration = calibration.model_copy(update={"sensitivity": dict(sensitivity)})
        record = convert(plan, output, encode=from_journal(journal), calibration=calibration, **_conversion(run))
        journal.remove()
    return record


def _calibrate(
    setup: Setup, schemes: Mapping[str, Scheme], options: QuantizeOptions, journal: Journal, run: Run
) -> Calibration:
    """Quantize every block that the journal does not hold yet, into it."""
    algorithm = ALGORITHMS[options.algorithm]
    errors: dict[str, float] = {}
    few_tokens: dict[str, int] = {}
    for block in quantize_blocks(
        setup.calibrator, setup.weights, schemes, setup.sequences, algorithm, setup.pool, journal.get
    ):
        journal.add(block)
        prefix = layer_prefix(block.index)
        errors.update({prefix + name: round(error, 6) for name, error in block.errors.items()})
        few_tokens.update({prefix + name: count for name, count in block.few_tokens.items()})
        run.progress("blocks", block.index + 1, setup.weights.config.num_layers)
        run.tell(block)
    return Calibration(
        algorithm=options.algorithm,
        dataset=options.dataset,
        tokens_sha256=setup.facts["tokens"],
        num_samples=options.num_samples,
        seq_len=options.seq_len,
        seed=options.seed,
        backend=setup.facts["backend"],
        output_errors=errors,
        few_tokens=few_tokens,
    )


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


def _conversion(run: Run) -> dict[str, Any]:
    return {
        "force": run.force,
        "command": run.command,
        "num_threads": run.num_threads,
        "progress": lambda _, done, total: run.progress("bytes", done, total),
    }
