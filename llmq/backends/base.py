"""What a backend promises. Only NumPy arrays cross these lines.

A backend is a plugin: an object with a name, a `probe` that says what is usable here and why not,
and openers for its capabilities. It is registered under the entry-point group ``llmq.backends``
and never imports another backend.

**Inference.** A model has a fixed number of *slots*. A slot is one sequence: its tokens are
written to positions 0, 1, 2, ... of its row of the key/value cache. `InferenceModel.extend` writes
a run of tokens into one slot. `InferenceModel.set_slot` hands a slot to a request, and from then
on each `InferenceModel.decode` writes one token into every active slot, attends on what is stored
and samples the next one; the sampled token stays on the device as the next one to write. Writing
at a position forgets everything after it; to reuse a prefix, extend from where it ends.

**A row's result depends on that row alone**, to the last bit: what else is in the batch, and
which slot it is in, changes nothing. Runs of tokens are a different matter: the same tokens
written by runs cut elsewhere may differ in their last bits, and so may tokens written by `decode`.

**State** is opaque and consumed: after ``state, out = model.decode(state, ...)`` the old state must
not be used again (JAX donates its buffers).

**Waiting.** `InferenceModel.decode` may return before the device is done; `InferenceModel.fetch`
waits. At most one step is dispatched ahead of the one fetched.

**Failing.** Arguments are valid, callers see to that; whatever a method raises is the device's fault
and the state is lost.

**Numbers.** With the float32 compute type two backends differ by the order of accumulation only.
`reference` is the slow, obvious twin that says what the result should be.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from llmq.checkpoint.loader import ModelWeights
from llmq.config import Scheme
from llmq.errors import BackendError
from llmq.quant import QTensor

State = Any

#: A dispatched step, to be fetched.
StepHandle = Any

#: Alternatives that a step can report beside the sampled token.
MAX_TOP_LOGPROBS = 20

#: Types that a model is trained and calibrated in: float16 lacks the range of what comes up there.
TrainingType = Literal["bfloat16", "float32"]

ComputeType = Literal["bfloat16", "float16", "float32"]

CacheType = Literal["bfloat16", "float16", "float32", "int8"]

#: What computes: JAX, torch on its own devices, or torch on XLA's.
RuntimeName = Literal["jax", "torch", "torch_xla"]

#: A kernel of its own for linears that a backend has beside the one it chooses.
KernelName = Literal["pallas"]

#: Where a teacher computes, if not on the device.
TeacherDevice = Literal["cpu"]

#: AdamW, its moments in float32 or in 8 bits.
OptimizerName = Literal["adamw", "adamw8bit"]


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How to open a model.

    Attributes:
        device: The backend's name of a device; None takes its accelerator, else the CPU.
        dtype: Compute type; None takes what the device is good at.
        num_slots: Sequences held at once.
        max_len: Positions of each slot.
        kv_int8: Store keys and values as int8 (see `quant.cache`), not in the compute type.
        num_threads: Threads that compute, where the framework can be told; None lets the model choose.
        dp: Groups of devices, each with slots of its own.
        tp: Devices of a group, which compute each layer together.
        sp: Devices of these that at least share the positions of every slot, for long contexts.
        compile: Compile the decode step, where the framework need not.
        kernel: Of linears with codes; None takes what the device is known to be fast with.
    """

    device: str | None = None
    dtype: ComputeType | None = None
    num_slots: int = 1
    max_len: int = 2048
    kv_int8: bool = False
    num_threads: int | None = None
    dp: int = 1
    tp: int = 1
    sp: int = 1
    compile: bool = False
    kernel: KernelName | None = None


@dataclass(frozen=True, slots=True)
class Caps:
    """What an open model is.

    Attributes:
        device: Where it runs, for people to read.
        dtype: Compute type.
        kv_dtype: Type of cached keys and values.
        num_slots: Sequences held at once.
        max_len: Positions of each slot.
        chunk_size: Prompts are written in runs cut at multiples of this; see `InferenceModel.extend`.
        vocab_size: Logits per position.
        kernels: How many linears run on which kernel, and why where it is not the fast one.
        chunks_per_run: Chunks that a run without logits may hold: several at once are faster.
    """

    device: str
    dtype: ComputeType
    kv_dtype: CacheType
    num_slots: int
    max_len: int
    chunk_size: int
    vocab_size: int
    kernels: tuple[str, ...]
    chunks_per_run: int = 1


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
class Run:
    """Tokens that continue what a slot holds, for `InferenceModel.score`.

    Attributes:
        tokens: int32 `[n]`, n at least 1.
        targets: int32 `[n]`: for every token, the one to score as its successor; None scores nothing.
        parent: Index of an earlier run of the call, itself without a parent, that this one
            continues; None continues the slot.
    """

    tokens: np.ndarray
    targets: np.ndarray | None = None
    parent: int | None = None


@dataclass(frozen=True, slots=True)
class Scores:
    """How likely the targets of a run were.

    Attributes:
        logprobs: float32 `[n]`, natural logarithm of each target's probability.
        is_greedy: bool `[n]`, whether each target was the most likely token (the lowest id of a tie).
    """

    logprobs: np.ndarray
    is_greedy: np.ndarray


@dataclass(frozen=True, slots=True)
class SlotSampling:
    """How a slot's tokens are chosen, in the order in which it is applied; `sampling` computes it.

    Attributes:
        logit_bias: Added to the logits of tokens.
        repetition_penalty: Divides positive and multiplies negative logits of tokens that the prompt
            or the answer holds.
        presence_penalty: Subtracted once from the logits of tokens that the answer holds.
        frequency_penalty: Subtracted from the logits of a token as often as the answer holds it.
        temperature: Divides the logits; 0 takes the most likely token.
        top_k: Keep this many tokens; 0 keeps all.
        top_p: Keep the smallest set of most likely tokens whose probabilities add up to this.
        min_p: Keep tokens at least this likely, relative to the most likely one.
    """

    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True, slots=True)
class StepOut:
    """What a step sampled. Rows of inactive slots are unspecified.

    Attributes:
        tokens: int32 `[num_slots]`; -1 where the logits were not finite.
        logprobs: float32 `[num_slots]`, natural logarithm of each token's probability before any bias,
            mask, penalty or temperature; None unless asked for.
        top_ids: int32 `[num_slots, MAX_TOP_LOGPROBS]`, the most likely tokens, best first, ties by lower
            id; None unless asked for.
        top_logprobs: float32 `[num_slots, MAX_TOP_LOGPROBS]`, their log-probabilities; None unless asked for.
    """

    tokens: np.ndarray
    logprobs: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Stats:
    """What an open model has done and holds.

    Attributes:
        num_compiles: Functions compiled so far; constant after `InferenceModel.warmup`.
        num_bytes: Of weights and state on the device.
    """

    num_compiles: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Memory:
    """Of a device, in bytes.

    Attributes:
        total: All of it.
        free: What new allocations can use.
    """

    total: int
    free: int


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

    def warmup(self, state: State) -> State:
        """Compile and touch everything that serving will use, so that nothing is compiled afterwards.

        Args:
            state: Consumed; what the slots hold is lost.

        Returns:
            The new state.
        """
        ...

    def extend(
        self, state: State, slot: int, tokens: np.ndarray, start: int, *, want_logits: bool = False
    ) -> tuple[State, np.ndarray | None]:
        """Write a run of tokens into a slot.

        A run of exactly `Caps.chunk_size` tokens that starts at a multiple of it gives the same bits
        whatever is written after it: that is what makes a reused prefix equal a fresh one. A run of up to
        `Caps.chunks_per_run` chunks, the last of which may be shorter, gives the bits of its chunks one by one.

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

    def set_slot(self, state: State, slot: int, prompt: np.ndarray, sampling: SlotSampling) -> State:
        """Hand a slot to a request. Its next `decode` writes the last token of the prompt.

        Args:
            state: Consumed.
            slot: Which sequence.
            prompt: int32 `[n]`, n at least 1; its first n - 1 tokens must have been written.
            sampling: How to choose what follows; nothing has been chosen yet.

        Returns:
            The new state.
        """
        ...

    def copy_slot(self, state: State, source: int, target: int, num_tokens: int) -> State:
        """Copy the first keys and values of a slot to another.

        Args:
            state: Consumed.
            source: Where they were written.
            target: Where they are written too.
            num_tokens: How many positions.

        Returns:
            The new state.
        """
        ...

    def decode(
        self,
        state: State,
        active: np.ndarray,
        uniform: np.ndarray,
        *,
        allowed: np.ndarray | None = None,
        want_logprobs: bool = False,
    ) -> tuple[State, StepHandle]:
        """Write each active slot's next token and sample the one after it.

        Args:
            state: Consumed.
            active: bool `[num_slots]`; the others stay untouched.
            uniform: float32 `[num_slots]`, a random number in [0, 1) for each; not read where the
                temperature is 0.
            allowed: uint32 `[num_slots, ceil(V / 32)]`, bit ``v % 32`` of word ``v // 32`` allows token v;
                None allows all.
            want_logprobs: Report log-probabilities.

        Returns:
            The new state, and what `fetch` takes.
        """
        ...

    def fetch(self, handle: StepHandle) -> StepOut:
        """Wait for a step.

        Args:
            handle: From `decode`; fetched once.

        Returns:
            What it sampled.
        """
        ...

    def score(self, state: State, slot: int, shared: int, runs: Sequence[Run]) -> tuple[State, list[Scores | None]]:
        """Score several continuations of what a slot holds, as if each stood alone after it.

        The runs are computed together: each sees positions 0 .. `shared` - 1 of the slot, its parent's
        tokens and its own. They are written behind one another into the slot's rows from `shared`
        on; of what was there, only the positions before `shared` and the first run are valid afterwards.

        Args:
            state: Consumed.
            slot: Which sequence.
            shared: Positions written before.
            runs: Together they fit between `shared` and `max_len`.

        Returns:
            The new state, and `Scores` for each run that has targets.
        """
        ...

    def stats(self) -> Stats:
        """What the model has done and holds.

        Returns:
            Counts, cheap enough to ask at every scrape of metrics.
        """
        ...

    def close(self) -> None:
        """Free the device. The model must not be used again."""
        ...


#: Tensors of a layer, by their names without its prefix.
Block = Mapping[str, "np.ndarray | QTensor"]

#: Activations of the calibration sequences at some place of the model, in a backend's own form.
Stream = Any


class Calibrator(Protocol):
    """Runs calibration sequences through a model one block at a time, so that one block is in memory.

    A block is run in stages: stage s computes what the linears of ``STAGES[s]`` read, from what the
    linears of the stage before made of theirs; the last stage, ``len(STAGES)``, leaves the block. The
    weights come with each call, so that a linear can be run quantized once it is.

    Sequences do not see each other, and positions that are not theirs do not exist: however they are
    packed and padded inside, nothing of it is in any result. No bit depends on the number of threads.

    Where a layer has experts, ``MLP_STAGE`` computes what router and experts read; the stage after it computes nothing,
    and the last all experts, each for the tokens that the router gives it. What is between is seen one expert at a
    time: `pick` the tokens, and `advance` them with the expert's weights as if it were the MLP of the layer.
    """

    def start(self, sequences: Sequence[np.ndarray]) -> Stream:
        """Look up embeddings.

        Args:
            sequences: int32 `[n]` each; lengths may differ.

        Returns:
            The stream before the first block.
        """
        ...

    def advance(self, stream: Stream, block: Block, stage: int) -> Stream:
        """Run a stage.

        Args:
            stream: At the stage before; it stays valid.
            block: Tensors of the layer that the stream is at: it counts those it has left, for layers may attend
                in different ways. Codes are dequantized to the compute type.
            stage: From 0 to ``len(STAGES)``.

        Returns:
            The stream at that stage.
        """
        ...

    def moments(self, stream: Stream) -> np.ndarray:
        """Second moments of what the linears of the current stage read.

        Args:
            stream: Of this calibrator.

        Returns:
            float64 `[I, I]`, the sum over all tokens of ``x x^T``.
        """
        ...

    def probabilities(self, stream: Stream, block: Block) -> np.ndarray:
        """How likely the router of a mixture finds each expert for each token.

        Args:
            stream: At ``MLP_STAGE``.
            block: Tensors of its layer.

        Returns:
            float32 `[T, E]`, for all tokens of all sequences, one behind the other.
        """
        ...

    def pick(self, stream: Stream, tokens: np.ndarray) -> Stream:
        """Some tokens alone, as if they went through one expert.

        Args:
            stream: At ``MLP_STAGE``; it stays valid.
            tokens: Rising indices of rows of `probabilities`, one at least.

        Returns:
            Those tokens at the same stage. It can be advanced by one stage, with `as_mlp` of the expert for a block.
        """
        ...

    def drift(self, before: Stream, stream: Stream, scale_I: np.ndarray | None = None) -> np.ndarray:
        """How what the linears read has moved, against what they read.

        Args:
            before: Where it was, at the same stage.
            stream: Where it is.
            scale_I: float32, what features of `stream` were divided by on purpose; None where they were not.

        Returns:
            float64 `[I, I]`, the sum over all tokens of ``(x_before / scale - x) x^T``. The difference is rounded to the
            compute type first.
        """
        ...

    def divergence(self, baseline: Stream, stream: Stream) -> float:
        """How much the predictions of two streams behind the last block differ.

        Args:
            baseline: What is the truth.
            stream: Held against it.

        Returns:
            Mean of KL(baseline || stream) over all tokens, in nats.
        """
        ...


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """Rows of documents to learn from.

    Attributes:
        tokens: int32 `[B, N]`.
        targets: int32 `[B, N]`: for every token its successor.
        learned: bool `[B, N]`, whether the target counts. At least one does.
        documents: int32 `[B, N]`: tokens of a row with the same number see each other; 0 is padding.
        positions: int32 `[B, N]`, of each token in its document.
    """

    tokens: np.ndarray
    targets: np.ndarray
    learned: np.ndarray
    documents: np.ndarray
    positions: np.ndarray


@dataclass(frozen=True, slots=True)
class Adapters:
    """Low-rank updates: the model uses ``W + alpha / rank * up @ down``, and only these are trained.

    Attributes:
        rank: Features between `down` and `up`.
        alpha: Their weight, times the rank.
        targets: Names of the weights that have one.
        seed: Of the initial `down`; `up` begins with zeros.
    """

    rank: int
    alpha: float
    targets: frozenset[str]
    seed: int

    def initial_down(self, name: str, num_features: int) -> np.ndarray:
        """Where `down` begins, on every backend alike.

        Args:
            name: Of the weight.
            num_features: Its input features.

        Returns:
            float32 `[rank, I]`.
        """
        bound = num_features**-0.5
        rng = np.random.default_rng([self.seed, zlib.crc32(name.encode())])
        return rng.uniform(-bound, bound, (self.rank, num_features)).astype(np.float32)


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """How to train a model.

    Attributes:
        device: As in `ModelOptions`.
        runtime: As in ``--runtime``, for a plugin that has more than one.
        dtype: Compute type; master weights are float32.
        mesh: Copies of the weights, and devices that share each; None shares one copy among all.
        max_len: Tokens of the longest row.
        schemes: Weight name -> the grid that training is to be aware of.
        rounded_inputs: Names of the weights whose linears take their inputs in int8, one scale a token.
        adapters: Train these only; None trains every weight.
        optimizer: With float32 moments, or with such of 8 bits.
        betas: Of AdamW.
        weight_decay: Of AdamW, on matrices.
        clip: Largest norm of the gradient; None leaves it as it is.
        recompute: Recompute activations in the backward pass rather than keep them.
        compile: Compile fake quantization, where the framework need not.
        teacher: Learn from the predictions of this model as well. The model that adapters are trained for shares
            its weights with them, in one process.
        teacher_device: Where another one computes, ``cpu``; None lets it share `device`.
        kd_weight: Their weight in the loss; the data's is 1 minus it.
        kd_temperature: Divides the logits of both models.
    """

    device: str | None = None
    runtime: RuntimeName | None = None
    dtype: TrainingType | None = None
    mesh: tuple[int, int] | None = None
    max_len: int = 2048
    schemes: Mapping[str, Scheme] = field(default_factory=lambda: MappingProxyType({}))
    rounded_inputs: frozenset[str] = frozenset()
    adapters: Adapters | None = None
    optimizer: OptimizerName = "adamw"
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    clip: float | None = 1.0
    recompute: bool = False
    compile: bool = False
    teacher: ModelWeights | None = None
    teacher_device: TeacherDevice | None = None
    kd_weight: float = 0.5
    kd_temperature: float = 1.0

    def mesh_of(self, num_devices: int) -> tuple[int, int]:
        """The layout of devices that train together.

        Args:
            num_devices: How many there are.

        Returns:
            As `mesh`.

        Raises:
            BackendError: The layout asked for takes another number.
        """
        dp, fsdp = self.mesh or (1, num_devices)
        if dp * fsdp != num_devices:
            raise BackendError(
                f"mesh='dp={dp},fsdp={fsdp}': takes {dp * fsdp} devices, and {num_devices} train together; make the "
                "product that number, or leave it out."
            )
        return dp, fsdp


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did.

    Attributes:
        loss: Mean over all learned tokens, in nats, before the update.
        grad_norm: Of the whole gradient, before it was clipped.
    """

    loss: float
    grad_norm: float


class Trainer(Protocol):
    """A model being trained. What it does in a step depends on its state and its arguments only.

    Where processes train together, each makes the same calls with the same arguments.

    Attributes:
        device: Where it runs, for people to read.
        dtype: Compute type.
        is_main: Whether this process is the one that writes files.
    """

    device: str
    dtype: ComputeType
    is_main: bool

    def step(self, batches: Sequence[TrainBatch], learning_rate: float, *, quantized: bool) -> StepResult:
        """Update the weights once.

        Args:
            batches: Computed one after the other; the loss is the mean over the tokens of all.
            learning_rate: Of this step.
            quantized: Whether the forward pass sees weights, and the inputs that are to be rounded, on their grids.

        Returns:
            What it did.
        """
        ...

    def evaluate(self, batch: TrainBatch, *, quantized: bool) -> np.ndarray:
        """Measure the loss.

        Args:
            batch: Rows.
            quantized: As for `step`.

        Returns:
            float64 `[B]`, the sum over each row's learned tokens, in nats.
        """
        ...

    def weight(self, name: str) -> np.ndarray:
        """A weight as it is now, adapters merged.

        Args:
            name: Of a tensor of the checkpoint.

        Returns:
            float32. Its codes are those that a quantized forward pass uses.
        """
        ...

    def state(self) -> dict[str, np.ndarray]:
        """Everything that training has changed.

        Returns:
            Arrays by name; the same names and shapes whatever the backend and the number of processes.
        """
        ...

    def load_state(self, step: int, state: Mapping[str, np.ndarray]) -> None:
        """Go back to a state.

        Args:
            step: How many steps had been done.
            state: From `state`, of this or another trainer of the same model and options.
        """
        ...

    def peak_bytes(self) -> int:
        """The most memory the device has held so far."""
        ...

    def close(self) -> None:
        """Free the device. The trainer must not be used again."""
        ...


@dataclass(frozen=True, slots=True)
class CompiledStep:
    """What a compiler made of a step, for a chip that need not be there.

    Attributes:
        name: Of the step.
        seconds: To compile it.
        argument_bytes: Weights, cache and the rest that is handed in, on one chip.
        temporary_bytes: Beside them while it runs.
        output_bytes: What it gives, without what it updates in place.
        collectives: Kind -> how many; those of the loop over layers are of a kind ``KIND a layer``.
        widened: Weights that it writes out in a wider type, as the compiler names them.
        missing_bytes: By how much it exceeds the chip's memory, and all sizes are 0; 0 when it fits.
    """

    name: str
    seconds: float
    argument_bytes: int = 0
    temporary_bytes: int = 0
    output_bytes: int = 0
    collectives: Mapping[str, int] = field(default_factory=dict[str, int])
    widened: tuple[str, ...] = ()
    missing_bytes: int = 0


@runtime_checkable
class Planner(Protocol):
    """A backend that compiles for chips it does not have."""

    def compile_steps(self, weights: ModelWeights, target: str, options: ModelOptions) -> Sequence[CompiledStep]:
        """Compile what serving runs.

        Args:
            weights: Their types and shapes count, and of layers that are alike only the first is read.
            target: As in ``v5e:1x1``.
            options: Slots, context and types; `device` is not read.

        Returns:
            A row for the decode step, the prefill of a chunk, and the head.

        Raises:
            BackendError: The compiler is not installed, or does not know the target.
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

    def memory(self, device: str | None) -> Memory:
        """How much a model may take.

        Args:
            device: As in `ModelOptions`.

        Returns:
            Of that device; of the machine on the CPU.

        Raises:
            BackendError: The device is not there.
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

    def open_calibrator(self, weights: ModelWeights, options: ModelOptions, num_threads: int) -> Calibrator:
        """Prepare to run a model block by block.

        Args:
            weights: Only what lies outside the blocks is loaded.
            options: Device and compute type; `max_len` is that of the longest sequence.
            num_threads: Threads on a CPU.

        Returns:
            The calibrator.

        Raises:
            BackendError: The device is not there or cannot run the model.
        """
        ...

    def open_trainer(self, weights: ModelWeights, options: TrainOptions) -> Trainer:
        """Load a model for training.

        Args:
            weights: An unquantized checkpoint.
            options: How.

        Returns:
            The trainer.

        Raises:
            BackendError: The device is not there or cannot train.
        """
        ...
