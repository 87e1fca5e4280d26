"""The slow, obvious backend: plain NumPy, no cache, every weight dequantized when it is used.

It is the oracle of the tests. Each call runs the whole sequence again in float64, so that what is
compared with it is the other side's rounding.

Shape letters: T positions, D hidden, H heads, K kv heads, h head size, E experts, X chosen ones, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from llmq.backends.base import (
    MAX_TOP_LOGPROBS,
    Calibrator,
    Caps,
    ComputeType,
    Memory,
    ModelOptions,
    Probe,
    Run,
    Scores,
    SlotSampling,
    State,
    Stats,
    StepHandle,
    StepOut,
    Trainer,
    TrainOptions,
)
from llmq.backends.host import host_memory
from llmq.backends.sampling import Rules, Seen, SlotRules, bias_row, log_probabilities, prompt_row, sample
from llmq.checkpoint.loader import ModelWeights
from llmq.errors import BackendError
from llmq.model.config import Experts
from llmq.model.names import EMBEDDING, FINAL_NORM, LM_HEAD, expert_names, layer_norms, layer_prefix, norm_factor
from llmq.model.rotary import rotary_tables
from llmq.quant import QTensor, dequantize, quantize_vectors
from llmq.quant.affine import dtype_of

#: Called with the name, input and output of every linear.
Observer = Callable[[str, np.ndarray, np.ndarray], None]


def reference_weight(weight: np.ndarray | QTensor, dtype: ComputeType = "float32") -> np.ndarray:
    """The matrix a weight stands for, rounded once to the compute type.

    Args:
        weight: Codes or an array, `[O, I]`.
        dtype: Compute type.

    Returns:
        float64 `[O, I]`.
    """
    dense = dequantize(weight, dtype) if isinstance(weight, QTensor) else weight.astype(dtype_of(np, dtype))
    return dense.astype(np.float64)


def forward(
    weights: ModelWeights,
    tokens: Sequence[int],
    observe: Observer | None = None,
    num_layers: int | None = None,
    kv_int8: bool = False,
) -> np.ndarray:
    """Logits of every position.

    Args:
        weights: The model.
        tokens: `[T]` ids.
        observe: Called for every linear.
        num_layers: Run only the first layers; None runs all.
        kv_int8: Attend on keys and values as an int8 cache gives them back.

    Returns:
        float64 `[T, V]`.
    """
    config = weights.config
    positions = np.arange(len(tokens))
    norms, activation = layer_norms(config), _ACTIVATIONS[config.activation]
    mixture = expert_names(config)
    rotations = list(zip(*rotary_tables(config, len(tokens)), strict=True))
    back = positions[:, None] - positions
    visibles = [(back >= 0) & (back < (attention.window or np.inf)) for attention in config.attentions]

    def linear(name: str, x: np.ndarray, key: str | None = None) -> np.ndarray:
        x = _through_int8(x) if weights.rounds_inputs(key or f"{name}.weight") else x
        y = x @ reference_weight(weights[key or f"{name}.weight"]).T
        if f"{name}.bias" in weights:
            y = y + reference_weight(weights[f"{name}.bias"])
        if observe:
            observe(name, x, y)
        return y

    def norm(name: str, x: np.ndarray) -> np.ndarray:
        scaled = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + config.norm_eps)
        weight = weights[name]
        assert not isinstance(weight, QTensor), name
        return scaled * reference_weight(norm_factor(config, weight))

    def heads(name: str, x: np.ndarray, num_heads: int) -> np.ndarray:
        out = linear(f"{name}_proj", x).reshape(len(tokens), num_heads, config.head_dim)
        return norm(f"{name}_norm.weight", out) if f"{name}_norm.weight" in weights else out

    def gated(gate: str, up: str, down: str, x: np.ndarray) -> np.ndarray:
        return linear(down, activation(linear(gate, x)) * linear(up, x))

    def mlp(at: str, x: np.ndarray) -> np.ndarray:
        if mixture is None or config.experts is None:
            return gated(f"{at}mlp.gate_proj", f"{at}mlp.up_proj", f"{at}mlp.down_proj", x)
        weight_TE, out = route(linear(f"{at}{mixture.router}", x), config.experts), np.zeros_like(x)
        for (gate, up, down), weight_T in zip(mixture.experts, weight_TE.T, strict=True):
            if (chosen := np.flatnonzero(weight_T)).size:
                mine = gated(f"{at}{gate}", f"{at}{up}", f"{at}{down}", x[chosen])
                out[chosen] += weight_T[chosen, None] * mine
        return out

    x = reference_weight(weights[EMBEDDING])[np.asarray(tokens)] * float(np.float32(config.embedding_scale))
    for layer in range(config.num_layers if num_layers is None else num_layers):
        at, kind = layer_prefix(layer), config.attention_index(layer)
        inner = norm(f"{at}{norms.attention}.weight", x)
        q = _rotate(heads(f"{at}self_attn.q", inner, config.num_heads), *rotations[kind])
        k = _rotate(heads(f"{at}self_attn.k", inner, config.num_kv_heads), *rotations[kind])
        v = heads(f"{at}self_attn.v", inner, config.num_kv_heads)
        if kv_int8:
            k, v = _through_int8(k), _through_int8(v)
        out = linear(f"{at}self_attn.o_proj", _attend(q * config.attention_scale, k, v, visibles[kind]))
        x = x + (norm(f"{at}{norms.attended}.weight", out) if norms.attended else out)
        out = mlp(at, norm(f"{at}{norms.mlp}.weight", x))
        x = x + (norm(f"{at}{norms.out}.weight", out) if norms.out else out)
    return linear("lm_head", norm(FINAL_NORM, x), EMBEDDING if config.tie_embeddings else LM_HEAD)


def route(scores_TE: np.ndarray, experts: Experts) -> np.ndarray:
    """How much each expert counts for each token.

    Args:
        scores_TE: Of the router.
        experts: How many are chosen.

    Returns:
        `[T, E]`, 0 for experts that are not chosen.
    """
    probs_TE = np.exp(scores_TE - scores_TE.max(axis=-1, keepdims=True))
    probs_TE /= probs_TE.sum(axis=-1, keepdims=True)
    chosen_TX = np.argsort(-probs_TE, axis=-1, kind="stable")[:, : experts.num_chosen]
    weight_TE = np.zeros_like(probs_TE)
    np.put_along_axis(weight_TE, chosen_TX, np.take_along_axis(probs_TE, chosen_TX, axis=-1), axis=-1)
    return weight_TE / weight_TE.sum(axis=-1, keepdims=True) if experts.normalized else weight_TE


#: `ModelConfig.activation` -> what it is.
_ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "silu": lambda x: x / (1.0 + np.exp(-x)),
    "gelu_tanh": lambda x: 0.5 * x * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3))),
}


def _rotate(x_THh: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    first, second = np.split(x_THh, 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _through_int8(x: np.ndarray) -> np.ndarray:
    """Vectors along the last axis, as int8 gives them back."""
    values, scale = quantize_vectors(x)
    return values * scale[..., None].astype(np.float64)


def _attend(q_THh: np.ndarray, k_TKh: np.ndarray, v_TKh: np.ndarray, visible: np.ndarray) -> np.ndarray:
    repeats = q_THh.shape[1] // k_TKh.shape[1]
    k_THh, v_THh = np.repeat(k_TKh, repeats, axis=1), np.repeat(v_TKh, repeats, axis=1)
    scores = np.where(visible, np.einsum("qHh,kHh->Hqk", q_THh, k_THh), -np.inf)
    probs = np.exp(scores - scores.max(axis=-1, keepdims=True))
    probs /= probs.sum(axis=-1, keepdims=True)
    return np.einsum("Hqk,kHh->qHh", probs, v_THh).reshape(len(q_THh), -1)


@dataclass(slots=True)
class ReferenceSlot:
    """A sequence, and how it goes on.

    Attributes:
        tokens: Those written, and behind `prompt` the one that the next step writes.
        prompt: What it was handed over with.
        sampling: How to choose tokens.
    """

    tokens: list[int] = field(default_factory=list)
    prompt: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    sampling: SlotSampling = field(default_factory=SlotSampling)

    def rules(self, vocab_size: int) -> tuple[Rules, Seen]:
        """What `sample` takes, for one slot.

        Args:
            vocab_size: V.

        Returns:
            The parameters, and which tokens the prompt and the answer hold.
        """
        slot = SlotRules(1)
        slot.set(0, self.sampling)
        answer_V = np.bincount(self.tokens[len(self.prompt) :], minlength=vocab_size).astype(np.int32)
        seen = Seen(prompt_row(self.prompt, vocab_size)[None], answer_V[None])
        return slot.rules(np.ones(1, np.bool_))._replace(bias_SV=bias_row(self.sampling, vocab_size)[None]), seen


class ReferenceModel:
    """`forward` behind the protocol of `base.InferenceModel`; the state is the slots' tokens."""

    def __init__(self, weights: ModelWeights, options: ModelOptions) -> None:
        self._weights = weights
        self.caps = Caps(
            device="NumPy on the CPU, float64 accumulation",
            dtype="float32",
            kv_dtype="int8" if options.kv_int8 else "float32",
            num_slots=options.num_slots,
            max_len=options.max_len,
            chunk_size=16,
            vocab_size=weights.config.vocab_size,
            kernels=("every linear dequantized at each use",),
        )

    def init_state(self) -> State:
        """See `base.InferenceModel.init_state`."""
        return [ReferenceSlot() for _ in range(self.caps.num_slots)]

    def warmup(self, state: State) -> State:
        """See `base.InferenceModel.warmup`."""
        return state

    def extend(
        self, state: State, slot: int, tokens: np.ndarray, start: int, *, want_logits: bool = False
    ) -> tuple[State, np.ndarray | None]:
        """See `base.InferenceModel.extend`."""
        state[slot].tokens[start:] = tokens.tolist()
        return state, self._logits(state[slot].tokens)[start:] if want_logits else None

    def set_slot(self, state: State, slot: int, prompt: np.ndarray, sampling: SlotSampling) -> State:
        """See `base.InferenceModel.set_slot`."""
        tokens = [*state[slot].tokens[: len(prompt) - 1], int(prompt[-1])]
        state[slot] = ReferenceSlot(tokens, prompt, sampling)
        return state

    def copy_slot(self, state: State, source: int, target: int, num_tokens: int) -> State:
        """See `base.InferenceModel.copy_slot`."""
        state[target].tokens[:] = state[source].tokens[:num_tokens]
        return state

    def decode(
        self,
        state: State,
        active: np.ndarray,
        uniform: np.ndarray,
        *,
        allowed: np.ndarray | None = None,
        want_logprobs: bool = False,
    ) -> tuple[State, StepHandle]:
        """See `base.InferenceModel.decode`."""
        num_slots, vocab_size = self.caps.num_slots, self.caps.vocab_size
        tokens_S, logprobs_S = np.full(num_slots, -1, np.int32), np.zeros(num_slots, np.float32)
        num_top = min(MAX_TOP_LOGPROBS, vocab_size)
        top_SN, top_logprobs_SN = np.zeros((num_slots, num_top), np.int32), np.zeros((num_slots, num_top), np.float32)
        for slot in np.flatnonzero(active):
            held, row = state[slot], slice(slot, slot + 1)
            logits = self._logits(held.tokens)[-1:]
            rules, seen = held.rules(vocab_size)
            words = None if allowed is None else allowed[row].view(np.int32)
            tokens_S[row] = sample(logits, uniform[row], rules, seen, words)
            logprobs_S[row], top_SN[row], top_logprobs_SN[row] = log_probabilities(logits, tokens_S[row])
            held.tokens.append(max(int(tokens_S[slot]), 0))
        return state, StepOut(tokens_S, *((logprobs_S, top_SN, top_logprobs_SN) if want_logprobs else ()))

    def fetch(self, handle: StepHandle) -> StepOut:
        """See `base.InferenceModel.fetch`."""
        return handle

    def score(self, state: State, slot: int, shared: int, runs: Sequence[Run]) -> tuple[State, list[Scores | None]]:
        """See `base.InferenceModel.score`."""
        scores: list[Scores | None] = []
        for run in runs:
            start, parent = shared, None if run.parent is None else runs[run.parent]
            if parent is not None:
                state, _ = self.extend(state, slot, parent.tokens, shared)
                start += len(parent.tokens)
            state, logits = self.extend(state, slot, run.tokens, start, want_logits=run.targets is not None)
            scores.append(None if logits is None or run.targets is None else score_rows(logits, run.targets))
        state, _ = self.extend(state, slot, runs[0].tokens, shared)
        return state, scores

    def stats(self) -> Stats:
        """See `base.InferenceModel.stats`."""
        return Stats(num_compiles=0, num_bytes=0)

    def close(self) -> None:
        """See `base.InferenceModel.close`."""

    def _logits(self, tokens: list[int]) -> np.ndarray:
        return forward(self._weights, tokens, kv_int8=self.caps.kv_dtype == "int8").astype(np.float32)


def score_rows(logits_MV: np.ndarray, targets_M: np.ndarray) -> Scores:
    """How likely targets are.

    Args:
        logits_MV: Of each position.
        targets_M: The token that follows it.

    Returns:
        Their scores.
    """
    highest_M = logits_MV.max(axis=-1)
    total_M = np.log(np.exp(logits_MV - highest_M[:, None]).sum(axis=-1)) + highest_M
    chosen_M = logits_MV[np.arange(len(targets_M)), targets_M]
    return Scores(chosen_M - total_M, logits_MV.argmax(axis=-1) == targets_M)


class ReferenceBackend:
    """The plugin."""

    name = "reference"
    framework = "numpy"

    def probe(self) -> list[Probe]:
        """See `base.Backend.probe`."""
        return [Probe("reference", True, f"NumPy {np.__version__}; slow, for checking results")]

    def has_accelerator(self) -> bool:
        """See `base.Backend.has_accelerator`."""
        return False

    def memory(self, device: str | None) -> Memory:
        """See `base.Backend.memory`."""
        _check_device(device)
        return host_memory()

    def open_model(self, weights: ModelWeights, options: ModelOptions) -> ReferenceModel:
        """See `base.Backend.open_model`."""
        _check_device(options.device)
        if options.dtype not in (None, "float32"):
            raise BackendError(f"dtype={options.dtype!r}: the reference computes in float32 only; leave out --dtype.")
        if options.kernel is not None:
            raise BackendError(f"kernel={options.kernel!r}: the reference has no kernels; leave out --kernel.")
        if options.compile:
            raise BackendError("compile: the reference compiles nothing; leave --compile out.")
        return ReferenceModel(weights, options)

    def open_calibrator(self, weights: ModelWeights, options: ModelOptions, num_threads: int) -> Calibrator:  # noqa: ARG002
        """See `base.Backend.open_calibrator`: not done here."""
        raise BackendError("backend='reference': does not calibrate; use cpu, gpu or tpu.")

    def open_trainer(self, weights: ModelWeights, options: TrainOptions) -> Trainer:  # noqa: ARG002
        """See `base.Backend.open_trainer`: not done here."""
        raise BackendError("backend='reference': does not train; use cpu, gpu or tpu.")


def _check_device(device: str | None) -> None:
    if device not in (None, "cpu"):
        raise BackendError(f"device={device!r}: the reference runs on the cpu; leave out --device.")
