"""Which device JAX computes on, found out before JAX looks for itself.

With the TPU runtime installed and no TPU in the machine, JAX's own search prints errors and takes
seconds. So the chips are looked for here, in ``/dev``, and JAX is told the answer; a platform the
user chose through ``JAX_PLATFORMS`` stays.

Compiled programs are kept between runs in ``$XDG_CACHE_HOME/llmq/jax`` (``~/.cache/llmq/jax``),
unless ``JAX_COMPILATION_CACHE_DIR`` names another place. The directory may be deleted at any time.
"""

import os
from collections.abc import Sequence
from importlib.metadata import entry_points, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.monitoring

from llmq.backends.base import Memory, Probe
from llmq.backends.host import host_memory
from llmq.backends.tpu.chips import has_tpu_chip
from llmq.errors import BackendError

Device = Any  # jax.Device, which is not a type to type checkers

#: The name of a device -> why it may be missing, and what JAX calls the platform.
DEVICES = {
    "cpu": ("JAX_PLATFORMS leaves the cpu out", "cpu"),
    "tpu": ("there is no TPU chip under /dev, or libtpu is not installed", "tpu"),
    "gpu": ("there is no GPU, or JAX has no plugin for it", "cuda"),
}


def cache_directory() -> Path:
    """Where compiled programs are kept.

    Returns:
        A directory; it need not exist.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llmq" / "jax"


def configure() -> None:
    """Tell JAX its platforms and its cache. Changes nothing once JAX has begun to compute."""
    if not jax.config.values["jax_platforms"]:
        jax.config.update("jax_platforms", ",".join(_platforms()))
    if not jax.config.values["jax_compilation_cache_dir"] and _is_writable(cache_directory()):
        jax.config.update("jax_compilation_cache_dir", str(cache_directory()))
        # JAX keeps only what took a second; a start waits for what took less as well.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def _is_writable(directory: Path) -> bool:
    existing = next(place for place in (directory, *directory.parents) if place.exists())
    return os.access(existing, os.W_OK)


def _platforms() -> Sequence[str]:
    found = []
    if has_tpu_chip() and find_spec("libtpu"):
        found.append("tpu")
    if Path("/dev/nvidiactl").exists() and any("cuda" in point.name for point in entry_points(group="jax_plugins")):
        found.append("cuda")
    return [*found, "cpu"]


def open_device(name: str | None) -> Device:
    """The device to compute on, the first of `open_devices`.

    Args:
        name: As there.

    Returns:
        The device.

    Raises:
        BackendError: There is none here.
    """
    return open_devices(name)[0]


def open_devices(name: str | None) -> list[Device]:
    """The devices to compute on; those of all processes, where there are several.

    Args:
        name: A key of `DEVICES`; None takes an accelerator if there is one, else the CPU.

    Returns:
        All devices of that kind.

    Raises:
        BackendError: There is no such device here.
    """
    configure()
    _join_processes()
    if name is not None and name not in DEVICES:
        raise BackendError(
            f"device={name!r}: backend tpu knows {', '.join(DEVICES)}; leave it out for the best one here."
        )
    reason, platform = DEVICES[name] if name else ("JAX finds no device", None)
    try:
        return jax.devices(platform)
    except RuntimeError as err:
        raise BackendError(f"device={name or 'auto'!r}: not usable here: {reason}; use --device cpu.") from err


def _join_processes() -> None:
    """Become one of several processes, where the environment names their coordinator as JAX does."""
    if "JAX_COORDINATOR_ADDRESS" in os.environ and not jax.distributed.is_initialized():
        size, rank = (int(os.environ[name]) for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"))
        jax.distributed.initialize(os.environ["JAX_COORDINATOR_ADDRESS"], size, rank)


def memory(name: str | None) -> Memory:
    """How much a model may take.

    Args:
        name: As for `open_device`.

    Returns:
        Of that device; of the machine on the CPU.

    Raises:
        BackendError: There is no such device here.
    """
    device = open_device(name)
    if device.platform == "cpu":
        return host_memory()
    stats = device.memory_stats()
    return Memory(stats["bytes_limit"], stats["bytes_limit"] - stats["bytes_in_use"])


_num_compiles = 0


def _count(event: str, duration_secs: float, **kwargs: str | int) -> None:  # noqa: ARG001
    global _num_compiles
    _num_compiles += event == "/jax/core/compile/backend_compile_duration"


jax.monitoring.register_event_duration_secs_listener(_count)


def num_compiles() -> int:
    """How many programs JAX compiled in this process, or found in its cache.

    Returns:
        All of them, those of single operations too.
    """
    return _num_compiles


def probe() -> list[Probe]:
    """What of JAX is usable here.

    Returns:
        Rows ``jax``, ``accelerator`` and ``tpu compiler``. JAX itself is asked for devices only
        where there is a chip.
    """
    return [
        Probe("jax", True, f"jax {version('jax')}, jaxlib {version('jaxlib')}"),
        _probe_accelerator(),
        _probe_compiler(),
    ]


def _probe_accelerator() -> Probe:
    if not has_tpu_chip():
        return Probe("accelerator", False, "no TPU chip in this machine; JAX computes on the CPU")
    try:
        device = open_device("tpu")
    except BackendError as err:
        return Probe("accelerator", False, str(err), "pip install 'llmq[tpu]'")
    return Probe("accelerator", True, f"{len(jax.devices('tpu'))} x {device.device_kind}")


def _probe_compiler() -> Probe:
    if find_spec("libtpu") is None:
        return Probe("tpu compiler", False, "libtpu is not installed", "pip install 'llmq[tpu]'")
    return Probe("tpu compiler", True, f"libtpu {version('libtpu')}: compiles for TPUs, with or without one")
