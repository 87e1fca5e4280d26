"""Where the server's lines go: standard error, one line each."""

import logging
import sys


def log_to_stderr() -> None:
    """Send the server's and uvicorn's lines to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for name, level in (("llmq", logging.INFO), ("uvicorn", logging.WARNING)):
        log = logging.getLogger(name)
        log.setLevel(level)
        log.handlers[:] = [handler]
        log.propagate = False
