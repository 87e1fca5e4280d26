"""A run's metrics as event files, which TensorBoard shows."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from llmq.errors import ConfigError

#: Field of an event -> its name in TensorBoard, which groups by what stands before the slash.
TAGS = MappingProxyType(
    {
        "loss": "train/loss",
        "grad_norm": "train/gradient_norm",
        "learning_rate": "train/learning_rate",
        "tokens_per_second": "train/tokens_per_second",
        "peak_bytes": "train/peak_bytes",
        "eval_loss": "eval/loss",
        "eval_loss_quantized": "eval/loss_quantized",
    }
)


class EventFiles:
    """A `loop.Watch` that writes what it is told: the run as ``qat``, one without fake quantization as ``baseline``.

    Everything is written out at the end of its ``with`` block. A run's first event hides what the directory shows of that step and later ones: a resumed run goes on where
    it was interrupted, a new one takes an older one's place.

    Args:
        directory: Of all runs; created with the first event.

    Raises:
        ConfigError: tensorboardX is not installed.
    """

    def __init__(self, directory: Path) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError as err:
            raise ConfigError(
                f"tensorboard={directory}: needs tensorboardX, which is not installed; install llmq[qat], or leave it out."
            ) from err
        self._directory, self._open = directory, SummaryWriter
        self._writers: dict[str, SummaryWriter] = {}

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Write one event."""
        name, step = "baseline" if event.get("baseline") else "qat", event["step"]
        if name not in self._writers:
            self._writers[name] = self._open(
                str(self._directory / name), purge_step=step, flush_secs=10, filename_suffix=f".{step}"
            )
        for field, tag in TAGS.items():
            if field in event:
                self._writers[name].add_scalar(tag, event[field], step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        for writer in self._writers.values():
            writer.close()
