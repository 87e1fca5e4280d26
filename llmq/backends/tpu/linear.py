"""A linear layer on a device: the layouts of a weight, and the product with each.

    y[m, o] = sum_i x[m, i] * weight[o, i] + bias[o]
    weight[o, i] = values[o, i] * scale[o, g] + zero[o, g]        g = i // group_size

No layout ever holds the dequantized matrix. On an accelerator it exists only in the operand of the
product, a piece at a time. On the CPU it is written out for one product where x has many rows; where it has
few, the scale multiplies a group's partial sum instead of its weights, and the zero meets the group's sum of x:

    y[m, o] = sum_g scale[o, g] * (sum_{i in g} x[m, i] * values[o, i])  +  zero[o, g] * (sum_{i in g} x[m, i])

Sums accumulate in float32; the result is rounded once to the type of x. Every layout is a pytree,
so that like layers stack along a leading axis and are scanned.

Shape letters: M rows of x, in N runs of r, I input and O output features, G groups, in P pairs p, g
features of a group, B blocks of a scan, b features of a block (c bytes).
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax.tree_util import register_dataclass

from llmq.backends.tpu.nibbles import pack_halves, unpack_halves
from llmq.quant import QTensor, quantize_vectors

Leaf = Any  # an array: NumPy while a layout is built, JAX once it is on the device

#: Features of a block where nothing else sets them. Measured on the CPU: 32 to 128 are alike,
#: beyond that XLA stops fusing the conversion into the product.
MAX_BLOCK = 128

#: Rows from which on a CPU dequantizes the whole of a weight. Measured with 8 to 128 rows of 576 and 1536
#: features: up to 16 the scan is a fifth faster, with 24 both take as long, from 32 on it is slower.
WHOLE_FROM = 24

#: For fewer rows XLA uses no matrix unit of a TPU, and copies a head's codes.
MIN_ROWS = 8

#: Rows of a run. From 128 rows in one on, the compiler for v6e makes the codes the left operand, and
#: transposes them at every step for 600k cycles; runs keep them on the right, at no cost on any chip.
MAX_RUN = 64

#: Chip -> rows from which on two groups are contracted as one, as deep as its matrix unit is. With fewer
#: rows the codes take longer to arrange than that saves.
PAIRS_FROM = {"v6e": 1024}


class Linear(Protocol):
    """A linear layer in some layout."""

    @property
    def kernel(self) -> str:
        """How the product is computed, for people to read."""
        ...

    def __call__(self, x_MI: jax.Array) -> jax.Array:
        """The product.

        Args:
            x_MI: `[M, I]` in the compute type.

        Returns:
            `[M, O]` in the type of `x_MI`.
        """
        ...


class QuantizedLinear(Linear, Protocol):
    """A layout of codes."""

    @classmethod
    def from_qtensor(cls, weight: QTensor, bias_O: np.ndarray | None) -> Self:
        """Lay out codes, in NumPy.

        Args:
            weight: `[O, I]`.
            bias_O: The bias, if the layer has one.

        Returns:
            The layer.
        """
        ...


class IntegerLinear(QuantizedLinear, Protocol):
    """A layout of codes that multiplies codes too."""

    def of_integers(self, values_MI: jax.Array) -> jax.Array:
        """The product with integers, without a bias.

        Args:
            values_MI: int8.

        Returns:
            float32 `[M, O]`.
        """
        ...


@register_dataclass
@dataclass(frozen=True)
class DenseLinear:
    """A matrix that was not quantized, in the compute type."""

    weight_IO: Leaf
    bias_O: Leaf | None

    @property
    def kernel(self) -> str:
        """See `Linear.kernel`."""
        return "dense"

    def __call__(self, x_MI: jax.Array) -> jax.Array:
        """See `Linear.__call__`."""
        y_MO = jnp.dot(x_MI, self.weight_IO, preferred_element_type=jnp.float32)
        return _finish(y_MO, self.bias_O, x_MI)


@register_dataclass
@dataclass(frozen=True)
class EinsumLinear:
    """Codes of their own width, dequantized in the operand of one product.

    For accelerators: the compiler reads int4 directly and fuses scale, zero and conversion into the matrix
    unit's operand, as long as groups and features stay separate axes and the arithmetic is in float32, and
    never writes the weight out. Each weight is rounded once, as the contract has it.

    Of all forms that were tried this one has the fewest estimated cycles for every scheme, chip and number of
    rows, but for `PAIRS_FROM`. Thousands of cycles for 4096 x 4096, symmetric int4 in groups of 128, bfloat16
    beside it (``benchmarks/tpu_cycles.py`` finds them, and the rest):

        chip, rows                                v5e: 8   256  1024   v6e: 8   256  1024
        bfloat16                                      88   118   369       46    55   174
        this                                          37    88   371       29    50   185
        this, all rows in one run                     37    88   371       29   624   749
        a product a group, scaled after it            66   400  1496       37   203   794
        dequantized, reshaped, multiplied            359   386     -      179   186   313

    Attributes:
        chip: As in ``--target``; None for one that nothing is known of.
    """

    values_GgO: Leaf
    scale_GO: Leaf
    zero_GO: Leaf | None
    bias_O: Leaf | None
    chip: str | None = field(default=None, metadata={"static": True})

    @classmethod
    def from_qtensor(cls, weight: QTensor, bias_O: np.ndarray | None) -> Self:
        """See `QuantizedLinear.from_qtensor`."""
        code_type = ml_dtypes.int4 if weight.num_bits == 4 else np.int8
        values_GgO = weight.values.T.reshape(weight.scale.shape[-1], weight.group_size, -1).astype(code_type)
        return cls(values_GgO, weight.scale.T, _transposed(weight.zero), bias_O)

    @property
    def kernel(self) -> str:
        """See `Linear.kernel`."""
        return f"{self.values_GgO.dtype.name} einsum, dequantized in its operand"

    def __call__(self, x_MI: jax.Array) -> jax.Array:
        """See `Linear.__call__`."""
        weight_GgO = _dequantized(self.values_GgO, self.scale_GO, self.zero_GO)
        # Whole pairs for each of up to eight devices that share the groups.
        in_pairs = weight_GgO.shape[0] % 16 == 0 and x_MI.shape[0] >= PAIRS_FROM.get(self.chip or "", math.inf)
        groups, form = ((-1, 2), "NrPpg,PpgO->NrO") if in_pairs else ((-1,), "NrGg,GgO->NrO")
        weight = weight_GgO.astype(x_MI.dtype).reshape(*groups, *weight_GgO.shape[1:])
        x_NrI = in_runs(x_MI)
        x = x_NrI.reshape(*x_NrI.shape[:2], *weight.shape[:-1])
        y_NrO = jnp.einsum(form, x, weight, preferred_element_type=jnp.float32)
        return _finish(y_NrO.reshape(-1, y_NrO.shape[-1])[: x_MI.shape[0]], self.bias_O, x_MI)

    def of_integers(self, values_MI: jax.Array) -> jax.Array:
        """See `IntegerLinear.of_integers`: in int8, summed in int32. There is one scale a row."""
        (values_IO,), (scale_O,) = self.values_GgO, _float32(self.scale_GO)
        y_MO = jnp.dot(pad_rows(values_MI), values_IO, preferred_element_type=jnp.int32)[: values_MI.shape[0]]
        return _float32(y_MO) * scale_O + _zero_part(values_MI[:, None], self.zero_GO)


@dataclass(frozen=True, slots=True)
class EinsumLayout:
    """`EinsumLinear` for a chip.

    Attributes:
        chip: As in ``--target``; None for one that nothing is known of.
    """

    chip: str | None

    def from_qtensor(self, weight: QTensor, bias_O: np.ndarray | None) -> EinsumLinear:
        """See `QuantizedLinear.from_qtensor`."""
        return replace(EinsumLinear.from_qtensor(weight, bias_O), chip=self.chip)


@register_dataclass
@dataclass(frozen=True)
class ScanLinear:
    """Codes in bytes, int4 two to a byte, multiplied block by block in a scan.

    For the CPU, where XLA would write out a float32 copy of any larger operand it has to convert;
    a block's copy stays in the cache of a core. A block is a group, or part of a row's one group. Many rows
    of x are worth the copy (`WHOLE_FROM`).
    """

    values_BbO: Leaf
    scale_GO: Leaf
    zero_GO: Leaf | None
    bias_O: Leaf | None
    num_bits: int = field(metadata={"static": True})

    @classmethod
    def from_qtensor(cls, weight: QTensor, bias_O: np.ndarray | None) -> Self:
        """See `QuantizedLinear.from_qtensor`."""
        num_outputs, num_features = weight.shape
        per_channel = weight.scale.shape[-1] == 1
        block_size = _block_size(num_features) if per_channel else weight.group_size
        values_BbO = np.ascontiguousarray(weight.values.T).reshape(-1, block_size, num_outputs)
        if weight.num_bits == 4:
            values_BbO = pack_halves(values_BbO, axis=1)
        # Float32 already here: XLA would move the conversion out of the scan over layers, and convert
        # the grids of the whole model at every step.
        scale_GO = weight.scale.T.astype(np.float32)
        zero_GO = None if weight.zero is None else weight.zero.T.astype(np.float32)
        return cls(values_BbO, scale_GO, zero_GO, bias_O, weight.num_bits)

    @property
    def kernel(self) -> str:
        """See `Linear.kernel`."""
        return "int4 packed-nibble scan" if self.num_bits == 4 else "int8 scan"

    def __call__(self, x_MI: jax.Array) -> jax.Array:
        """See `Linear.__call__`."""
        y_MO = self._scanned(x_MI) if x_MI.shape[0] < WHOLE_FROM else self._multiplied(x_MI)
        return _finish(y_MO, self.bias_O, x_MI)

    def of_integers(self, values_MI: jax.Array) -> jax.Array:
        """See `IntegerLinear.of_integers`. XLA's int8 product is slow on many CPUs; a block's sum is exact in float32 too."""
        return self._scanned(_float32(values_MI))

    def _multiplied(self, x_MI: jax.Array) -> jax.Array:
        """float32 `[M, O]`: one product for each half of the codes, because joining them would write them once more."""
        num_blocks, _, num_outputs = self.values_BbO.shape
        halves = unpack_halves(self.values_BbO) if self.num_bits == 4 else (self.values_BbO,)
        x_MBhb = x_MI.reshape(x_MI.shape[0], num_blocks, len(halves), -1)
        y_MO = jnp.zeros((x_MI.shape[0], num_outputs), jnp.float32)
        for half, values_BbO in enumerate(halves):
            weight_BbO = _dequantized(values_BbO, self.scale_GO, self.zero_GO)
            weight_IO = lax.optimization_barrier(weight_BbO.astype(x_MI.dtype).reshape(-1, num_outputs))
            x_half = x_MBhb[:, :, half].reshape(x_MI.shape[0], -1)
            y_MO += jnp.dot(x_half, weight_IO, preferred_element_type=jnp.float32)
        return y_MO

    def _scanned(self, x_MI: jax.Array) -> jax.Array:
        """float32 `[M, O]`, block by block."""
        num_blocks, _, num_outputs = self.values_BbO.shape
        num_groups, num_rows = self.scale_GO.shape[0], x_MI.shape[0]
        blockwise = num_groups == num_blocks
        x_BMb = x_MI.reshape(num_rows, num_blocks, -1).swapaxes(0, 1)

        def add_block(y_MO: jax.Array, block: tuple[jax.Array, jax.Array, jax.Array | None]) -> tuple[jax.Array, None]:
            x, values, scale = block
            part_MO = self._product(x, values)
            return y_MO + (part_MO if scale is None else part_MO * scale), None

        empty_MO = jnp.zeros((num_rows, num_outputs), jnp.float32)
        scale_BO = self.scale_GO if blockwise else None
        y_MO, _ = lax.scan(add_block, empty_MO, (x_BMb, self.values_BbO, scale_BO))
        if not blockwise:
            y_MO = y_MO * self.scale_GO
        return y_MO + _zero_part(x_MI.reshape(num_rows, num_groups, -1), self.zero_GO)

    def _product(self, x: jax.Array, values: jax.Array) -> jax.Array:
        """`[M, O]` of one block: `[M, b]` times its codes, `[b, O]` or packed `[c, O]`."""
        if self.num_bits == 8:
            return jnp.dot(x, values.astype(x.dtype), preferred_element_type=jnp.float32)
        # One product for each half: joining them first would write the block once more.
        halves = zip(jnp.split(x, 2, axis=1), unpack_halves(values), strict=True)
        low, high = (jnp.dot(x, half.astype(x.dtype), preferred_element_type=jnp.float32) for x, half in halves)
        return low + high


@register_dataclass
@dataclass(frozen=True)
class Int8InputLinear:
    """Codes times codes: each row of x is rounded to int8 first.

        y[m, o] = x_scale[m] * (sum_i x_values[m, i] * values[o, i]) * scale[o]
                  +  x_scale[m] * (sum_i x_values[m, i]) * zero[o]  +  bias[o]

    Attributes:
        codes: One scale a row, and no bias.
        bias_O: Added last.
    """

    codes: Any  # an IntegerLinear
    bias_O: Leaf | None

    @property
    def kernel(self) -> str:
        """See `Linear.kernel`."""
        return f"{self.codes.kernel}, inputs in int8"

    def __call__(self, x_MI: jax.Array) -> jax.Array:
        """See `Linear.__call__`."""
        values_MI, scale_M = quantize_vectors(x_MI)
        return _finish(self.codes.of_integers(values_MI) * scale_M[:, None], self.bias_O, x_MI)


def pad_rows(x_MI: jax.Array) -> jax.Array:
    """At least `MIN_ROWS` rows.

    Args:
        x_MI: `[M, I]`.

    Returns:
        `x_MI`, with rows of zeros below it where there are fewer.
    """
    return jnp.pad(x_MI, ((0, max(0, MIN_ROWS - x_MI.shape[0])), (0, 0)))


def in_runs(x_MI: jax.Array) -> jax.Array:
    """Rows in runs that a matrix unit is used for, and that leave the other operand where it is.

    Args:
        x_MI: `[M, I]`.

    Returns:
        `[N, r, I]` with `MIN_ROWS` <= r <= `MAX_RUN`; rows of zeros fill the last run.
    """
    num_rows, num_features = x_MI.shape
    run = min(max(num_rows, MIN_ROWS), MAX_RUN)
    return jnp.pad(x_MI, ((0, -num_rows % run), (0, 0))).reshape(-1, run, num_features)


def _block_size(num_features: int) -> int:
    """The largest even divisor up to `MAX_BLOCK`; all features where there is none."""
    sizes = range(MAX_BLOCK, 1, -2)
    return next((size for size in sizes if num_features % size == 0), num_features)


def _transposed(zero_OG: np.ndarray | None) -> np.ndarray | None:
    return None if zero_OG is None else zero_OG.T


def _float32(array: Leaf) -> jax.Array:
    return array.astype(jnp.float32)


def _dequantized(values_GgO: Leaf, scale_GO: Leaf, zero_GO: Leaf | None) -> jax.Array:
    """float32 `[G, g, O]`; a grid of one group is that of all blocks."""
    weight_GgO = _float32(values_GgO) * _float32(scale_GO)[:, None]
    return weight_GgO if zero_GO is None else weight_GgO + _float32(zero_GO)[:, None]


def _zero_part(x_MGg: jax.Array, zero_GO: Leaf | None) -> jax.Array | float:
    if zero_GO is None:
        return 0.0
    x_MG = jnp.sum(x_MGg, axis=-1, dtype=jnp.float32)
    return jnp.dot(x_MG, _float32(zero_GO), precision=lax.Precision.HIGHEST)


def _finish(y_MO: jax.Array, bias_O: Leaf | None, x_MI: jax.Array) -> jax.Array:
    """Add the bias in float32, then round to the type of x."""
    return (y_MO if bias_O is None else y_MO + _float32(bias_O)).astype(x_MI.dtype)
