"""The decoder as it is trained: float32 master weights, seen by the forward pass on their grids.

    forward   w  ->  dequantize(quantize(w))  rounded once to the compute type
    backward  the gradient as it is, but 0 where the code was clipped (`llmq.quant.gradient`)

Weights are a dictionary by their names in the checkpoint; those of a segment of like layers lie stacked
under the name without the layer, behind the segment's number. Experts are computed for every token, each on its
own, and count 0 for tokens that did not choose them.

Shape letters: B rows, N tokens of each, D hidden, K kv heads, R query heads of each, h head size,
O output features, I input features, V vocabulary, A ways to attend.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from llmq.backends.tpu.linear import Leaf
from llmq.backends.tpu.mlp import ACTIVATIONS, route
from llmq.backends.tpu.model import of_layer, precision
from llmq.config import Scheme
from llmq.model.config import ModelConfig
from llmq.model.names import EMBEDDING, FINAL_NORM, LM_HEAD, STAGES, expert_names, layer_norms
from llmq.quant import dequantize, fake_quantize_vectors, quantize
from llmq.quant.gradient import is_clipped

Tensors = Mapping[str, jax.Array]


@dataclass(frozen=True)
class Spec:
    """What a compiled step depends on beside arrays.

    Attributes:
        config: The model.
        dtype: Compute type.
        schemes: Key of a matrix -> its grid; hashable.
        rounded_inputs: Keys of the matrices that multiply inputs in int8.
        num_segments: Of like layers.
        factor: Of adapters; 0 where there are none.
        recompute: Recompute the activations of a layer in the backward pass.
    """

    config: ModelConfig
    dtype: str
    schemes: tuple[tuple[str, Scheme], ...]
    rounded_inputs: frozenset[str]
    num_segments: int
    factor: float
    recompute: bool


class Rows(NamedTuple):
    """A batch on the device.

    Attributes:
        tokens_BN, targets_BN: int32.
        learned_BN: bool.
        documents_BN: int32, 0 for padding.
        cos_BANh, sin_BANh: Rotation of each token, `[B, A, N, h / 2]`, for each of `ModelConfig.attentions`.
    """

    tokens_BN: jax.Array
    targets_BN: jax.Array
    learned_BN: jax.Array
    documents_BN: jax.Array
    cos_BANh: jax.Array
    sin_BANh: jax.Array


class Taught(NamedTuple):
    """What a teacher makes of a batch.

    Attributes:
        x_BND: What its head reads.
        head_VD: Its head.
        share: Of the divergence from it in the loss.
        temperature: Divides the logits of both.
    """

    x_BND: jax.Array
    head_VD: jax.Array
    share: float
    temperature: float


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def straight_through(master_OI: jax.Array, scheme: Scheme, dtype: str) -> jax.Array:
    """A weight on its grid, with the gradient of the master weight behind it.

    Args:
        master_OI: float32.
        scheme: The grid.
        dtype: Compute type.

    Returns:
        `[O, I]` in the compute type.
    """
    return dequantize(quantize(master_OI, scheme), dtype)


def _forward(master_OI: jax.Array, scheme: Scheme, dtype: str) -> tuple[jax.Array, jax.Array]:
    codes = quantize(master_OI, scheme)
    return dequantize(codes, dtype), is_clipped(master_OI, codes)


def _backward(_scheme: Scheme, _dtype: str, clipped_OI: jax.Array, grad_OI: jax.Array) -> tuple[jax.Array]:
    return (jnp.where(clipped_OI, 0.0, grad_OI.astype(jnp.float32)),)


straight_through.defvjp(_forward, _backward)


@jax.custom_vjp
def round_inputs(x: jax.Array) -> jax.Array:
    """What a linear reads that takes its inputs in int8, with the gradient passed through.

    Args:
        x: `[..., I]` in the compute type.

    Returns:
        As `llmq.quant.fake_quantize_vectors`.
    """
    return fake_quantize_vectors(x)


round_inputs.defvjp(lambda x: (fake_quantize_vectors(x), None), lambda _, grad: (grad,))


def merged(weight_OI: jax.Array, down_RI: jax.Array, up_OR: jax.Array, factor: float) -> jax.Array:
    """A weight with its adapter added, the same bits wherever it is computed."""
    with precision("float32"):
        return lax.optimization_barrier(weight_OI + factor * (up_OR @ down_RI))


def hidden(spec: Spec, tensors: Tensors, rows: Rows, *, quantized: bool) -> tuple[jax.Array, jax.Array]:
    """Run a batch up to the head.

    Args:
        spec: The model.
        tensors: Master weights, and adapters.
        rows: The batch.
        quantized: Whether the forward pass sees weights, and the inputs that are to be rounded, on their grids.

    Returns:
        What the head reads, `[B, N, D]`, and the head, `[V, D]`, in the compute type.
    """
    schemes = dict(spec.schemes) if quantized else {}

    def seen(held: Tensors, key: str, scheme: Scheme | None) -> jax.Array:
        weight = held[key]
        if f"up {key}" in held:
            weight = merged(weight, held[f"down {key}"], held[f"up {key}"], spec.factor)
        return straight_through(weight, scheme, spec.dtype) if scheme else weight.astype(spec.dtype)

    config, first = spec.config, 0
    x_BND = seen(tensors, EMBEDDING, schemes.get(EMBEDDING))[rows.tokens_BN]
    if config.scales_embedding:
        x_BND = x_BND * jnp.asarray(config.embedding_scale, spec.dtype)
    for segment in range(spec.num_segments):
        at = f"{segment} "
        stacked = {_without(key, at): array for key, array in tensors.items() if at in key}
        mine = {_without(key, at): scheme for key, scheme in schemes.items() if at in key}
        rounded = {_without(key, at) for key in spec.rounded_inputs if at in key and quantized}
        past = first + next(len(array) for array in stacked.values())
        kinds = [config.attention_index(index) for index in range(first, past)]
        attention_L = jnp.array(kinds) if len(config.attentions) > 1 else None
        first = past

        def layer(
            x: jax.Array,
            scanned: tuple[Tensors, jax.Array | None],
            mine: Mapping[str, Scheme] = mine,
            rounded: Collection[str] = rounded,
        ) -> tuple[jax.Array, None]:
            held, attention = scanned
            see = {key: seen(held, key, mine.get(key)) for key in held if not key.startswith(("up ", "down "))}
            return _layer(config, see, rounded, x, rows, attention), None

        x_BND, _ = lax.scan(jax.checkpoint(layer) if spec.recompute else layer, x_BND, (stacked, attention_L))
    head = EMBEDDING if config.tie_embeddings else LM_HEAD
    return _norm(config, x_BND, tensors[FINAL_NORM]), seen(tensors, head, schemes.get(head))


def losses(spec: Spec, tensors: Tensors, rows: Rows, taught: Taught | None = None, *, quantized: bool) -> jax.Array:
    """Loss of every row, from the data and, where there is one, a teacher.

    Args:
        spec: The model.
        tensors: Master weights, and adapters.
        rows: The batch.
        taught: What the teacher makes of it.
        quantized: Whether the forward pass sees weights on their grids.

    Returns:
        float32 `[B]`, the sum over learned tokens.
    """
    x_BND, head_VD = hidden(spec, tensors, rows, quantized=quantized)

    @jax.checkpoint
    def row(part: tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]) -> jax.Array:
        """One row's logits at a time, in the backward pass as well."""
        x_ND, target_N, learned_N, theirs_ND = part
        logits_NV = jnp.einsum("ND,VD->NV", x_ND, head_VD, preferred_element_type=jnp.float32)
        chosen_N = jnp.take_along_axis(logits_NV, target_N[:, None], axis=-1)[:, 0]
        loss_N = jax.nn.logsumexp(logits_NV, axis=-1) - chosen_N
        if taught is not None:
            theirs_NV = jnp.einsum("ND,VD->NV", theirs_ND, taught.head_VD, preferred_element_type=jnp.float32)
            wanted_NV = jax.nn.log_softmax(theirs_NV / taught.temperature)
            found_NV = jax.nn.log_softmax(logits_NV / taught.temperature)
            divergence_N = jnp.sum(jnp.exp(wanted_NV) * (wanted_NV - found_NV), axis=-1) * taught.temperature**2
            loss_N = (1 - taught.share) * loss_N + taught.share * divergence_N
        return jnp.sum(jnp.where(learned_N, loss_N, 0.0))

    return lax.map(row, (x_BND, rows.targets_BN, rows.learned_BN, None if taught is None else taught.x_BND))


def _without(key: str, at: str) -> str:
    """A key without its segment, which stands behind an adapter's part."""
    return key.replace(at, "", 1)


def _layer(
    config: ModelConfig,
    see: Tensors,
    rounded: Collection[str],
    x_BND: jax.Array,
    rows: Rows,
    attention: jax.Array | None,
) -> jax.Array:
    def linear(name: str, x_BNI: jax.Array) -> jax.Array:
        key = f"{name}.weight"
        y_BNO = (round_inputs(x_BNI) if key in rounded else x_BNI) @ see[key].T
        bias = see.get(f"{name}.bias")
        return y_BNO if bias is None else y_BNO + bias.astype(y_BNO.dtype)

    def norm(name: str | None, x: jax.Array) -> jax.Array:
        weight = see.get(f"{name}.weight")
        return x if weight is None else _norm(config, x, weight)

    def heads(part: str) -> jax.Array:
        x = linear(f"self_attn.{part}_proj", normed_BND)
        return norm(f"self_attn.{part}_norm", x.reshape(*x.shape[:2], -1, config.head_dim))

    norms = layer_norms(config)
    rotation = (rows.cos_BANh.swapaxes(0, 1), rows.sin_BANh.swapaxes(0, 1))
    cos_BNh, sin_BNh, window = of_layer(config, rotation, attention)
    normed_BND = norm(norms.attention, x_BND)
    q_BNHh, k_BNKh = (_rotate(heads(part), cos_BNh, sin_BNh) for part in "qk")
    attended_BND = _attend(config, window, q_BNHh, k_BNKh, heads("v"), rows.documents_BN)
    x_BND = x_BND + norm(norms.attended, linear("self_attn.o_proj", attended_BND))
    normed_BND = norm(norms.mlp, x_BND)

    def mlp(gate: str, up: str, down: str) -> jax.Array:
        return linear(down, ACTIVATIONS[config.activation](linear(gate, normed_BND)) * linear(up, normed_BND))

    mixture = expert_names(config)
    if mixture is None or config.experts is None:
        return x_BND + norm(norms.out, mlp(*STAGES[2], *STAGES[3]))
    tokens_MD = normed_BND.reshape(-1, normed_BND.shape[-1])
    weight_ME = route(tokens_MD, see[f"{mixture.router}.weight"], config.experts)
    weight_BNE = weight_ME.reshape(*normed_BND.shape[:2], -1)
    parts = [
        weight_BNE[..., index, None] * mlp(*names).astype(jnp.float32) for index, names in enumerate(mixture.experts)
    ]
    return x_BND + norm(norms.out, sum(parts, jnp.zeros(x_BND.shape, jnp.float32)).astype(x_BND.dtype))


def _attend(
    config: ModelConfig,
    window: Leaf | int | None,
    q_BNHh: jax.Array,
    k_BNKh: jax.Array,
    v_BNKh: jax.Array,
    documents_BN: jax.Array,
) -> jax.Array:
    """Causal attention within documents; padding sees padding."""
    num_tokens = documents_BN.shape[1]
    back_NN = jnp.arange(num_tokens)[:, None] - jnp.arange(num_tokens)
    visible_NN = back_NN >= 0
    if window is not None:
        visible_NN &= back_NN < window
    visible_BNN = visible_NN & (documents_BN[:, :, None] == documents_BN[:, None, :])
    q_BNKRh = q_BNHh.reshape(*k_BNKh.shape[:3], -1, config.head_dim) * jnp.asarray(config.attention_scale, q_BNHh.dtype)
    scores_BKRNn = jnp.einsum("BNKRh,BnKh->BKRNn", q_BNKRh, k_BNKh, preferred_element_type=jnp.float32)
    scores_BKRNn = jnp.where(visible_BNN[:, None, None], scores_BKRNn, -jnp.inf)
    probs_BKRNn = jax.nn.softmax(scores_BKRNn, axis=-1).astype(v_BNKh.dtype)
    out_BNKRh = jnp.einsum("BKRNn,BnKh->BNKRh", probs_BKRNn, v_BNKh, preferred_element_type=jnp.float32)
    return out_BNKRh.astype(q_BNHh.dtype).reshape(*documents_BN.shape, -1)


def _norm(config: ModelConfig, x: jax.Array, weight: jax.Array) -> jax.Array:
    """Root-mean-square norm over the last axis, in float32."""
    wide, factor = x.astype(jnp.float32), weight.astype(jnp.float32)
    if config.norm_offset:
        factor = config.norm_offset + factor
    scaled = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + config.norm_eps)
    return (scaled * factor).astype(x.dtype)


def _rotate(x_BNHh: jax.Array, cos_BNh: jax.Array, sin_BNh: jax.Array) -> jax.Array:
    """Rotate the pairs (j, j + h / 2) of each head, in float32."""
    first, second = jnp.split(x_BNHh.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos_BNh[:, :, None], sin_BNh[:, :, None]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BNHh.dtype)
