"""Keys and values of every slot on the device, and which of them a token sees.

Shape letters: B slots of the batch, N tokens of each, K kv heads, h head size, L layers, S slots,
T positions of a slot, t some of them.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import register_dataclass

from llmq.backends.tpu.linear import Leaf
from llmq.model.config import ModelConfig
from llmq.quant import quantize_vectors

#: Positions that attention reads at a time; the cache is a whole number of blocks long. A block
#: beyond a row's position changes none of its bits, so rows of any lengths share one loop.
BLOCK = 128


@register_dataclass
@dataclass(frozen=True)
class Cache:
    """Keys, after rotation, and values of every row, in the compute type or as int8 codes.

    Attributes:
        k_LSTKh, v_LSTKh: What is stored.
        k_scale_LSKT, v_scale_LSKT: float32 scales of codes, as they multiply scores; None without.
    """

    k_LSTKh: Leaf
    v_LSTKh: Leaf
    k_scale_LSKT: Leaf | None = None
    v_scale_LSKT: Leaf | None = None


@register_dataclass
@dataclass(frozen=True)
class Place:
    """Where the tokens of a batch go, and what each sees.

    A token sees the rows before `shared`, its parent's and those of its own run, up to itself; its
    positions count through them, whatever lies between.

    Attributes:
        slot: The first slot of the batch, a scalar.
        row_BN: Row of its slot that each token is written to, -1 for padding.
        first_BN: Row where the token's run begins.
        parent_BN: Row where the parent of the token's run begins.
        parent_size_BN: Rows of that parent, which lie before the run; 0 without one.
        shared: Rows that every run continues, a scalar.
    """

    slot: Leaf
    row_BN: Leaf
    first_BN: Leaf
    parent_BN: Leaf
    parent_size_BN: Leaf
    shared: Leaf

    def position(self, row: jax.Array) -> jax.Array:
        """Position in the sequence of a row that a token sees.

        Args:
            row: `[B, N]` the tokens' own rows, or `[B, N, t]` rows of each.

        Returns:
            The same shape.
        """
        runs = (self.first_BN, self.parent_BN, self.parent_size_BN)
        first, parent, parent_size = runs if row.ndim == 2 else (array_BN[:, :, None] for array_BN in runs)
        begins, before = jnp.where(row < first, parent, first), jnp.where(row < first, 0, parent_size)
        return jnp.where(row < self.shared, row, row - begins + before + self.shared)

    def visible(self, seen_t: jax.Array) -> jax.Array:
        """Which rows a token sees.

        Args:
            seen_t: `[t]` rows.

        Returns:
            bool `[B, N, t]`.
        """
        runs = (self.row_BN, self.first_BN, self.parent_BN, self.parent_size_BN)
        row, first, parent, parent_size = (array_BN[:, :, None] for array_BN in runs)
        of_parent = (seen_t >= parent) & (seen_t < parent + parent_size)
        return (seen_t <= row) & ((seen_t < self.shared) | of_parent | (seen_t >= first))


def whole_blocks(max_len: int) -> int:
    """Positions of a slot, rounded up to blocks.

    Args:
        max_len: As asked for.

    Returns:
        A multiple of `BLOCK`.
    """
    return -(-max_len // BLOCK) * BLOCK


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
    slots, num_positions = (config.num_layers, num_slots), whole_blocks(max_len)
    stored = [jnp.zeros((*slots, num_positions, config.num_kv_heads, config.head_dim), dtype) for _ in range(2)]
    scales = [jnp.zeros((*slots, config.num_kv_heads, num_positions)) for _ in range(2) if dtype == "int8"]
    return Cache(*stored, *scales)


def write(cache: Cache, index: jax.Array, place: Place, k_BNKh: jax.Array, v_BNKh: jax.Array) -> Cache:
    """Store the keys and values of a layer's tokens.

    Args:
        cache: Where.
        index: The layer.
        place: Which rows.
        k_BNKh: Keys, after rotation.
        v_BNKh: Values.

    Returns:
        The cache with them.
    """
    num_rows = cache.k_LSTKh.shape[2]
    # Padding goes to a row past the end, which drops it.
    at_BN = jnp.where(place.row_BN < 0, num_rows, place.row_BN)
    slot_B1 = place.slot + jnp.arange(at_BN.shape[0])[:, None]

    def put(stored: Leaf, new: jax.Array) -> jax.Array:
        return stored.at[index, slot_B1, at_BN].set(new, mode="drop")

    def put_scale(stored: Leaf | None, new_BNK: jax.Array) -> jax.Array:
        """Into a layer's scales, and these back: a scatter into all would have TPUs turn them around at every layer."""
        assert stored is not None
        first = (index, place.slot, 0, 0)
        scale_BKT = lax.dynamic_slice(stored, first, (1, len(at_BN), *stored.shape[2:]))[0]
        batch_B1 = jnp.arange(len(at_BN))[:, None]
        scale_BKT = scale_BKT.at[batch_B1, :, at_BN].set(new_BNK, mode="drop")
        return lax.dynamic_update_slice(stored, scale_BKT[None], first)

    if cache.k_scale_LSKT is None:
        return Cache(put(cache.k_LSTKh, k_BNKh), put(cache.v_LSTKh, v_BNKh))
    (k, k_scale), (v, v_scale) = quantize_vectors(k_BNKh), quantize_vectors(v_BNKh)
    return Cache(
        put(cache.k_LSTKh, k),
        put(cache.v_LSTKh, v),
        put_scale(cache.k_scale_LSKT, k_scale),
        put_scale(cache.v_scale_LSKT, v_scale),
    )


@partial(jax.jit, donate_argnames="cache")
def copy_slot(cache: Cache, source: Leaf, target: Leaf, num_tokens: Leaf) -> Cache:
    """Copy the first rows of a slot to another, in whole blocks.

    Args:
        cache: Donated.
        source: Slot, a scalar.
        target: Slot, a scalar.
        num_tokens: How many rows, a scalar.

    Returns:
        The cache.
    """

    def copy(block: jax.Array, cache: Cache) -> Cache:
        def put(stored: jax.Array) -> jax.Array:
            of_block = (block * BLOCK, 0, 0) if stored.ndim == 5 else (0, block * BLOCK)
            sizes = (1, BLOCK, *stored.shape[3:]) if stored.ndim == 5 else (1, stored.shape[2], BLOCK)
            found = lax.dynamic_slice(stored, (0, source, *of_block), (stored.shape[0], *sizes))
            return lax.dynamic_update_slice(stored, found, (0, target, *of_block))

        return jax.tree.map(put, cache)

    return lax.fori_loop(0, -(-num_tokens // BLOCK), copy, cache)
