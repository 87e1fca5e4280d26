"""Tensor parallelism: the processes that torchrun started hold a part of every layer each.

Shards are explicit, cut from codes and scales before any kernel sees them: q, k, v, gate and up along their
outputs, o and down along their inputs, whose products are summed over the processes, once each a layer. The head
is split along the vocabulary and its logits are gathered, so that every process samples the same tokens; the
embedding is looked up whole by each. The first process is called by the engine; what it is called with it tells
the others, who do the same.
"""

import atexit
import copyreg
import os
import signal
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from llmq.backends.base import InferenceModel, ModelOptions, State, StepHandle, StepOut
from llmq.backends.gpu.linear import Linear
from llmq.checkpoint import layout
from llmq.checkpoint.loader import ModelWeights
from llmq.errors import BackendError, ConfigError
from llmq.model.names import EMBEDDING, LM_HEAD
from llmq.model.shards import SPLIT_INPUTS, check_tp
from llmq.quant import QTensor

#: A server may wait for a request as long as this.
_PATIENCE = timedelta(days=365)


def _proxy(items: dict[Any, Any]) -> MappingProxyType[Any, Any]:
    return MappingProxyType(items)


# `SlotSampling.logit_bias` is one, which pickle does not know.
copyreg.pickle(MappingProxyType, lambda proxy: (_proxy, (dict(proxy),)))

_SPLIT_OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


#: What a decoder is made of.
AnyWeights: TypeAlias = "ModelWeights | ShardedWeights"


class Team:
    """The processes that share a model.

    Args:
        device: What this one computes on.

    Attributes:
        size: How many there are.
        rank: Which one this is.
    """

    def __init__(self, device: torch.device) -> None:
        if not dist.is_initialized():
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=_PATIENCE)
        self.size, self.rank = dist.get_world_size(), dist.get_rank()
        self._control = dist.new_group(backend="gloo", timeout=_PATIENCE)
        self._alone = False

    def total(self, y: Tensor) -> Tensor:
        """The sum over all processes, added up in float32."""
        if self._alone:
            return y
        summed = y.float()
        dist.all_reduce(summed)
        return summed.to(y.dtype)

    def gather(self, y_MO: Tensor) -> Tensor:
        """What all processes have, behind one another."""
        if self._alone:
            return y_MO
        parts = [torch.empty_like(y_MO) for _ in range(self.size)]
        dist.all_gather(parts, y_MO.contiguous())
        return torch.cat(parts, dim=-1)

    @contextmanager
    def alone(self) -> Generator[None]:
        """Within it nothing is exchanged: each process tries its own kernels, in its own time."""
        self._alone = True
        try:
            yield
        finally:
            self._alone = False

    def tell(self, message: Any = None) -> Any:
        """What the first process says, in every process."""
        box = [message]
        dist.broadcast_object_list(box, src=0, group=self._control)  # pyright: ignore[reportArgumentType]
        return box[0]


def join_team(options: ModelOptions, device: torch.device) -> Team | None:
    """Meet the processes that share the model.

    Args:
        options: Of the model.
        device: What this process computes on.

    Returns:
        All of them; None where a process has a model to itself.

    Raises:
        BackendError: Their number is not the one that was asked for.
    """
    running = int(os.environ.get("WORLD_SIZE", "1"))
    if options.dp > 1 or options.sp > 1:
        raise BackendError(
            f"mesh='dp={options.dp},tp={options.tp},sp={options.sp}': the gpu backend splits layers only; leave dp and sp out."
        )
    if options.tp != running:
        raise BackendError(
            f"tp={options.tp}: the gpu backend takes as many processes, and {running} run; "
            f"start it as torchrun --nproc-per-node {options.tp} -m llmq ... --tp {options.tp}."
        )
    if running == 1:
        return None
    if options.compile:
        raise BackendError(
            f"tp={options.tp}: steps that processes share are not compiled; leave --compile or --tp out."
        )
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return Team(device)


class ShardedWeights(Mapping[str, "np.ndarray | QTensor"]):
    """One process's part of a model's weights; `config` describes that part, as a model of its own.

    Args:
        weights: The whole model.
        team: Who shares it.

    Raises:
        ConfigError: Heads, features or groups cannot be shared evenly, inputs are rounded together, or there are experts.
    """

    def __init__(self, weights: ModelWeights, team: Team) -> None:
        config, size = weights.config, team.size
        if weights.quantization is not None and weights.quantization.activation == "int8":
            raise ConfigError(
                f"tp={size}: the model rounds inputs to int8 by their largest feature, of which a process here sees only "
                "its part; use one process, or --backend tpu."
            )
        if config.experts is not None:
            raise ConfigError(
                f"tp={size}: processes of the gpu backend do not share experts, and {config.architecture} has some; use one "
                "process, or --backend tpu."
            )
        scales = {name: weights.entries[name + layout.SCALE][1] for name in weights if weights.is_quantized(name)}
        groups = {name: (weights.shapes[name][-1], shape[-1]) for name, shape in scales.items() if shape[-1] > 1}
        check_tp(size, config, groups)
        self._weights, self._rank, self._size = weights, team.rank, size
        self.config = config.model_copy(
            update={
                "num_heads": config.num_heads // size,
                "num_kv_heads": max(1, config.num_kv_heads // size),
                "intermediate_size": config.intermediate_size // size,
            }
        )

    def __getitem__(self, name: str) -> np.ndarray | QTensor:
        weight, (module, _, kind) = self._weights[name], name.rpartition(".")
        if f"{module}.weight".endswith(SPLIT_INPUTS):
            if kind == "bias":  # added once to the sum
                return weight if self._rank == 0 else np.zeros_like(weight)
            return _columns(weight, self._rank, self._size)
        if not module.endswith(_SPLIT_OUTPUTS):
            return weight
        num_parts = self._size
        if module.endswith(("k_proj", "v_proj")):
            num_parts = min(num_parts, self._weights.config.num_kv_heads)
        return _rows(weight, self._rank * num_parts // self._size, num_parts)

    def rounds_inputs(self, name: str) -> bool:  # noqa: ARG002
        """See `ModelWeights.rounds_inputs`; models that do are refused."""
        return False

    def head(self) -> np.ndarray | QTensor:
        """The part of the head."""
        name = EMBEDDING if self.config.tie_embeddings else LM_HEAD
        return _rows(self._weights[name], self._rank, self._size)

    def __contains__(self, name: object) -> bool:
        return name in self._weights

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def _rows(weight: np.ndarray | QTensor, index: int, num_parts: int) -> np.ndarray | QTensor:
    size = weight.shape[0] // num_parts
    part = slice(index * size, (index + 1) * size)
    if not isinstance(weight, QTensor):
        return weight[part]
    zero = None if weight.zero is None else weight.zero[part]
    return QTensor(weight.values[part], weight.scale[part], zero, weight.num_bits)


def _columns(weight: np.ndarray | QTensor, index: int, num_parts: int) -> np.ndarray | QTensor:
    def part(array: np.ndarray) -> np.ndarray:
        size = array.shape[1] // num_parts
        return array if array.shape[1] == 1 else array[:, index * size : (index + 1) * size]

    if not isinstance(weight, QTensor):
        return part(weight)
    zero = None if weight.zero is None else part(weight.zero)
    return QTensor(part(weight.values), part(weight.scale), zero, weight.num_bits)


class SummedLinear(Linear):
    """A linear split along its inputs.

    Args:
        part: This process's.
        team: Whose products are added up.
    """

    def __init__(self, part: Linear, team: Team) -> None:
        super().__init__(None)
        self._part, self._team = part, team

    def __call__(self, x_MI: Tensor, chunk: int = 0) -> Tensor:
        """See `Linear.__call__`."""
        return self._team.total(self._part(x_MI, chunk))

    @property
    def kernels(self) -> tuple[str, ...]:
        """See `Linear.kernels`."""
        return self._part.kernels

    @property
    def num_bytes(self) -> int:
        """See `Linear.num_bytes`."""
        return self._part.num_bytes


class GatheredLinear(SummedLinear):
    """A linear split along its outputs, which every process needs whole."""

    def __call__(self, x_MI: Tensor, chunk: int = 0) -> Tensor:
        """See `Linear.__call__`."""
        return self._team.gather(self._part(x_MI, chunk))


class LeadingModel:
    """The model that the engine sees: it tells the others what it is asked; see `base.InferenceModel`.

    Args:
        model: This process's part.
        team: Who shares it.
    """

    def __init__(self, model: InferenceModel, team: Team) -> None:
        self._model, self._team, self.caps = model, team, model.caps
        self._is_open = True
        atexit.register(self.close)

    def init_state(self) -> State:
        """See `base.InferenceModel.init_state`."""
        self._team.tell(("init_state", (), {}))
        return self._model.init_state()

    def warmup(self, state: State) -> State:
        """See `base.InferenceModel.warmup`."""
        self._team.tell(("warmup", (), {}))
        return self._model.warmup(state)

    def extend(self, state: State, *args: Any, **kwargs: Any) -> tuple[State, np.ndarray | None]:
        """See `base.InferenceModel.extend`."""
        self._team.tell(("extend", args, kwargs))
        return self._model.extend(state, *args, **kwargs)

    def set_slot(self, state: State, *args: Any, **kwargs: Any) -> State:
        """See `base.InferenceModel.set_slot`."""
        self._team.tell(("set_slot", args, kwargs))
        return self._model.set_slot(state, *args, **kwargs)

    def copy_slot(self, state: State, *args: Any, **kwargs: Any) -> State:
        """See `base.InferenceModel.copy_slot`."""
        self._team.tell(("copy_slot", args, kwargs))
        return self._model.copy_slot(state, *args, **kwargs)

    def decode(self, state: State, *args: Any, **kwargs: Any) -> tuple[State, StepHandle]:
        """See `base.InferenceModel.decode`."""
        self._team.tell(("decode", args, kwargs))
        return self._model.decode(state, *args, **kwargs)

    def fetch(self, handle: StepHandle) -> StepOut:
        """See `base.InferenceModel.fetch`."""
        self._team.tell(("fetch", (), {}))
        return self._model.fetch(handle)

    def score(self, state: State, *args: Any, **kwargs: Any) -> Any:
        """See `base.InferenceModel.score`."""
        self._team.tell(("score", args, kwargs))
        return self._model.score(state, *args, **kwargs)

    def stats(self) -> Any:
        """See `base.InferenceModel.stats`: of this process's part."""
        return self._model.stats()

    def close(self) -> None:
        """See `base.InferenceModel.close`. The others end."""
        if self._is_open:
            self._is_open = False
            self._team.tell(None)
            self._model.close()
            dist.destroy_process_group()


def follow(model: InferenceModel, team: Team) -> None:
    """Do what the first process is asked for, until it closes.

    Args:
        model: This process's part.
        team: Who shares it.
    """
    for ending in (signal.SIGTERM, signal.SIGINT):  # the first process drains, then closes
        signal.signal(ending, signal.SIG_IGN)
    state, handles = None, []
    while (call := team.tell()) is not None:
        name, args, kwargs = call
        if name == "init_state":
            state = model.init_state()
        elif name == "fetch":
            model.fetch(handles.pop(0))
        elif name == "decode":
            state, handle = model.decode(state, *args, **kwargs)
            handles.append(handle)
        elif name in ("extend", "score"):
            state, _ = getattr(model, name)(state, *args, **kwargs)
        else:
            state = getattr(model, name)(state, *args, **kwargs)
    model.close()
    dist.destroy_process_group()
