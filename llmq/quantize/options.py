"""How ``llmq quantize`` chooses codes: one frozen configuration and the table of algorithms."""

import re
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from llmq.backends.base import TrainingType
from llmq.config import Frozen, validated
from llmq.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Algorithm:
    """How codes are chosen.

    Attributes:
        grid: Where scale and zero come from: ``nearest``, ``mse`` or ``hqq``, see `llmq.quant.search`.
        fold: Move scales of features into what comes before, see `llmq.quant.awq`.
        feedback: Choose codes for the output's error, see `llmq.quant.gptq`.
        about: What it is, for people to read.
    """

    grid: str
    fold: bool = False
    feedback: bool = False
    about: str = ""

    @property
    def needs_data(self) -> bool:
        """Whether it looks at activations."""
        return self.fold or self.feedback


ALGORITHMS: MappingProxyType[str, Algorithm] = MappingProxyType(
    {
        "rtn": Algorithm("nearest", about="round to nearest, as convert does"),
        "mse": Algorithm("mse", about="scale and zero of each group by search"),
        "hqq": Algorithm("hqq", about="half-quadratic: few large errors rather than many small ones"),
        "awq": Algorithm("mse", fold=True, about="features with large activations get a finer grid"),
        "gptq": Algorithm("mse", feedback=True, about="second-order: weights make up for each other's errors"),
        "awq+gptq": Algorithm("mse", fold=True, feedback=True, about="both"),
    }
)


class Target(Frozen):
    """What a mixed-precision artifact must meet; one of three.

    Attributes:
        bits: Average bits of a linear's weight, scales and zeros included.
        size: Bytes of the artifact's directory.
        max_kl: Divergence of its predictions from the source's, in nats a token, on held-out text.
    """

    bits: Annotated[float, Field(gt=0)] | None = None
    size: Annotated[int, Field(gt=0)] | None = None
    max_kl: Annotated[float, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        named = [value for value in (self.bits, self.size, self.max_kl) if value is not None]
        if len(named) > 1:
            raise ValueError("target: must be one of --target-bits, --target-size and --max-kl")
        return self

    def __bool__(self) -> bool:
        return any(value is not None for value in (self.bits, self.size, self.max_kl))

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.model_dump(exclude_none=True).items())

    @classmethod
    def parse(cls, bits: float | None, size: str | None, max_kl: float | None) -> Self:
        """Read a target from the command line.

        Args:
            bits: See `bits`.
            size: As in ``90MB`` or ``1.5GiB``; a plain number is bytes.
            max_kl: See `max_kl`.

        Returns:
            The target.

        Raises:
            ConfigError: A value breaks a rule.
        """
        return validated(cls, bits=bits, size=None if size is None else _parse_size(size), max_kl=max_kl)


_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{infix}b": base**power
    for infix, base in (("", 1000), ("i", 1024))
    for power, prefix in enumerate("kmgt", 1)
}


def _parse_size(text: str) -> int:
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise ConfigError(f"target_size={text!r}: must be a size like 90MB or 1.5GiB.")
    return int(float(match[1]) * _UNITS[match[2]])


class QuantizeOptions(Frozen):
    """How to choose codes, and from which data.

    Attributes:
        algorithm: A key of `ALGORITHMS`.
        dataset: Text to calibrate on: a file, or a hub id; None for algorithms that need none.
        num_samples: Sequences of it.
        seq_len: Tokens of each.
        seed: Chooses the sequences.
        backend, device, dtype: What the model runs on.
        target: What mixed precision must meet; empty for one scheme.
        sensitivity: File for what each scheme costs each linear; a target measures it without one too.
    """

    algorithm: str = "gptq"
    dataset: str | None = None
    num_samples: Annotated[int, Field(ge=1)] = 128
    seq_len: Annotated[int, Field(ge=2)] = 512
    seed: Annotated[int, Field(ge=0, lt=1 << 32)] = 0
    backend: str = "auto"
    device: str | None = None
    dtype: TrainingType | None = None
    target: Target = Target()
    sensitivity: Path | None = None

    @property
    def num_tokens(self) -> int:
        """Of all sequences."""
        return self.num_samples * self.seq_len

    @property
    def holds_out(self) -> bool:
        """Whether a part of the dataset is set aside to measure on."""
        return bool(self.target) or self.sensitivity is not None

    @field_validator("algorithm")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in ALGORITHMS:
            raise ValueError(f"must be one of {', '.join(ALGORITHMS)}")
        return value

    @model_validator(mode="after")
    def _has_data(self) -> Self:
        if self.dataset is None and self.holds_out:
            raise ValueError("dataset: is missing; what a scheme costs is measured on text, so name some")
        if self.dataset is None and ALGORITHMS[self.algorithm].needs_data:
            free = ", ".join(name for name, row in ALGORITHMS.items() if not row.needs_data)
            raise ValueError(
                f"dataset: is missing; {self.algorithm} calibrates on text, so name some, or choose one of {free}"
            )
        return self


def choose_algorithm(named: str | None, *, is_trained: bool) -> str:
    """The algorithm to quantize with.

    Args:
        named: By the user, if any.
        is_trained: Whether the checkpoint was trained for its grid.

    Returns:
        A key of `ALGORITHMS`, or what is none; a trained grid is reached by rounding to nearest, and by nothing else.

    Raises:
        ConfigError: What the user named contradicts the training.
    """
    if is_trained and named not in (None, "rtn"):
        raise ConfigError(
            f"algorithm={named!r}: the checkpoint was trained for the nearest codes; leave it out or choose rtn."
        )
    return named or ("rtn" if is_trained else "gptq")
