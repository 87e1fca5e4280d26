"""What torch.compile needs on a CPU, and where its programs are kept."""

import os
import shutil
import sysconfig
from pathlib import Path

import torch

from llmq.errors import BackendError


def compiler_refusal(device: torch.device) -> str:
    """Why nothing can be compiled here.

    Args:
        device: For which device.

    Returns:
        The reason and the way out; empty when it can.
    """
    if device.type != "cpu":
        return ""
    names = [os.environ["CXX"]] if "CXX" in os.environ else ["g++", "clang++"]
    if not any(map(shutil.which, names)):
        return f"needs a C++ compiler, and {' or '.join(names)} is not here; install it, or leave --compile out"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "needs Python's C headers, and they are not here; install them, or leave --compile out"
    return ""


def prepare(device: torch.device) -> None:
    """To be called before anything is compiled: programs are kept for the next run.

    Args:
        device: For which device.

    Raises:
        BackendError: Nothing can be compiled here.
    """
    if reason := compiler_refusal(device):
        raise BackendError(f"compile: {reason}.")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "llmq" / "programs"))
