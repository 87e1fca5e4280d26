"""A linear layer on a device: the layouts of a weight, and the product with each.

    y[m, o] = sum_i x[m, i] * weight[o, i] + bias[o]
    weight[o, i] = values[o, i] * scale[o, g] + zero[o, g]        g = i // group_size

No layout ever holds the dequantized matrix. The scale multiplies a group's partial sum instead of
its weights, and the zero meets the group's sum of x:

    y[m, o] = sum_g scale[o, g] * (sum_{i in g} x[m, i] * values[o, i])  +  zero[o, g] * (sum_{i in g} x[m, i])

Sums accumulate in float32; the result is rounded once to the type of x. Every layout is a pytree,
so that like layers stack along a leading axis and are scanned.

Shape letters: M rows of x, I input and O output features, G groups, g features of a group, B
blocks of a scan, b features of a block (c bytes).
"""

from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax.tree_util import register_dataclass

from llmq.backends.tpu.nibbles import pack_halves, unpack_halves
from llmq.quant import QTensor

Leaf = Any  # an array: NumPy while a layout is built, JAX once it is on the device

#: Features of a block where nothing else sets them. Measured on the CPU: 32 to 128 are alike,
#: beyond that XLA stops fusing the conversion into the product.
MAX_BLOCK = 128

#: For fewer rows XLA uses no matrix unit of a TPU, and copies a head's codes.
MIN_ROWS = 8


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
    """Codes of their own width, multiplied group by group in one batched product.

    For accelerators: the compiler reads int4 directly and fuses the conversion into the matrix
    unit's operand, as long as groups and features stay separate axes.
    """

    values_GgO: Leaf
    scale_GO: Leaf
    zero_GO: Leaf | None
    bias_O: Leaf | None

    @classmethod
    def from_qtensor(cls, weight: QTensor, bias_O: np.ndarray | None) -> Self:
        """See `QuantizedLinear.from_qtensor`."""
        code_type = ml_dtypes.int4 if weight.num_bits == 4 else np.int8
        values_GgO = weight.values.T.reshape(weight.scale.shape[-1], weight.group_size, -1).astype(code_type)
        return cls(values_GgO, weight.scale.T, _transposed(weight.zero), bias_O)

    @property
    def kernel(self) -> str:
        """See `Linear.kernel`."""
        return f"{self.values_GgO.dtype.name} einsum, scale after each group"

    def __call__(self, x_MI: jax.Array) -> jax.Array:
        """See `Linear.__call__`."""
        num_groups, group_size, _ = self.values_GgO.shape
        x_MGg = pad_rows(x_MI).reshape(-1, num_groups, group_size)
        values_GgO = self.values_GgO.astype(x_MI.dtype)
        y_MGO = jnp.einsum("mGg,Ggo->mGo", x_MGg, values_GgO, preferred_element_type=jnp.float32)
        y_MO = jnp.sum(y_MGO * _float32(self.scale_GO), axis=1) + _zero_part(x_MGg, self.zero_GO)
        return _finish(y_MO[: x_MI.shape[0]], self.bias_O, x_MI)


@register_dataclass
@dataclass(frozen=True)
class ScanLinear:
    """Codes in bytes, int4 two to a byte, multiplied block by block in a scan.

    For the CPU, where XLA would write out a float32 copy of any larger operand it has to convert;
    a block's copy stays in the cache of a core. A block is a group, or part of a row's one group.
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
        y_MO += _zero_part(x_MI.reshape(num_rows, num_groups, -1), self.zero_GO)
        return _finish(y_MO, self.bias_O, x_MI)

    def _product(self, x: jax.Array, values: jax.Array) -> jax.Array:
        """`[M, O]` of one block: `[M, b]` times its codes, `[b, O]` or packed `[c, O]`."""
        if self.num_bits == 8:
            return jnp.dot(x, values.astype(x.dtype), preferred_element_type=jnp.float32)
        # One product for each half: joining them first would write the block once more.
        halves = zip(jnp.split(x, 2, axis=1), unpack_halves(values), strict=True)
        low, high = (jnp.dot(x, half.astype(x.dtype), preferred_element_type=jnp.float32) for x, half in halves)
        return low + high


def pad_rows(x_MI: jax.Array) -> jax.Array:
    """At least `MIN_ROWS` rows.

    Args:
        x_MI: `[M, I]`.

    Returns:
        `x_MI`, with rows of zeros below it where there are fewer.
    """
    return jnp.pad(x_MI, ((0, max(0, MIN_ROWS - x_MI.shape[0])), (0, 0)))


def _block_size(num_features: int) -> int:
    """The largest even divisor up to `MAX_BLOCK`; all features where there is none."""
    sizes = range(MAX_BLOCK, 1, -2)
    return next((size for size in sizes if num_features % size == 0), num_features)


def _transposed(zero_OG: np.ndarray | None) -> np.ndarray | None:
    return None if zero_OG is None else zero_OG.T


def _float32(array: Leaf) -> jax.Array:
    return array.astype(jnp.float32)


def _zero_part(x_MGg: jax.Array, zero_GO: Leaf | None) -> jax.Array | float:
    if zero_GO is None:
        return 0.0
    x_MG = jnp.sum(x_MGg, axis=-1, dtype=jnp.float32)
    return jnp.dot(x_MG, _float32(zero_GO), precision=lax.Precision.HIGHEST)


def _finish(y_MO: jax.Array, bias_O: Leaf | None, x_MI: jax.Array) -> jax.Array:
    """Add the bias in float32, then round to the type of x."""
    return (y_MO if bias_O is None else y_MO + _float32(bias_O)).astype(x_MI.dtype)
