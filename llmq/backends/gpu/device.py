"""Which torch devices and kernels are usable here."""

import ctypes
from contextlib import suppress
from typing import Any

import torch

from llmq.backends.base import ComputeType, Memory, ModelOptions, Probe
from llmq.backends.host import host_memory
from llmq.errors import BackendError

DTYPES: dict[ComputeType, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}

#: tinygemm needs bfloat16 tensor cores.
MIN_CUDA_CAPABILITY = (8, 0)


def choose_device(options: ModelOptions) -> tuple[torch.device, ComputeType]:
    """The device and compute type to open a model with.

    Args:
        options: What the user asked for.

    Returns:
        The CUDA device when there is one, else the CPU; bfloat16 unless asked otherwise.

    Raises:
        BackendError: The named device is not there.
    """
    name = options.device or ("cuda" if has_cuda() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as err:
        raise BackendError(f"device={name!r}: torch knows no such device; use cpu or cuda.") from err
    if device.type not in ("cpu", "cuda"):
        raise BackendError(f"device={name!r}: the gpu backend runs on cpu and cuda.")
    if device.type == "cuda" and not has_cuda():
        raise BackendError(f"device={name!r}: this torch ({torch.__version__}) finds no CUDA device; use --device cpu.")
    return device, options.dtype or "bfloat16"


def memory(name: str | None) -> Memory:
    """How much a model may take.

    Args:
        name: As in `ModelOptions.device`.

    Returns:
        Of the device.

    Raises:
        BackendError: The named device is not there.
    """
    device, _ = choose_device(ModelOptions(device=name))
    if device.type == "cpu":
        return host_memory()
    free, total = torch.cuda.mem_get_info(device)
    return Memory(total, free)


def release_freed_memory() -> None:
    """Give freed memory back to the system: glibc keeps what lies between blocks in use, several times a model's size."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def has_cuda() -> bool:
    """Whether torch finds a CUDA device."""
    return torch.cuda.is_available()


def probe() -> list[Probe]:
    """The rows of ``llmq doctor`` for this backend.

    Returns:
        torch itself, the accelerator, the kernels.
    """
    rows = [Probe("torch", True, f"torch {torch.__version__}, {torch.get_num_threads()} CPU threads")]
    if has_cuda():
        capability = torch.cuda.get_device_capability()
        fits = capability >= MIN_CUDA_CAPABILITY
        detail = f"{torch.cuda.get_device_name()}, compute capability {capability[0]}.{capability[1]}"
        rows.append(Probe("accelerator", fits, detail if fits else f"{detail}: tinygemm needs 8.0"))
    else:
        built = torch.version.cuda
        detail = f"{'no CUDA device found' if built else 'this torch is a CPU build'}; torch computes on the CPU"
        rows.append(Probe("accelerator", False, detail, "" if built else "pip install --force-reinstall torch"))
    for name in ("_weight_int4pack_mm_for_cpu", "_weight_int8pack_mm"):
        found = has_kernel(name)
        rows.append(
            Probe(f"kernel {name.strip('_')}", found, "CPU" if found else f"missing in torch {torch.__version__}")
        )
    return rows


def has_kernel(name: str) -> bool:
    """Whether this torch has an operator.

    Args:
        name: In the ``aten`` namespace.

    Returns:
        True when it can be looked up.
    """
    aten: Any = torch.ops.aten
    return hasattr(aten, name)
