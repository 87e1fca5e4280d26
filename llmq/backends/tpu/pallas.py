"""A kernel of our own for the product with codes on a TPU: codes stream from memory once, and nothing else does.

    y[m, o] = sum_g scale[o, g] * (sum_{i in g} x[m, i] * values[o, i])  +  zero[o, g] * (sum_{i in g} x[m, i])

It is `linear`'s equation in one program. The layers' codes lie in one stack, and the kernel finds its layer
by an index: a layer cut out of the stack would be a copy of its codes. A tile is some columns of all features.
While it is computed the next one is read; inside it, blocks of `LANES` features go through the matrix unit one
after the other.

Where a block has several groups, and rows are few, each row of x comes once for each group with the features of the
others set to 0, and finds that group's sum: the codes themselves are multiplied, without a rounding. Many rows
would pay for that by as many times more work of the matrix unit; then the scale multiplies the codes, and the result
is rounded to the type of x, as `quant.dequantize` rounds it.

**No chip has run it.** It is held against float64 in JAX's TPU interpreter, the TPU compiler takes it, and the
compiler's own schedule says how long a tile takes (``benchmarks/tpu_schedule.py``). Until a chip has run it,
it is used only when asked for.

Shape letters: M rows of x, I input and O output features, L layers, G groups, B blocks, b features of a block,
n columns of a tile, r groups of a block.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.tree_util import register_dataclass

from llmq.backends.tpu.linear import MIN_ROWS, EinsumLayout, Leaf, Linear
from llmq.backends.tpu.mlp import Mixture
from llmq.quant import QTensor

#: Features that are multiplied at a time, and what columns are counted in.
LANES = 128

#: Rows of x in a program; more are computed by several, each from the codes anew.
MAX_ROWS = 256

#: Rows that go through the matrix unit for one block, repetitions counted, up to which codes are not scaled first.
#: From the schedules, v5e, 4096 x 4096, int4, thousands of cycles unscaled and scaled: group 32, 16 rows 22 and 22, 32
#: rows 36 and 24; group 64, 64 rows 39 and 28; group 128, never repeated, 64 rows 21 and 26, 256 rows 75 and 68.
MAX_REPEATED_ROWS = 64

#: Chips that multiply bfloat16 outside of the matrix unit.
_MULTIPLY_BFLOAT16 = ("v6e",)

#: Of the chip's fast memory, bytes; two tiles of codes lie in it, the rows of x and what is computed.
_FAST_MEMORY = 96 << 20


class Tiles(NamedTuple):
    """How a product is cut.

    Attributes:
        columns: Of a tile.
        blocks: Multiplied in one turn of the loop inside a tile.
    """

    columns: int
    blocks: int


@register_dataclass
@dataclass(frozen=True)
class PallasLinear:
    """Codes of all layers of a segment, multiplied by a kernel that takes the layer's index.

    The grids may have rows of zeros below those of the groups.
    """

    values_BbO: Leaf
    scale_GO: Leaf
    zero_GO: Leaf | None
    bias_O: Leaf | None
    group_size: int = field(metadata={"static": True})
    chip: str = field(metadata={"static": True})
    layer: Leaf | None = None

    @property
    def kernel(self) -> str:
        """See `Linear.kernel`."""
        return f"{self.values_BbO.dtype.name} Pallas kernel"

    def __call__(self, x_MI: jax.Array) -> jax.Array:
        """See `Linear.__call__`. The arrays are stacks, and `layer` says which."""
        assert self.layer is not None
        codes = (self.values_BbO, self.scale_GO, self.zero_GO)
        y_MO = matmul(x_MI, *codes, self.layer, self.group_size, self.chip)
        if self.bias_O is not None:
            y_MO += self.bias_O[self.layer].astype(jnp.float32)
        return y_MO.astype(x_MI.dtype)


@dataclass(frozen=True, slots=True)
class PallasLayout:
    """The layout for a chip; a matrix that the kernel cannot cut keeps the compiler's product.

    Attributes:
        chip: As in ``--target``.
    """

    chip: str

    def from_qtensor(self, weight: QTensor, bias_O: np.ndarray | None) -> Linear:
        """See `linear.QuantizedLinear.from_qtensor`."""
        num_outputs, num_features = weight.shape
        block_size = _block_size(num_features, weight.scale.shape[-1])
        if block_size is None or num_outputs % LANES:
            return EinsumLayout(self.chip).from_qtensor(weight, bias_O)
        code_type = ml_dtypes.int4 if weight.num_bits == 4 else np.int8
        values_BbO = weight.values.T.reshape(-1, block_size, num_outputs).astype(code_type)
        zero_GO = None if weight.zero is None else _padded(weight.zero.T)
        return PallasLinear(values_BbO, _padded(weight.scale.T), zero_GO, bias_O, weight.group_size, self.chip)


def _padded(grid_GO: np.ndarray) -> np.ndarray:
    """Whole tiles of memory: of other stacks the compiler would make a copy at every step."""
    num_groups = grid_GO.shape[0]
    return np.pad(grid_GO, ((0, -num_groups % 8 if num_groups > 1 else 0), (0, 0)))


def at_layer(segment: Any, layer: Leaf) -> Any:
    """One layer of a segment.

    Args:
        segment: A tree of stacks.
        layer: Index.

    Returns:
        The tree of the layer's arrays; stacks of `PallasLinear` and of experts stay, and know the index.
    """

    def one(node: Any) -> Any:
        if isinstance(node, PallasLinear | Mixture):
            return replace(node, layer=layer)
        return lax.dynamic_index_in_dim(node, layer, keepdims=False, allow_negative_indices=False)

    return jax.tree.map(one, segment, is_leaf=lambda node: isinstance(node, PallasLinear | Mixture))


def _block_size(num_features: int, num_groups: int) -> int | None:
    """Features of a block: whole groups, or part of a row's one group."""
    group_size = num_features // num_groups
    if num_groups == 1 or LANES % group_size == 0:
        return LANES if num_features % LANES == 0 else None
    return group_size if group_size % LANES == 0 else None


def matmul(
    x_MI: jax.Array,
    values_LBbO: jax.Array,
    scale_LGO: jax.Array,
    zero_LGO: jax.Array | None,
    layer: Leaf,
    group_size: int,
    chip: str,
    tiles: Tiles | None = None,
) -> jax.Array:
    """The product with one layer of a stack.

    Args:
        x_MI: `[M, I]`, bfloat16 or float32.
        values_LBbO: int4 or int8.
        scale_LGO: With any more rows than there are groups.
        zero_LGO: The same; None when symmetric.
        layer: Index, int32.
        group_size: Features that share a scale; blocks hold whole groups, or all are one group.
        chip: Whose tiles to take.
        tiles: Others.

    Returns:
        float32 `[M, O]`.
    """
    num_rows, num_features = x_MI.shape
    _, num_blocks, block_size, num_outputs = values_LBbO.shape
    num_groups, num_grid_rows = num_features // group_size, scale_LGO.shape[1]
    # A number of rows that programs share evenly, and that fills registers.
    num_programs = -(-num_rows // MAX_ROWS)
    rows = -(-num_rows // (num_programs * MIN_ROWS)) * MIN_ROWS
    x_MI = jnp.pad(x_MI, ((0, num_programs * rows - num_rows), (0, 0)))
    columns, turn = tiles or find_tiles(chip, rows, num_features, num_outputs, group_size)

    def stack_spec(*sizes: int) -> pl.BlockSpec:
        zeros = (0,) * (len(sizes) - 1)
        return pl.BlockSpec((1, *sizes, columns), lambda column, _, layer_ref: (layer_ref[0], 0, *zeros, column))

    def rows_spec(times: int, width: int) -> pl.BlockSpec:
        return pl.BlockSpec((times * rows, width), lambda _, row, __: (row, 0))

    operands = [x_MI, values_LBbO, scale_LGO]
    in_specs = [rows_spec(1, num_features), stack_spec(num_blocks, block_size), stack_spec(num_grid_rows)]
    if zero_LGO is not None:
        operands += [_sums(x_MI, num_groups, num_grid_rows, rows), zero_LGO]
        in_specs += [rows_spec(_PARTS, num_grid_rows), stack_spec(num_grid_rows)]
    y_MO = pl.pallas_call(
        partial(_kernel, group_size=group_size, turn=turn, in_bfloat16=chip in _MULTIPLY_BFLOAT16),
        name=f"{values_LBbO.dtype.name}_matmul",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(-(-num_outputs // columns), num_programs),
            in_specs=in_specs,
            out_specs=pl.BlockSpec((rows, columns), lambda column, row, _: (row, column)),
            scratch_shapes=[pltpu.VMEM((num_grid_rows, columns), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((num_programs * rows, num_outputs), jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=_FAST_MEMORY
        ),
    )(jnp.reshape(layer, (1,)).astype(jnp.int32), *operands)
    return y_MO[:num_rows]


def _kernel(
    layer_ref: Any,  # noqa: ARG001  the index maps read it
    x_ref: Any,
    values_ref: Any,
    scale_ref: Any,
    *refs: Any,
    group_size: int,
    turn: int,
    in_bfloat16: bool,
) -> None:
    """A tile: `[M, n]` of the product."""
    *zero_refs, y_ref, wide_ref = refs
    _, num_blocks, block_size, num_columns = values_ref.shape
    num_rows, num_features = x_ref.shape
    one_group, repeats = group_size == num_features, max(1, block_size // group_size)
    scale_first = repeats > 1 and repeats * num_rows > MAX_REPEATED_ROWS
    # In float32 a row can be read on its own, which a row of packed pairs cannot.
    wide_ref[...] = scale_ref[0].astype(jnp.float32)

    def scale_1n(block: jax.Array, group: int) -> jax.Array:
        return wide_ref[pl.ds(block * repeats + group, 1)]

    def add_block(y_Mn: jax.Array, x_Mb: jax.Array, block: jax.Array) -> jax.Array:
        values_bn = values_ref[0, block]
        if scale_first:
            between = x_Mb.dtype if in_bfloat16 else jnp.float32
            groups = jnp.split(values_bn.astype(between), repeats)
            scaled = [values_gn * scale_1n(block, group).astype(between) for group, values_gn in enumerate(groups)]
            return y_Mn + _dot(x_Mb, jnp.concatenate(scaled))
        parts = jnp.split(_dot(_one_group_each(x_Mb, repeats), values_bn), repeats)
        for group, part_Mn in enumerate(parts):
            y_Mn += part_Mn if one_group else part_Mn * scale_1n(block, group)
        return y_Mn

    def add_blocks(index: jax.Array, y_Mn: jax.Array) -> jax.Array:
        size = turn * block_size
        x_Mt = x_ref[:, pl.ds(pl.multiple_of(index * size, size), size)]
        for step, x_Mb in enumerate(jnp.split(x_Mt, turn, axis=1)):
            y_Mn = add_block(y_Mn, x_Mb, index * turn + step)
        return y_Mn

    y_Mn = lax.fori_loop(0, num_blocks // turn, add_blocks, jnp.zeros((num_rows, num_columns), jnp.float32))
    if one_group:
        y_Mn *= wide_ref[...]
    if zero_refs:
        sums_ref, zero_ref = zero_refs
        y_Mn += sum(jnp.split(_dot(sums_ref[...], zero_ref[0]), _PARTS))
    y_ref[...] = y_Mn


def _dot(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.dot(x, y.astype(x.dtype), preferred_element_type=jnp.float32)


def _one_group_each(x_Mb: jax.Array, repeats: int) -> jax.Array:
    """`[r * M, b]`: the rows once for each group of the block, 0 outside of it."""
    if repeats == 1:
        return x_Mb
    size = x_Mb.shape[1] // repeats
    feature_Mb = lax.broadcasted_iota(jnp.int32, x_Mb.shape, 1)
    wide_Mb = x_Mb.astype(jnp.float32)  # not every chip selects in bfloat16
    within = [(feature_Mb >= first) & (feature_Mb < first + size) for first in range(0, x_Mb.shape[1], size)]
    parts = [jnp.where(within_Mb, wide_Mb, 0) for within_Mb in within]
    return jnp.concatenate(parts).astype(x_Mb.dtype)


#: bfloat16 numbers that a float32 is the sum of.
_PARTS = 3


def _sums(x_MI: jax.Array, num_groups: int, num_grid_rows: int, rows: int) -> jax.Array:
    """Sums of x over groups, bfloat16 `[3 * M, G]`: three parts of them for the rows of each program."""
    rest_MG = jnp.sum(x_MI.reshape(-1, num_groups, x_MI.shape[1] // num_groups), axis=-1, dtype=jnp.float32)
    rest_MG = jnp.pad(rest_MG, ((0, 0), (0, num_grid_rows - num_groups)))
    parts = []
    for _ in range(_PARTS):
        # Not by astype: the compiler takes conversion there and back for nothing.
        part_MG = lax.reduce_precision(rest_MG, exponent_bits=8, mantissa_bits=7)
        parts.append(part_MG.astype(jnp.bfloat16).reshape(-1, rows, num_grid_rows))
        rest_MG = rest_MG - part_MG
    return jnp.stack(parts, axis=1).reshape(-1, num_grid_rows)


#: Chip, rows up to, I, O and group size of a product, None for any, and its tiles; the first row counts that fits and
#: whose tiles divide the blocks. Found by ``python -m benchmarks.tpu_schedule --tune``, which compiles the linears of
#: Llama-2-7B and Llama-3-8B with tiles of 256 to 1024 columns by 1 to 43 blocks: each of these is within 10 % of the
#: fewest cycles, the reading of the first tile, for which everything waits, among them. v5p has the units of v5e twice.
TILES: tuple[tuple[str | None, int, int | None, int | None, int | None, Tiles], ...] = (
    ("v6e", MAX_ROWS, None, None, None, Tiles(512, 16)),
    ("v6e", MAX_ROWS, None, None, None, Tiles(512, 43)),
    (None, 8, None, None, None, Tiles(256, 16)),
    (None, 16, None, 1024, None, Tiles(256, 16)),
    (None, 64, None, None, None, Tiles(512, 16)),
    (None, MAX_ROWS, None, None, None, Tiles(256, 16)),
    (None, MAX_ROWS, None, None, None, Tiles(256, 43)),
)


def find_tiles(chip: str, num_rows: int, num_features: int, num_outputs: int, group_size: int) -> Tiles:
    """How to cut a product.

    Args:
        chip: As in ``--target``.
        num_rows: M of a program.
        num_features: I.
        num_outputs: O.
        group_size: Features that share a scale.

    Returns:
        The tiles, of no more columns than there are.
    """
    product = (chip, num_features, num_outputs, group_size)
    num_blocks = num_features // (LANES if group_size == num_features else max(LANES, group_size))
    for of_chip, most_rows, *sizes, tiles in TILES:
        fits = all(wanted in (None, size) for wanted, size in zip((of_chip, *sizes), product, strict=True))
        if fits and num_rows <= most_rows and num_blocks % tiles.blocks == 0:
            return Tiles(min(tiles.columns, num_outputs), tiles.blocks)
    blocks = max(size for size in range(1, 17) if num_blocks % size == 0)
    return Tiles(min(256, num_outputs), blocks)
