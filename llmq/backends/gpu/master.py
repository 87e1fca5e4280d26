"""Master weights as modules: held in float32, seen by the forward pass as `straight` says.

Suffixes: D hidden, O output features, I input features, R rank.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmq.backends.base import Adapters
from llmq.backends.gpu.model import rms_norm
from llmq.backends.gpu.straight import Seen, round_inputs, see, see_all, straight_through
from llmq.config import Scheme


class Matrix(nn.Module):
    """A master weight, with an adapter where it has one.

    Args:
        name: Of the tensor in the checkpoint.
        weight_OI: float32.
        scheme: Its grid, if it is to be quantized.
        dtype: Compute type.
        compiled: As for `see`.

    Attributes:
        name: Of the tensor in the checkpoint.
        factor: Of the adapter; 0 where there is none.
        keeps_seen: Whether what the forward pass sees is kept between passes.
    """

    def __init__(
        self, name: str, weight_OI: Tensor, scheme: Scheme | None, dtype: torch.dtype, *, compiled: bool
    ) -> None:
        super().__init__()
        self.name, self.scheme, self.dtype, self._compiled = name, scheme, dtype, compiled
        self.weight = nn.Parameter(weight_OI)
        self.factor = 0.0
        self.keeps_seen = True
        self._quantized, self._adapted = False, True
        self._seen: Seen | None = None

    def adapt(self, adapters: Adapters) -> None:
        """Add an adapter, which changes nothing yet."""
        num_out, num_in = self.weight.shape
        self.down = nn.Parameter(torch.from_numpy(adapters.initial_down(self.name, num_in)).to(self.weight.device))
        self.up = nn.Parameter(torch.zeros(num_out, adapters.rank, device=self.weight.device))
        self.factor = adapters.alpha / adapters.rank

    def merged(self, gather: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Tensor:
        """The master weight, its adapter added: float32 `[O, I]`; `gather` makes parts whole."""
        if not self.factor:
            return gather(self.weight)
        return gather(self.weight) + self.factor * (gather(self.up) @ gather(self.down))

    def look(self, quantized: bool, *, adapted: bool = True) -> None:
        """Choose whether the forward pass sees the grid, and adapters; to be called whenever the weight has changed, too."""
        self._quantized, self._adapted, self._seen = quantized, adapted, None

    def seen(self) -> Tensor:
        """What the forward pass multiplies with, `[O, I]` in the compute type.

        It is computed once until the next `look`: the passes over several batches, and those that
        recompute activations, share it.
        """
        merged_OI = self.merged() if self._adapted else self.weight
        seen = self._seen or see(merged_OI.detach(), self._grid(), self.dtype, compiled=self._compiled)
        self._seen = seen if self.keeps_seen else None
        return straight_through(merged_OI, seen)

    def _grid(self) -> Scheme | None:
        return self.scheme if self._quantized else None

    @staticmethod
    def see_together(matrices: "Sequence[Matrix]") -> None:
        """Compute at once what several are about to be asked for; those with an adapter see to themselves.

        Args:
            matrices: Of one model.
        """
        alike: dict[tuple[Scheme | None, int], list[Matrix]] = defaultdict(list)
        for matrix in matrices:
            if matrix._seen is None and not matrix.factor:
                scheme = matrix._grid()
                alike[scheme, (scheme and scheme.group_size) or matrix.weight.shape[1]].append(matrix)
        for (scheme, _), some in alike.items():
            first, masters = some[0], [matrix.weight.detach() for matrix in some]
            seen = see_all(masters, scheme, first.dtype, compiled=first._compiled)
            for matrix, of_matrix in zip(some, seen, strict=True):
                matrix._seen = of_matrix


class Linear(Matrix):
    """``y = x @ weight.T + bias``.

    Args:
        name: Of the tensor in the checkpoint.
        weight_OI: float32.
        scheme: Its grid, if it is to be quantized.
        dtype: Compute type.
        bias_O: float32, or None.
        rounds_inputs: Whether x is rounded to int8 whenever the forward pass sees the grid.
        compiled: As for `see`.
    """

    def __init__(
        self,
        name: str,
        weight_OI: Tensor,
        scheme: Scheme | None,
        dtype: torch.dtype,
        bias_O: Tensor | None,
        *,
        rounds_inputs: bool,
        compiled: bool,
    ) -> None:
        super().__init__(name, weight_OI, scheme, dtype, compiled=compiled)
        self.bias = None if bias_O is None else nn.Parameter(bias_O)
        self._rounds_inputs = rounds_inputs

    def forward(self, x: Tensor) -> Tensor:
        """Multiply."""
        y = F.linear(round_inputs(x) if self._rounds_inputs and self._quantized else x, self.seen())
        return y if self.bias is None else y + self.bias.to(self.dtype)


class Norm(nn.Module):
    """Root-mean-square norm.

    Args:
        name: Of the tensor in the checkpoint.
        weight_D: float32.
        eps: Added to the mean square.
        offset: Added to the weight.
    """

    def __init__(self, name: str, weight_D: Tensor, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.name, self._eps, self._offset = name, eps, offset
        self.weight = nn.Parameter(weight_D)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last axis."""
        weight_D = self.weight.to(x.dtype)
        return rms_norm(x, weight_D.float() + self._offset if self._offset else weight_D, self._eps)
