"""The decoder, read from top to bottom: tokens in, cache updated, logits out.

One function serves prefill, decode and scoring. A batch is B consecutive slots of N tokens each;
prefill has one slot and many tokens, decode all slots and one token. A token at row -1 is padding: it
is not written to the cache, and what is computed for it means nothing.

Like layers lie stacked in segments and are scanned. The cache travels in the scan's carry, where
XLA updates it in place; as a scanned input and output it would be copied whole at every layer.

Shape letters: B slots of the batch, N tokens of each, D hidden, K kv heads, R query heads of each,
h head size, L layers, S slots, T positions of a slot, t positions of a block, V vocabulary.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import register_dataclass

from llmq.backends.tpu.linear import Leaf, Linear
from llmq.backends.tpu.table import Table
from llmq.model.config import ModelConfig
from llmq.quant import quantize_vectors

#: Positions that attention reads at a time; the cache is a whole number of blocks long. A block
#: beyond a row's position changes none of its bits, so rows of any lengths share one loop.
BLOCK = 128

#: Below every score, and finite: a row that has seen nothing yet must not become NaN.
LOWEST = -1e30


@register_dataclass
@dataclass(frozen=True)
class Layer:
    """Weights of one layer, or of a segment of layers along a leading axis."""

    attention_norm_D: Leaf
    q: Linear
    k: Linear
    v: Linear
    q_norm_h: Leaf | None
    k_norm_h: Leaf | None
    o: Linear
    mlp_norm_D: Leaf
    gate: Linear
    up: Linear
    down: Linear


@register_dataclass
@dataclass(frozen=True)
class Params:
    """All weights.

    Attributes:
        embedding: The token matrix.
        segments: Stacked layers, in order.
        final_norm_D: Norm before the head.
        head: None when tied to the embedding.
        cos_Th, sin_Th: Rotary tables, `[T, h / 2]`.
    """

    embedding: Table
    segments: tuple[Layer, ...]
    final_norm_D: Leaf
    head: Table | None
    cos_Th: Leaf
    sin_Th: Leaf


@register_dataclass
@dataclass(frozen=True)
class Cache:
    """Keys, after rotation, and values of every row, in the compute type or as int8 codes.

    Attributes:
        k_LSTKh, v_LSTKh: What is stored.
        k_scale_LSTK, v_scale_LSTK: float32 scales of codes; None without.
    """

    k_LSTKh: Leaf
    v_LSTKh: Leaf
    k_scale_LSTK: Leaf | None = None
    v_scale_LSTK: Leaf | None = None


@register_dataclass
@dataclass(frozen=True)
class Place:
    """Where the tokens of a batch go, and what each sees: the rows before `shared`, and its own run.

    Attributes:
        slot: The first slot of the batch, a scalar.
        row_BN: Row of its slot that each token is written to, -1 for padding.
        first_BN: Row where the token's run begins. A run follows the shared rows, whatever lies between.
        shared: Rows that every run continues, a scalar.
    """

    slot: Leaf
    row_BN: Leaf
    first_BN: Leaf
    shared: Leaf

    def position(self, row: jax.Array) -> jax.Array:
        """Position in the sequence of a row that a token sees.

        Args:
            row: `[B, N]` the tokens' own rows, or `[B, N, t]` rows of each.

        Returns:
            The same shape.
        """
        first = self.first_BN if row.ndim == 2 else self.first_BN[:, :, None]
        return jnp.where(row < self.shared, row, row - first + self.shared)


def empty_cache(config: ModelConfig, num_slots: int, max_len: int, dtype: jax.typing.DTypeLike) -> Cache:
    """A cache of zeros.

    Args:
        config: The model.
        num_slots: S.
        max_len: Positions of a slot, rounded up to whole blocks.
        dtype: Type of what is stored.

    Returns:
        The cache.
    """
    num_positions = -(-max_len // BLOCK) * BLOCK
    shape = (config.num_layers, num_slots, num_positions, config.num_kv_heads, config.head_dim)
    stored = [jnp.zeros(shape, dtype) for _ in range(2)]
    return Cache(*stored, *(jnp.zeros(shape[:-1]) for _ in range(2) if dtype == "int8"))


Wanted = Literal["cache", "logits", "scores"]


@partial(jax.jit, static_argnames=("config", "dtype", "wanted"), donate_argnames="cache")
def forward(
    config: ModelConfig,
    dtype: str,
    params: Params,
    cache: Cache,
    token_BN: Leaf,
    place: Place,
    target_BN: Leaf,
    wanted: Wanted,
) -> tuple[Cache, jax.Array | tuple[jax.Array, jax.Array] | None]:
    """Write tokens into the cache and predict what follows each.

    Args:
        config: The model.
        dtype: Compute type.
        params: Its weights.
        cache: Donated.
        token_BN: int32 `[B, N]`.
        place: Where they go, and what they see.
        target_BN: int32 `[B, N]`, what to score as the successor of each.
        wanted: Beside the cache: nothing, logits, or scores of the targets.

    Returns:
        The cache, and either None, float32 `[B, N, V]` logits, or `[B, N]` log-probabilities of the
        targets with whether each was the most likely token.
    """
    # Otherwise accelerators multiply float32 in bfloat16 passes.
    with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
        position_BN = jnp.maximum(place.position(place.row_BN), 0)
        rotation = (params.cos_Th[position_BN], params.sin_Th[position_BN])
        x_BND = params.embedding.lookup(token_BN, dtype)

        def step(
            carry: tuple[jax.Array, Cache], scanned: tuple[jax.Array, Layer]
        ) -> tuple[tuple[jax.Array, Cache], None]:
            (x_BND, cache), (index, layer) = carry, scanned
            x_BND, cache = _layer(config, layer, index, x_BND, cache, place, rotation)
            return (x_BND, cache), None

        first = 0
        for segment in params.segments:
            num_layers = segment.attention_norm_D.shape[0]
            indices = jnp.arange(first, first + num_layers)
            (x_BND, cache), _ = lax.scan(step, (x_BND, cache), (indices, segment))
            first += num_layers
        if wanted == "cache":
            return cache, None
        x_MD = _norm(x_BND, params.final_norm_D, config.norm_eps).reshape(-1, x_BND.shape[-1])
        head = params.head or params.embedding
        if wanted == "logits":
            return cache, head.project(x_MD).reshape(*token_BN.shape, -1)
        scores = _score(head, x_MD, target_BN.reshape(-1))
        return cache, jax.tree.map(lambda score_M: score_M.reshape(token_BN.shape), scores)


#: Rows of logits held at once while scoring.
HEAD_ROWS = 256


def _score(head: Table, x_MD: jax.Array, target_M: jax.Array) -> tuple[jax.Array, jax.Array]:
    def score(block: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, target = block
        logits = head.project(x)
        chosen = jnp.take_along_axis(logits, target[:, None], axis=-1)[:, 0]
        return chosen - jax.nn.logsumexp(logits, axis=-1), jnp.argmax(logits, axis=-1) == target

    num_blocks = max(1, len(x_MD) // HEAD_ROWS)
    blocks = (x_MD.reshape(num_blocks, -1, x_MD.shape[-1]), target_M.reshape(num_blocks, -1))
    return jax.tree.map(lambda score_Bm: score_Bm.reshape(-1), lax.map(score, blocks))


Rotation = tuple[jax.Array, jax.Array]  # cos and sin of each token, `[B, N, h / 2]`


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
    x_BND = x_BND + attended_BND
    normed_BND = _norm(x_BND, layer.mlp_norm_D, config.norm_eps)
    gated = jax.nn.silu(_apply(layer.gate, normed_BND)) * _apply(layer.up, normed_BND)
    return x_BND + _apply(layer.down, gated), cache


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
        x = _apply(linear, x_BND).reshape(*x_BND.shape[:2], -1, config.head_dim)
        return x if norm_h is None else _norm(x, norm_h, config.norm_eps)

    q_BNHh = _rotate(heads(layer.q, layer.q_norm_h), rotation)
    k_BNKh = _rotate(heads(layer.k, layer.k_norm_h), rotation)
    cache = _write(cache, index, place, k_BNKh, heads(layer.v, None))
    q_BNKRh = q_BNHh.reshape(*k_BNKh.shape[:3], -1, config.head_dim)
    attended_BNKRh = _attend(q_BNKRh, cache, index, place, config.sliding_window)
    return _apply(layer.o, attended_BNKRh.reshape(*x_BND.shape[:2], -1)), cache


def _write(cache: Cache, index: jax.Array, place: Place, k_BNKh: jax.Array, v_BNKh: jax.Array) -> Cache:
    num_rows = cache.k_LSTKh.shape[2]
    # Padding goes to a row past the end, which drops it.
    at_BN = jnp.where(place.row_BN < 0, num_rows, place.row_BN)
    slot_B1 = place.slot + jnp.arange(at_BN.shape[0])[:, None]

    def write(stored: Leaf, new: jax.Array) -> jax.Array:
        return stored.at[index, slot_B1, at_BN].set(new, mode="drop")

    if cache.k_scale_LSTK is None:
        return Cache(write(cache.k_LSTKh, k_BNKh), write(cache.v_LSTKh, v_BNKh))
    (k, k_scale), (v, v_scale) = quantize_vectors(k_BNKh), quantize_vectors(v_BNKh)
    return Cache(
        write(cache.k_LSTKh, k),
        write(cache.v_LSTKh, v),
        write(cache.k_scale_LSTK, k_scale),
        write(cache.v_scale_LSTK, v_scale),
    )


def _attend(q_BNKRh: jax.Array, cache: Cache, index: jax.Array, place: Place, window: int | None) -> jax.Array:
    """Softmax attention over the cache, a block of positions at a time, up to the last one in use.

    Source:
        The running maximum and sum: arXiv:1805.02867, algorithm 3.
    """
    num_slots, num_tokens, num_kv_heads, num_repeats, head_dim = q_BNKRh.shape
    q_BNKRh = q_BNKRh * jnp.asarray(head_dim**-0.5, q_BNKRh.dtype)
    row_BN1, first_BN1 = place.row_BN[:, :, None], place.first_BN[:, :, None]
    position_BN1 = place.position(place.row_BN)[:, :, None]

    def read(stored: Leaf, start: jax.Array) -> jax.Array:
        sizes = (1, num_slots, BLOCK, num_kv_heads, head_dim)[: stored.ndim]
        return lax.dynamic_slice(stored, (index, place.slot, start, 0, 0)[: stored.ndim], sizes)[0]

    def read_scale(stored: Leaf | None, start: jax.Array) -> jax.Array | float:
        """Scales as `[B, K, 1, 1, t]`: they multiply scores and probabilities."""
        return 1.0 if stored is None else read(stored, start).swapaxes(1, 2)[:, :, None, None]

    def add_block(
        block: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        highest_BKRN, total_BKRN, out_BKRNh = carry
        start = block * BLOCK
        k_BtKh, v_BtKh = (read(stored, start).astype(q_BNKRh.dtype) for stored in (cache.k_LSTKh, cache.v_LSTKh))
        seen_t = start + jnp.arange(BLOCK)
        visible_BNt = (seen_t <= row_BN1) & ((seen_t < place.shared) | (seen_t >= first_BN1))
        if window is not None:
            seen_BNt = jnp.broadcast_to(seen_t, (*place.row_BN.shape, BLOCK))
            visible_BNt &= position_BN1 - place.position(seen_BNt) < window
        scores_BKRNt = jnp.einsum("BNKRh,BtKh->BKRNt", q_BNKRh, k_BtKh, preferred_element_type=jnp.float32)
        scores_BKRNt *= read_scale(cache.k_scale_LSTK, start)
        scores_BKRNt = jnp.where(visible_BNt[:, None, None], scores_BKRNt, -jnp.inf)
        raised_BKRN = jnp.maximum(highest_BKRN, jnp.max(scores_BKRNt, axis=-1))
        shrink_BKRN = jnp.exp(highest_BKRN - raised_BKRN)
        weight_BKRNt = jnp.exp(scores_BKRNt - raised_BKRN[..., None])
        scaled_BKRNt = (weight_BKRNt * read_scale(cache.v_scale_LSTK, start)).astype(v_BtKh.dtype)
        added_BKRNh = jnp.einsum("BKRNt,BtKh->BKRNh", scaled_BKRNt, v_BtKh, preferred_element_type=jnp.float32)
        total_BKRN = total_BKRN * shrink_BKRN + jnp.sum(weight_BKRNt, axis=-1)
        return raised_BKRN, total_BKRN, out_BKRNh * shrink_BKRN[..., None] + added_BKRNh

    rows = (num_slots, num_kv_heads, num_repeats, num_tokens)
    start = (jnp.full(rows, LOWEST), jnp.zeros(rows), jnp.zeros((*rows, head_dim)))
    num_blocks = jnp.max(place.row_BN) // BLOCK + 1
    _, total_BKRN, out_BKRNh = lax.fori_loop(0, num_blocks, add_block, start)
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


def _rotate(x_BNHh: jax.Array, rotation: Rotation) -> jax.Array:
    """Rotate the pairs (j, j + h / 2) of each head, in float32."""
    first, second = jnp.split(x_BNHh.astype(jnp.float32), 2, axis=-1)
    cos, sin = (table_BNh[:, :, None] for table_BNh in rotation)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BNHh.dtype)
