"""One process at a time: a directory is taken, and no other llmq works in it until it is let go."""

import fcntl
import os
from pathlib import Path

from llmq.errors import OutputError


def hold(directory: Path, output: Path) -> int:
    """Make a directory, if it is not there, and take it for this process.

    Args:
        directory: Where to work.
        output: What the work is for, as the user named it.

    Returns:
        A descriptor; closing it, or the end of the process, lets go.

    Raises:
        OutputError: Another process has it.
    """
    while True:
        directory.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(directory, os.O_RDONLY)
        except FileNotFoundError:  # whoever had it has just removed it
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), directory.stat()):
                return descriptor
        except BlockingIOError as err:
            os.close(descriptor)
            raise OutputError(
                f"output={output}: another llmq is writing there; wait for it or choose another directory."
            ) from err
        except FileNotFoundError:
            pass  # likewise: what we hold has lost its name
        os.close(descriptor)
