"""The course of a training run, read from the log that ``llmq qat`` leaves beside the weights."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmq.errors import ConfigError

#: Name of that log: JSON lines, one a step and one a measurement.
METRICS = "qat_metrics.jsonl"

#: Losses in nats a token, each behind the number of steps done.
Curve = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Training:
    """A run of ``llmq qat``.

    Attributes:
        label: The directory's name, or the log's.
        losses: Of each step's own batches.
        held_out: On rows that are not trained on.
        held_out_quantized: Likewise, with every weight on its grid.
        fake_quant_from: The first step that saw weights on their grids; None where none did.
    """

    label: str
    losses: Curve
    held_out: Curve
    held_out_quantized: Curve
    fake_quant_from: int | None


def is_training(path: Path) -> bool:
    """Whether a path is meant as a training run: a directory, or JSON lines.

    Args:
        path: Whatever the user named.

    Returns:
        True for what `read_training` is to read.
    """
    return path.is_dir() or path.suffix == ".jsonl"


def read_training(path: Path) -> Training:
    """Read a run.

    Args:
        path: The directory that ``llmq qat`` wrote, or a log.

    Returns:
        Its course.

    Raises:
        ConfigError: There is no log, or it is damaged.
    """
    log = path / METRICS if path.is_dir() else path
    try:
        text = log.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as err:
        reason = getattr(err, "strerror", None) or err
        raise ConfigError(f"{log}: cannot be read ({reason}); give a directory or a log that llmq qat wrote.") from err
    curves: dict[str, list[tuple[int, float]]] = {"loss": [], "eval_loss": [], "eval_loss_quantized": []}
    quantized: list[int] = []
    for number, line in enumerate(text.split("\n")[:-1], 1):  # a line without an end is still being written
        try:
            event = json.loads(line)
            step = int(event["step"])
            for field in curves.keys() & event.keys():
                curves[field].append((step, _number(event, field)))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
            raise ConfigError(f"{log}: line {number} is no step of llmq qat; give an undamaged log.") from err
        if event.get("quantized"):
            quantized.append(step)
    if not any(curves.values()):
        raise ConfigError(f"{log}: holds no step of llmq qat.")
    name = path.resolve().name if path.is_dir() or path.name != METRICS else path.resolve().parent.name
    losses, held_out, held_out_quantized = (tuple(curve) for curve in curves.values())
    return Training(name, losses, held_out, held_out_quantized, min(quantized, default=None))


def _number(event: Mapping[str, Any], field: str) -> float:
    value = float(event[field])
    if not math.isfinite(value):
        raise ValueError(f"{field} is not finite")
    return value
