"""Keys and values of every slot on the device, and which of them a token sees.

Devices that share a key/value head share the positions of every slot, in turns of a block: of a short sequence as well,
each holds its part.

Shape letters: B slots of the batch, N tokens of each, K kv heads, h head size, L layers, S slots,
T positions of a slot, t some of them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.tree_util import register_dataclass

from llmq.backends.tpu.linear import Leaf
from llmq.model.config import ModelConfig
from llmq.quant import quantize_vectors

#: Axes of a mesh: groups of slots, key/value heads, and what shares a head.
DP, HEADS, SHARED = "dp", "heads", "shared"

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
        mesh: The devices that hold it together; None for one.
    """

    k_LSTKh: Leaf
    v_LSTKh: Leaf
    k_scale_LSKT: Leaf | None = None
    v_scale_LSKT: Leaf | None = None
    mesh: Mesh | None = field(default=None, metadata={"static": True})

    @property
    def specs(self) -> "Cache":
        """How it is split: the same tree, of specs."""
        return jax.tree.map(
            lambda part: P(None, DP, SHARED, HEADS) if part.ndim == 5 else P(None, DP, HEADS, SHARED), self
        )

    @property
    def turns(self) -> tuple[int, jax.Array | int]:
        """On one of the devices: how many of them take turns with the blocks of positions, and which one it is."""
        return (self.mesh.shape[SHARED], lax.axis_index(SHARED)) if self.mesh else (1, 0)

    def own(self, slot: Leaf) -> tuple[Leaf, jax.Array | bool]:
        """On one of the devices: a slot as one of its own, and whether it is."""
        if self.mesh is None:
            return slot, True
        num_slots = self.k_LSTKh.shape[1]
        mine = slot - lax.axis_index(DP) * num_slots
        return mine, (mine >= 0) & (mine < num_slots)

    def on_each(
        self,
        function: Callable[..., Any],
        index: Leaf,
        place: "Place",
        window: Leaf | int | None,
        *x_BNKX: jax.Array,
        keeps: bool = False,
    ) -> Any:
        """``function(cache, index, place, window, *x)`` on every device, for its slots, heads and positions.

        A batch of all slots is split as they are. That of a single slot is computed by every group, of which one holds it.

        Args:
            function: As on a single device, but for what `turns` and `own` say.
            index: The layer.
            place: Of the batch.
            window: As for attention.
            *x_BNKX: Arrays with an axis of key/value heads.
            keeps: Whether it returns the cache, rather than an array like `x_BNKX`.

        Returns:
            Its result.
        """
        mesh = self.mesh
        if mesh is None:
            return function(self, index, place, window, *x_BNKX)
        is_split = place.row_BN.shape[0] == self.k_LSTKh.shape[1]
        batch = DP if is_split else None
        rows, heads = P(batch), P(batch, None, HEADS)

        def on_one(cache: Cache, index: Leaf, place: Place, window: Leaf | int | None, *x_BNKX: jax.Array) -> Any:
            if is_split:
                return function(cache, index, place, window, *x_BNKX)
            slot, is_here = cache.own(place.slot)
            row_BN = place.row_BN if not keeps else jnp.where(is_here, place.row_BN, -1)
            found = function(cache, index, replace(place, slot=slot, row_BN=row_BN), window, *x_BNKX)
            return found if keeps or mesh.shape[DP] == 1 else lax.psum(jnp.where(is_here, found, 0), DP)

        in_specs = (self.specs, P(), Place(P(), rows, rows, rows, rows, P()), P(), *(heads for _ in x_BNKX))
        out_specs = self.specs if keeps else heads
        spread = jax.shard_map(on_one, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        return spread(self, index, place, window, *x_BNKX)


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


def whole_blocks(max_len: int, num_parts: int = 1) -> int:
    """Positions of a slot, rounded up to blocks.

    Args:
        max_len: As asked for.
        num_parts: Devices that share them, evenly.

    Returns:
        A multiple of `BLOCK`.
    """
    return -(-max_len // (BLOCK * num_parts)) * BLOCK * num_parts


def empty_cache(
    config: ModelConfig, num_slots: int, max_len: int, dtype: jax.typing.DTypeLike, mesh: Mesh | None = None
) -> Cache:
    """A cache of zeros.

    Args:
        config: The model.
        num_slots: S.
        max_len: Positions of a slot, rounded up to whole blocks.
        dtype: Type of what is stored.
        mesh: The devices; None for one.

    Returns:
        The cache.
    """
    num_parts = mesh.shape[SHARED] if mesh else 1
    slots, num_positions = (config.num_layers, num_slots), whole_blocks(max_len, num_parts)
    stored = [jnp.zeros((*slots, num_positions, config.num_kv_heads, config.head_dim), dtype) for _ in range(2)]
    scales = [jnp.zeros((*slots, config.num_kv_heads, num_positions)) for _ in range(2) if dtype == "int8"]
    return Cache(*stored, *scales, mesh=mesh if mesh and mesh.size > 1 else None)


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
    return cache.on_each(_write, index, place, None, k_BNKh, v_BNKh, keeps=True)


def _write(cache: Cache, index: Leaf, place: Place, _: None, k_BNKh: jax.Array, v_BNKh: jax.Array) -> Cache:
    """`write`, of one device."""
    num_rows, (num_turns, turn) = cache.k_LSTKh.shape[2], cache.turns
    block_BN = place.row_BN // BLOCK
    is_here_BN = (place.row_BN >= 0) & (block_BN % num_turns == turn)
    # Padding goes to a row past the end, which drops it; so does what others hold.
    at_BN = jnp.where(is_here_BN, block_BN // num_turns * BLOCK + place.row_BN % BLOCK, num_rows)
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

    k, v = cache.k_LSTKh, cache.v_LSTKh
    if cache.k_scale_LSKT is None:
        return replace(cache, k_LSTKh=put(k, k_BNKh), v_LSTKh=put(v, v_BNKh))
    (k_new, k_scale), (v_new, v_scale) = quantize_vectors(k_BNKh), quantize_vectors(v_BNKh)
    return replace(
        cache,
        k_LSTKh=put(k, k_new),
        v_LSTKh=put(v, v_new),
        k_scale_LSKT=put_scale(cache.k_scale_LSKT, k_scale),
        v_scale_LSKT=put_scale(cache.v_scale_LSKT, v_scale),
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
    if cache.mesh is None:
        return _copy_slot(cache, source, target, num_tokens)
    in_specs = (cache.specs, P(), P(), P())
    spread = jax.shard_map(_copy_slot, mesh=cache.mesh, in_specs=in_specs, out_specs=cache.specs, check_vma=False)
    return spread(cache, source, target, num_tokens)


def _copy_slot(cache: Cache, source: Leaf, target: Leaf, num_tokens: Leaf) -> Cache:
    """`copy_slot`, of one device."""
    (source, is_source), (target, is_target) = cache.own(source), cache.own(target)

    def copy(block: jax.Array, cache: Cache) -> Cache:
        def put(stored: jax.Array) -> jax.Array:
            of_block = (block * BLOCK, 0, 0) if stored.ndim == 5 else (0, block * BLOCK)
            sizes = (1, BLOCK, *stored.shape[3:]) if stored.ndim == 5 else (1, stored.shape[2], BLOCK)

            def read(slot: Leaf) -> jax.Array:
                return lax.dynamic_slice(stored, (0, slot, *of_block), (stored.shape[0], *sizes))

            found = read(source)
            if cache.mesh and cache.mesh.shape[DP] > 1:
                found = lax.psum(jnp.where(is_source, found, 0), DP)
                found = jnp.where(is_target, found, read(target))
            return lax.dynamic_update_slice(stored, found, (0, target, *of_block))

        return jax.tree.map(put, cache)

    return lax.fori_loop(0, -(-num_tokens // (BLOCK * cache.turns[0])), copy, cache)
