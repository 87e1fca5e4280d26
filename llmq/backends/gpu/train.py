"""`base.Trainer` in torch: AdamW on float32 master weights, the forward pass in the compute type."""

import resource
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import nn

from llmq.backends.base import ComputeType, ModelOptions, StepResult, TrainBatch, TrainOptions
from llmq.backends.gpu import xla
from llmq.backends.gpu.compiler import prepare
from llmq.backends.gpu.device import DTYPES, choose_device
from llmq.backends.gpu.linear import to_tensor
from llmq.backends.gpu.master import Matrix
from llmq.backends.gpu.optimizer import open_optimizer
from llmq.backends.gpu.trainable import Taught, TrainableDecoder
from llmq.backends.gpu.world import World, to_numpy, whole
from llmq.checkpoint.loader import ModelWeights
from llmq.errors import BackendError


class TorchTrainer:
    """See `base.Trainer`.

    Args:
        weights: The model.
        options: How to train it.
    """

    def __init__(self, weights: ModelWeights, options: TrainOptions) -> None:
        choose = xla.choose_device if options.runtime == "torch_xla" else choose_device
        device, dtype = choose(ModelOptions(device=options.device, dtype=options.dtype))
        self.dtype: ComputeType = dtype
        self._world = World(device, options)
        self._device, self.is_main = self._world.device, self._world.rank == 0
        self._is_traced = device.type == "xla"
        name = xla.device_name() if self._is_traced else str(device)
        self.device = f"{self._world.size} x {name}" if self._world.size > 1 else name
        self._clip = options.clip
        if options.compile:
            if device.type != "cpu":
                raise BackendError(
                    f"compile: fake quantization is compiled for a CPU, not for {device.type}; leave --compile out."
                )
            prepare(device)
        self._looking: bool | None = None  # at the grid or not; None when weights have changed since
        self._model = TrainableDecoder(
            weights,
            options.schemes,
            options.rounded_inputs,
            options.max_len,
            self._device,
            DTYPES[dtype],
            recompute=options.recompute,
            compiled=options.compile,
            static=self._is_traced,
        )
        self._teacher = self._open_teacher(weights, options)
        self._lesson = (options.kd_weight, options.kd_temperature)
        if options.adapters is not None:
            self._model.requires_grad_(False)
            for matrix in self._model.matrices():
                if matrix.name in options.adapters.targets:
                    matrix.adapt(options.adapters)
        self._world.shard(self._model)
        self._trained = self._named_parameters()
        self._optimizer = open_optimizer(self._trained, options, self._world)
        self._launch()

    def _open_teacher(self, weights: ModelWeights, options: TrainOptions) -> TrainableDecoder | None:
        """Whose predictions are learned from: the model itself, where only adapters change it."""
        if options.teacher is None:
            return None
        if options.teacher is weights and options.adapters and self._world.size == 1:
            return self._model
        device = torch.device(options.teacher_device) if options.teacher_device else self._device
        own = DTYPES[self.dtype]
        static = self._is_traced  # as many rows as the model
        teacher = TrainableDecoder(options.teacher, {}, (), options.max_len, device, own, static=static, master=own)
        return teacher.requires_grad_(False)

    def _named_parameters(self) -> dict[str, nn.Parameter]:
        """What is trained, by its name in a state."""
        named = {f"weight {name}": getattr(module, attribute) for name, module, attribute in self._model.tensors()}
        for matrix in self._model.matrices():
            if matrix.factor:
                named |= {f"down {matrix.name}": matrix.down, f"up {matrix.name}": matrix.up}
        return {name: parameter for name, parameter in named.items() if parameter.requires_grad}

    def step(self, batches: Sequence[TrainBatch], learning_rate: float, *, quantized: bool) -> StepResult:
        """See `base.Trainer.step`."""
        total = sum(int(batch.learned.sum()) for batch in batches)
        share = torch.tensor([self._world.size / total], device=self._device)  # processes average their gradients
        mine = [self._world.part(batch) for batch in batches]
        lessons = self._taught(mine)
        self._look(quantized)
        parts = []
        for batch, taught in zip(mine, lessons, strict=True):
            part = self._model(self._model.rows(batch), taught).sum()
            (part * share).backward()
            parts.append(part.detach())
        norm = torch.nn.utils.clip_grad_norm_(self._trained.values(), torch.inf if self._clip is None else self._clip)
        self._optimizer.step(learning_rate)
        self._looking = None
        self._launch()
        nats = sum(float(part) for part in parts)
        return StepResult(self._world.total(nats) / total, float(whole(norm)))

    @torch.no_grad()
    def _taught(self, batches: Sequence[TrainBatch]) -> Sequence[Taught | None]:
        """Of all batches before the first is learned from: the teacher may be the model, seen otherwise."""
        teacher = self._teacher
        if teacher is None:
            return [None] * len(batches)
        if teacher is self._model:
            self._looking = None
            for matrix in teacher.matrices():
                matrix.look(quantized=False, adapted=False)
        head_VD = teacher.head.seen().to(self._device)
        return [
            Taught(teacher.hidden(teacher.rows(batch)).to(self._device), head_VD, *self._lesson) for batch in batches
        ]

    @torch.no_grad()
    def evaluate(self, batch: TrainBatch, *, quantized: bool) -> np.ndarray:
        """See `base.Trainer.evaluate`."""
        self._look(quantized)
        nats_M, learned_BN = self._model(self._model.rows(batch)), torch.from_numpy(batch.learned)
        self._launch()
        nats_M = nats_M.cpu().double()
        if len(nats_M) == learned_BN.numel():
            return nats_M.view(learned_BN.shape).sum(dim=1).numpy()
        return nats_M.new_zeros(learned_BN.shape).masked_scatter(learned_BN, nats_M).sum(dim=1).numpy()

    @torch.no_grad()
    def weight(self, name: str) -> np.ndarray:
        """See `base.Trainer.weight`."""
        module, attribute = next((m, a) for key, m, a in self._model.tensors() if key == name)
        if isinstance(module, Matrix) and attribute == "weight":
            return to_numpy(module.merged(whole))
        return to_numpy(getattr(module, attribute))

    def state(self) -> dict[str, np.ndarray]:
        """See `base.Trainer.state`."""
        weights = {name: to_numpy(parameter) for name, parameter in self._trained.items()}
        return weights | self._optimizer.state()

    @torch.no_grad()
    def load_state(self, step: int, state: Mapping[str, np.ndarray]) -> None:
        """See `base.Trainer.load_state`."""
        for name, parameter in self._trained.items():
            parameter.copy_(self._world.put(parameter, to_tensor(state[name])))
        self._optimizer.load_state(step, state)
        self._looking = None
        self._launch()

    def peak_bytes(self) -> int:
        """See `base.Trainer.peak_bytes`."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        if self._is_traced and (peak := xla.peak_bytes(self._device)):
            return peak
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def close(self) -> None:
        """See `base.Trainer.close`."""
        del self._model, self._optimizer, self._trained, self._teacher

    def _look(self, quantized: bool) -> None:
        if self._looking != quantized:
            self._looking = quantized
            for matrix in self._model.matrices():
                matrix.look(quantized)

    def _launch(self) -> None:
        """Run what was only recorded so far, where the device compiles what it runs."""
        if not self._is_traced:
            return
        self._looking = None  # a program that begins with what was seen would be another one
        for matrix in self._model.matrices():
            matrix.look(quantized=False)  # nor is that kept among the results
        xla.launch()
