"""The decoder, read from top to bottom: tokens in, cache updated, then the head.

One function serves prefill, decode and scoring; the heads are functions of their own, so that what is
asked of a token does not change how it is computed. A batch is B consecutive slots of N tokens each;
prefill has one slot and many tokens, decode all slots and one token. A token at row -1 is padding: it
is not written to the cache, and what is computed for it means nothing.

Like layers lie stacked in segments and are scanned. The cache travels in the scan's carry, where
XLA updates it in place; as a scanned input and output it would be copied whole at every layer.

Shape letters: B slots of the batch, N tokens of each, D hidden, K kv heads, R query heads of each,
h head size, L layers, A ways to attend, S slots, T positions of a slot, t positions of a block, V vocabulary.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.tree_util import register_dataclass

from llmq.backends.tpu.cache import BLOCK, SHARED, Cache, Place, write
from llmq.backends.tpu.linear import Leaf, Linear
from llmq.backends.tpu.mlp import Mixture, Mlp
from llmq.backends.tpu.pallas import at_layer
from llmq.backends.tpu.table import Table
from llmq.model.config import ModelConfig

#: Below every score, and finite: a row that has seen nothing yet must not become NaN.
LOWEST = -1e30


@register_dataclass
@dataclass(frozen=True)
class Layer:
    """Weights of one layer, or of a segment of layers along a leading axis.

    Norms hold what they multiply by. The last three are None where layers have no such norm, and where they
    all attend alike; else `attention` is the index of their way in `ModelConfig.attentions`.
    """

    attention_norm_D: Leaf
    q: Linear
    k: Linear
    v: Linear
    q_norm_h: Leaf | None
    k_norm_h: Leaf | None
    o: Linear
    mlp_norm_D: Leaf
    mlp: Mlp | Mixture
    attended_norm_D: Leaf | None = None
    out_norm_D: Leaf | None = None
    attention: Leaf | None = None


@register_dataclass
@dataclass(frozen=True)
class Params:
    """All weights.

    Attributes:
        embedding: The token matrix.
        segments: Stacked layers, in order.
        final_norm_D: Norm before the head.
        head: None when tied to the embedding.
        cos_ATh, sin_ATh: Rotary tables, `[A, T, h / 2]`, one for each of `ModelConfig.attentions`.
    """

    embedding: Table
    segments: tuple[Layer, ...]
    final_norm_D: Leaf
    head: Table | None
    cos_ATh: Leaf
    sin_ATh: Leaf

    def embed(self, config: ModelConfig, ids: jax.Array, dtype: str) -> jax.Array:
        """Embeddings, `[..., D]` in the compute type."""
        found = self.embedding.lookup(ids, dtype)
        return found * jnp.asarray(config.embedding_scale, dtype) if config.scales_embedding else found

    def project(self, x_MD: jax.Array) -> jax.Array:
        """Logits, float32 `[M, V]`."""
        return (self.head or self.embedding).project(x_MD)


def precision(dtype: str) -> AbstractContextManager[None]:
    """Within it products are of full precision; accelerators multiply float32 in bfloat16 passes otherwise.

    Args:
        dtype: Compute type.

    Returns:
        The context.
    """
    return jax.default_matmul_precision("highest" if dtype == "float32" else "default")


@partial(jax.jit, static_argnames=("config", "dtype"), donate_argnames="cache")
def forward(
    config: ModelConfig, dtype: str, params: Params, cache: Cache, token_BN: Leaf, place: Place
) -> tuple[Cache, jax.Array]:
    """Write tokens into the cache, and find what the head needs to predict their successors.

    Args:
        config: The model.
        dtype: Compute type.
        params: Its weights.
        cache: Donated.
        token_BN: int32 `[B, N]`.
        place: Where they go, and what they see.

    Returns:
        The cache, and `[B, N, D]` for the head.
    """
    with precision(dtype):
        position_BN = jnp.maximum(place.position(place.row_BN), 0)
        rotation = (params.cos_ATh[:, position_BN], params.sin_ATh[:, position_BN])
        x_BND = params.embed(config, token_BN, dtype)

        def step(
            segment: Layer, first: int, carry: tuple[jax.Array, Cache], index: jax.Array
        ) -> tuple[tuple[jax.Array, Cache], None]:
            x_BND, cache = carry
            layer = at_layer(segment, index)
            return _layer(config, layer, first + index, x_BND, cache, place, rotation), None

        first = 0
        for segment in params.segments:
            num_layers = segment.attention_norm_D.shape[0]
            (x_BND, cache), _ = lax.scan(partial(step, segment, first), (x_BND, cache), jnp.arange(num_layers))
            first += num_layers
        return cache, _norm(x_BND, params.final_norm_D, config.norm_eps)


@partial(jax.jit, static_argnames="dtype")
def logits(dtype: str, params: Params, x_BND: jax.Array) -> jax.Array:
    """The head.

    Args:
        dtype: Compute type.
        params: The weights.
        x_BND: From `forward`.

    Returns:
        float32 `[B, N, V]`.
    """
    with precision(dtype):
        return params.project(x_BND.reshape(-1, x_BND.shape[-1])).reshape(*x_BND.shape[:2], -1)


#: Rows of logits held at once while scoring.
HEAD_ROWS = 256


@partial(jax.jit, static_argnames=("config", "dtype"), donate_argnames="cache")
def decode(
    config: ModelConfig,
    dtype: str,
    params: Params,
    cache: Cache,
    token_S: Leaf,
    position_S: Leaf,
    active_S: Leaf,
) -> tuple[Cache, jax.Array]:
    """Write a token into every active slot, and predict its successor.

    Args:
        config: The model.
        dtype: Compute type.
        params: Its weights.
        cache: Donated.
        token_S: int32.
        position_S: int32, where each goes.
        active_S: bool; the others are not written.

    Returns:
        The cache, and float32 `[S, V]` logits.
    """
    row_S1 = jnp.where(active_S, position_S, -1)[:, None]
    none_S1 = jnp.zeros_like(row_S1)
    place = Place(jnp.int32(0), row_S1, none_S1, none_S1, none_S1, jnp.int32(0))
    cache, x_S1D = forward(config, dtype, params, cache, token_S[:, None], place)
    return cache, logits(dtype, params, x_S1D)[:, 0]


@partial(jax.jit, static_argnames="dtype")
def scores(dtype: str, params: Params, x_BND: jax.Array, target_BN: Leaf) -> tuple[jax.Array, jax.Array]:
    """How likely targets are.

    Args:
        dtype: Compute type.
        params: The weights.
        x_BND: From `forward`.
        target_BN: int32 `[B, N]`.

    Returns:
        Log-probabilities, float32 `[B, N]`, and whether each target is the most likely token, bool `[B, N]`.
    """

    def score(block: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x_MD, target_M = block
        logits_MV = params.project(x_MD)
        chosen_M = jnp.take_along_axis(logits_MV, target_M[:, None], axis=-1)[:, 0]
        return chosen_M - jax.nn.logsumexp(logits_MV, axis=-1), jnp.argmax(logits_MV, axis=-1) == target_M

    with precision(dtype):
        num_blocks = max(1, target_BN.size // HEAD_ROWS)
        blocks = (x_BND.reshape(num_blocks, -1, x_BND.shape[-1]), target_BN.reshape(num_blocks, -1))
        return jax.tree.map(lambda score_Xm: score_Xm.reshape(target_BN.shape), lax.map(score, blocks))


Rotation = tuple[jax.Array, jax.Array]  # cos and sin of each token, `[A, B, N, h / 2]`


def of_layer(
    config: ModelConfig, rotation: Rotation, attention: Leaf | None
) -> tuple[jax.Array, jax.Array, Leaf | int | None]:
    """Which rotation and which window a layer has.

    Args:
        config: The model.
        rotation: Cosine and sine for each of `ModelConfig.attentions`.
        attention: The layer's, a scalar; None where there is one.

    Returns:
        Cosine and sine of the layer, and its window: None to see all, an array where layers differ.
    """
    cos_A, sin_A = rotation
    windows = [found.window for found in config.attentions]
    if attention is None:
        return cos_A[0], sin_A[0], windows[0]
    window_A = np.array([np.iinfo(np.int32).max if window is None else window for window in windows], np.int32)
    return cos_A[attention], sin_A[attention], jnp.asarray(window_A)[attention]


def _layer(
    config: ModelConfig,
    layer: Layer,
    index: jax.Array,
    x_BND: jax.Array,
    cache: Cache,
    place: Place,
    rotation: Rotation,
) -> tuple[jax.Array, Cache]:
    normed_BND = _norm(x_BND, layer.attention_norm_D, config.norm_eps)
    attended_BND, cache = _attention(config, layer, index, normed_BND, cache, place, rotation)
    x_BND = x_BND + _norm_if(attended_BND, layer.attended_norm_D, config.norm_eps)
    normed_BND = _norm(x_BND, layer.mlp_norm_D, config.norm_eps)
    out_MD = layer.mlp(config, normed_BND.reshape(-1, normed_BND.shape[-1]), place.row_BN.reshape(-1) >= 0)
    return x_BND + _norm_if(out_MD.reshape(x_BND.shape), layer.out_norm_D, config.norm_eps), cache


def _attention(
    config: ModelConfig,
    layer: Layer,
    index: jax.Array,
    x_BND: jax.Array,
    cache: Cache,
    place: Place,
    rotation: Rotation,
) -> tuple[jax.Array, Cache]:
    """Write the tokens' keys and values, then attend on what is stored."""

    def heads(linear: Linear, norm_h: Leaf | None) -> jax.Array:
        # The compiler for TPUs would move the cut into heads into the product, and write the weight out for it.
        x_BNO = lax.optimization_barrier(_apply(linear, x_BND))
        x = x_BNO.reshape(*x_BND.shape[:2], -1, config.head_dim)
        return _norm_if(x, norm_h, config.norm_eps)

    cos_BNh, sin_BNh, window = of_layer(config, rotation, layer.attention)
    q_BNHh = _rotate(heads(layer.q, layer.q_norm_h), cos_BNh, sin_BNh)
    k_BNKh = _rotate(heads(layer.k, layer.k_norm_h), cos_BNh, sin_BNh)
    cache = write(cache, index, place, k_BNKh, heads(layer.v, None))
    q_BNKRh = q_BNHh.reshape(*k_BNKh.shape[:3], -1, config.head_dim)
    scaled_BNKRh = q_BNKRh * jnp.asarray(config.attention_scale, q_BNKRh.dtype)
    attended_BNKRh = cache.on_each(_attend, index, place, window, scaled_BNKRh)
    return _apply(layer.o, attended_BNKRh.reshape(*x_BND.shape[:2], -1)), cache


def _attend(cache: Cache, index: Leaf, place: Place, window: Leaf | int | None, q_BNKRh: jax.Array) -> jax.Array:
    """Softmax attention of scaled queries over the cache, a block of positions at a time, up to the last one in use.

    Devices that share the positions each go over their own, then put together what they found.

    Source:
        The running maximum and sum: arXiv:1805.02867, algorithm 3.
    """
    num_slots, num_tokens, num_kv_heads, num_repeats, head_dim = q_BNKRh.shape
    position_BN1 = place.position(place.row_BN)[:, :, None]
    last_B1 = jnp.max(place.row_BN, axis=1, keepdims=True)
    num_turns, turn = cache.turns

    def read(stored: Leaf, start: jax.Array, held_Bt: jax.Array) -> jax.Array:
        """What a slot held before may not be finite, and 0 times that is not 0."""
        sizes = (1, num_slots, BLOCK, num_kv_heads, head_dim)
        block_BtKh = lax.dynamic_slice(stored, (index, place.slot, start, 0, 0), sizes)[0]
        return jnp.where(held_Bt[:, :, None, None], block_BtKh, 0)

    def read_scale(stored: Leaf | None, start: jax.Array, held_Bt: jax.Array) -> jax.Array | float:
        """Scales as `[B, K, 1, 1, t]`: they multiply scores and probabilities."""
        if stored is None:
            return 1.0
        sizes = (1, num_slots, num_kv_heads, BLOCK)
        block_BKt = lax.dynamic_slice(stored, (index, place.slot, 0, start), sizes)[0]
        # The compiler for TPUs would lie heads beside each other, and turn all scales around for it.
        block_BKt = with_layout_constraint(block_BKt, Layout((0, 1, 2)))
        return jnp.where(held_Bt[:, None], block_BKt, 0)[:, :, None, None]

    def add_block(
        block: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        highest_BKRN, total_BKRN, out_BKRNh = carry
        seen_t = (block * num_turns + turn) * BLOCK + jnp.arange(BLOCK)
        here = (block * BLOCK, seen_t <= last_B1)
        k_BtKh, v_BtKh = (read(stored, *here).astype(q_BNKRh.dtype) for stored in (cache.k_LSTKh, cache.v_LSTKh))
        visible_BNt = place.visible(seen_t)
        if window is not None:
            seen_BNt = jnp.broadcast_to(seen_t, (*place.row_BN.shape, BLOCK))
            visible_BNt &= position_BN1 - place.position(seen_BNt) < window
        scores_BKRNt = jnp.einsum("BNKRh,BtKh->BKRNt", q_BNKRh, k_BtKh, preferred_element_type=jnp.float32)
        scores_BKRNt *= read_scale(cache.k_scale_LSKT, *here)
        scores_BKRNt = jnp.where(visible_BNt[:, None, None], scores_BKRNt, -jnp.inf)
        raised_BKRN = jnp.maximum(highest_BKRN, jnp.max(scores_BKRNt, axis=-1))
        shrink_BKRN = jnp.exp(highest_BKRN - raised_BKRN)
        weight_BKRNt = jnp.exp(scores_BKRNt - raised_BKRN[..., None])
        scaled_BKRNt = (weight_BKRNt * read_scale(cache.v_scale_LSKT, *here)).astype(v_BtKh.dtype)
        added_BKRNh = jnp.einsum("BKRNt,BtKh->BKRNh", scaled_BKRNt, v_BtKh, preferred_element_type=jnp.float32)
        total_BKRN = total_BKRN * shrink_BKRN + jnp.sum(weight_BKRNt, axis=-1)
        return raised_BKRN, total_BKRN, out_BKRNh * shrink_BKRN[..., None] + added_BKRNh

    rows = (num_slots, num_kv_heads, num_repeats, num_tokens)
    start = (jnp.full(rows, LOWEST), jnp.zeros(rows), jnp.zeros((*rows, head_dim)))
    num_blocks = jnp.max(place.row_BN) // (BLOCK * num_turns) + 1
    highest_BKRN, total_BKRN, out_BKRNh = lax.fori_loop(0, num_blocks, add_block, start)
    if num_turns > 1:
        shrink_BKRN = jnp.exp(highest_BKRN - lax.pmax(highest_BKRN, SHARED))
        found = total_BKRN * shrink_BKRN, out_BKRNh * shrink_BKRN[..., None]
        total_BKRN, out_BKRNh = lax.psum(found, SHARED)
    # Padding has seen nothing; its total of 0 must not divide.
    out_BKRNh = out_BKRNh / jnp.where(total_BKRN == 0, 1, total_BKRN)[..., None]
    return out_BKRNh.transpose(0, 3, 1, 2, 4).astype(q_BNKRh.dtype)


def _apply(linear: Linear, x_BNI: jax.Array) -> jax.Array:
    return linear(x_BNI.reshape(-1, x_BNI.shape[-1])).reshape(*x_BNI.shape[:2], -1)


def _norm(x: jax.Array, weight: Leaf, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis, in float32."""
    wide = x.astype(jnp.float32)
    scaled = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (scaled * weight.astype(jnp.float32)).astype(x.dtype)


def _norm_if(x: jax.Array, weight: Leaf | None, eps: float) -> jax.Array:
    return x if weight is None else _norm(x, weight, eps)


def _rotate(x_BNHh: jax.Array, cos_BNh: jax.Array, sin_BNh: jax.Array) -> jax.Array:
    """Rotate the pairs (j, j + h / 2) of each head, in float32."""
    first, second = jnp.split(x_BNHh.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos_BNh[:, :, None], sin_BNh[:, :, None]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BNHh.dtype)
