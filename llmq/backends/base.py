"""What a backend promises. Only NumPy arrays cross these lines.

A backend is a plugin: an object with a name, a `probe` that says what is usable here and why not,
and openers for its capabilities. It is registered under the entry-point group ``llmq.backends``
and never imports another backend.

**Inference.** A model has a fixed number of *slots*. A slot is one sequence: its tokens are
written to positions 0, 1, 2, ... of its row of the key/value cache. `InferenceModel.extend` writes
a run of tokens into one slot; `InferenceModel.decode` writes one token into each of many. Both
write first and attend on what was stored. A row's result depends on that row alone, so what else
is in the batch changes nothing. Writing at a position forgets everything after it; to reuse a
prefix, extend from where it ends.

**State** is opaque and consumed: after ``state, out = model.decode(state, ...)`` the old state must
not be used again (JAX donates its buffers).

**Numbers.** With the float32 compute type two backends differ by the order of accumulation only.
`reference` is the slow, obvious twin that says what the result should be.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from llmq.checkpoint.loader import ModelWeights

State = Any

ComputeType = Literal["bfloat16", "float32"]

CacheType = Literal["bfloat16", "float32", "int8"]


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How to open a model.

    Attributes:
        device: The backend's name of a device; None takes its accelerator, else the CPU.
        dtype: Compute type; None takes what the device is good at.
        num_slots: Sequences held at once.
        max_len: Positions of each slot.
        kv_int8: Store keys and values as int8 (see `quant.cache`), not in the compute type.
    """

    device: str | None = None
    dtype: ComputeType | None = None
    num_slots: int = 1
    max_len: int = 2048
    kv_int8: bool = False


@dataclass(frozen=True, slots=True)
class Caps:
    """What an open model is.

    Attributes:
        device: Where it runs, for people to read.
        dtype: Compute type.
        kv_dtype: Type of cached keys and values.
        num_slots: Sequences held at once.
        max_len: Positions of each slot.
        vocab_size: Logits per position.
        kernels: How many linears run on which kernel, and why where it is not the fast one.
    """

    device: str
    dtype: ComputeType
    kv_dtype: CacheType
    num_slots: int
    max_len: int
    vocab_size: int
    kernels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Probe:
    """One row of ``llmq doctor``.

    Attributes:
        name: What was looked for.
        usable: Whether it works here.
        detail: What was found, or why it does not.
        fix: A command that would change that; empty when there is none or none is needed.
    """

    name: str
    usable: bool
    detail: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Scores:
    """How likely the targets of a run were.

    Attributes:
        logprobs: float32 `[n]`, natural logarithm of each target's probability.
        is_greedy: bool `[n]`, whether each target was the most likely token (the lowest id of a tie).
    """

    logprobs: np.ndarray
    is_greedy: np.ndarray


class InferenceModel(Protocol):
    """A model that answers.

    Attributes:
        caps: What it is.
    """

    caps: Caps

    def init_state(self) -> State:
        """An empty cache.

        Returns:
            The state to pass on.
        """
        ...

    def extend(
        self, state: State, slot: int, tokens: np.ndarray, start: int, *, want_logits: bool = False
    ) -> tuple[State, np.ndarray | None]:
        """Write a run of tokens into a slot.

        Args:
            state: Consumed.
            slot: Which sequence.
            tokens: int32 `[n]`, n at least 1.
            start: Position of the first one; the positions before it must have been written.
            want_logits: Compute logits at every position of the run.

        Returns:
            The new state, and float32 `[n, V]` logits if they were wanted.
        """
        ...

    def decode(self, state: State, tokens: np.ndarray, positions: np.ndarray) -> tuple[State, np.ndarray]:
        """Write one token into each active slot and predict the next.

        Args:
            state: Consumed.
            tokens: int32 `[num_slots]`.
            positions: int32 `[num_slots]`, where each token goes; -1 leaves a slot untouched.

        Returns:
            The new state, and float32 `[num_slots, V]` logits; rows of untouched slots are
            unspecified.
        """
        ...

    def score(
        self, state: State, slot: int, shared: int, runs: Sequence[np.ndarray], targets: Sequence[np.ndarray]
    ) -> tuple[State, list[Scores]]:
        """Score several continuations of what a slot holds, as if each stood alone after it.

        The runs are computed together: each sees positions 0 .. `shared` - 1 of the slot and its own
        tokens. They are written behind one another into the slot's rows from `shared` on; of
        what was there, only the positions before `shared` and, with a single run, the run itself
        are valid afterwards.

        Args:
            state: Consumed.
            slot: Which sequence.
            shared: Positions written before.
            runs: int32 `[n]` each, n at least 1. Together they fit between `shared` and `max_len`.
            targets: int32 `[n]` each: for every token of the run, the one to score as its successor.

        Returns:
            The new state, and a `Scores` for each run.
        """
        ...


class Backend(Protocol):
    """A plugin.

    Attributes:
        name: As in ``--backend``.
        framework: The package it cannot do without.
    """

    name: str
    framework: str

    def probe(self) -> Sequence[Probe]:
        """What is usable here: libraries, devices, kernels.

        Returns:
            Rows for ``llmq doctor``; the first one tells whether the backend works at all.
        """
        ...

    def has_accelerator(self) -> bool:
        """Whether the device it was made for is in this machine; quick, so that ``auto`` can ask.

        Returns:
            False when models would run on the CPU.
        """
        ...

    def open_model(self, weights: ModelWeights, options: ModelOptions) -> InferenceModel:
        """Load a model for inference.

        Args:
            weights: Its weights.
            options: How.

        Returns:
            The model, with its weights in the device's layout.

        Raises:
            BackendError: The device is not there or cannot run the model.
        """
        ...
