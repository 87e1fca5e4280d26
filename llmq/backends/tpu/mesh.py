"""Where arrays lie when several devices run one model: a mesh of `dp` groups of slots by `tp` parts of a layer.

Where a model has fewer key/value heads than a layer has parts, some parts share a head: each holds its weights, and
a part of its positions in the cache.

q, k, v, gate and up are split along their outputs, o and down along their inputs, groups and scales with
them; the embedding and the head along the vocabulary; the cache along slots, key/value heads and positions.
The compiler finds the collectives, two sums a layer, but for those of attention over positions that devices share.
One device is a mesh of one.

Shape letters: as in `linear`, `table` and `cache`; a segment's leaves have an axis of layers in front.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from llmq.backends.tpu.cache import DP, HEADS, SHARED
from llmq.backends.tpu.linear import DenseLinear, EinsumLinear, Int8InputLinear, Leaf, ScanLinear
from llmq.backends.tpu.mlp import Mixture, Mlp
from llmq.backends.tpu.model import Layer, Params
from llmq.backends.tpu.pallas import PallasLinear
from llmq.backends.tpu.table import DenseTable, EinsumTable, ScanTable, Table
from llmq.checkpoint.loader import ModelWeights
from llmq.errors import BackendError
from llmq.model.shards import check_tp

Device = Any  # jax.Device, which is not a type to type checkers

#: Parts of a layer.
TP = (HEADS, SHARED)


def make_mesh(devices: Sequence[Device], dp: int, tp: int, num_kv_heads: int = 1, sp: int = 1) -> Mesh:
    """Lay devices out.

    Args:
        devices: Those there are.
        dp: Groups, each with slots of its own.
        tp: Devices of a group.
        num_kv_heads: Of the model; divides `tp`, or is divided by it.
        sp: Devices of a group that share positions, at least: all that heads leave over do.

    Returns:
        The mesh, `[dp, heads, shared]`.

    Raises:
        BackendError: There are too few, or `sp` does not divide `tp`.
    """
    if tp % sp:
        raise BackendError(f"mesh='tp={tp},sp={sp}': sp must divide tp.")
    if dp * tp > len(devices):
        raise BackendError(f"mesh='dp={dp},tp={tp}': takes {dp * tp} devices, and there are {len(devices)} here.")
    heads = math.gcd(tp // sp, num_kv_heads)
    return Mesh(np.array([*devices[: dp * tp]]).reshape(dp, heads, tp // heads), (DP, *TP))


def parts(mesh: Mesh) -> int:
    """How many devices compute a layer together.

    Args:
        mesh: From `make_mesh`.

    Returns:
        Their number.
    """
    return mesh.shape[HEADS] * mesh.shape[SHARED]


def check_weights(weights: ModelWeights, tp: int) -> None:
    """Refuse weights that cannot be shared.

    Args:
        weights: The model.
        tp: Devices that compute a layer together.

    Raises:
        ConfigError: Heads, features or groups cannot be shared evenly.
    """
    quantized = [name for name in weights if weights.is_quantized(name)]
    groups = {name: (weights.shapes[name][-1], weights.entries[f"{name}.scale"][1][-1]) for name in quantized}
    check_tp(tp, weights.config, {name: row for name, row in groups.items() if row[1] > 1})


def put(array: np.ndarray, mesh: Mesh, spec: P) -> jax.Array:
    """Bring an array onto the devices; each process gives the parts of its own.

    Args:
        array: The whole.
        mesh: The devices.
        spec: How it is split.

    Returns:
        The same array.
    """
    sharding = NamedSharding(mesh, spec)
    if mesh.size == 1:
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(array.shape, sharding, lambda part: array[part])


def whole(array: jax.Array) -> np.ndarray:
    """An array on the host, gathered from all processes, which must all ask for it.

    Args:
        array: On any devices.

    Returns:
        A copy of all of it.
    """
    if array.is_fully_addressable:
        return np.array(array)
    return np.array(multihost_utils.process_allgather(array, tiled=True))


def layer_specs(layer: Layer, tp: int, num_kv_heads: int) -> Layer:
    """How a layer is split.

    Args:
        layer: Its leaves have no axis of layers.
        tp: Devices that share it.
        num_kv_heads: Of the model.

    Returns:
        The same tree, of specs.
    """
    of_heads = HEADS if num_kv_heads % tp else TP
    return replace(
        replicated(layer),
        q=_by_outputs(layer.q),
        k=_by_outputs(layer.k, of_heads),
        v=_by_outputs(layer.v, of_heads),
        o=_by_inputs(layer.o, tp),
        mlp=_mlp_specs(layer.mlp, tp),
    )


def _mlp_specs(mlp: Mlp | Mixture, tp: int) -> Mlp | Mixture:
    """Every expert is split as the one MLP of a layer is."""
    if isinstance(mlp, Mlp):
        return Mlp(_by_outputs(mlp.gate), _by_outputs(mlp.up), _by_inputs(mlp.down, tp))
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), mlp.experts)
    experts = jax.tree.map(lambda spec: P(None, *spec), _mlp_specs(one, tp), is_leaf=_is_spec)
    return Mixture(P(), experts)


def _by_outputs(linear: Any, axes: str | tuple[str, ...] = TP) -> Any:
    """The last axis of every leaf is that of the outputs."""
    return jax.tree.map(lambda leaf: P(*(None,) * (leaf.ndim - 1), axes), linear)


def _by_inputs(linear: Any, tp: int) -> Any:
    bias = None if linear.bias_O is None else P()
    if isinstance(linear, DenseLinear):
        return DenseLinear(P(TP), bias)
    if isinstance(linear, Int8InputLinear):
        return Int8InputLinear(_by_inputs(linear.codes, tp), bias)
    if isinstance(linear, ScanLinear | PallasLinear):  # of one device: its blocks come one after the other
        return replicated(linear)
    assert isinstance(linear, EinsumLinear)
    by_groups = linear.scale_GO.shape[0] % tp == 0
    grid = P(TP) if by_groups else P()
    zero = None if linear.zero_GO is None else grid
    values = P(TP) if by_groups else P(None, TP)
    return replace(linear, values_GgO=values, scale_GO=grid, zero_GO=zero, bias_O=bias)


def replicated(tree: Any) -> Any:
    """What every device holds whole.

    Args:
        tree: Of arrays, or of their shapes.

    Returns:
        The same tree, of specs.
    """
    return jax.tree.map(lambda _: P(), tree)


def table_specs(table: Table) -> Table:
    """How a token matrix is split: every leaf by rows.

    Args:
        table: The matrix.

    Returns:
        The same tree, of specs.
    """
    assert isinstance(table, DenseTable | EinsumTable | ScanTable)
    return jax.tree.map(lambda _: P(TP) if isinstance(table, DenseTable | EinsumTable) else P(), table)


def params_specs(params: Params, tp: int, num_kv_heads: int) -> Params:
    """How a model is split.

    Args:
        params: Or their shapes.
        tp: Devices that compute a layer together.
        num_kv_heads: Of the model.

    Returns:
        The same tree, of specs.
    """

    def behind_layers(spec: P) -> P:
        return P(None, *spec)

    segments = []
    for segment in params.segments:
        one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), segment)
        segments.append(jax.tree.map(behind_layers, layer_specs(one, tp, num_kv_heads), is_leaf=_is_spec))
    head = None if params.head is None else table_specs(params.head)
    return Params(table_specs(params.embedding), tuple(segments), P(), head, P(), P())


def _is_spec(value: Leaf) -> bool:
    return isinstance(value, P)


def shardings(mesh: Mesh, specs: Any) -> Any:
    """The same tree, of shardings.

    Args:
        mesh: The devices.
        specs: A tree of specs.

    Returns:
        The tree.
    """
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=_is_spec)
