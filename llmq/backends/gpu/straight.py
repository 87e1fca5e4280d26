"""What the forward pass of training sees of a master weight or of a linear's input, and the gradient it sends back.

    forward   w  ->  dequantize(quantize(w))  rounded once to the compute type
    backward  the gradient as it is, but 0 where the code was clipped (`llmq.quant.gradient`)

On the CPU the arithmetic is that of `llmq.quant` with the liberty `llmq.quant.rows` takes as well:
the exact residual is computed only where the guess lies near a tie or was clipped. Tests hold it to
`llmq.quant` bit for bit.

Suffixes: O output features, I input features, g features a group, N groups, M groups that hold a doubtful weight.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
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

#: Those of `_program` made so far.
_PROGRAMS: dict[Scheme, Callable[[Tensor, Tensor], list[Tensor]]] = {}


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


def see(master_OI: Tensor, scheme: Scheme | None, dtype: torch.dtype, *, compiled: bool = False) -> Seen:
    """Fake-quantize a weight.

    Args:
        master_OI: float32, contiguous, finite.
        scheme: The grid, group size settled; None only rounds to the compute type.
        dtype: Compute type.
        compiled: Do what takes every weight in a program of torch.compile, on a CPU; the bits are the same.

    Returns:
        What the forward pass sees.
    """
    return see_all([master_OI], scheme, dtype, compiled=compiled)[0]


@torch.no_grad()
def see_all(
    masters: Sequence[Tensor], scheme: Scheme | None, dtype: torch.dtype, *, compiled: bool = False
) -> list[Seen]:
    """Fake-quantize weights on the same grid: what is done once a call takes as long as the rest for one of them.

    Args:
        masters: As for `see`; the same number of features a group.
        scheme: As for `see`.
        dtype: Likewise.
        compiled: Likewise.

    Returns:
        What the forward pass sees of each; the weights share their memory.
    """
    if scheme is None:
        return [Seen(master_OI.to(dtype)) for master_OI in masters]
    device = masters[0].device
    if device.type == "xla":
        return [see_traced(master_OI, scheme, dtype) for master_OI in masters]
    length = scheme.group_size or masters[0].shape[1]
    weights = [master_OI.view(-1, length) for master_OI in masters]
    counts = [len(weight_Ng) for weight_Ng in weights]
    seen_Ng = torch.empty(sum(counts), length, dtype=dtype, device=device)
    worst_N, *grid = (_guess_compiled if compiled else _guess_all)(weights, seen_Ng, scheme)
    clipped = _settle(seen_Ng, weights, worst_N, grid, scheme)
    return [
        Seen(weight_Ng.view_as(master_OI), indices if len(indices) else None)
        for master_OI, weight_Ng, indices in zip(masters, seen_Ng.split(counts), clipped, strict=True)
    ]


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


def _guess_all(weights: Sequence[Tensor], seen_Ng: Tensor, scheme: Scheme) -> list[Tensor]:
    """A guess at what is seen of every weight.

    Args:
        weights: Whose groups follow one another in the rest.
        seen_Ng: Takes what the guesses stand for.
        scheme: Of the codes.

    Returns:
        The largest distance of a group's weights from their guesses, `[N]`, and the grid, see `_guess`.
    """
    length, is_cpu = seen_Ng.shape[1], seen_Ng.device.type == "cpu"
    num_groups = max(1, _PIECE_ELEMENTS // length) if is_cpu else len(seen_Ng)
    pieces = _split(weights, num_groups)
    sizes = [len(piece_Ng) for piece_Ng in pieces]
    # Two reductions are eight times as fast as aminmax.
    low_N, high_N = (torch.cat([extreme(piece_Ng, -1) for piece_Ng in pieces]) for extreme in (torch.amin, torch.amax))
    scale_N, zero_N, constant_N = choose_scale_zero(low_N, high_N, scheme)
    if scale_N.min() < _SUBNORMALS_MATTER_BELOW:
        pieces = _split([flush(torch, weight_Ng) for weight_Ng in weights], num_groups)
    grid = _columns(scale_N, zero_N)
    masked = [constant_N[:, None]] if constant_N.any() else []
    worst_N = torch.empty_like(scale_N)
    memory = scale_N.new_empty(2, max(sizes), length)
    cut = [part.split(sizes) for part in (seen_Ng, worst_N, *grid, *masked)]
    for piece_Ng, to_Ng, far_N, *given in zip(pieces, *cut, strict=True):
        steps_Ng, codes_Ng = memory[:, : len(piece_Ng)]
        _guess(piece_Ng, given[: len(grid)], scheme, steps_Ng, codes_Ng, given[len(grid) :])
        torch.amax(steps_Ng.abs_(), -1, out=far_N)
        to_Ng.copy_(_weight(codes_Ng, given[: len(grid)]))
    return [worst_N, *grid]


def _guess_compiled(weights: Sequence[Tensor], seen_Ng: Tensor, scheme: Scheme) -> list[Tensor]:
    """`_guess_all` by a program for each weight."""
    if scheme not in _PROGRAMS:
        _PROGRAMS[scheme] = _program(scheme)
    program, sizes = _PROGRAMS[scheme], [len(weight_Ng) for weight_Ng in weights]
    guessed = [program(*given) for given in zip(weights, seen_Ng.split(sizes), strict=True)]
    worst_N, *grid = map(torch.cat, zip(*guessed, strict=True))
    if grid[0].min() < _SUBNORMALS_MATTER_BELOW:
        return _guess_all(weights, seen_Ng, scheme)
    return [worst_N, *grid]


def _program(scheme: Scheme) -> Callable[[Tensor, Tensor], list[Tensor]]:
    """For any number of groups of any length; a subnormal must be nothing to its group."""

    def guess_all(weight_Ng: Tensor, seen_Ng: Tensor) -> list[Tensor]:
        scale_N, zero_N, constant_N = choose_scale_zero(weight_Ng.amin(-1), weight_Ng.amax(-1), scheme)
        grid = _columns(scale_N, zero_N)
        steps_Ng, codes_Ng = torch.empty_like(weight_Ng), torch.empty_like(weight_Ng)
        _guess(weight_Ng, grid, scheme, steps_Ng, codes_Ng, [constant_N[:, None]])
        seen_Ng.copy_(_weight(codes_Ng, grid))
        return [steps_Ng.abs_().amax(-1), *grid]

    # No product is contracted with a sum unless the compiler is told to; casts it would leave out.
    options: dict[str, Any] = {"emulate_precision_casts": True}
    compiled: Any = torch.compile(  # pyright: ignore[reportCallIssue]
        guess_all, fullgraph=True, dynamic=True, isolate_recompiles=True, options=options
    )

    def run(weight_Ng: Tensor, seen_Ng: Tensor) -> list[Tensor]:
        with warnings.catch_warnings():  # torch warns of what it traces through
            warnings.simplefilter("ignore")
            return compiled(weight_Ng, seen_Ng)

    return run


def _columns(scale_N: Tensor, zero_N: Tensor | None) -> list[Tensor]:
    """The grid as `_guess` takes it."""
    return [part_N[:, None] for part_N in (scale_N, 1.0 / scale_N, zero_N) if part_N is not None]


def _split(weights: Sequence[Tensor], num_groups: int) -> list[Tensor]:
    return [piece_Ng for weight_Ng in weights for piece_Ng in weight_Ng.split(num_groups)]


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


def _settle(
    seen_Ng: Tensor, weights: Sequence[Tensor], worst_N: Tensor, grid: Sequence[Tensor], scheme: Scheme
) -> list[Tensor]:
    """Decide by the exact residual where the guess may be wrong: few groups hold such a weight.

    Args:
        seen_Ng: What the guesses stand for; is corrected.
        weights: The weights, whose groups follow one another in the other arguments.
        worst_N: The largest distance of a weight from its guess.
        grid: See `_guess`.
        scheme: Of the codes.

    Returns:
        For each weight, flat indices of what was clipped, ascending.
    """
    counts, length = [len(weight_Ng) for weight_Ng in weights], seen_Ng.shape[1]
    doubtful = [(part_N > _CERTAIN).nonzero()[:, 0] for part_N in worst_N.split(counts)]
    weight_Mg = torch.cat([weight_Ng[groups] for weight_Ng, groups in zip(weights, doubtful, strict=True)])
    weight_Mg = flush(torch, weight_Mg)
    starts = list(accumulate(counts, initial=0))
    groups_M = torch.cat([groups + start for groups, start in zip(doubtful, starts, strict=False)])
    grid = [part[groups_M] for part in grid]
    steps_Mg, codes_Mg = torch.empty_like(weight_Mg), torch.empty_like(weight_Mg)
    _guess(weight_Mg, grid, scheme, steps_Mg, codes_Mg)
    row, column = (steps_Mg.abs_() > _CERTAIN).nonzero(as_tuple=True)
    scale, inverse, *zero = (part[row, 0] for part in grid)
    offset, guess = weight_Mg[row, column], codes_Mg[row, column]
    if zero:
        offset = offset - zero[0]
    settled = guess + step(torch, guess, offset - guess * scale, scale * 0.5)
    settled.clamp_(scheme.qmin, scheme.qmax)
    beyond = step(torch, settled, offset - settled * scale, scale * 0.5) != 0.0
    places = groups_M[row] * length + column
    seen_Ng.view(-1)[places] = _weight(settled, [scale, inverse, *zero]).to(seen_Ng.dtype)
    clipped = places[beyond]
    ends = torch.searchsorted(clipped, clipped.new_tensor(starts) * length)
    return [
        clipped[first:end] - start * length
        for start, (first, end) in zip(starts, pairwise(ends.tolist()), strict=False)
    ]
