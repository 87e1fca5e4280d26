"""What a run has finished, kept beside its output until it ends.

The first line says what was run; each further line holds answers that belong together. A line
that a kill cut short is left out.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmq.errors import ConfigError, OutputError


class Journal:
    """Finished answers by key.

    Args:
        path: The file; None keeps nothing.
        run: Everything that can change an answer, as JSON values.
        resume: Go on from what the file holds, rather than start anew.

    Raises:
        ConfigError: The file is of another run, or is no journal.
        OutputError: It cannot be written.
    """

    def __init__(self, path: Path | None, run: Mapping[str, Any], *, resume: bool = False) -> None:
        self._path = path
        self._answers: dict[str, Any] = {}
        self._file = None
        if path is None:
            return
        header = json.dumps({"run": run}, sort_keys=True)
        lines = _complete_lines(path) if resume and path.is_file() else []
        if lines:
            _check_same(path, lines[0], json.loads(header)["run"])
            for line in lines[1:]:
                self._answers.update(json.loads(line))
        try:
            self._file = path.open("w", encoding="utf-8")
        except OSError as err:
            raise OutputError(f"{path}: cannot be written ({err.strerror or err}).") from err
        self._write(header)
        for line in lines[1:]:
            self._write(line)

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, key: str) -> Any:
        """An answer from before.

        Args:
            key: Of the request.

        Returns:
            What `add` was given, or None.
        """
        return self._answers.get(key)

    def add(self, answers: Mapping[str, Any]) -> None:
        """Keep answers; all of them or, if the process dies, none.

        Args:
            answers: By key, as JSON values.
        """
        if self._file:
            self._write(json.dumps(answers))

    def close(self) -> None:
        """Leave the file for a later run."""
        if self._file:
            self._file.close()

    def remove(self) -> None:
        """Delete the file: the run is complete."""
        self.close()
        if self._path:
            self._path.unlink(missing_ok=True)

    def _write(self, line: str) -> None:
        assert self._file
        self._file.write(line + "\n")
        self._file.flush()


def _complete_lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split("\n")[:-1]
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"{path}: cannot be read ({err}); delete it to start anew.") from err


def _check_same(path: Path, line: str, run: Mapping[str, Any]) -> None:
    try:
        before = json.loads(line)["run"]
    except (ValueError, KeyError, TypeError) as err:
        raise ConfigError(f"{path}: is not a journal of llmq eval; delete it to start anew.") from err
    changed = sorted(name for name in {*before, *run} if before.get(name) != run.get(name))
    if changed:
        name = changed[0]
        raise ConfigError(
            f"{path}: is of a run with {name}={before.get(name)!r}, now it is {run.get(name)!r}; leave out --resume to start anew."
        )
