"""How many rows a step computes, so that no row's bits depend on the others, and how many chunks a run.

A kernel may add up in another order for another number of rows, or for the last rows of a batch:
a float32 product of 7 rows differs from one of 8, and its first rows from its last. So the layers
are tried, once, with equal rows: a number of rows is *even* when all of them come out equal and equal to
those of the other even numbers. A step is padded to the next even number. Chunks are written at once where they
come out as one by one.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from llmq.backends.gpu.model import Decoder, RowFunction

#: How far beyond the number of slots an even number is looked for.
_MARGIN = 16


class Computing(Protocol):
    """What computes steps: a decoder, compiled or not."""

    device: torch.device
    dtype: torch.dtype

    def row_functions(self) -> Sequence[RowFunction]:
        """See `Decoder.row_functions`."""
        ...


@torch.inference_mode()
def row_counts(decoder: Computing, num_slots: int) -> list[int]:
    """How many rows to compute for every number of active slots.

    Args:
        decoder: The model.
        num_slots: Slots at most.

    Returns:
        `num_slots` + 1 numbers, each at least its index. `num_slots` itself stands where no number
        within reach is even.
    """
    beyond = range(num_slots, num_slots + _MARGIN)
    largest, result = next(((n, r) for n in beyond if (r := _result(decoder, n))), (num_slots, None))
    even = [n for n in range(1, largest) if result and _result(decoder, n) == result] + [largest]
    return [next(n for n in even if n >= num_active) for num_active in range(num_slots + 1)]


@torch.inference_mode()
def chunks_per_run(decoder: Decoder, chunk_size: int, most: int) -> int:
    """How many chunks of a prompt are written at once.

    Args:
        decoder: The model. Is told whether it may multiply them as one: on a CPU with AMX the number of rows decides on
            the order of sums.
        chunk_size: Tokens of a chunk.
        most: More would gain nothing.

    Returns:
        `most` where the layers give the bits that they give chunk by chunk, else 1. Also 1 where rows choose experts:
        how many choose one decides on its kernel.
    """
    if decoder.config.experts is not None:
        return 1
    _, *layers = decoder.row_functions()  # a run of several chunks needs no logits

    def changes_bits(layer: RowFunction) -> bool:
        num_features, function = layer
        x_MF = torch.randn(most * chunk_size, num_features, generator=torch.Generator().manual_seed(0))
        x_MF = x_MF.to(decoder.device, decoder.dtype)
        alone = torch.cat([function(part, chunk_size) for part in x_MF.split(chunk_size)])
        return not torch.equal(function(x_MF, chunk_size), alone)

    for joined in (True, False):
        decoder.join_chunks(joined)
        if not any(map(changes_bits, layers)):
            return most
    return 1


def _result(decoder: Computing, count: int) -> list[bytes] | None:
    """What the model makes of `count` equal rows, in bits; None when they come out different."""
    rows = []
    for num_features, function in decoder.row_functions():
        x_F = torch.randn(num_features, generator=torch.Generator().manual_seed(0))
        y = function(x_F.to(decoder.device, decoder.dtype).repeat(count, 1), 0)
        if not torch.equal(y, y[:1].expand_as(y)):
            return None
        rows.append(y[0].float().cpu().numpy().tobytes())
    return rows
