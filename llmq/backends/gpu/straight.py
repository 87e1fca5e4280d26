"""What the forward pass of training sees of a master weight or of a linear's input, and the gradient it sends back.

    forward   w  ->  dequantize(quantize(w))  rounded once to the compute type
    backward  the gradient as it is, but 0 where the code was clipped (`llmq.quant.gradient`)

On the CPU the arithmetic is that of `llmq.quant` with the liberty `llmq.quant.rows` takes as well:
the exact residual is computed only where the guess lies near a tie or was clipped. Tests hold it to
`llmq.quant` bit for bit.

Suffixes: O output features, I input features, G groups a row, g features a group.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmq.config import Scheme
from llmq.quant import dequantize, fake_quantize_vectors, quantize
from llmq.quant.affine import choose_scale_zero, flush, step
from llmq.quant.gradient import is_clipped

#: Elements quantized at a time: they and what is computed of them fit a core's cache.
_PIECE_ELEMENTS = 1 << 19

#: A guess nearer than this to its code is on the right side of every tie, see `llmq.quant.rows`.
_CERTAIN = 0.4999

#: From this scale on a subnormal weight is zero to its group, see `llmq.quant.rows`.
_SUBNORMALS_MATTER_BELOW = 2.0**-100


@dataclass(frozen=True, slots=True)
class Seen:
    """What the forward pass sees of a weight.

    Attributes:
        weight_OI: In the compute type.
        clipped: What gets no gradient: flat indices, or a bool for every weight; None when there is nothing.
    """

    weight_OI: Tensor
    clipped: Tensor | None = None


def straight_through(master_OI: Tensor, seen: Seen) -> Tensor:
    """`seen` in the forward pass, with the gradient of `master_OI` behind it.

    Args:
        master_OI: float32.
        seen: Made of it.

    Returns:
        `[O, I]` in the compute type.
    """
    return _Straight.apply(master_OI, seen.weight_OI, seen.clipped)


def round_inputs(x: Tensor) -> Tensor:
    """What a linear reads that takes its inputs in int8, with the gradient passed through.

    Args:
        x: `[..., I]` in the compute type.

    Returns:
        As `llmq.quant.fake_quantize_vectors`.
    """
    return _Straight.apply(x, fake_quantize_vectors(x.detach()), None)


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, master_OI: Tensor, seen_OI: Tensor, clipped: Tensor | None) -> Tensor:
        ctx.dtype, ctx.clipped = master_OI.dtype, clipped
        return seen_OI.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        grad_OI = grads[0].to(ctx.dtype)
        if ctx.clipped is None:
            return grad_OI, None, None
        if ctx.clipped.dtype is torch.bool:
            return grad_OI.masked_fill(ctx.clipped, 0.0), None, None
        grad_OI = grad_OI.clone() if grad_OI is grads[0] else grad_OI
        grad_OI.view(-1)[ctx.clipped] = 0.0
        return grad_OI, None, None


@torch.no_grad()
def see(master_OI: Tensor, scheme: Scheme | None, dtype: torch.dtype) -> Seen:
    """Fake-quantize a weight.

    Args:
        master_OI: float32, contiguous, finite.
        scheme: The grid, group size settled; None only rounds to the compute type.
        dtype: Compute type.

    Returns:
        What the forward pass sees.
    """
    if scheme is None:
        return Seen(master_OI.to(dtype))
    if master_OI.device.type == "xla":
        return see_traced(master_OI, scheme, dtype)
    num_rows, num_features = master_OI.shape
    seen_OI = torch.empty(master_OI.shape, dtype=dtype, device=master_OI.device)
    rows = max(1, _PIECE_ELEMENTS // num_features) if master_OI.device.type == "cpu" else num_rows
    clipped = []
    for start in range(0, num_rows, rows):
        weight_OGg = master_OI[start : start + rows].unflatten(1, (-1, scheme.group_size or num_features))
        seen_OGg, indices = _see_piece(weight_OGg, scheme)
        seen_OI[start : start + rows] = seen_OGg.flatten(1)
        clipped.append(indices + start * num_features)
    indices = torch.cat(clipped)
    return Seen(seen_OI, indices if len(indices) else None)


def see_traced(master_OI: Tensor, scheme: Scheme, dtype: torch.dtype) -> Seen:
    """`see` for devices that compile what they run: nothing is decided by looking at a value.

    Args:
        master_OI: As for `see`.
        scheme: The grid.
        dtype: Compute type.

    Returns:
        The same.
    """
    codes = quantize(master_OI, scheme)
    return Seen(dequantize(codes, str(dtype).removeprefix("torch.")), is_clipped(master_OI, codes))


def _see_piece(weight_OGg: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    low_OG, high_OG = weight_OGg.amin(-1), weight_OGg.amax(-1)  # eight times as fast as aminmax
    scale_OG, zero_OG, constant_OG = choose_scale_zero(low_OG, high_OG, scheme)
    if scale_OG.min() < _SUBNORMALS_MATTER_BELOW:
        weight_OGg = flush(torch, weight_OGg)
    offset_OGg = weight_OGg if zero_OG is None else weight_OGg - zero_OG[..., None]
    steps_OGg = offset_OGg * (1.0 / scale_OG)[..., None]
    codes_OGg = steps_OGg.round().clamp_(scheme.qmin, scheme.qmax)
    error_OGg = steps_OGg.sub_(codes_OGg).abs_()
    if constant_OG.any():
        for array in (codes_OGg, error_OGg):
            array.masked_fill_(constant_OG[..., None], 0.0)
    doubtful = _indices_above(error_OGg, _CERTAIN)
    scale = scale_OG.view(-1)[doubtful // codes_OGg.shape[-1]]
    offset, guess = offset_OGg.reshape(-1)[doubtful], codes_OGg.view(-1)[doubtful]
    settled = guess + step(torch, guess, offset - guess * scale, scale * 0.5)
    settled.clamp_(scheme.qmin, scheme.qmax)
    codes_OGg.view(-1)[doubtful] = settled
    beyond = step(torch, settled, offset - settled * scale, scale * 0.5) != 0.0
    seen_OGg = codes_OGg.mul_(scale_OG[..., None])
    if zero_OG is not None:
        seen_OGg.add_(zero_OG[..., None])
    return seen_OGg, doubtful[beyond]


def _indices_above(array_OGg: Tensor, bound: float) -> Tensor:
    """Flat indices of the elements over a bound, ascending; most groups have none."""
    groups = (array_OGg.amax(-1).view(-1) > bound).nonzero()[:, 0]
    group_size = array_OGg.shape[-1]
    row, column = (array_OGg.view(-1, group_size)[groups] > bound).nonzero(as_tuple=True)
    return groups[row] * group_size + column
