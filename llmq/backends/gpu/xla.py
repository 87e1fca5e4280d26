"""torch on XLA's devices: the few functions of torch_xla that this backend needs.

torch_xla records operations and compiles what it has recorded when it is told to `launch`. A number
that is read before cuts the recording in two, and a shape, a decision or a Python number that changes
from step to step makes another program: what runs here avoids all of these. So a run compiles two
programs of a training step, without and with fake quantization.

Autograd learns of the device when it is first used in a process: `choose_device` comes before any
backward pass, also of tensors on the CPU.

Executed on XLA's CPU only, by ``make test-xla``; no TPU has run it.
"""

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from llmq.backends.base import ComputeType, ModelOptions
from llmq.errors import BackendError

#: Names of devices; torch_xla writes them in capitals.
DEVICES = ("cpu", "tpu")


def choose_device(options: ModelOptions) -> tuple[torch.device, ComputeType]:
    """The device and compute type to train with.

    Args:
        options: What the user asked for.

    Returns:
        The device, torch_xla's own choice unless one is named; bfloat16 unless asked otherwise, on the
        CPU float32.

    Raises:
        BackendError: The device is not there, or is to be shared by several processes.
    """
    name, size = options.device, os.environ.get("WORLD_SIZE", "1")
    if name not in (None, *DEVICES):
        raise BackendError(
            f"device={name!r}: torch_xla computes on {' and '.join(DEVICES)}; leave it out for the best one."
        )
    if size != "1":
        raise BackendError(f"runtime='torch_xla': trains in one process, not in {size}; start it without torchrun.")
    try:
        if name is not None:
            os.environ.setdefault("PJRT_DEVICE", name.upper())  # else torch_xla chooses when imported, and says so
            _module("torch_xla.runtime").set_device_type(name.upper())
        device = _module("torch_xla").device()
    except (RuntimeError, OSError) as err:
        reason = str(err).strip().splitlines()[0]
        raise BackendError(
            f"device={name or 'auto'!r}: torch_xla cannot compute on it here ({reason}); use --device cpu."
        ) from err
    return device, options.dtype or ("float32" if _kind() == "CPU" else "bfloat16")


def device_name() -> str:
    """The device, for people to read.

    Returns:
        Its kind, and the version of torch_xla.
    """
    return f"{_kind()} (torch_xla {_module('torch_xla').__version__})"


def launch() -> None:
    """Run what has been recorded."""
    _module("torch_xla").sync()


def peak_bytes(device: torch.device) -> int | None:
    """The most memory that a device has held.

    Args:
        device: From `choose_device`.

    Returns:
        Bytes; None on the CPU, which does not tell.
    """
    if _kind() == "CPU":
        return None
    return _module("torch_xla.core.xla_model").get_memory_info(device)["peak_bytes_used"]


def recomputed(function: Callable[..., Tensor], *given: Any) -> Tensor:
    """``function(*given)``, computed anew in the backward pass; XLA is kept from using what it computed before.

    Args:
        function: To be computed twice.
        *given: Its arguments. Gradients go to those that are tensors, and to the parameters it knows of.

    Returns:
        Its result.
    """
    tensors = (value for value in given if isinstance(value, Tensor))
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
        return function(*given)  # torch_xla asks for an argument that has a gradient
    if isinstance(function, nn.Module):
        function = function.forward  # by whose self torch_xla finds the parameters that XLA must read again
    return _module("torch_xla.utils.checkpoint").checkpoint(function, *given, preserve_rng_state=False)


def cast_int4(values: Tensor, device: torch.device) -> Tensor:
    """Codes in four bits each.

    torch_xla knows of no other way than a constant in a program. That program is run here, once: to
    every later one its result is an argument.

    Args:
        values: int4 codes as int8, on the CPU.
        device: From `choose_device`.

    Returns:
        The codes on the device. They must not be read back: torch_xla aborts the process.
    """
    cast = _module("torch_xla")._XLAC._xla_cast_int4(values.to(device), values.flatten().tolist())
    launch()
    return cast


def matmul(x_MI: Tensor, values_GgO: Tensor, scale_GO: Tensor, minus_zero_GO: Tensor | None) -> Tensor:
    """``x @ (values * scale - minus_zero)``, the codes multiplied as they are.

    Args:
        x_MI: Activations.
        values_GgO: Codes, from `cast_int4` or int8.
        scale_GO: In the type of `x_MI`.
        minus_zero_GO: Likewise; None when symmetric.

    Returns:
        `[M, O]` in the type of `x_MI`.

    Source:
        torch_xla ``experimental/xla_quantized_matmul.py``, the blockwise branch. Its per-channel branch
        does not compile for four bits on XLA's CPU; a row that is one group takes this one.
    """
    _module("torch_xla.experimental.xla_quantized_matmul")  # defines the operator
    operator: Any = torch.ops.xla.quantized_matmul
    return operator(x_MI, values_GgO, scale_GO, minus_zero_GO, block_size=values_GgO.shape[1])


def _kind() -> str:
    return _module("torch_xla.runtime").device_type()


def _module(name: str) -> Any:
    return import_module(name)
