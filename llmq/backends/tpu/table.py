"""The token matrix on a device: rows looked up by the embedding, and multiplied by the head.

Both are one matrix when the model ties them, so one layout serves both: rows stay rows.

    lookup(ids)[m] = weight[ids[m]]            project(x)[m, v] = sum_d x[m, d] * weight[v, d]

Shape letters: M rows of x, V vocabulary, D hidden, G groups of a row, g features of a group, c bytes
of a row, r rows of a block.
"""

from dataclasses import dataclass, field
from typing import Protocol, Self

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax.tree_util import register_dataclass

from llmq.backends.tpu.linear import Leaf, pad_rows
from llmq.backends.tpu.nibbles import pack_halves, unpack_halves
from llmq.quant import QTensor

#: Rows that `ScanTable` multiplies at a time. Measured on the CPU: the fastest of 96, 384, 1536.
MAX_ROWS = 1536


class Table(Protocol):
    """A token matrix in some layout."""

    @property
    def kernel(self) -> str:
        """How `project` is computed, for people to read."""
        ...

    def lookup(self, ids: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
        """Rows of the matrix.

        Args:
            ids: int32 `[...]`.
            dtype: Compute type.

        Returns:
            `[..., D]`; only these rows are dequantized.
        """
        ...

    def project(self, x_MD: jax.Array) -> jax.Array:
        """The product with every row.

        Args:
            x_MD: `[M, D]` in the compute type.

        Returns:
            float32 `[M, V]`.
        """
        ...


class QuantizedTable(Table, Protocol):
    """A layout of codes."""

    @classmethod
    def from_qtensor(cls, weight: QTensor) -> Self:
        """Lay out codes, in NumPy.

        Args:
            weight: `[V, D]`.

        Returns:
            The table.
        """
        ...


@register_dataclass
@dataclass(frozen=True)
class DenseTable:
    """A matrix that was not quantized, in the compute type."""

    weight_VD: Leaf

    @property
    def kernel(self) -> str:
        """See `Table.kernel`."""
        return "dense"

    def lookup(self, ids: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
        """See `Table.lookup`."""
        return self.weight_VD[ids].astype(dtype)

    def project(self, x_MD: jax.Array) -> jax.Array:
        """See `Table.project`."""
        return jnp.einsum("md,vd->mv", x_MD, self.weight_VD, preferred_element_type=jnp.float32)


@register_dataclass
@dataclass(frozen=True)
class EinsumTable:
    """Codes of their own width in one product; for accelerators (see `linear.EinsumLinear`)."""

    values_VD: Leaf
    scale_VG: Leaf
    zero_VG: Leaf | None

    @classmethod
    def from_qtensor(cls, weight: QTensor) -> Self:
        """See `QuantizedTable.from_qtensor`."""
        code_type = ml_dtypes.int4 if weight.num_bits == 4 else np.int8
        return cls(weight.values.astype(code_type), weight.scale, weight.zero)

    @property
    def kernel(self) -> str:
        """See `Table.kernel`."""
        return f"{self.values_VD.dtype.name} einsum, scale after each group"

    def lookup(self, ids: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
        """See `Table.lookup`."""
        # As many ids as rows of a product: of a single row XLA makes a slice, and copies all codes for it.
        ids_M1 = pad_rows(ids.reshape(-1, 1))
        rows_MD = _dequantize(*_rows((self.values_VD, self.scale_VG, self.zero_VG), ids_M1[:, 0]))
        return rows_MD[: ids.size].reshape(*ids.shape, -1).astype(dtype)

    def project(self, x_MD: jax.Array) -> jax.Array:
        """See `Table.project`."""
        num_tokens, num_groups = self.scale_VG.shape
        padded_MD = pad_rows(x_MD)
        x_MGg = padded_MD.reshape(padded_MD.shape[0], num_groups, -1)
        values_VGg = self.values_VD.reshape(num_tokens, num_groups, -1).astype(x_MD.dtype)
        y_MVG = jnp.einsum("mGg,vGg->mvG", x_MGg, values_VGg, preferred_element_type=jnp.float32)
        y_MV = jnp.sum(y_MVG * self.scale_VG.astype(jnp.float32), axis=-1)
        if self.zero_VG is not None:
            x_MG = jnp.sum(x_MGg, axis=-1, dtype=jnp.float32)
            zero_VG = self.zero_VG.astype(jnp.float32)
            y_MV += jnp.einsum("mG,vG->mv", x_MG, zero_VG, precision=lax.Precision.HIGHEST)
        return y_MV[: x_MD.shape[0]]


@register_dataclass
@dataclass(frozen=True)
class ScanTable:
    """Codes in bytes, int4 two to a byte, multiplied some rows at a time; for the CPU.

    Rows are padded with zeros to whole blocks.
    """

    values_Vc: Leaf
    scale_VG: Leaf
    zero_VG: Leaf | None
    num_bits: int = field(metadata={"static": True})
    num_tokens: int = field(metadata={"static": True})

    @classmethod
    def from_qtensor(cls, weight: QTensor) -> Self:
        """See `QuantizedTable.from_qtensor`."""
        num_tokens = weight.shape[0]
        values_Vc = pack_halves(weight.values, axis=1) if weight.num_bits == 4 else weight.values
        num_blocks, block_rows = _blocks(num_tokens)
        padding = num_blocks * block_rows - num_tokens

        def padded(array: np.ndarray) -> np.ndarray:
            return np.pad(array, [(0, padding), *[(0, 0)] * (array.ndim - 1)])

        # Float32 already here, for the reason given in `linear.ScanLinear`.
        scale_VG = padded(weight.scale.astype(np.float32))
        zero_VG = None if weight.zero is None else padded(weight.zero.astype(np.float32))
        return cls(padded(values_Vc), scale_VG, zero_VG, weight.num_bits, num_tokens)

    @property
    def kernel(self) -> str:
        """See `Table.kernel`."""
        return f"int{self.num_bits} scan over rows"

    def lookup(self, ids: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
        """See `Table.lookup`."""
        return self._dequantize(*_rows((self.values_Vc, self.scale_VG, self.zero_VG), ids)).astype(dtype)

    def project(self, x_MD: jax.Array) -> jax.Array:
        """See `Table.project`."""
        num_blocks, block_rows = _blocks(self.num_tokens)

        def split(array: Leaf | None) -> jax.Array | None:
            return None if array is None else jnp.reshape(array, (num_blocks, block_rows, *array.shape[1:]))

        def multiply(block: tuple[jax.Array, jax.Array, jax.Array | None]) -> jax.Array:
            rows = self._dequantize(*block).astype(x_MD.dtype)
            return jnp.einsum("md,rd->mr", x_MD, rows, preferred_element_type=jnp.float32)

        blocks = (split(self.values_Vc), split(self.scale_VG), split(self.zero_VG))
        y_BMr = lax.map(multiply, blocks)
        return y_BMr.swapaxes(0, 1).reshape(x_MD.shape[0], -1)[:, : self.num_tokens]

    def _dequantize(self, values: jax.Array, scale: jax.Array, zero: jax.Array | None) -> jax.Array:
        codes = jnp.concatenate(unpack_halves(values), axis=-1) if self.num_bits == 4 else values
        return _dequantize(codes, scale, zero)


def _blocks(num_tokens: int) -> tuple[int, int]:
    """Number of blocks and rows of each, with less than one row of padding a block."""
    num_blocks = -(-num_tokens // MAX_ROWS)
    return num_blocks, -(-num_tokens // num_blocks)


def _rows(arrays: tuple[Leaf, Leaf, Leaf | None], ids: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    values, scale, zero = arrays
    return values[ids], scale[ids], None if zero is None else zero[ids]


def _dequantize(values: jax.Array, scale: jax.Array, zero: jax.Array | None) -> jax.Array:
    """float32 `[..., D]` of codes `[..., D]` and a grid `[..., G]`."""
    group_size = values.shape[-1] // scale.shape[-1]
    weight = values.astype(jnp.float32) * _spread(scale, group_size)
    return weight if zero is None else weight + _spread(zero, group_size)


def _spread(grid: jax.Array, group_size: int) -> jax.Array:
    return jnp.repeat(grid.astype(jnp.float32), group_size, axis=-1)
