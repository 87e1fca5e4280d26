"""The int4 kernel: which matrices it takes, how they are prepacked, the call.

tinygemm computes ``x @ ((codes - 8) * scale + zero).T`` with unsigned codes, which is llmq's map
with ``codes = values + 8``: artifact and kernel share every number. Prepacked bytes depend on the
device, and on a CPU on its instruction set, so they are made at load and never saved.

The CUDA branch follows torch's documented layout and has not been run by this project's tests.

Source: pytorch ``aten/src/ATen/native/native_functions.yaml``, ``_weight_int4pack_mm`` and
``_weight_int4pack_mm_for_cpu``.
"""

import torch
from torch import Tensor

from llmq.quant import QTensor

GROUP_SIZES = (256, 128, 64, 32)

#: Tiles of 16 input features that a CUDA thread block takes at once, best first.
_INNER_K_TILES = (8, 4, 2)


def kernel_group_size(qtensor: QTensor) -> int | None:
    """The largest group size of the kernel that the matrix's groups are made of.

    Args:
        qtensor: int4 codes.

    Returns:
        A divisor of the group size, or None when the kernel has none.
    """
    return next((g for g in GROUP_SIZES if qtensor.group_size % g == 0), None)


def refusal(qtensor: QTensor, device: torch.device, dtype: torch.dtype) -> str:
    """Why the kernel cannot run a matrix.

    Args:
        qtensor: int4 codes `[O, I]`.
        device: Where.
        dtype: Compute type.

    Returns:
        The reason; empty when it can.
    """
    out_features, in_features = qtensor.shape
    if dtype is not torch.bfloat16:
        return "the int4 kernel computes in bfloat16"
    if str(qtensor.scale.dtype) != "bfloat16":
        return "the int4 kernel takes bfloat16 scales"
    if kernel_group_size(qtensor) is None:
        return f"no group size of the int4 kernel divides {qtensor.group_size}"
    multiple = 16 if device.type == "cpu" else 8
    if out_features % multiple:
        return f"{out_features} outputs: the int4 kernel takes multiples of {multiple}"
    if device.type == "cuda" and in_features % 32:
        return f"{in_features} inputs: the int4 kernel takes multiples of 32"
    return ""


def prepack(values_OI: Tensor, device: torch.device) -> Tensor:
    """Codes in the kernel's layout.

    Args:
        values_OI: int8 codes in [-8, 7], on the CPU.
        device: Where the kernel will run.

    Returns:
        An opaque tensor on that device.
    """
    codes_OI = values_OI.to(torch.int32) + 8
    if device.type == "cpu":
        return torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes_OI, 1)
    codes_OI = codes_OI.to(device=device, dtype=torch.uint8)
    pairs_OB = (codes_OI[:, 0::2] << 4) | codes_OI[:, 1::2]  # the even feature in the high nibble
    tiles = next(t for t in _INNER_K_TILES if codes_OI.shape[1] % (16 * t) == 0)
    return torch.ops.aten._convert_weight_to_int4pack(pairs_OB, tiles)


def matmul(x_MI: Tensor, packed: Tensor, group_size: int, scale_zero_GO2: Tensor) -> Tensor:
    """Multiply.

    Args:
        x_MI: bfloat16 activations.
        packed: From `prepack`.
        group_size: One of `GROUP_SIZES`.
        scale_zero_GO2: bfloat16 scale and zero of each group, transposed and interleaved.

    Returns:
        bfloat16 `[M, O]`.
    """
    if x_MI.device.type == "cpu":
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x_MI, packed, group_size, scale_zero_GO2)
    return torch.ops.aten._weight_int4pack_mm(x_MI, packed, group_size, scale_zero_GO2)
