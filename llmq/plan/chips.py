"""Chips: memory, bandwidth and matrix rate, with where each figure is stated.

Rates are dense, without structured sparsity. They are what the maker states, not what was measured.
"""

import math
import re
from dataclasses import dataclass
from types import MappingProxyType

from llmq.errors import ConfigError

_GB, _GIB, _TERA = 1e9, 1 << 30, 1e12


@dataclass(frozen=True, slots=True)
class Chip:
    """One device.

    Attributes:
        name: As in ``--target``.
        memory: Bytes.
        bandwidth: Of that memory, bytes a second.
        bf16_rate: Operations a second on bfloat16 matrices; a multiplication and its addition are two.
        int8_rate: The same on int8 matrices.
        num_dims: Of a slice's shape, as in ``v5p:2x2x1``; 1 for a count, as in ``h100:8``.
        source: Where the maker says so.
    """

    name: str
    memory: float
    bandwidth: float
    bf16_rate: float
    int8_rate: float
    num_dims: int
    source: str

    @property
    def is_tpu(self) -> bool:
        """Whether the TPU compiler knows it."""
        return self.num_dims > 1


_TPU = "https://cloud.google.com/tpu/docs/"
_NVIDIA = "https://www.nvidia.com/en-us/data-center/"

CHIPS: MappingProxyType[str, Chip] = MappingProxyType(
    {
        chip.name: chip
        for chip in (
            Chip("v4", 32 * _GIB, 1228 * _GB, 275 * _TERA, 275 * _TERA, 3, _TPU + "v4"),
            Chip("v5e", 16 * _GIB, 819 * _GB, 197 * _TERA, 393 * _TERA, 2, _TPU + "v5e"),
            Chip("v5p", 95 * _GIB, 2765 * _GB, 459 * _TERA, 918 * _TERA, 3, _TPU + "v5p"),
            Chip("v6e", 32 * _GIB, 1640 * _GB, 918 * _TERA, 1836 * _TERA, 2, _TPU + "v6e"),
            Chip("l4", 24 * _GB, 300 * _GB, 121 * _TERA, 242 * _TERA, 1, _NVIDIA + "l4/"),
            Chip("l40s", 48 * _GB, 864 * _GB, 362 * _TERA, 733 * _TERA, 1, _NVIDIA + "l40s/"),
            Chip("a100", 80 * _GB, 2039 * _GB, 312 * _TERA, 624 * _TERA, 1, _NVIDIA + "a100/"),
            Chip("h100", 80 * _GB, 3350 * _GB, 989 * _TERA, 1979 * _TERA, 1, _NVIDIA + "h100/"),
            Chip("h200", 141 * _GB, 4800 * _GB, 989 * _TERA, 1979 * _TERA, 1, _NVIDIA + "h200/"),
        )
    }
)


@dataclass(frozen=True, slots=True)
class Target:
    """Chips of one kind that work together.

    Attributes:
        chip: Their kind.
        shape: Of the slice; one number for chips without a shape.
    """

    chip: Chip
    shape: tuple[int, ...]

    @property
    def num_chips(self) -> int:
        """How many."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"

    @classmethod
    def parse(cls, text: str) -> "Target":
        """Read a target from the command line.

        Args:
            text: As in ``v5e:2x4``, ``h100:8``, or a chip's name alone for one of them.

        Returns:
            The target.

        Raises:
            ConfigError: The chip is unknown, or the shape is not one of it.
        """
        name, _, shape = text.strip().lower().partition(":")
        if name not in CHIPS:
            raise ConfigError(f"target={text!r}: unknown chip {name!r}; llmq knows {', '.join(CHIPS)}.")
        chip = CHIPS[name]
        if not shape:
            return cls(chip, (1,) * chip.num_dims)
        sizes = shape.split("x")
        if len(sizes) != chip.num_dims or not all(re.fullmatch("[1-9][0-9]{0,3}", size) for size in sizes):
            example = f"{name}:{'x'.join('2' * chip.num_dims)}"
            raise ConfigError(
                f"target={text!r}: a {name} slice has {chip.num_dims} sizes, as in {example}; name the chip alone for one."
                if chip.is_tpu
                else f"target={text!r}: must be a chip and how many, as in {example}."
            )
        return cls(chip, tuple(map(int, sizes)))
