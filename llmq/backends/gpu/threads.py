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
def choose_threads(decoder: Decoder, num_slots: int, num_tokens: int) -> Threads:
    """Measure, on one of each kind of layer and the head.

    Args:
        decoder: The model.
        num_slots: Rows of a step at most.
        num_tokens: Of a run.

    Returns:
        The fastest numbers, at most the current one, which is left as it is.
    """
    head, *layers = decoder.row_functions()
    calls = [partial(_rows, decoder, [head, *layers], count, False) for count in (1, num_slots)]
    calls.append(partial(_rows, decoder, layers, num_tokens, True))
    before = torch.get_num_threads()
    try:
        return Threads(*(_fastest(call, before) for call in calls))
    finally:
        use(before)


def use(num_threads: int) -> None:
    """Compute with so many threads from now on.

    Args:
        num_threads: At least 1.
    """
    if torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)


def _rows(decoder: Decoder, functions: Sequence[RowFunction], count: int, is_run: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        function(torch.randn(count, width, generator=generator).to(decoder.dtype), is_run)
        for width, function in functions
    ]


def _fastest(call: Callable[[], list[Tensor]], most: int) -> int:
    """The number of threads with the shortest call; the first call of each is not timed."""
    candidates = [n for n in (1 << power for power in range(most.bit_length())) if n < most] + [most]
    results = [_with_threads(n, call) for n in candidates]
    seconds: dict[int, list[float]] = {
        n: [] for n, result in zip(candidates, results, strict=True) if all(map(torch.equal, result, results[-1]))
    }
    if len(seconds) == 1:
        return most
    start = time.perf_counter()
    while time.perf_counter() - start < _BUDGET:
        for n, measured in seconds.items():
            before = time.perf_counter()
            _with_threads(n, call)
            measured.append(time.perf_counter() - before)
    return min(seconds, key=lambda n: statistics.median(seconds[n]))


def _with_threads(num_threads: int, call: Callable[[], list[Tensor]]) -> list[Tensor]:
    use(num_threads)
    return call()
