"""Whether a TPU is in this machine, without asking JAX."""

from pathlib import Path

#: Device nodes of TPU chips: the older driver's, and those handed to user space.
CHIP_NODES = ("accel[0-9]*", "vfio/[0-9]*")


def has_tpu_chip(dev: Path = Path("/dev")) -> bool:
    """Whether the machine has a TPU chip.

    Args:
        dev: Where device nodes are.

    Returns:
        True when there is a node of one.
    """
    return any(next(dev.glob(pattern), None) for pattern in CHIP_NODES)
