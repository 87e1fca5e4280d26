"""A run of ``llmq qat``: checkpoint and data in, a checkpoint that is ready for its grid out."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from llmq.backends.base import Trainer
from llmq.backends.registry import select_backend
from llmq.checkpoint.writer import check_target
from llmq.evaluate.statistics import Recovered, Sample, ratio_stderr, recovered
from llmq.qat.adapter import adapter_directory, write_adapter
from llmq.qat.checkpoints import METRICS, Checkpoints
from llmq.qat.loop import Measurement, Watch, train, watch_nothing
from llmq.qat.output import write_checkpoint
from llmq.qat.plan import Plan, train_options


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run came to.

    Attributes:
        record: Of the output, as in its ``llmq.json``; None in processes that write nothing.
        measured: On the held-out rows, in the end.
        baseline: Likewise after training without fake quantization, where that was asked for.
        recovered: The share of that model's loss to rounding that this one does not have.
    """

    record: dict[str, Any] | None
    measured: Measurement
    baseline: Measurement | None
    recovered: Recovered | None


def run(
    plan: Plan,
    output: Path,
    *,
    resume: bool = False,
    force: bool = False,
    command: Sequence[str] = (),
    watch: Watch = watch_nothing,
) -> Outcome:
    """Train, and write the checkpoint; of a run that trains adapters, these as well.

    Args:
        plan: From `plan_run`.
        output: Directory to create.
        resume: Go on from the newest checkpoint of an interrupted run to the same output.
        force: Replace an existing output.
        command: The command line, for the record.
        watch: Told of every step and measurement.

    Returns:
        What it came to.

    Raises:
        LlmqError: The output cannot be written, or the run cannot go on.
    """
    place, recipe = output.resolve(), plan.recipe
    for target in (output, adapter_directory(output)) if recipe.lora else (output,):
        check_target(target, plan.weights.reader.path, force=force)
    plugin, device = select_backend(recipe.backend, recipe.device, recipe.runtime)
    held = ExitStack()

    def trained(plan: Plan, name: str, watch: Watch) -> tuple[Trainer, Checkpoints, Measurement]:
        trainer = plugin.open_trainer(plan.weights, train_options(plan, device))
        checkpoints = Checkpoints(
            place.with_name(name), plan.facts, resume=resume, keep=recipe.keep, is_main=trainer.is_main
        )
        held.callback(checkpoints.close)
        measured = train(trainer, plan.recipe, plan.steps, plan.num_steps, plan.held_out, checkpoints, watch)
        return trainer, checkpoints, measured

    with held:
        finished: list[Checkpoints] = []
        baseline = None
        if recipe.baseline:
            plain = recipe.model_copy(update={"fake_quant_after_n_steps": plan.num_steps})
            trainer, checkpoints, baseline = trained(
                replace(plan, recipe=plain),
                f"{place.name}.qat-baseline",
                lambda event: watch({**event, "baseline": True}),
            )
            trainer.close()
            finished.append(checkpoints)
        trainer, checkpoints, measured = trained(plan, f"{place.name}.qat", watch)
        finished.append(checkpoints)
        gain = _recovered(baseline, measured) if baseline else None
        result = {
            "eval_loss": measured.losses[0],
            "eval_loss_quantized": measured.losses[1],
            "baseline_eval_loss": baseline.losses[0] if baseline else None,
            "baseline_eval_loss_quantized": baseline.losses[1] if baseline else None,
            "recovered": gain.share if gain else None,
            "recovered_stderr": gain.stderr if gain else None,
            "verdict": str(gain.verdict) if gain else None,
            "rows_skipped": plan.num_skipped,
            "backend": plugin.name,
            "device": trainer.device,
            "dtype": trainer.dtype,
        }
        record = None
        if trainer.is_main:
            metrics = (checkpoints.directory / METRICS).read_bytes()
            record = write_checkpoint(output, trainer, plan.weights, recipe, plan.schemes, metrics, result, command)
        else:
            for name in plan.weights.shapes:  # every process takes part in gathering a weight
                trainer.weight(name)
        if recipe.lora:
            state = trainer.state()
            if trainer.is_main:
                write_adapter(output, state, recipe, recipe.lora, command)
        trainer.close()
        if trainer.is_main:
            for checkpoints in finished:
                checkpoints.remove()
        return Outcome(record, measured, baseline, gain)


def _recovered(baseline: Measurement, measured: Measurement) -> Recovered:
    """Of what rounding costs the plainly trained model, the share that the other does not lose."""
    before, rounded, trained = (
        _sample(nats, measured.num_tokens) for nats in (baseline.nats, baseline.quantized_nats, measured.quantized_nats)
    )
    return recovered(before, rounded, trained, higher_is_better=False)


def _sample(nats: np.ndarray, num_tokens: np.ndarray) -> Sample:
    items = nats * len(nats) / num_tokens.sum()
    names = tuple(str(index) for index in range(len(items)))
    return Sample(float(items.mean()), ratio_stderr(nats, num_tokens), items, names)
