"""The machine's own memory, for backends that run on its CPU."""

import os
from pathlib import Path

from llmq.backends.base import Memory

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
