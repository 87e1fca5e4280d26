"""A directory for what a long run keeps beside its output: what is run, and whether a later run is the same."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmq.checkpoint.writer import to_json
from llmq.errors import ConfigError

#: Holds what is run; everything else of the run lies beside it.
RUN = "run.json"


def start_run(directory: Path, run: Mapping[str, Any]) -> None:
    """Make the directory, and note what is run; a directory without the note is of no run.

    Args:
        directory: Not there yet.
        run: Everything that can change a bit of the result, as JSON values.
    """
    directory.mkdir(parents=True)
    staged = directory / ".partial"
    staged.write_bytes(to_json(run))
    staged.replace(directory / RUN)


def check_run(directory: Path, run: Mapping[str, Any]) -> None:
    """Refuse to go on with another run.

    Args:
        directory: Of the interrupted run.
        run: As for `start_run`.

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
