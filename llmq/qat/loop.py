"""The training loop: what happens at each step, whichever backend trains.

A step depends on the trainer's state and its own number only: its rows, its learning rate and whether
it sees quantized weights all follow from the number. So a run resumed from any checkpoint does what it
would have done.
"""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmq.backends.base import TrainBatch, Trainer
from llmq.errors import TrainingError
from llmq.qat.checkpoints import METRICS, Checkpoints
from llmq.qat.packing import Steps
from llmq.qat.recipe import Recipe

#: Told of every step and every measurement, as it stands in the metrics.
Watch = Callable[[Mapping[str, Any]], None]


def watch_nothing(_event: Mapping[str, Any]) -> None:
    """A `Watch` that tells nobody."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Loss on the rows that are held out.

    Attributes:
        nats: float64 `[n]`, of each row.
        quantized_nats: Likewise, with every weight on its grid.
        num_tokens: int64 `[n]`, learned tokens of each.
    """

    nats: np.ndarray
    quantized_nats: np.ndarray
    num_tokens: np.ndarray

    @property
    def losses(self) -> tuple[float, float]:
        """Mean over all tokens, as they are and quantized."""
        total = self.num_tokens.sum()
        return float(self.nats.sum() / total), float(self.quantized_nats.sum() / total)


def measure(trainer: Trainer, batches: Sequence[TrainBatch]) -> Measurement:
    """Measure the loss with and without quantization.

    Args:
        trainer: The model. Its last forward pass is a quantized one.
        batches: Held-out rows.

    Returns:
        The losses.
    """
    nats, quantized = (
        np.concatenate([trainer.evaluate(batch, quantized=quantized) for batch in batches])
        for quantized in (False, True)
    )
    return Measurement(nats, quantized, np.concatenate([batch.learned.sum(axis=1) for batch in batches]))


def train(
    trainer: Trainer,
    recipe: Recipe,
    steps: Steps,
    num_steps: int,
    held_out: Sequence[TrainBatch],
    checkpoints: Checkpoints,
    watch: Watch = watch_nothing,
) -> Measurement:
    """Run all steps, from the newest checkpoint on.

    Args:
        trainer: In its initial state.
        recipe: What to do.
        steps: The batches.
        num_steps: How many steps.
        held_out: Rows to measure on.
        checkpoints: Of this run.
        watch: Told of every step and measurement.

    Returns:
        The last measurement.

    Raises:
        TrainingError: The loss is not a number any more.
    """
    first, state = checkpoints.load() or (0, None)
    if state is not None:
        trainer.load_state(first, state)
    metrics = _Metrics(checkpoints.directory / METRICS, first or -1, watch, is_main=trainer.is_main)
    last = None if first else _measured(trainer, held_out, 0, metrics)
    for step in range(first, num_steps):
        batches, rate, began = steps[step], recipe.learning_rate(step, num_steps), time.monotonic()
        done = trainer.step(batches, rate, quantized=recipe.is_quantized(step))
        if not math.isfinite(done.loss) or not math.isfinite(done.grad_norm):
            raise TrainingError(
                f"step {step + 1}: the loss is {done.loss:g} and the gradient's norm {done.grad_norm:g}; lower --lr "
                "or raise --warmup."
            )
        metrics.add(
            step=step + 1,
            loss=done.loss,
            grad_norm=done.grad_norm,
            learning_rate=rate,
            quantized=recipe.is_quantized(step),
            tokens_per_second=sum(batch.tokens.size for batch in batches) / (time.monotonic() - began),
            peak_bytes=trainer.peak_bytes(),
        )
        ends = step + 1 == num_steps
        if ends or (recipe.eval_every and (step + 1) % recipe.eval_every == 0):
            last = _measured(trainer, held_out, step + 1, metrics)
        if recipe.save_every and ((step + 1) % recipe.save_every == 0 or ends):
            state = trainer.state()
            if trainer.is_main:
                checkpoints.save(step + 1, state)
    return last or measure(trainer, held_out)


def _measured(trainer: Trainer, held_out: Sequence[TrainBatch], step: int, metrics: "_Metrics") -> Measurement:
    found = measure(trainer, held_out)
    loss, quantized_loss = found.losses
    metrics.add(step=step, eval_loss=loss, eval_loss_quantized=quantized_loss)
    return found


class _Metrics:
    """A line of JSON for each event; those of steps that a resumed run repeats are dropped."""

    def __init__(self, path: Path, last: int, watch: Watch, *, is_main: bool) -> None:
        self._path, self._watch, self._is_main = path, watch, is_main
        if is_main:
            kept = read_metrics(path, last) if path.exists() else []
            path.write_text("".join(json.dumps(event) + "\n" for event in kept), encoding="utf-8")

    def add(self, **event: Any) -> None:
        if self._is_main:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(event) + "\n")
            self._watch(event)


def read_metrics(path: Path, last: int | None = None) -> list[dict[str, Any]]:
    """Events of a run.

    Args:
        path: Its metrics.
        last: The last step to read; None reads all.

    Returns:
        One object each, in order. A line that a kill cut short ends them.
    """
    events = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            break
        if last is None or event["step"] <= last:
            events.append(event)
    return events
