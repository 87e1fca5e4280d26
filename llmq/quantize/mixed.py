"""Mixed precision: a table of what schemes cost, a plan that meets a target, an artifact held against it."""

import json
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from llmq.backends.base import ModelOptions
from llmq.backends.registry import select_backend
from llmq.checkpoint.loader import load_weights
from llmq.checkpoint.record import Record
from llmq.checkpoint.writer import check_target, swap, to_json
from llmq.convert import ConversionPlan
from llmq.errors import ConfigError
from llmq.evaluate.divergence import measure_divergence
from llmq.model.tokenizer import Tokenizer
from llmq.quantize.data import hold_out, read_dataset
from llmq.quantize.options import QuantizeOptions, Target
from llmq.quantize.run import quantize
from llmq.quantize.sensitivity import TABLE, Sensitivity, measure_sensitivity
from llmq.quantize.sensitivity_page import page
from llmq.quantize.setup import PLAIN, Run, set_up
from llmq.quantize.targets import expected_kl, plan_for_target


def plan_mixed(
    plan: ConversionPlan, options: QuantizeOptions, output: Path, run: Run = PLAIN, target: Target | None = None
) -> tuple[ConversionPlan, float]:
    """Measure what schemes cost, and choose them to meet the target.

    Args:
        plan: With the configuration's own schemes.
        options: The target, and data to measure on.
        output: The table is kept beside it, unless the options name a file.
        run: How it is carried out.
        target: In place of that of the options.

    Returns:
        The plan, or the one given where there is no target; and the divergence to expect of it.

    Raises:
        LlmqError: The options do not fit the model or the data, or no choice meets the target.
    """
    place = output.resolve()
    cache = options.sensitivity or place.with_name(f"{place.name}.sensitivity.json")
    table = _sensitivity(plan, options, cache, run)
    cache.with_suffix(".html").write_text(page(table), encoding="utf-8")
    target = target or options.target
    return plan_for_target(plan, table, target) if target else (plan, expected_kl(plan, table))


def _sensitivity(plan: ConversionPlan, options: QuantizeOptions, cache: Path, run: Run) -> list[Sensitivity]:
    """The table, measured unless the file holds it for the same inputs."""
    with set_up(plan, options, run) as setup:
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


def quantize_to_divergence(
    plan: ConversionPlan, options: QuantizeOptions, output: Path, run: Run = PLAIN
) -> tuple[Record, float]:
    """Quantize with as few bytes as keep the divergence, measured on the artifact itself, within the target.

    The sum over stages of what each costs alone is where it starts; where the artifact turns out to diverge
    more than the target, the expectation is lowered by as much, and the artifact made again.

    Args:
        plan: With the configuration's own schemes.
        options: With `max_kl` as the target.
        output: Directory to create.
        run: How the run is carried out.

    Returns:
        The record, and the divergence measured on held-out text, in nats a token.

    Raises:
        LlmqError: As for `quantize`, or the target cannot be met.
    """
    check_target(output, plan.reader.path, force=run.force)
    wanted = options.target.max_kl
    assert wanted is not None
    place = output.resolve()
    candidate = place.with_name(f".{place.name}.llmq-candidate")
    bound = wanted
    try:
        found = wanted
        for _ in range(_MAX_ROUNDS):
            mixed, _ = plan_mixed(plan, options, output, run, Target(max_kl=bound))
            record = quantize(mixed, options, candidate, replace(run, force=True))
            found = _measure_divergence(plan, options, candidate)
            if found <= wanted:
                swap(candidate, place)
                return record, found
            bound *= _CAUTION * wanted / found
    finally:
        shutil.rmtree(candidate, ignore_errors=True)
    raise ConfigError(
        f"max_kl={wanted}: was not met in {_MAX_ROUNDS} attempts, the last diverges by {found:.4g}; name a higher one."
    )


#: Artifacts made to meet a divergence, and by how much each expects less than the one before missed by.
_MAX_ROUNDS, _CAUTION = 4, 0.9

#: Held-out sequences that an artifact is measured on.
_MEASURED_SAMPLES = 16


def _measure_divergence(plan: ConversionPlan, options: QuantizeOptions, artifact: Path) -> float:
    """Of an artifact's predictions from the source's, on held-out text."""
    assert options.dataset is not None
    _, text = hold_out(read_dataset(options.dataset))
    weights, quantized = load_weights(plan.model), load_weights(str(artifact))
    tokenizer = Tokenizer.from_files(weights.reader.side_files(), weights.config)
    plugin, device = select_backend(options.backend, options.device)
    how = ModelOptions(device=device, dtype=options.dtype, max_len=options.seq_len)
    with closing(plugin.open_model(weights, how)) as baseline, closing(plugin.open_model(quantized, how)) as model:
        length = _MEASURED_SAMPLES * options.seq_len
        measured = measure_divergence(model, baseline, tokenizer, text, window=options.seq_len, max_tokens=length)
    return measured.metrics["divergence/kl_mean"].value
