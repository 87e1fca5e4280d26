"""A directory for what a long run keeps beside its output: whose it is, what is run, and whether a later run is the same."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmq.checkpoint.hold import hold
from llmq.checkpoint.writer import to_json
from llmq.errors import ConfigError

#: Holds what is run; everything else of the run lies beside it.
RUN = "run.json"

#: Where a file is written before it takes its name.
PARTIAL = ".partial"


class RunDirectory:
    """A run's directory, in the hands of one process from here to `close` or `remove`.

    Args:
        path: Beside the output; made if it is not there.
        run: Everything that can change a bit of the result, as JSON values.
        files: Names of what the run keeps there. A directory that holds anything else is nobody's to delete.
        resume: Go on from what the directory holds, if it is of a run, rather than start anew.

    Attributes:
        path: As given.
        is_new: Whether the run starts anew.

    Raises:
        ConfigError: The directory is of another run, or holds something else.
        OutputError: Another process is at work there.
    """

    def __init__(self, path: Path, run: Mapping[str, Any], files: re.Pattern[str], *, resume: bool) -> None:
        self.path, self._files = path, files
        self._descriptor: int | None = hold(path, path)
        try:
            self._check_ours()
            self.is_new = not (resume and (path / RUN).exists())
            if self.is_new:
                self._clear()
                (path / PARTIAL).write_bytes(to_json(run))
                (path / PARTIAL).replace(path / RUN)
            else:
                check_run(path, run)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leave the directory for a later run."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def remove(self) -> None:
        """Delete everything: the output stands. What appeared there and is not of the run stays."""
        self._clear()
        if not any(self.path.iterdir()):
            self.path.rmdir()
        self.close()

    def _check_ours(self) -> None:
        is_run = (self.path / RUN).exists()
        for file in sorted(self.path.iterdir()):
            known = file.name == PARTIAL or (is_run and self._is_known(file))
            if not (known and file.is_file()):
                raise ConfigError(
                    f"output: {self.path} is where unfinished work is kept, and holds something else, {file.name}; move it."
                )

    def _clear(self) -> None:
        (self.path / RUN).unlink(missing_ok=True)  # last to be written and first to go: no note, no run
        for file in list(self.path.iterdir()):
            if self._is_known(file):
                file.unlink()

    def _is_known(self, file: Path) -> bool:
        return file.name in (RUN, PARTIAL) or self._files.fullmatch(file.name) is not None


def check_run(directory: Path, run: Mapping[str, Any]) -> None:
    """Refuse to go on with another run.

    Args:
        directory: Of the interrupted run.
        run: Everything that can change a bit of the result, as JSON values.

    Raises:
        ConfigError: A setting has changed, or the directory is of no run.
    """
    try:
        before = json.loads((directory / RUN).read_bytes())
    except (OSError, ValueError) as err:
        raise ConfigError(f"resume: {directory} holds no usable run; leave out --resume to start anew.") from err
    now = json.loads(to_json(run))
    changed = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
    if changed:
        name = changed[0]
        raise ConfigError(
            f"resume: the interrupted run had {name}={before.get(name)!r}, now it is {now.get(name)!r}; "
            "give the same settings, or leave out --resume to start anew."
        )
