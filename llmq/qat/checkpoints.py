"""Checkpoints of a run, beside its output: each whole or absent, so that a kill loses only steps.

One safetensors file a checkpoint, the same for every backend and any number of processes.
"""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from llmq.checkpoint.run import RUN, check_run, start_run
from llmq.checkpoint.safetensors import encode_header, flush_to_disk, read_header, write_array
from llmq.errors import ConfigError

#: Lies beside the checkpoints.
METRICS = "metrics.jsonl"

_NAME = re.compile(r"step-(\d{8})\.safetensors")


class Checkpoints:
    """The directory of a run.

    Args:
        directory: Beside the output.
        run: Everything that can change a bit of the result, as JSON values.
        resume: Go on from what the directory holds, rather than start anew.
        keep: Checkpoints to keep, the newest ones.
        is_main: Whether this process is the one that writes; others only read what was there before.

    Raises:
        ConfigError: The directory is of another run, or of something else.
    """

    def __init__(
        self, directory: Path, run: Mapping[str, Any], *, resume: bool, keep: int, is_main: bool = True
    ) -> None:
        self.directory, self._keep = directory, keep
        self._is_new = not (resume and (directory / RUN).exists())
        if not self._is_new:
            check_run(directory, run)
        if not (self._is_new and is_main):
            return
        if directory.exists():
            if not (directory / RUN).exists() and any(path.name != ".partial" for path in directory.iterdir()):
                raise ConfigError(f"output: {directory} is where checkpoints go, and holds something else; move it.")
            shutil.rmtree(directory)
        start_run(directory, run)

    def save(self, step: int, state: Mapping[str, np.ndarray]) -> None:
        """Keep a state; all of it or, if the process dies, nothing.

        Args:
            step: Steps done.
            state: From `Trainer.state`.
        """
        staged = self.directory / ".partial"
        with staged.open("wb") as file:
            file.write(encode_header({name: (array.dtype, array.shape) for name, array in state.items()}, {}))
            for array in state.values():
                write_array(file, array)
            flush_to_disk(file)
        staged.replace(self.directory / f"step-{step:08d}.safetensors")
        for older in self._steps()[: -self._keep]:
            self._path(older).unlink()

    def load(self) -> tuple[int, dict[str, np.ndarray]] | None:
        """The newest state.

        Returns:
            Steps done and the state; None where there is none.
        """
        steps = [] if self._is_new else self._steps()
        if not steps:
            return None
        stored, _ = read_header(self._path(steps[-1]))
        return steps[-1], {name: tensor.read() for name, tensor in stored.items()}

    def remove(self) -> None:
        """Delete everything: the output stands."""
        shutil.rmtree(self.directory)

    def _path(self, step: int) -> Path:
        return self.directory / f"step-{step:08d}.safetensors"

    def _steps(self) -> list[int]:
        found = (_NAME.fullmatch(path.name) for path in self.directory.iterdir())
        return sorted(int(match[1]) for match in found if match)
