"""How many threads compute on a CPU, measured: one often beats two where a step is small.

The choice changes no bit: numbers of threads are tried only where everything comes out as with all of them.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from llmq.backends.gpu.model import Decoder, RowFunction

#: Seconds of each of the three measurements, about: candidates take turns while there is time.
_BUDGET = 0.3

Call = Callable[[], list[Tensor]]


@dataclass(frozen=True, slots=True)
class Threads:
    """How many threads compute what.

    Attributes:
        one: A step of one row.
        more: A step of more rows.
        run: A run of tokens.
    """

    one: int
    more: int
    run: int

    def __str__(self) -> str:
        return f"threads: {self.one} for a step of one row, {self.more} for more rows, {self.run} for runs of a prompt"


@torch.inference_mode()
def choose_threads(decoder: Decoder, row_counts: Sequence[int], chunk: int, longest: int) -> Threads:
    """Measure, on one of each kind of layer and the head.

    Args:
        decoder: The model.
        row_counts: Rows computed for every number of active slots, from 0 on.
        chunk: Tokens of a chunk.
        longest: Tokens of the longest run.

    Returns:
        The fastest numbers, at most the current one, which is left as it is. In float32 always the
        current one: a product's and attention's last bits depend on it.
    """
    most = torch.get_num_threads()
    if decoder.dtype is torch.float32 or most == 1:
        return Threads(most, most, most)
    head, *layers = decoder.row_functions()
    steps = {count: partial(_rows, decoder, [head, *layers], count, 0) for count in row_counts[1:]}
    num_alike = len(decoder.layers) / len(decoder.unlike)
    run = partial(_rows, decoder, layers, longest, chunk)

    def parts(count: int) -> list[tuple[float, Call]]:
        return [(1, partial(_rows, decoder, [head], count, 0)), (num_alike, partial(_rows, decoder, layers, count, 0))]

    try:
        for_steps = _agreeing(list(steps.values()), most)
        one, more = (_fastest(parts(count), for_steps) for count in (row_counts[1], row_counts[-1]))
        shorter = partial(_rows, decoder, layers, min(chunk, longest), chunk)
        return Threads(one, more, _fastest([(1, run)], _agreeing([shorter, run], most)))
    finally:
        use(most)


def use(num_threads: int) -> None:
    """Compute with so many threads from now on.

    Args:
        num_threads: At least 1.
    """
    if torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)


def _rows(decoder: Decoder, functions: Sequence[RowFunction], count: int, chunk: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        function(torch.randn(count, width, generator=generator).to(decoder.dtype), chunk)
        for width, function in functions
    ]


def _agreeing(calls: Sequence[Call], most: int) -> list[int]:
    """Numbers of threads under which every call gives the bits that it gives with the most."""
    expected = _with_threads(most, calls)
    fewer = [n for n in (1 << power for power in range(most.bit_length())) if n < most]
    return [n for n in fewer if all(map(torch.equal, _with_threads(n, calls), expected))] + [most]


def _fastest(parts: Sequence[tuple[float, Call]], candidates: Sequence[int]) -> int:
    """The number of threads with the shortest sum of calls, each as often as stands before it."""
    if len(candidates) == 1:
        return candidates[0]
    seconds: dict[int, list[float]] = {n: [] for n in candidates}
    start = time.perf_counter()
    while time.perf_counter() - start < _BUDGET:
        for n, measured in seconds.items():
            use(n)
            measured.append(sum(times * _seconds(call) for times, call in parts))
    return min(candidates, key=lambda n: statistics.median(seconds[n]))


def _seconds(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _with_threads(num_threads: int, calls: Sequence[Call]) -> list[Tensor]:
    use(num_threads)
    return [result for call in calls for result in call()]
