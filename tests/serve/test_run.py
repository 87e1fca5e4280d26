"""From a model's name to a server: the thread that a model is opened on."""

import subprocess
import sys
import threading

import pytest

from llmq.errors import BackendError
from llmq.serve.run import apart

_LEAVES_NO_THREADS = """
import os, time
os.environ["OMP_NUM_THREADS"] = "3"
import torch
from llmq.serve.run import apart

def count():
    return len(os.listdir("/proc/self/task"))

def compute():
    torch.ones(1 << 20).exp_()
    return count()

before = count()
assert apart(compute) >= before + 2  # itself, and one that helps it
until = time.monotonic() + 10
while count() > before and time.monotonic() < until:
    time.sleep(0.01)
assert count() == before, (before, count())
"""


def test_apart_hands_over_what_is_returned_and_raised() -> None:
    ran_on = apart(threading.current_thread)
    assert ran_on is not threading.current_thread()
    assert not ran_on.is_alive()

    def fail() -> None:
        raise BackendError("device: is not there.")

    with pytest.raises(BackendError, match="is not there"):
        apart(fail)


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads as Linux shows them")
def test_apart_leaves_no_openmp_threads() -> None:
    """More of them than cores, and none waits awake for the engine's next kernel."""
    pytest.importorskip("torch")
    subprocess.run([sys.executable, "-c", _LEAVES_NO_THREADS], check=True, timeout=300)
