"""Mixed precision: a table of what schemes cost, and a plan that meets a target."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmq.checkpoint.writer import to_json
from llmq.convert import ConversionPlan
from llmq.quantize.options import ALGORITHMS, QuantizeOptions
from llmq.quantize.sensitivity import TABLE, Sensitivity, costs, measure_sensitivity
from llmq.quantize.sensitivity_page import page
from llmq.quantize.setup import PLAIN, Run, set_up
from llmq.quantize.targets import expected_kl, plan_for_target


@dataclass(frozen=True, slots=True)
class Mixed:
    """What a measurement came to.

    Attributes:
        plan: Meets the target; the one given where there is none.
        kl: The divergence to expect of it, in nats a token.
        sensitivity: Stage -> what the coarsest scheme costs there alone, for the record.
    """

    plan: ConversionPlan
    kl: float
    sensitivity: Mapping[str, float]


def plan_mixed(plan: ConversionPlan, options: QuantizeOptions, output: Path, run: Run = PLAIN) -> Mixed:
    """Measure what schemes cost, and choose them to meet the target.

    Args:
        plan: With the configuration's own schemes.
        options: The target, and data to measure on.
        output: The table is kept beside it, unless the options name a file.
        run: How it is carried out.

    Returns:
        The plan, and what to expect of it.

    Raises:
        LlmqError: The options do not fit the model or the data, or no choice meets the target.
    """
    table = sensitivity_table(plan, options, output, run)
    if options.target:
        return Mixed(*plan_for_target(plan, table, options.target), costs(table))
    return Mixed(plan, expected_kl(plan, table), costs(table))


def sensitivity_table(
    plan: ConversionPlan, options: QuantizeOptions, output: Path, run: Run = PLAIN
) -> Sequence[Sensitivity]:
    """What each scheme costs each stage; measured once, and kept in a file with a page beside it.

    Args:
        plan: The model.
        options: Data to measure on.
        output: As for `plan_mixed`.
        run: How it is carried out.

    Returns:
        The table, read from the file where that holds it for the same inputs.

    Raises:
        LlmqError: The options do not fit the model or the data.
    """
    place = output.resolve()
    cache = options.sensitivity or place.with_name(f"{place.name}.sensitivity.json")
    with set_up(plan, options, run) as setup:
        config = plan.config
        facts = {
            **setup.facts,
            "algorithm": options.algorithm,
            "symmetric": config.symmetric,
            "scale_dtype": config.scale_dtype,
        }
        table = _kept(cache, facts)
        if table is None:
            table = measure_sensitivity(
                setup.calibrator,
                setup.weights,
                config,
                ALGORITHMS[options.algorithm],
                setup.sequences,
                setup.heldout,
                setup.pool,
                run.progress,
            )
    cache.parent.mkdir(parents=True, exist_ok=True)
    staged = cache.with_name(f".{cache.name}.partial")
    staged.write_bytes(to_json({"facts": facts, "table": TABLE.dump_python(table, mode="json")}))
    staged.replace(cache)
    cache.with_suffix(".html").write_text(page(table), encoding="utf-8")
    return table


def _kept(cache: Path, facts: Mapping[str, object]) -> list[Sensitivity] | None:
    """The table in a file; None where there is none, or one of other inputs."""
    try:
        kept = json.loads(cache.read_bytes())
        return TABLE.validate_python(kept["table"]) if kept["facts"] == json.loads(to_json(facts)) else None
    except (OSError, ValueError, TypeError, KeyError):
        return None
