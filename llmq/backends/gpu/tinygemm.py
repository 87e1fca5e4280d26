"""The int4 kernel: which matrices it takes, how they are prepacked, the call.

tinygemm computes ``x @ ((codes - 8) * scale + zero).T`` with unsigned codes, which is llmq's map
with ``codes = values + 8``: artifact and kernel share every number. Prepacked bytes depend on the
device, and on a CPU on its instruction set, so they are made at load and never saved.

The CUDA branch follows torch's documented layout and has not been run by this project's tests.

Source: pytorch ``aten/src/ATen/native/native_functions.yaml``, ``_weight_int4pack_mm`` and
``_weight_int4pack_mm_for_cpu``.
"""

from functools import cache

import torch
from torch import Tensor

from llmq.quant import QTensor

GROUP_SIZES = (256, 128, 64, 32)

#: Outputs of a block of the layout that `dequantize` reads.
_BLOCK = 64

#: Bytes of codes dequantized at once, so that what is made of them stays in the cache.
_CACHED = 1 << 17

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


@cache
def can_unpack(device_type: str) -> bool:
    """Whether `dequantize` understands the layout that `prepack` makes here: tried, not assumed.

    Args:
        device_type: As torch names it.

    Returns:
        True on CPUs with AVX512.
    """
    if device_type != "cpu":
        return False
    codes_OI = torch.arange(2 * _BLOCK * 32, dtype=torch.int32).mul_(7).remainder_(16).view(2 * _BLOCK, 32)
    values_NIb = _unpack(prepack(codes_OI.to(torch.int8) - 8, torch.device("cpu")).view(-1, 32, _BLOCK // 2))
    return torch.equal(values_NIb.mT.reshape_as(codes_OI) + 8, codes_OI)


def dequantize(packed: Tensor, group_size: int, scale_zero_GO2: Tensor) -> Tensor:
    """The weight, in float32 rounded once: what `llmq.quant.dequantize` gives. Where `can_unpack`.

    Args:
        packed: From `prepack`, of a multiple of 64 outputs: N blocks of b = 64.
        group_size: As for `matmul`, g.
        scale_zero_GO2: As for `matmul`.

    Returns:
        bfloat16 `[I, O]`.
    """
    num_groups, num_outputs, _ = scale_zero_GO2.shape
    weight_GgNb = torch.empty(num_groups, group_size, num_outputs // _BLOCK, _BLOCK, dtype=torch.bfloat16)
    weight_NGgb = weight_GgNb.permute(2, 0, 1, 3)
    scale_zero_NG1b2 = scale_zero_GO2.view(num_groups, -1, _BLOCK, 2).transpose(0, 1).unsqueeze(2)
    bytes_NIh = packed.view(-1, num_groups * group_size, _BLOCK // 2)
    step = max(1, _CACHED // bytes_NIh[0].numel())
    for start in range(0, len(bytes_NIh), step):
        at = slice(start, start + step)
        values = _unpack(bytes_NIh[at]).float().view(-1, num_groups, group_size, _BLOCK)
        scale, zero = scale_zero_NG1b2[at].float().unbind(-1)
        weight_NGgb[at] = torch.addcmul(zero, values, scale)
    return weight_GgNb.view(-1, num_outputs)


def _unpack(bytes_NIh: Tensor) -> Tensor:
    """Signed codes `[N, I, b]`: the low nibbles are the first half of a block's outputs."""
    return torch.cat([bytes_NIh & 15, bytes_NIh >> 4], dim=-1).view(torch.int8).sub_(8)
