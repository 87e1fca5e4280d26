"""How far a quantized matrix lies from its source."""

import math
from dataclasses import dataclass
from typing import Self

import numpy as np

from llmq.quant.affine import dequantize
from llmq.quant.qtensor import QTensor


@dataclass(frozen=True, slots=True)
class Fidelity:
    """Sums over the elements of a matrix; two parts of it add up with ``+``.

    Attributes:
        squared_error: Sum of (weight - dequantized)^2.
        squared_weight: Sum of weight^2.
        max_steps: Largest |weight - dequantized| in units of its scale. At most 1/2 plus rounding,
            but for weights clipped at the upper end of a symmetric grid: those reach 1.
    """

    squared_error: float = 0.0
    squared_weight: float = 0.0
    max_steps: float = 0.0

    @property
    def sqnr_db(self) -> float:
        """Signal-to-quantization-noise ratio in dB; infinite when nothing was lost."""
        if self.squared_error == 0.0:
            return math.inf
        return 10.0 * math.log10(max(self.squared_weight, 1e-300) / self.squared_error)

    @property
    def relative_error(self) -> float:
        """Norm of the error over the norm of the weight."""
        return math.sqrt(self.squared_error / self.squared_weight) if self.squared_weight else 0.0

    def __add__(self, other: Self) -> "Fidelity":
        return Fidelity(
            self.squared_error + other.squared_error,
            self.squared_weight + other.squared_weight,
            max(self.max_steps, other.max_steps),
        )


def fidelity(weight_OI: np.ndarray, qtensor: QTensor) -> Fidelity:
    """Compare a matrix with its codes, in float64.

    Args:
        weight_OI: The source, `[O, I]`.
        qtensor: Its codes, NumPy, same shape.

    Returns:
        The sums.
    """
    weight = weight_OI.astype(np.float64)
    error = weight - dequantize(qtensor).astype(np.float64)
    steps = np.repeat(qtensor.scale.astype(np.float64), qtensor.group_size, axis=-1)
    return Fidelity(
        squared_error=float(np.vdot(error, error)),
        squared_weight=float(np.vdot(weight, weight)),
        max_steps=float(np.max(np.abs(error) / steps, initial=0.0)),
    )
