"""The quantized matrix: one equation and its invariants.

    weight[o, i]  ~=  values[o, i] * scale[o, g] + zero[o, g]        g = i // group_size

Shape letters: O output features, I input features, G groups a row, g features a group
(I = G * g). A leading axis (experts) may stand before O in every field alike.
"""

from dataclasses import dataclass
from typing import Any

Array = Any  # an array of NumPy, torch or JAX: whatever array_api_compat recognizes


@dataclass(frozen=True, slots=True)
class QTensor:
    """Codes and their grid.

    Attributes:
        values: int8 `[O, I]`, the codes: in [-8, 7] for int4, [-128, 127] for int8.
        scale: `[O, G]`, the step of the grid; bfloat16 unless configured otherwise. Positive.
        zero: `[O, G]`, the float weight that code 0 stands for, or None when symmetric.
        num_bits: 4 or 8.

    Raises:
        ValueError: Shapes contradict each other, or G does not divide I.
    """

    values: Array
    scale: Array
    zero: Array | None
    num_bits: int

    def __post_init__(self) -> None:
        values, scale = tuple(self.values.shape), tuple(self.scale.shape)
        if len(values) < 2 or values[:-1] != scale[:-1] or scale[-1] == 0 or values[-1] % scale[-1]:
            raise ValueError(f"values {values} and scale {scale}: must be [O, I] and [O, G] with I a multiple of G.")
        if self.zero is not None and tuple(self.zero.shape) != scale:
            raise ValueError(f"zero {tuple(self.zero.shape)} and scale {scale}: must have the same shape.")
        if self.num_bits not in (4, 8):
            raise ValueError(f"num_bits={self.num_bits}: must be 4 or 8.")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix, `[O, I]`."""
        return tuple(self.values.shape)

    @property
    def group_size(self) -> int:
        """Input features that share a scale; I when per-channel."""
        return self.values.shape[-1] // self.scale.shape[-1]

    @property
    def symmetric(self) -> bool:
        """Whether code 0 stands for the weight 0."""
        return self.zero is None
