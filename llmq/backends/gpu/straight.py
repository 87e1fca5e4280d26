"""What the forward pass of training sees of a master weight or of a linear's input, and the gradient it sends back.

    forward   w  ->  dequantize(quantize(w))  rounded once to the compute type
    backward  the gradient as it is, but 0 where the code was clipped (`llmq.quant.gradient`)

On the CPU the arithmetic is that of `llmq.quant` with the liberty `llmq.quant.rows` takes as well:
the exact residual is computed only where the guess lies near a tie or was clipped. Tests hold it to
`llmq.quant` bit for bit.

Suffixes: O output features, I input features, G groups a row, g features a group.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmq.config import Scheme
from llmq.quant import dequantize, fake_quantize_vectors, quantize
from llmq.quant.affine import choose_scale_zero, flush, step
from llmq.quant.gradient import is_clipped

#: Elements quantized at a time: they and what is computed of them fit a core's cache.
_PIECE_ELEMENTS = 1 << 16

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
    weight_OGg = master_OI.unflatten(1, (-1, scheme.group_size or num_features))
    # Two reductions are eight times as fast as aminmax.
    scale_OG, zero_OG, constant_OG = choose_scale_zero(weight_OGg.amin(-1), weight_OGg.amax(-1), scheme)
    if scale_OG.min() < _SUBNORMALS_MATTER_BELOW:
        weight_OGg = flush(torch, weight_OGg)
    parts = [scale_OG, 1.0 / scale_OG, *([] if zero_OG is None else [zero_OG])]
    masked = [constant_OG] if constant_OG.any() else []
    rows = max(1, _PIECE_ELEMENTS // num_features) if master_OI.device.type == "cpu" else num_rows
    seen_OI = torch.empty(master_OI.shape, dtype=dtype, device=master_OI.device)
    worst_OG = torch.empty_like(scale_OG)
    memory = master_OI.new_empty(2, min(rows, num_rows), *weight_OGg.shape[1:])
    for start in range(0, num_rows, rows):
        piece = slice(start, start + rows)
        steps_OGg, codes_OGg = memory[:, : len(weight_OGg[piece])]
        grid = [part[piece, :, None] for part in parts]
        _guess(weight_OGg[piece], grid, scheme, steps_OGg, codes_OGg, [part[piece, :, None] for part in masked])
        torch.amax(steps_OGg.abs_(), -1, out=worst_OG[piece])
        seen_OI[piece] = _weight(codes_OGg, grid).flatten(1)
    clipped = _settle(seen_OI, weight_OGg, worst_OG, parts, scheme)
    return Seen(seen_OI, clipped if len(clipped) else None)


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


def _guess(
    weight: Tensor, grid: list[Tensor], scheme: Scheme, steps: Tensor, codes: Tensor, constant: Sequence[Tensor] = ()
) -> None:
    """The codes nearest to weights by a product with the inverse of their scale, and how far they are from them.

    Args:
        weight: In any shape, as all that follows.
        grid: Scale, its inverse and, where there is one, zero.
        scheme: Of the codes.
        steps: Takes the distances, in steps of the grid.
        codes: Takes the codes.
        constant: Where codes and distances are 0, or nothing.
    """
    _, inverse, *zero = grid
    torch.mul(torch.sub(weight, zero[0], out=steps) if zero else weight, inverse, out=steps)
    torch.round(steps, out=codes).clamp_(scheme.qmin, scheme.qmax)
    steps.sub_(codes)
    for mask in constant:
        codes.masked_fill_(mask, 0.0)
        steps.masked_fill_(mask, 0.0)


def _weight(codes: Tensor, grid: list[Tensor]) -> Tensor:
    """What codes stand for, in their place."""
    scale, _, *zero = grid
    codes.mul_(scale)
    return codes.add_(zero[0]) if zero else codes


def _settle(seen_OI: Tensor, weight_OGg: Tensor, worst_OG: Tensor, parts: list[Tensor], scheme: Scheme) -> Tensor:
    """Decide by the exact residual where the guess may be wrong: few groups hold such a weight.

    Args:
        seen_OI: What the guesses stand for; is corrected.
        weight_OGg: The weight.
        worst_OG: The largest distance of a weight from its guess.
        parts: See `_guess`.
        scheme: Of the codes.

    Returns:
        Flat indices of what was clipped, ascending.
    """
    groups_N = (worst_OG.view(-1) > _CERTAIN).nonzero()[:, 0]
    weight_Ng = weight_OGg.reshape(-1, weight_OGg.shape[-1])[groups_N]
    grid = [part.view(-1)[groups_N, None] for part in parts]
    steps_Ng, codes_Ng = torch.empty_like(weight_Ng), torch.empty_like(weight_Ng)
    _guess(weight_Ng, grid, scheme, steps_Ng, codes_Ng)
    row, column = (steps_Ng.abs_() > _CERTAIN).nonzero(as_tuple=True)
    scale, inverse, *zero = (part[row, 0] for part in grid)
    offset, guess = weight_Ng[row, column], codes_Ng[row, column]
    if zero:
        offset = offset - zero[0]
    settled = guess + step(torch, guess, offset - guess * scale, scale * 0.5)
    settled.clamp_(scheme.qmin, scheme.qmax)
    beyond = step(torch, settled, offset - settled * scale, scale * 0.5) != 0.0
    doubtful = groups_N[row] * weight_OGg.shape[-1] + column
    seen_OI.view(-1)[doubtful] = _weight(settled, [scale, inverse, *zero]).to(seen_OI.dtype)
    return doubtful[beyond]
