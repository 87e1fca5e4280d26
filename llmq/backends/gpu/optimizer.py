"""AdamW, its moments in float32 or in torchao's 8 bits, and how they lie in a state.

``first NAME`` and ``second NAME`` are the moments of a parameter. One of 8 bits is two arrays instead:
``first codes NAME``, uint8 in the parameter's shape, and ``first scales NAME``, float32, one for each
block of 256 elements in their order. torchao leaves small parameters' moments in float32.

Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", section 2.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from llmq.backends.base import TrainOptions
from llmq.backends.gpu.linear import to_tensor
from llmq.backends.gpu.world import World, to_numpy
from llmq.errors import BackendError

#: The moments, by what they are called in a state.
_MOMENTS = {"first": "exp_avg", "second": "exp_avg_sq"}


class AdamW:
    """AdamW with float32 moments.

    Args:
        trained: Parameters, by their names in a state. Those with one axis do not decay.
        options: Of training.
        world: The processes that hold parts of the parameters.
    """

    def __init__(self, trained: Mapping[str, nn.Parameter], options: TrainOptions, world: World) -> None:
        self._trained, self._world = trained, world
        matrices = [p for p in trained.values() if p.ndim > 1]
        others = [p for p in trained.values() if p.ndim == 1]
        decays = ((matrices, options.weight_decay), (others, 0.0))
        groups = [{"params": params, "weight_decay": decay} for params, decay in decays if params]
        self._inner = self._open(groups, options.betas)

    def _open(self, groups: Sequence[dict[str, Any]], betas: tuple[float, float]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, lr=0.0, betas=betas, fused=True)

    def step(self, learning_rate: float) -> None:
        """Update every parameter by its gradient, and drop the gradients."""
        for group in self._inner.param_groups:
            group["lr"] = learning_rate
        self._inner.step()
        self._inner.zero_grad(set_to_none=True)

    def state(self) -> dict[str, np.ndarray]:
        """Both moments of every parameter, whole."""
        state: dict[str, np.ndarray] = {}
        for name, parameter in self._trained.items():
            held = self._inner.state[parameter]
            for moment, key in _MOMENTS.items():
                state |= self._stored(moment, name, held[key] if key in held else torch.zeros_like(parameter))
        return state

    def load_state(self, step: int, state: Mapping[str, np.ndarray]) -> None:
        """Go back to a state.

        Args:
            step: How many steps had been done.
            state: From `state`; other arrays in it are not looked at.
        """
        for name, parameter in self._trained.items():
            held = {key: self._read(moment, name, parameter, state) for moment, key in _MOMENTS.items()}
            self._inner.state[parameter] = {"step": self._count(step), **held}

    def _count(self, step: int) -> Tensor:
        return torch.tensor(float(step), device=self._world.device)

    def _stored(self, moment: str, name: str, held: Tensor) -> dict[str, np.ndarray]:
        return {f"{moment} {name}": to_numpy(held)}

    def _read(self, moment: str, name: str, like: nn.Parameter, state: Mapping[str, np.ndarray]) -> Tensor:
        return self._world.put(like, to_tensor(state[f"{moment} {name}"]))


class AdamW8bit(AdamW):
    """AdamW with moments of 8 bits, by torchao: 2 bytes a parameter rather than 8.

    On a CPU an update makes float32 copies of one parameter, a dozen times the largest in all, so that small models
    with large embeddings take more memory rather than less there.

    Raises:
        BackendError: torchao is not usable here, or several processes train together.
    """

    def _open(self, groups: Sequence[dict[str, Any]], betas: tuple[float, float]) -> torch.optim.Optimizer:
        if self._world.size > 1:
            raise BackendError(
                f"optimizer='adamw8bit': the {self._world.size} processes would cut its blocks of 256, and a checkpoint "
                "would fit no other number of them; use adamw."
            )
        before = logging.root.manager.disable
        logging.disable(logging.WARNING)  # of kernels for other devices that torchao brings
        try:
            from torchao.optim import AdamW8bit as Inner
            from torchao.optim.subclass_8bit import OptimState8bit
        except ImportError as err:
            raise BackendError(
                f"optimizer='adamw8bit': needs torchao, which cannot be imported here ({err}); install llmq[qat], or use adamw."
            ) from err
        finally:
            logging.disable(before)
        self._quantized = OptimState8bit
        return Inner(groups, lr=0.0, betas=betas)

    def step(self, learning_rate: float) -> None:
        """See `AdamW.step`. torchao compiles the update of each shape; on a CPU, where that takes minutes, it does not."""
        for group in self._inner.param_groups:
            group["lr"].fill_(learning_rate)
        with torch.compiler.set_stance("force_eager" if self._world.device.type == "cpu" else "default"):
            self._inner.step()
        self._inner.zero_grad(set_to_none=True)

    def _count(self, step: int) -> Tensor:
        return torch.tensor(float(step))

    def _stored(self, moment: str, name: str, held: Tensor) -> dict[str, np.ndarray]:
        if not isinstance(held, self._quantized):
            return super()._stored(moment, name, held)
        return {f"{moment} codes {name}": to_numpy(held.codes), f"{moment} scales {name}": to_numpy(held.scale)}

    def _read(self, moment: str, name: str, like: nn.Parameter, state: Mapping[str, np.ndarray]) -> Tensor:
        if f"{moment} codes {name}" not in state:
            return super()._read(moment, name, like, state)
        codes, scales = (to_tensor(state[f"{moment} {part} {name}"]) for part in ("codes", "scales"))
        held = self._quantized.zeros(
            like.shape, moment == "first", codes.numel() // scales.numel(), like.device, like.dtype
        )
        held.codes.copy_(codes)
        held.scale.copy_(scales)
        return held


class TracedAdamW(AdamW):
    """AdamW as one program of a device that compiles what it runs: what changes from step to step lies on the device.

    Rates and counts have one axis: torch_xla makes constants of arrays without.
    """

    def _open(self, groups: Sequence[dict[str, Any]], betas: tuple[float, float]) -> torch.optim.Optimizer:
        inner = torch.optim.AdamW(groups, lr=self._number(0.0), betas=betas, foreach=False, capturable=True)
        for parameter in self._trained.values():  # which the first step would else make, in another program
            held = {key: torch.zeros_like(parameter) for key in _MOMENTS.values()}
            inner.state[parameter] = {"step": self._count(0), **held}
        return inner

    def step(self, learning_rate: float) -> None:
        """See `AdamW.step`."""
        for group in self._inner.param_groups:
            group["lr"] = self._number(learning_rate)
        self._inner.step()
        self._inner.zero_grad(set_to_none=True)

    def _count(self, step: int) -> Tensor:
        return self._number(float(step))

    def _number(self, value: float) -> Tensor:
        return torch.tensor([value], device=self._world.device)


#: Name in `TrainOptions` -> the optimizer.
OPTIMIZERS = {"adamw": AdamW, "adamw8bit": AdamW8bit}


def open_optimizer(trained: Mapping[str, nn.Parameter], options: TrainOptions, world: World) -> AdamW:
    """The optimizer that training asks for.

    Args:
        trained: As for `AdamW`.
        options: Of training.
        world: As for `AdamW`.

    Returns:
        It.

    Raises:
        BackendError: It is not usable here.
    """
    if world.device.type != "xla":
        return OPTIMIZERS[options.optimizer](trained, options, world)
    if options.optimizer != "adamw":
        raise BackendError(
            f"optimizer={options.optimizer!r}: not with runtime torch_xla, whose torch torchao does not take; use adamw."
        )
    return TracedAdamW(trained, options, world)
