"""Checkpoints of a run, beside its output: each whole or absent, so that a kill loses only steps.

One safetensors file a checkpoint, under the model's own tensor names, the same for every backend, any
number of processes and any mesh: what several processes saved, one resumes, and the other way round.

torch.distributed.checkpoint and orbax would write in parallel, a directory of files from each process that only
their own framework reads. They are not used, because one loop serves both frameworks here, one file that is
renamed once it is on the disk is whole or absent by itself, and any reader of safetensors can look into it. The
price: one process gathers the state, three float32 arrays a trained weight, in its own memory.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from llmq.checkpoint.run import PARTIAL, RUN, RunDirectory, check_run
from llmq.checkpoint.safetensors import encode_header, flush_to_disk, read_header, write_array

#: Lies beside the checkpoints.
METRICS = "metrics.jsonl"

_NAME = re.compile(r"step-(\d{8})\.safetensors")

_FILES = re.compile(rf"{_NAME.pattern}|{re.escape(METRICS)}")


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
        OutputError: Another process writes there.
    """

    def __init__(
        self, directory: Path, run: Mapping[str, Any], *, resume: bool, keep: int, is_main: bool = True
    ) -> None:
        self.directory, self._keep = directory, keep
        self._held = RunDirectory(directory, run, _FILES, resume=resume) if is_main else None
        self._is_new = self._held.is_new if self._held else not (resume and (directory / RUN).exists())
        if not (is_main or self._is_new):
            check_run(directory, run)

    def save(self, step: int, state: Mapping[str, np.ndarray]) -> None:
        """Keep a state; all of it or, if the process dies, nothing.

        Args:
            step: Steps done.
            state: From `Trainer.state`.
        """
        staged = self.directory / PARTIAL
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

    def close(self) -> None:
        """Leave everything for a later run."""
        if self._held:
            self._held.close()

    def remove(self) -> None:
        """Delete everything: the output stands."""
        if self._held:
            self._held.remove()

    def _path(self, step: int) -> Path:
        return self.directory / f"step-{step:08d}.safetensors"

    def _steps(self) -> list[int]:
        found = (_NAME.fullmatch(path.name) for path in self.directory.iterdir())
        return sorted(int(match[1]) for match in found if match)
