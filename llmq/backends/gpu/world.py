"""The processes that train together: one, or as many as ``torchrun`` started.

Each holds a part of the rows of every weight (FSDP2) and computes a part of the rows of every batch. A
grid lies within a row of the weight, so sharding cuts none. A mesh may ask for several copies of the
weights; the processes of each copy hold the parts of it, and all average their gradients.
"""

import os
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from llmq.backends.base import TrainBatch, TrainOptions
from llmq.backends.gpu.trainable import TrainableDecoder
from llmq.errors import BackendError


class World:
    """All processes of a run.

    Args:
        device: What this process computes on.
        options: Of training; of these, the mesh.

    Attributes:
        size: How many there are.
        rank: Which one this is.
        device: What this one computes on.
    """

    def __init__(self, device: torch.device, options: TrainOptions) -> None:
        self.size, self.rank, self.device = int(os.environ.get("WORLD_SIZE", "1")), 0, device
        self._mesh: DeviceMesh | None = None
        shape = options.mesh_of(self.size)
        if self.size == 1:
            return
        if device.type == "cuda":
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(self.device)
        if not dist.is_initialized():
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        self.rank = dist.get_rank()
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("dp", "fsdp"))
        self._mesh = mesh if shape[0] > 1 else mesh["fsdp"]

    def shard(self, model: TrainableDecoder) -> None:
        """Leave this process its part of every weight; a layer is gathered while it is computed."""
        if self._mesh is None:
            return
        for layer in model.layers:
            fully_shard(layer, mesh=self._mesh)
        fully_shard(model, mesh=self._mesh)
        for matrix in model.matrices():
            matrix.keeps_seen = False

    def part(self, batch: TrainBatch) -> TrainBatch:
        """The rows of a batch that this process computes.

        Args:
            batch: The same in every process.

        Returns:
            Its part.

        Raises:
            BackendError: The rows cannot be shared out.
        """
        num_rows = len(batch.tokens)
        if num_rows % self.size:
            raise BackendError(f"batch_size={num_rows}: must be a multiple of the {self.size} processes.")
        mine = slice(self.rank * num_rows // self.size, (self.rank + 1) * num_rows // self.size)
        fields = ("tokens", "targets", "learned", "documents", "positions")
        return replace(batch, **{field: getattr(batch, field)[mine] for field in fields})

    def total(self, value: float) -> float:
        """The sum of a number over all processes."""
        if self.size == 1:
            return value
        summed = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(summed)
        return float(summed)

    def put(self, parameter: nn.Parameter, array: Tensor) -> Tensor:
        """A whole tensor, laid out as a parameter is."""
        if not isinstance(parameter, DTensor):
            return array.to(self.device)
        return distribute_tensor(array.to(self.device), parameter.device_mesh, parameter.placements, src_data_rank=None)


def whole(tensor: Tensor) -> Tensor:
    """A tensor, gathered from all processes, which must all ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def to_numpy(tensor: Tensor) -> np.ndarray:
    """A copy of a whole tensor."""
    return whole(tensor.detach()).cpu().numpy().copy()
