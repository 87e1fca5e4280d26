"""How ``llmq quantize`` chooses codes: one frozen configuration and the table of algorithms."""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from llmq.backends.base import ComputeType
from llmq.config import Frozen


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


class QuantizeOptions(Frozen):
    """How to choose codes, and from which data.

    Attributes:
        algorithm: A key of `ALGORITHMS`.
        dataset: Text to calibrate on: a file, or a hub id; None for algorithms that need none.
        num_samples: Sequences of it.
        seq_len: Tokens of each.
        seed: Chooses the sequences.
        backend, device, dtype: What the model runs on.
    """

    algorithm: str = "gptq"
    dataset: str | None = None
    num_samples: Annotated[int, Field(ge=1)] = 128
    seq_len: Annotated[int, Field(ge=2)] = 512
    seed: Annotated[int, Field(ge=0, lt=1 << 32)] = 0
    backend: str = "auto"
    device: str | None = None
    dtype: ComputeType | None = None

    @field_validator("algorithm")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in ALGORITHMS:
            raise ValueError(f"must be one of {', '.join(ALGORITHMS)}")
        return value

    @model_validator(mode="after")
    def _has_data(self) -> Self:
        if ALGORITHMS[self.algorithm].needs_data and self.dataset is None:
            free = ", ".join(name for name, row in ALGORITHMS.items() if not row.needs_data)
            raise ValueError(
                f"dataset: is missing; {self.algorithm} calibrates on text, so name some, or choose one of {free}"
            )
        return self
