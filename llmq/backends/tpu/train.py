"""`base.Trainer` in JAX: one compiled gradient and one compiled update, their buffers donated.

Rows of a batch are spread over the devices, and so are the output features of each weight: a grid lies
within a row of the weight, so no device needs more than its part to quantize. Where a mesh asks for
several copies of the weights, rows are spread over all devices and each weight over those of a copy.
"""

import resource
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from llmq.backends.base import ComputeType, StepResult, TrainBatch, TrainOptions
from llmq.backends.tpu.device import DEVICES, open_device
from llmq.backends.tpu.mesh import whole
from llmq.backends.tpu.model import precision
from llmq.backends.tpu.trainable import Rows, Spec, Taught, hidden, losses, merged
from llmq.checkpoint.loader import ModelWeights
from llmq.errors import BackendError
from llmq.model.names import layer_prefix
from llmq.model.rotary import rotary_tables
from llmq.quant.affine import dtype_of

#: AdamW's moments, by what they are called in a state.
_MOMENTS = {"first": "mu", "second": "nu"}

#: A batch over the devices.
_BY_ROWS = P(("dp", "fsdp"))

_Tensors = dict[str, Any]

#: Cosines and sines, float32 `[A, T, h / 2]` for each of `ModelConfig.attentions`.
_Tables = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, slots=True)
class _Teacher:
    """Whose predictions are learned from.

    Attributes:
        spec: Its model.
        held: Its tensors.
        rotation: Its tables.
        device: Where it computes; None spreads it over the devices that train.
        share: Of the divergence from it in the loss.
        temperature: Divides the logits of both.
    """

    spec: Spec
    held: _Tensors
    rotation: _Tables
    device: Any
    share: float
    temperature: float


class JaxTrainer:
    """See `base.Trainer`.

    Args:
        weights: The model.
        options: How to train it.

    Raises:
        BackendError: The device is not there, computes badly in the type asked for, or the optimizer is
            another than AdamW.
    """

    def __init__(self, weights: ModelWeights, options: TrainOptions) -> None:
        if options.optimizer != "adamw":
            raise BackendError(
                f"optimizer={options.optimizer!r}: the tpu backend holds AdamW's moments in float32; use adamw, or "
                "--backend gpu."
            )
        if options.compile:
            raise BackendError("compile: the tpu backend compiles everything anyway; leave --compile out.")
        device = open_device(options.device)
        on_cpu = device.platform == "cpu"
        self.dtype: ComputeType = options.dtype or ("float32" if on_cpu else "bfloat16")
        if on_cpu and self.dtype == "bfloat16":
            raise BackendError(
                "dtype='bfloat16': JAX has no fast bfloat16 product on the cpu; use float32 or --backend cpu."
            )
        devices = jax.devices(DEVICES[options.device][1] if options.device else device.platform)
        self.is_main = jax.process_index() == 0
        self._mesh = Mesh(np.array(devices).reshape(options.mesh_of(len(devices))), ("dp", "fsdp"))
        self.device = f"{len(devices)} x {device.device_kind} (JAX {jax.__version__})"
        self._places = _Places(weights, options)
        factor = options.adapters.alpha / options.adapters.rank if options.adapters else 0.0
        schemes = tuple((key, options.schemes[names[0]]) for key, names in self._places if names[0] in options.schemes)
        rounded = frozenset(key for key, names in self._places if names[0] in options.rounded_inputs)
        segments = self._places.num_segments
        self._spec = Spec(weights.config, self.dtype, schemes, rounded, segments, factor, options.recompute)
        held = {key: self._put(self._places.stack(names, weights)) for key, names in self._places}
        adapters = self._adapters(options, held)
        self._trained: _Tensors = adapters or held
        self._frozen: _Tensors = held if adapters else {}
        self._rotation = rotary_tables(weights.config, options.max_len)
        self._teacher = self._open_teacher(weights, options)
        self._clip = jnp.inf if options.clip is None else options.clip
        self._optimizer: Any = optax.chain(
            optax.scale_by_adam(*options.betas),
            optax.add_decayed_weights(options.weight_decay, {key: _is_matrix(key) for key in self._trained}),
        )
        self._moments: Any = self._optimizer.init(self._trained)

    def step(self, batches: Sequence[TrainBatch], learning_rate: float, *, quantized: bool) -> StepResult:
        """See `base.Trainer.step`."""
        total = sum(int(batch.learned.sum()) for batch in batches)
        parts, grads = [], None
        for batch in batches:
            rows, taught = self._rows(batch, self._rotation), self._taught(batch)
            part, more = _gradients(self._spec, self._trained, self._frozen, rows, taught, total, quantized)
            grads = more if grads is None else _add(grads, more)
            parts.append(part)
        self._trained, self._moments, norm = _update(
            self._optimizer, self._trained, self._moments, grads, learning_rate, self._clip
        )
        return StepResult(float(sum(float(part) for part in parts)) / total, float(norm))

    def evaluate(self, batch: TrainBatch, *, quantized: bool) -> np.ndarray:
        """See `base.Trainer.evaluate`."""
        found = _losses(self._spec, self._trained, self._frozen, self._rows(batch, self._rotation), quantized)
        return whole(found).astype(np.float64)[: len(batch.tokens)]

    def weight(self, name: str) -> np.ndarray:
        """See `base.Trainer.weight`."""
        key, index = self._places.find(name)
        held = {**self._frozen, **self._trained}
        parts = [held[part] for part in (key, f"down {key}", f"up {key}") if part in held]
        if index is not None:
            parts = [part[index] for part in parts]
        return whole(_merged(*parts, self._spec.factor) if len(parts) > 1 else parts[0])

    def state(self) -> dict[str, np.ndarray]:
        """See `base.Trainer.state`."""
        adam = self._moments[0]
        found = {"": self._trained, **{f"{moment} ": getattr(adam, field) for moment, field in _MOMENTS.items()}}
        return {
            prefix + name: array for prefix, held in found.items() for name, array in self._places.unstack(held).items()
        }

    def load_state(self, step: int, state: Mapping[str, np.ndarray]) -> None:
        """See `base.Trainer.load_state`."""
        keys = list(self._trained)

        def restack(prefix: str) -> _Tensors:
            return {key: self._put(self._places.restack(key, prefix, state)) for key in keys}

        self._trained = restack("")
        adam = self._moments[0]._replace(
            count=jnp.asarray(step, jnp.int32), **{field: restack(f"{moment} ") for moment, field in _MOMENTS.items()}
        )
        self._moments = (adam, *self._moments[1:])

    def peak_bytes(self) -> int:
        """See `base.Trainer.peak_bytes`."""
        stats = self._mesh.local_devices[0].memory_stats()
        return stats["peak_bytes_in_use"] if stats else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def close(self) -> None:
        """See `base.Trainer.close`."""
        del self._trained, self._frozen, self._moments

    def _open_teacher(self, weights: ModelWeights, options: TrainOptions) -> _Teacher | None:
        """Whose predictions are learned from: the model itself, where only adapters change it."""
        teacher, device = options.teacher, None
        if teacher is None:
            return None
        if teacher is weights and self._frozen:
            places, held, rotation = self._places, self._frozen, self._rotation
        else:
            places, rotation = _Places(teacher, TrainOptions()), rotary_tables(teacher.config, options.max_len)
            device = jax.local_devices(backend=options.teacher_device)[0] if options.teacher_device else None
            dtype = dtype_of(np, self.dtype)
            arrays = ((key, places.stack(names, teacher).astype(dtype)) for key, names in places)
            held = {key: jax.device_put(array, device) if device else self._put(array) for key, array in arrays}
        spec = Spec(teacher.config, self.dtype, (), frozenset(), places.num_segments, 0.0, False)
        return _Teacher(spec, held, rotation, device, options.kd_weight, options.kd_temperature)

    def _taught(self, batch: TrainBatch) -> Taught | None:
        teacher = self._teacher
        if teacher is None:
            return None
        if teacher.device is None:
            x_BND, head_VD = _hidden(teacher.spec, teacher.held, self._rows(batch, teacher.rotation))
        else:
            rows = Rows(*jax.device_put(self._padded(batch, teacher.rotation), teacher.device))
            found_BND, found_VD = map(np.asarray, _hidden(teacher.spec, teacher.held, rows))
            x_BND, head_VD = self._spread(found_BND, _BY_ROWS), self._put(found_VD)
        return Taught(x_BND, head_VD, teacher.share, teacher.temperature)

    def _adapters(self, options: TrainOptions, held: _Tensors) -> _Tensors:
        found: _Tensors = {}
        adapters = options.adapters
        if adapters is None:
            return found
        for key, names in self._places:
            if names[0] not in adapters.targets:
                continue
            num_out, num_in = held[key].shape[-2:]
            downs = [adapters.initial_down(name, num_in) for name in names]
            stacked = held[key].ndim == 3
            up = np.zeros((len(names), num_out, adapters.rank), np.float32)
            found[f"down {key}"] = self._put(np.stack(downs) if stacked else downs[0])
            found[f"up {key}"] = self._put(up if stacked else up[0])
        return found

    def _put(self, array: np.ndarray) -> jax.Array:
        """A tensor on the devices: matrices in parts along their output features, where these divide."""
        axis = array.ndim - 2
        splits = array.ndim > 1 and array.shape[axis] % self._mesh.shape["fsdp"] == 0
        spec = P(*(None,) * axis, "fsdp") if splits else P()
        return self._spread(array, spec)

    def _rows(self, batch: TrainBatch, rotation: _Tables) -> Rows:
        """A batch on the devices."""
        return Rows(*(self._spread(array, _BY_ROWS) for array in self._padded(batch, rotation)))

    def _padded(self, batch: TrainBatch, rotation: _Tables) -> list[np.ndarray]:
        """The fields of `Rows`, filled up with rows of padding to a multiple of the number of devices."""
        cos, sin = (table_ATh[:, batch.positions].swapaxes(0, 1) for table_ATh in rotation)
        arrays = (batch.tokens, batch.targets, batch.learned, batch.documents, cos, sin)
        missing = -len(batch.tokens) % self._mesh.size
        return [np.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1)) for array in arrays]

    def _spread(self, array: np.ndarray, spec: P) -> jax.Array:
        """An array that every process holds, on the devices of all."""
        return jax.make_array_from_callback(array.shape, NamedSharding(self._mesh, spec), lambda part: array[part])


class _Places:
    """Where each tensor of the checkpoint lies: like layers are stacked, as `trainable` says."""

    def __init__(self, weights: ModelWeights, options: TrainOptions) -> None:
        num_layers = weights.config.num_layers
        targets = options.adapters.targets if options.adapters else frozenset[str]()
        suffixes: dict[int, list[str]] = {
            layer: [
                name.removeprefix(layer_prefix(layer))
                for name in weights.shapes
                if name.startswith(layer_prefix(layer))
            ]
            for layer in range(num_layers)
        }

        def structure(layer: int) -> list[Any]:
            names = [layer_prefix(layer) + suffix for suffix in suffixes[layer]]
            return [(options.schemes.get(name), name in options.rounded_inputs, name in targets) for name in names]

        self._names: dict[str, list[str]] = {
            name: [name] for name in weights.shapes if not name.startswith("model.layers.")
        }
        self.num_segments = 0
        for _, like in groupby(range(num_layers), structure):
            layers = list(like)
            for suffix in suffixes[layers[0]]:
                self._names[f"{self.num_segments} {suffix}"] = [layer_prefix(layer) + suffix for layer in layers]
            self.num_segments += 1
        self._found = {name: (key, at) for key, names in self._names.items() for at, name in enumerate(names)}

    def __iter__(self) -> Iterator[tuple[str, list[str]]]:
        return iter(self._names.items())

    def find(self, name: str) -> tuple[str, int | None]:
        """The key of a tensor, and its place in the stack, if it lies in one."""
        key, at = self._found[name]
        return key, None if key == name else at

    def stack(self, names: Sequence[str], weights: ModelWeights) -> np.ndarray:
        """Tensors of a checkpoint as one float32 array."""
        arrays = [np.asarray(weights[name], np.float32) for name in names]
        return np.stack(arrays) if self._found[names[0]][0] != names[0] else arrays[0]

    def unstack(self, held: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
        """Arrays under their names in a state: ``weight NAME``, ``down NAME`` or ``up NAME``."""
        found = {}
        for key, array in held.items():
            part, inner = _split(key)
            for at, name in enumerate(self._names[inner]):
                found[f"{part} {name}"] = whole(array[at] if inner != name else array)
        return found

    def restack(self, key: str, prefix: str, state: Mapping[str, np.ndarray]) -> np.ndarray:
        """Undo `unstack` for one key."""
        part, inner = _split(key)
        arrays = [state[f"{prefix}{part} {name}"] for name in self._names[inner]]
        return np.stack(arrays) if self._names[inner][0] != inner else arrays[0]


def _split(key: str) -> tuple[str, str]:
    part, _, inner = key.partition(" ")
    return (part, inner) if part in ("down", "up") else ("weight", key)


def _is_matrix(key: str) -> bool:
    return not key.endswith((".bias", "norm.weight"))


@partial(jax.jit, static_argnames=("spec", "quantized"))
def _losses(spec: Spec, trained: _Tensors, frozen: _Tensors, rows: Rows, quantized: bool) -> jax.Array:
    with precision(spec.dtype):
        return losses(spec, {**frozen, **trained}, rows, quantized=quantized)


@partial(jax.jit, static_argnames=("spec",))
def _hidden(spec: Spec, tensors: _Tensors, rows: Rows) -> tuple[jax.Array, jax.Array]:
    with precision(spec.dtype):
        return hidden(spec, tensors, rows, quantized=False)


@partial(jax.jit, static_argnames=("spec", "quantized"))
def _gradients(
    spec: Spec,
    trained: _Tensors,
    frozen: _Tensors,
    rows: Rows,
    taught: Taught | None,
    total: int,
    quantized: bool,
) -> tuple[jax.Array, _Tensors]:
    """Sum of losses, and the gradient of their mean over all batches of the step."""

    def loss(trained: _Tensors) -> tuple[jax.Array, jax.Array]:
        found = jnp.sum(losses(spec, {**frozen, **trained}, rows, taught, quantized=quantized))
        return found / total, found

    with precision(spec.dtype):
        grads, found = jax.grad(loss, has_aux=True)(trained)
    return found, grads


@partial(jax.jit, donate_argnums=0)
def _add(grads: _Tensors, more: _Tensors) -> _Tensors:
    return jax.tree.map(jnp.add, grads, more)


@partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
def _update(
    optimizer: optax.GradientTransformation,
    trained: _Tensors,
    moments: Any,
    grads: _Tensors,
    learning_rate: float,
    clip: float,
) -> tuple[_Tensors, Any, jax.Array]:
    norm = jnp.sqrt(sum(jnp.vdot(grad, grad) for grad in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda grad: grad * jnp.minimum(1.0, clip / (norm + 1e-6)), grads)
    updates, moments = optimizer.update(grads, moments, trained)
    return jax.tree.map(lambda weight, update: weight - learning_rate * update, trained, updates), moments, norm


_merged = jax.jit(merged, static_argnames="factor")
