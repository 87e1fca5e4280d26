"""How fast a model reads and writes tokens: ``llmq bench MODEL``. Any backend, through its protocol alone."""

import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmq.backends.base import InferenceModel, SlotSampling, State

#: Bytes read to measure the memory's bandwidth: more than any cache holds.
_SWEPT_BYTES = 1 << 28

#: Times that they are read.
_SWEEPS = 5


@dataclass(frozen=True, slots=True)
class Spread:
    """Several measurements of one thing.

    Attributes:
        median: The middle one.
        lowest: The lowest.
        highest: The highest.
    """

    median: float
    lowest: float
    highest: float


@dataclass(frozen=True, slots=True)
class Speed:
    """Of one workload.

    Attributes:
        batch_size: Sequences at once.
        prompt_len: Tokens of each prompt.
        gen_len: Tokens of each answer.
        prefill: Prompt tokens a second, of all sequences, up to the first token of each answer.
        decode: Generated tokens a second, of all sequences, after the first.
        first_token: Seconds until the first token of one sequence alone.
        step: Seconds of a decoding step.
    """

    batch_size: int
    prompt_len: int
    gen_len: int
    prefill: Spread
    decode: Spread
    first_token: Spread
    step: Spread


def measure(
    model: InferenceModel,
    prompt_lens: Sequence[int],
    gen_lens: Sequence[int],
    batch_sizes: Sequence[int],
    repeat: int,
    progress: Callable[[int, int], None],
) -> list[Speed]:
    """Run every combination.

    Args:
        model: With slots for the largest batch, and room for the longest prompt and answer.
        prompt_lens: Tokens of a prompt.
        gen_lens: Tokens of an answer, at least 2.
        batch_sizes: Sequences at once.
        repeat: Measurements of each.
        progress: Is told how many of how many runs are done.

    Returns:
        One entry a combination, batch sizes outermost.
    """
    state = model.warmup(model.init_state())
    loads = [(size, prompt, gen) for size in batch_sizes for prompt in prompt_lens for gen in gen_lens]
    found: list[Speed] = []
    for load in loads:
        runs: list[tuple[float, float, float]] = []
        for _ in range(repeat):
            state, run = run_once(model, state, *load)
            runs.append(run)
            progress(len(found) * repeat + len(runs), len(loads) * repeat)
        batch_size, prompt_len, gen_len = load
        alone, prompts, steps = zip(*runs, strict=True)
        found.append(
            Speed(
                *load,
                prefill=_spread([batch_size * prompt_len / seconds for seconds in prompts]),
                decode=_spread([batch_size * (gen_len - 1) / seconds for seconds in steps]),
                first_token=_spread(alone),
                step=_spread([seconds / (gen_len - 1) for seconds in steps]),
            )
        )
    return found


def run_once(
    model: InferenceModel, state: State, batch_size: int, prompt_len: int, gen_len: int
) -> tuple[State, tuple[float, float, float]]:
    """One workload, once.

    Args:
        model: With slots and room for it.
        state: Consumed.
        batch_size: Sequences at once.
        prompt_len: Tokens of each prompt.
        gen_len: Tokens of each answer.

    Returns:
        The new state; seconds until the first sequence's first token, until everyone's, and of all further steps.
    """
    num_slots, longest = model.caps.num_slots, model.caps.chunk_size * model.caps.chunks_per_run
    uniform, slots = np.zeros(num_slots, np.float32), np.arange(num_slots)
    prompts = np.random.default_rng(0).integers(0, model.caps.vocab_size, (batch_size, prompt_len)).astype(np.int32)
    start = time.perf_counter()
    alone = 0.0
    for slot, prompt in enumerate(prompts):
        for at in range(0, prompt_len - 1, longest):
            state, _ = model.extend(state, slot, prompt[at : min(at + longest, prompt_len - 1)], at)
        state = model.set_slot(state, slot, prompt, SlotSampling())
        state, handle = model.decode(state, slots == slot, uniform)
        model.fetch(handle)
        alone = alone or time.perf_counter() - start
    prefilled = time.perf_counter()
    for _ in range(gen_len - 1):
        state, handle = model.decode(state, slots < batch_size, uniform)
        model.fetch(handle)
    return state, (alone, prefilled - start, time.perf_counter() - prefilled)


def _spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))


def memory_bandwidth() -> float:
    """What this machine's memory gives one thread.

    Returns:
        Bytes a second, the best of some sweeps over an array that fits no cache.
    """
    swept = np.ones(_SWEPT_BYTES // 8)
    seconds: list[float] = []
    for _ in range(_SWEEPS):
        start = time.perf_counter()
        swept.sum()
        seconds.append(time.perf_counter() - start)
    return swept.nbytes / min(seconds)


def peak_resident_bytes() -> int:
    """The most memory this process has held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {"system": platform.platform(), "machine": platform.machine(), "python": platform.python_version()}
