"""The int4 kernel: which matrices it takes, how they are prepacked, the call.

tinygemm computes ``x @ ((codes - 8) * scale + zero).T`` with unsigned codes, which is llmq's map
with ``codes = values + 8``: artifact and kernel share every number. Prepacked bytes depend on the
device, and on a CPU on its instruction set, so they are made at load and never saved.

The CUDA branch follows torch's documented layout and has not been run by this project's tests.

Source: pytorch ``aten/src/ATen/native/native_functions.yaml``, ``_weight_int4pack_mm`` and
``_weight_int4pack_mm_for_cpu``.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from llmq.quant import QTensor

GROUP_SIZES = (256, 128, 64, 32)

#: Outputs of a block of the layout that `dequantize` reads.
BLOCK = 64

#: Weights dequantized at once for a dense product: what is made of them stays in the cache.
PART = 1 << 20

#: The low nibbles of eight bytes.
_LOW = 0x0F0F0F0F0F0F0F0F

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
    values_OI = torch.arange(2 * BLOCK * 32).mul_(7919).bitwise_right_shift_(3).remainder_(16).sub_(8).to(torch.int8)
    values_OI = values_OI.view(2 * BLOCK, 32)
    packed = prepack(values_OI, torch.device("cpu"))
    return torch.equal(_unpack(packed, 32), values_OI.T)


def dense_matmul(parts: Sequence[Tensor], packed: Tensor, group_size: int, scale_zero_GO2: Tensor) -> Tensor:
    """What `matmul` computes, through a dense weight a part at a time: for many rows. Where `can_unpack`.

    Args:
        parts: bfloat16 activations `[m, I]`, each multiplied apart.
        packed: From `prepack`, of a multiple of 64 outputs.
        group_size: As for `matmul`.
        scale_zero_GO2: As for `matmul`.

    Returns:
        bfloat16 `[M, O]`, M rows of all parts.
    """
    step = max(1, PART // (parts[0].shape[1] * BLOCK)) * BLOCK
    y_MO = parts[0].new_empty(sum(map(len, parts)), scale_zero_GO2.shape[1])
    cut = (packed.split(step), scale_zero_GO2.split(step, dim=1), y_MO.split(step, dim=1))
    for packed_o, scale_zero_Go2, y_Mo in zip(*cut, strict=True):
        multiply_parts(parts, dequantize(packed_o, group_size, scale_zero_Go2), y_Mo)
    return y_MO


def multiply_parts(parts: Sequence[Tensor], weight_IO: Tensor, y_MO: Tensor) -> None:
    """Multiply each part by a dense weight.

    Args:
        parts: Activations `[m, I]`.
        weight_IO: Of their type.
        y_MO: Takes the products, behind one another.
    """
    for part, out in zip(parts, y_MO.split([len(part) for part in parts]), strict=True):
        torch.mm(part, weight_IO, out=out)


def dequantize(packed: Tensor, group_size: int, scale_zero_GO2: Tensor) -> Tensor:
    """The weight, in float32 rounded once: what `llmq.quant.dequantize` gives. Where `can_unpack`.

    Args:
        packed: As for `dense_matmul`: N blocks of 64 outputs.
        group_size: As for `matmul`, g.
        scale_zero_GO2: As for `matmul`.

    Returns:
        bfloat16 `[I, O]`.
    """
    num_inputs = len(scale_zero_GO2) * group_size
    values_GgO = _unpack(packed, num_inputs).bfloat16().unflatten(0, (-1, group_size))
    scale_G1O, zero_G1O = (part.contiguous()[:, None] for part in scale_zero_GO2.unbind(-1))
    torch.addcmul(zero_G1O, values_GgO, scale_G1O, out=values_GgO)  # in float32, rounded once
    return values_GgO.flatten(0, 1)


def _unpack(packed: Tensor, num_inputs: int) -> Tensor:
    """Signed codes `[I, O]`: the low nibbles are the first half of a block's outputs. Taken eight bytes, w, at a time."""
    bytes_INw = packed.view(-1, num_inputs, BLOCK // 2).view(torch.int64).transpose(0, 1).contiguous()
    codes_IN2w = torch.stack([bytes_INw & _LOW, (bytes_INw >> 4) & _LOW], dim=2)
    return codes_IN2w.view(torch.int8).view(num_inputs, -1).sub_(8)
