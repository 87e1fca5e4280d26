"""From a model's weights to `model.Params` on a device, one layer at a time.

Each matrix is read, laid out in NumPy in its final width and let go. Consecutive layers of one
structure become a segment, stacked leaf by leaf, so that a segment is never held twice. (On an
accelerator the host holds int4 codes a byte each until they are on the device.)
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from types import MappingProxyType
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from llmq.backends.base import KernelName
from llmq.backends.tpu.cache import whole_blocks
from llmq.backends.tpu.device import Device
from llmq.backends.tpu.linear import (
    DenseLinear,
    EinsumLayout,
    EinsumLinear,
    Int8InputLinear,
    IntegerLinear,
    Linear,
    ScanLinear,
)
from llmq.backends.tpu.mesh import layer_specs, parts, put, table_specs
from llmq.backends.tpu.mlp import Mixture, Mlp
from llmq.backends.tpu.model import Layer, Params
from llmq.backends.tpu.pallas import PallasLayout
from llmq.backends.tpu.table import DenseTable, EinsumTable, QuantizedTable, ScanTable, Table
from llmq.checkpoint.loader import ModelWeights
from llmq.errors import BackendError
from llmq.model.names import EMBEDDING, FINAL_NORM, LM_HEAD, expert_names, layer_norms, layer_prefix, norm_factor
from llmq.model.rotary import rotary_tables
from llmq.quant import QTensor
from llmq.quant.affine import dtype_of


class LinearLayout(Protocol):
    """A kind of linear layer with codes, or what chooses one."""

    def from_qtensor(self, weight: QTensor, bias_O: np.ndarray | None) -> Linear:
        """See `linear.QuantizedLinear.from_qtensor`."""
        ...


@dataclass(frozen=True, slots=True)
class Layouts:
    """The layouts of codes that a platform is fast with."""

    linear: LinearLayout
    table: type[QuantizedTable]
    integer: type[IntegerLinear]  # where inputs are codes too


CPU_LAYOUTS = Layouts(ScanLinear, ScanTable, ScanLinear)
ACCELERATOR_LAYOUTS = Layouts(EinsumLinear, EinsumTable, EinsumLinear)

#: What JAX calls a chip -> as in ``--target``.
_CHIPS = MappingProxyType({"TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p", "TPU v6 lite": "v6e"})


def accelerator_layouts(device: Device, num_devices: int, kernel: KernelName | None) -> Layouts:
    """The layouts for an accelerator.

    Args:
        device: One of them.
        num_devices: That share the model.
        kernel: As asked for.

    Returns:
        The layouts.

    Raises:
        BackendError: The kernel does not run there.
    """
    if kernel is None:
        return replace(ACCELERATOR_LAYOUTS, linear=EinsumLayout(_CHIPS.get(device.device_kind)))
    if device.platform != "tpu":
        raise BackendError(
            f"kernel={kernel!r}: runs on a TPU, and the device here is a {device.platform}; leave --kernel out."
        )
    if num_devices > 1:
        raise BackendError(
            f"kernel={kernel!r}: runs on one device, and {num_devices} are to share the model; leave --kernel out, or "
            "take one device."
        )
    return replace(ACCELERATOR_LAYOUTS, linear=PallasLayout(_CHIPS.get(device.device_kind, device.device_kind)))


def load_params(
    weights: ModelWeights, layouts: Layouts, dtype: str, max_len: int, mesh: Mesh
) -> tuple[Params, tuple[str, ...]]:
    """Bring a model onto its devices.

    Args:
        weights: The model.
        layouts: How its codes lie.
        dtype: Compute type: that of matrices without codes.
        max_len: Positions of a slot.
        mesh: Where to.

    Returns:
        The weights, and a line on each kernel they run on.
    """
    loader = _Loader(weights, layouts, dtype)
    segments, kernels = [], Counter[str]()
    layers = (loader.layer(index) for index in range(weights.config.num_layers))
    for _, like in groupby(layers, _structure):
        segment = list(like)
        kernels.update(linear.kernel for layer in segment for linear in _linears(layer))
        segments.append(_stacked(segment, mesh, weights.config.num_kv_heads))
    embedding = loader.table(EMBEDDING)
    head = None if weights.config.tie_embeddings else loader.table(LM_HEAD)
    rest = (embedding, loader.norm(FINAL_NORM), head, *rotary_tables(weights.config, whole_blocks(max_len)))
    specs = (table_specs(embedding), P(), head and table_specs(head), P(), P())
    embedding, final_norm_D, head, cos_ATh, sin_ATh = jax.tree.map(
        lambda leaf, spec: put(leaf, mesh, spec), rest, specs
    )
    params = Params(embedding, tuple(segments), final_norm_D, head, cos_ATh, sin_ATh)
    return params, _kernel_lines(kernels, (head or embedding).kernel, len(segments))


def outline_params(weights: ModelWeights, layouts: Layouts, dtype: str, max_len: int) -> Params:
    """What `load_params` would bring onto a device, as types and shapes.

    Args:
        weights: The model; of layers that are alike the first is read.
        layouts: How its codes lie.
        dtype: Compute type.
        max_len: Positions of a slot.

    Returns:
        The weights, each leaf a `jax.ShapeDtypeStruct`.
    """
    loader, config = _Loader(weights, layouts, dtype), weights.config

    def stored(index: int) -> list[tuple[str, Any]]:
        at = layer_prefix(index)
        return sorted((name.removeprefix(at), row) for name, row in weights.entries.items() if name.startswith(at))

    segments = []
    for _, like in groupby(range(config.num_layers), stored):
        first, *others = like
        layer = loader.layer(first)
        segments.append(jax.tree.map(partial(_shaped, 1 + len(others)), layer))
    head = None if config.tie_embeddings else loader.table(LM_HEAD)
    rest = (loader.table(EMBEDDING), loader.norm(FINAL_NORM), head, *rotary_tables(config, whole_blocks(max_len)))
    embedding, final_norm_D, head, cos_ATh, sin_ATh = jax.tree.map(_shaped_alone, rest)
    return Params(embedding, tuple(segments), final_norm_D, head, cos_ATh, sin_ATh)


def _shaped(num_layers: int, leaf: np.ndarray) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((num_layers, *leaf.shape), leaf.dtype)


def _shaped_alone(leaf: np.ndarray) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


class _Loader:
    """Reads and lays out one thing at a time."""

    def __init__(self, weights: ModelWeights, layouts: Layouts, dtype: str) -> None:
        self.weights = weights
        self.layouts = layouts
        self.dtype = dtype_of(np, dtype)

    def layer(self, index: int) -> Layer:
        at, config = layer_prefix(index), self.weights.config
        norms, differ = layer_norms(config), len(config.attentions) > 1
        return Layer(
            attention_norm_D=self.norm(f"{at}{norms.attention}.weight"),
            q=self.linear(f"{at}self_attn.q_proj"),
            k=self.linear(f"{at}self_attn.k_proj"),
            v=self.linear(f"{at}self_attn.v_proj"),
            q_norm_h=self.norm_if(config.qk_norm, f"{at}self_attn.q_norm.weight"),
            k_norm_h=self.norm_if(config.qk_norm, f"{at}self_attn.k_norm.weight"),
            o=self.linear(f"{at}self_attn.o_proj"),
            mlp_norm_D=self.norm(f"{at}{norms.mlp}.weight"),
            mlp=self.mlp(at),
            attended_norm_D=self.norm_if(config.output_norms, f"{at}{norms.attended}.weight"),
            out_norm_D=self.norm_if(config.output_norms, f"{at}{norms.out}.weight"),
            attention=np.array(config.attention_index(index), np.int32) if differ else None,
        )

    def mlp(self, at: str) -> Mlp | Mixture:
        mixture = expert_names(self.weights.config)
        if mixture is None:
            return Mlp(*(self.linear(f"{at}mlp.{part}_proj") for part in ("gate", "up", "down")))
        # A kernel that finds a layer in a stack does not find an expert in a stack of stacks.
        layout = self.layouts.linear
        layout = EinsumLayout(layout.chip) if isinstance(layout, PallasLayout) else layout
        experts = [Mlp(*(self.linear(f"{at}{name}", layout) for name in names)) for names in mixture.experts]
        if len(set(map(_structure, experts))) > 1:
            raise BackendError(
                f"{at}{mixture.router}: the experts of this layer are not all stored alike, which the tpu backend needs "
                "to scan them; give them one scheme, or use --backend gpu."
            )
        return Mixture(
            self.array(f"{at}{mixture.router}.weight"), jax.tree.map(lambda *leaves: np.stack(leaves), *experts)
        )

    def linear(self, name: str, layout: LinearLayout | None = None) -> Linear:
        weight, bias_O = self.weights[f"{name}.weight"], self.optional(f"{name}.bias")
        if isinstance(weight, QTensor):
            if self.weights.rounds_inputs(f"{name}.weight"):
                return Int8InputLinear(self.layouts.integer.from_qtensor(weight, None), bias_O)
            return (layout or self.layouts.linear).from_qtensor(weight, bias_O)
        return DenseLinear(weight.T.astype(self.dtype), bias_O)

    def table(self, name: str) -> Table:
        weight = self.weights[name]
        if isinstance(weight, QTensor):
            return self.layouts.table.from_qtensor(weight)
        return DenseTable(weight.astype(self.dtype))

    def norm(self, name: str) -> np.ndarray:
        return norm_factor(self.weights.config, self.array(name))

    def norm_if(self, present: bool, name: str) -> np.ndarray | None:
        return self.norm(name) if present else None

    def optional(self, name: str) -> np.ndarray | None:
        return self.array(name) if name in self.weights else None

    def array(self, name: str) -> np.ndarray:
        """A norm or bias, in the type it is stored in: it is upcast where it is used."""
        array = self.weights[name]
        assert not isinstance(array, QTensor), name
        return array


def _structure(layer: Layer | Mlp) -> tuple[Any, ...]:
    leaves, tree = jax.tree.flatten(layer)
    return tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def _linears(layer: Layer) -> Iterator[Linear]:
    yield from (layer.q, layer.k, layer.v, layer.o)
    mlp, times = (layer.mlp, 1) if isinstance(layer.mlp, Mlp) else (layer.mlp.experts, len(layer.mlp.router_ED))
    yield from times * (mlp.gate, mlp.up, mlp.down)


def _stacked(layers: list[Layer], mesh: Mesh, num_kv_heads: int) -> Layer:
    """Stack like layers on the devices, giving up each leaf as soon as it is there."""
    tree = jax.tree.structure(layers[0])
    specs = jax.tree.leaves(layer_specs(layers[0], parts(mesh), num_kv_heads))
    columns = [jax.tree.leaves(layer) for layer in layers]
    layers.clear()
    stacked = [put(np.stack([column.pop(0) for column in columns]), mesh, P(None, *spec)) for spec in specs]
    return jax.tree.unflatten(tree, stacked)


def _kernel_lines(kernels: Counter[str], head: str, num_segments: int) -> tuple[str, ...]:
    lines = [f"{count} linears: {kernel}" for kernel, count in kernels.most_common()]
    if num_segments > 1:
        lines.append(f"layers differ in structure: {num_segments} scanned segments")
    return (*lines, f"head: {head}")
