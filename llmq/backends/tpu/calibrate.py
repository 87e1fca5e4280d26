"""`base.Calibrator` in JAX: sequences padded to one length, every stage one compiled function.

Shape letters: B sequences of a batch, N positions of each, M all B x N, D hidden, I input features of a linear,
K kv heads, R query heads of each, h head size, E experts, P tokens of one, V vocabulary.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import pairwise
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import register_dataclass

from llmq.backends.base import Block, ComputeType, ModelOptions
from llmq.backends.tpu.device import Device
from llmq.backends.tpu.linear import Leaf
from llmq.backends.tpu.mlp import ACTIVATIONS, probabilities, route
from llmq.backends.tpu.model import precision
from llmq.checkpoint.loader import ModelWeights
from llmq.model.config import ModelConfig
from llmq.model.names import (
    EMBEDDING,
    FINAL_NORM,
    LM_HEAD,
    MLP_STAGE,
    STAGES,
    as_mlp,
    expert_names,
    layer_norms,
    norm_factor,
    stage_tensors,
)
from llmq.model.rotary import rotary_tables
from llmq.quant import QTensor, dequantize
from llmq.quant.affine import dtype_of

#: Tokens computed together, unless one sequence is longer.
_BATCH_TOKENS = 2048

#: Lengths of sequences are rounded up to multiples of this, so that few functions are compiled.
_LENGTH_STEP = 64


@register_dataclass
@dataclass(frozen=True)
class Batch:
    """Some sequences, padded at their ends.

    Attributes:
        valid_BN: Which positions are tokens.
        hidden_BND: The residual stream.
        inputs_BNI: What the linears of the stage read.
    """

    valid_BN: Leaf
    hidden_BND: Leaf
    inputs_BNI: Leaf


class JaxStream(NamedTuple):
    """All sequences at some place of the model.

    Attributes:
        batches: Their activations.
        layer: The block that is being run.
        picked: Whether these are tokens of one expert.
    """

    batches: list[Batch]
    layer: int
    picked: bool = False


class JaxCalibrator:
    """See `base.Calibrator`.

    Args:
        weights: The model; only what lies outside the blocks is read.
        options: Compute type and the longest sequence.
        device: Where to run.
    """

    def __init__(self, weights: ModelWeights, options: ModelOptions, device: Device) -> None:
        dtype: ComputeType = options.dtype or ("float32" if device.platform == "cpu" else "bfloat16")
        self._config, self._dtype, self._device = weights.config, dtype, device
        self._read, self._mixture = stage_tensors(weights.config), expert_names(weights.config)
        self._embedding_VD = self._put(weights[EMBEDDING])
        tied = weights.config.tie_embeddings
        self._head_VD = self._embedding_VD if tied else self._put(weights[LM_HEAD])
        self._final_norm_D = self._put_norm(weights[FINAL_NORM])
        num_positions = -(-options.max_len // _LENGTH_STEP) * _LENGTH_STEP
        self._rotation = jax.device_put(rotary_tables(weights.config, num_positions), device)

    def start(self, sequences: Sequence[np.ndarray]) -> JaxStream:
        """See `base.Calibrator.start`."""
        return JaxStream([self._embed(batch) for batch in _batches(sequences)], 0)

    def advance(self, stream: JaxStream, block: Block, stage: int) -> JaxStream:
        """See `base.Calibrator.advance`."""
        if self._mixture and stage > MLP_STAGE and not stream.picked:
            return self._mixed(stream, block) if stage == len(STAGES) else stream
        tensors = {
            name: self._put_norm(tensor) if name.endswith("norm.weight") else self._put(tensor)
            for name, tensor in block.items()
            if name in self._read[stage]
        }
        kind = self._config.attention_index(stream.layer) if stage == 1 else 0
        rotation = (self._rotation[0][kind], self._rotation[1][kind])
        advance = partial(_advance, self._config, self._dtype, (stage, kind), tensors, rotation)
        batches = [advance(batch) for batch in stream.batches]
        return JaxStream(batches, stream.layer + (stage == len(STAGES)), stream.picked)

    def probabilities(self, stream: JaxStream, block: Block) -> np.ndarray:
        """See `base.Calibrator.probabilities`."""
        router_ED = self._router(block)
        parts = [(np.asarray(_probabilities(batch, router_ED)), np.asarray(batch.valid_BN)) for batch in stream.batches]
        return np.concatenate([prob_BNE[valid_BN] for prob_BNE, valid_BN in parts])

    def pick(self, stream: JaxStream, tokens: np.ndarray) -> JaxStream:
        """See `base.Calibrator.pick`."""
        valid = [np.flatnonzero(np.asarray(batch.valid_BN)) for batch in stream.batches]
        bounds = np.cumsum([0, *map(len, valid)])
        places = np.searchsorted(tokens, bounds)
        picked = [
            _picked(batch, *_padded(valid_M[tokens[first:last] - start]))
            for batch, valid_M, start, (first, last) in zip(
                stream.batches, valid, bounds[:-1], pairwise(places), strict=True
            )
            if first < last
        ]
        return JaxStream(picked, stream.layer, picked=True)

    def moments(self, stream: JaxStream) -> np.ndarray:
        """See `base.Calibrator.moments`."""
        return _total(_moments(batch) for batch in stream.batches)

    def drift(self, before: JaxStream, stream: JaxStream, scale_I: np.ndarray | None = None) -> np.ndarray:
        """See `base.Calibrator.drift`."""
        divisor_I = None if scale_I is None else jax.device_put(scale_I, self._device)
        pairs = zip(before.batches, stream.batches, strict=True)
        return _total(_drift(*pair, divisor_I) for pair in pairs)

    def divergence(self, baseline: JaxStream, stream: JaxStream) -> float:
        """See `base.Calibrator.divergence`."""
        total = num_tokens = 0.0
        head = (self._final_norm_D, self._head_VD)
        for ours, theirs in zip(baseline.batches, stream.batches, strict=True):
            kl_BN = np.asarray(_divergence(self._config, self._dtype, head, ours, theirs), np.float64)
            total += float(kl_BN.sum())
            num_tokens += int(np.asarray(ours.valid_BN).sum())
        return total / num_tokens

    def _mixed(self, stream: JaxStream, block: Block) -> JaxStream:
        """Leave a block with experts; one of them is on the device at a time."""
        assert self._mixture is not None
        router_ED, at_end = self._router(block), f"{layer_norms(self._config).out}.weight"
        weights = [np.asarray(_weights(self._config, batch, router_ED)) for batch in stream.batches]
        sums = [
            jnp.zeros((len(weight_ME), batch.inputs_BNI.shape[-1]))
            for weight_ME, batch in zip(weights, stream.batches, strict=True)
        ]
        for index, names in enumerate(self._mixture.experts):
            if not any(weight_ME[:, index].any() for weight_ME in weights):
                continue
            expert = {name: self._put(tensor) for name, tensor in as_mlp(names, block).items()}
            for place, (weight_ME, batch) in enumerate(zip(weights, stream.batches, strict=True)):
                if (mine := np.flatnonzero(weight_ME[:, index])).size:
                    place_P, valid_P = _padded(mine)
                    weight_P = np.where(valid_P, weight_ME[place_P, index], 0)
                    sums[place] = _add_expert(self._config, self._dtype, expert, batch, place_P, weight_P, sums[place])
        tensors = {name: self._put_norm(block[name]) for name in (at_end,) if name in block}
        leave = partial(_leave, self._config, self._dtype, tensors)
        return JaxStream(list(map(leave, stream.batches, sums)), stream.layer + 1)

    def _router(self, block: Block) -> jax.Array:
        """In the type it is stored in."""
        assert self._mixture is not None
        router = block[f"{self._mixture.router}.weight"]
        assert not isinstance(router, QTensor), self._mixture.router
        return jax.device_put(router, self._device)

    def _embed(self, sequences: Sequence[np.ndarray]) -> Batch:
        length = -(-max(map(len, sequences)) // _LENGTH_STEP) * _LENGTH_STEP
        token_BN = np.zeros((len(sequences), length), np.int32)
        valid_BN = np.zeros(token_BN.shape, bool)
        for row, sequence in enumerate(sequences):
            token_BN[row, : len(sequence)] = sequence
            valid_BN[row, : len(sequence)] = True
        hidden_BND = self._embedding_VD[jax.device_put(token_BN, self._device)]
        if self._config.scales_embedding:
            hidden_BND = hidden_BND * jnp.asarray(self._config.embedding_scale, self._dtype)
        return Batch(jax.device_put(valid_BN, self._device), hidden_BND, hidden_BND[:, :0])

    def _put(self, tensor: np.ndarray | QTensor) -> jax.Array:
        dense = dequantize(tensor) if isinstance(tensor, QTensor) else tensor
        return jax.device_put(dense.astype(dtype_of(np, self._dtype)), self._device)

    def _put_norm(self, weight: np.ndarray | QTensor) -> jax.Array:
        """What a norm multiplies by; in float32 where an offset is part of it."""
        assert not isinstance(weight, QTensor)
        factor = norm_factor(self._config, weight)
        return jax.device_put(factor, self._device) if self._config.norm_offset else self._put(factor)


_Tensors = Mapping[str, jax.Array]


def _batches(sequences: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
    """Sequences, up to `_BATCH_TOKENS` tokens together with their padding."""
    batches: list[list[np.ndarray]] = []
    longest = 0
    for sequence in sequences:
        longest = max(longest, len(sequence))
        if not batches or longest * (len(batches[-1]) + 1) > _BATCH_TOKENS:
            batches.append([])
            longest = len(sequence)
        batches[-1].append(sequence)
    return batches


def _padded(place_P: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Places in as many as a power of two, the others a repeated one, and which are there: few functions are compiled."""
    room = max(_LENGTH_STEP, 1 << (len(place_P) - 1).bit_length())
    return np.pad(place_P, (0, room - len(place_P)), "edge").astype(np.int32), np.arange(room) < len(place_P)


@partial(jax.jit, static_argnames=("config", "dtype", "place"))
def _advance(
    config: ModelConfig,
    dtype: str,
    place: tuple[int, int],
    block: _Tensors,
    rotation: tuple[jax.Array, jax.Array],
    batch: Batch,
) -> Batch:
    """Run a stage, which with the layer's index in `ModelConfig.attentions` is its place."""
    norms, (stage, kind) = layer_norms(config), place

    def norm(name: str | None, x: jax.Array) -> jax.Array:
        weight = block.get(f"{name}.weight")
        return x if weight is None else _norm(x, weight, config.norm_eps)

    with precision(dtype):
        hidden_BND, inputs_BNI = batch.hidden_BND, batch.inputs_BNI
        if stage == 0:
            inputs_BNI = norm(norms.attention, hidden_BND)
        elif stage == 1:
            q, k, v = (_heads(config, _linear(block, f"self_attn.{name}_proj", inputs_BNI)) for name in "qkv")
            q, k = (_rotate(norm(f"self_attn.{name}_norm", x), rotation) for name, x in (("q", q), ("k", k)))
            inputs_BNI = _attended(config, config.attentions[kind].window, q, k, v)
        elif stage == 2:
            hidden_BND = hidden_BND + norm(norms.attended, _linear(block, "self_attn.o_proj", inputs_BNI))
            inputs_BNI = norm(norms.mlp, hidden_BND)
        elif stage == 3:
            inputs_BNI = _gated(config, block, inputs_BNI)
        else:
            assert stage == len(STAGES)
            hidden_BND = hidden_BND + norm(norms.out, _linear(block, "mlp.down_proj", inputs_BNI))
            inputs_BNI = hidden_BND[:, :0]
        return Batch(batch.valid_BN, hidden_BND, inputs_BNI)


@partial(jax.jit, static_argnames=("config", "dtype"))
def _leave(config: ModelConfig, dtype: str, block: _Tensors, batch: Batch, sum_MD: jax.Array) -> Batch:
    """The end of a block whose experts give this sum."""
    with precision(dtype):
        out_BND = sum_MD.reshape(batch.inputs_BNI.shape).astype(batch.inputs_BNI.dtype)
        norm_D = block.get(f"{layer_norms(config).out}.weight")
        hidden_BND = batch.hidden_BND + (out_BND if norm_D is None else _norm(out_BND, norm_D, config.norm_eps))
        return Batch(batch.valid_BN, hidden_BND, hidden_BND[:, :0])


@partial(jax.jit, static_argnames=("config", "dtype"))
def _add_expert(
    config: ModelConfig,
    dtype: str,
    block: _Tensors,
    batch: Batch,
    place_P: jax.Array,
    weight_P: jax.Array,
    sum_MD: jax.Array,
) -> jax.Array:
    """Add what an expert makes of some tokens, times their weights."""
    with precision(dtype):
        x_BPD = _inputs(batch)[None, place_P]
        y_BPD = _linear(block, "mlp.down_proj", _gated(config, block, x_BPD)).astype(jnp.float32)
        return sum_MD.at[place_P].add(weight_P[:, None] * y_BPD[0])


@jax.jit
def _picked(batch: Batch, place_P: jax.Array, valid_P: jax.Array) -> Batch:
    x_BPD = _inputs(batch)[None, place_P]
    return Batch(valid_P[None], x_BPD[:, :0], x_BPD)


@jax.jit
def _probabilities(batch: Batch, router_ED: jax.Array) -> jax.Array:
    return probabilities(_inputs(batch), router_ED).reshape(*batch.valid_BN.shape, -1)


@partial(jax.jit, static_argnames="config")
def _weights(config: ModelConfig, batch: Batch, router_ED: jax.Array) -> jax.Array:
    """How much each expert counts for each token, `[M, E]`; nothing at padding."""
    assert config.experts is not None
    return jnp.where(batch.valid_BN.reshape(-1, 1), route(_inputs(batch), router_ED, config.experts), 0)


def _inputs(batch: Batch) -> jax.Array:
    """What the linears read, `[M, I]`."""
    return batch.inputs_BNI.reshape(-1, batch.inputs_BNI.shape[-1])


def _gated(config: ModelConfig, block: _Tensors, x_BNI: jax.Array) -> jax.Array:
    gate, up = (_linear(block, f"mlp.{name}_proj", x_BNI) for name in ("gate", "up"))
    return ACTIVATIONS[config.activation](gate) * up


def _heads(config: ModelConfig, x_BNO: jax.Array) -> jax.Array:
    return x_BNO.reshape(*x_BNO.shape[:2], -1, config.head_dim)


def _attended(
    config: ModelConfig, window: int | None, q_BNHh: jax.Array, k_BNKh: jax.Array, v_BNKh: jax.Array
) -> jax.Array:
    """Causal attention of each sequence on itself; padding stands behind all that is read."""
    num_sequences, length, _, _ = q_BNHh.shape
    q_BNKRh = q_BNHh.reshape(*k_BNKh.shape[:3], -1, config.head_dim)
    scores_BKRNT = jnp.einsum("BNKRh,BTKh->BKRNT", q_BNKRh, k_BNKh, preferred_element_type=jnp.float32)
    distance_NT = jnp.arange(length)[:, None] - jnp.arange(length)
    visible_NT = distance_NT >= 0
    if window is not None:
        visible_NT &= distance_NT < window
    probs_BKRNT = jax.nn.softmax(jnp.where(visible_NT, scores_BKRNT * config.attention_scale, -jnp.inf), axis=-1)
    out_BNKRh = jnp.einsum("BKRNT,BTKh->BNKRh", probs_BKRNT.astype(v_BNKh.dtype), v_BNKh)
    return out_BNKRh.reshape(num_sequences, length, -1)


@jax.jit
def _moments(batch: Batch) -> jax.Array:
    inputs_BNI = batch.inputs_BNI.astype(jnp.float32)
    return _outer(jnp.where(batch.valid_BN[..., None], inputs_BNI, 0), inputs_BNI)


@jax.jit
def _drift(before: Batch, batch: Batch, divisor_I: jax.Array | None) -> jax.Array:
    expected_BNI = before.inputs_BNI if divisor_I is None else before.inputs_BNI / divisor_I
    moved_BNI = (expected_BNI - batch.inputs_BNI).astype(batch.inputs_BNI.dtype)
    return _outer(jnp.where(batch.valid_BN[..., None], moved_BNI, 0), batch.inputs_BNI)


def _total(matrices: Iterable[jax.Array]) -> np.ndarray:
    """Their sum in float64, on the host."""
    return reduce(np.add, (np.asarray(matrix_II, np.float64) for matrix_II in matrices))


def _outer(left_BNI: jax.Array, right_BNI: jax.Array) -> jax.Array:
    with precision("float32"):
        return jnp.einsum("BNI,BNJ->IJ", left_BNI.astype(jnp.float32), right_BNI.astype(jnp.float32))


@partial(jax.jit, static_argnames=("config", "dtype"))
def _divergence(
    config: ModelConfig, dtype: str, head: tuple[jax.Array, jax.Array], baseline: Batch, batch: Batch
) -> jax.Array:
    """KL divergence of each position, 0 at padding; a sequence at a time, for the logits are many."""
    norm_D, head_VD = head

    def log_probs(hidden_ND: jax.Array) -> jax.Array:
        x_ND = _norm(hidden_ND, norm_D, config.norm_eps)
        return jax.nn.log_softmax(jnp.dot(x_ND, head_VD.T, preferred_element_type=jnp.float32), axis=-1)

    def one(rows: tuple[jax.Array, jax.Array]) -> jax.Array:
        ours_NV, theirs_NV = map(log_probs, rows)
        return jnp.sum(jnp.exp(ours_NV) * (ours_NV - theirs_NV), axis=-1)

    with precision(dtype):
        kl_BN = lax.map(one, (baseline.hidden_BND, batch.hidden_BND))
        return jnp.where(batch.valid_BN, kl_BN, 0.0)


def _linear(block: _Tensors, name: str, x_BNI: jax.Array) -> jax.Array:
    y_BNO = jnp.einsum("BNI,OI->BNO", x_BNI, block[f"{name}.weight"], preferred_element_type=jnp.float32)
    bias_O = block.get(f"{name}.bias")
    return (y_BNO if bias_O is None else y_BNO + bias_O).astype(x_BNI.dtype)


def _norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    wide = x.astype(jnp.float32)
    scaled = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (scaled * weight.astype(jnp.float32)).astype(x.dtype)


def _rotate(x_BNHh: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    first, second = jnp.split(x_BNHh.astype(jnp.float32), 2, axis=-1)
    cos, sin = (table_Th[: x_BNHh.shape[1], None] for table_Th in rotation)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_BNHh.dtype)
