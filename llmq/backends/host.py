"""What a process can know without a framework: the machine's memory, and its own place among those that train."""

import os
from pathlib import Path

from llmq.backends.base import Memory

#: What launchers set: how many processes there are, and which one this is. torchrun's, and JAX's.
_PLACES = (("WORLD_SIZE", "RANK"), ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"))

_MEMINFO = Path("/proc/meminfo")


def host_memory() -> Memory:
    """Memory of the machine.

    Returns:
        On Linux, what the kernel calls available; elsewhere the pages that are free.
    """
    if _MEMINFO.is_file():
        fields = dict(line.split(":") for line in _MEMINFO.read_text().splitlines())
        total, free = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
        return Memory(total, free)
    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page
    return Memory(total, os.sysconf("SC_AVPHYS_PAGES") * page if "SC_AVPHYS_PAGES" in os.sysconf_names else total)


def is_first_process() -> bool:
    """Whether this process is the one that speaks for those that a launcher started together."""
    return all(os.environ.get(size, "1") == "1" or os.environ.get(rank, "0") == "0" for size, rank in _PLACES)
