"""A recipe: everything that decides what ``llmq qat`` trains, in one file or on the command line."""

import math
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import Field, FiniteFloat, model_validator

from llmq.backends.base import OptimizerName, RuntimeName, TeacherDevice, TrainingType
from llmq.config import Frozen, QuantizationConfig, validated
from llmq.errors import ConfigError

#: Linears that get an adapter unless others are named.
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

_Count = Annotated[int, Field(gt=0)]
_Share = Annotated[float, Field(ge=0, lt=1)]


class Lora(Frozen):
    """Train low-rank adapters only; they are merged in the end.

    Attributes:
        rank: Of each adapter.
        alpha: The adapter is weighed by alpha / rank.
        targets: Endings of the names of linears that get one.
    """

    rank: _Count
    alpha: Annotated[FiniteFloat, Field(gt=0)] = 16.0
    targets: tuple[str, ...] = LORA_TARGETS


class Distillation(Frozen):
    """Learn from the predictions of an unquantized model as well.

    Attributes:
        teacher: A directory, a ``.gguf`` file or a hub id, of the same vocabulary.
        weight: Of the divergence from the teacher in the loss; the data's loss has the rest.
        temperature: Divides the logits of both.
        device: ``cpu`` keeps the teacher's weights off the device; None holds them there.
    """

    teacher: str
    weight: Annotated[float, Field(gt=0, le=1)] = 0.5
    temperature: Annotated[FiniteFloat, Field(gt=0)] = 1.0
    device: TeacherDevice | None = None


class Mesh(Frozen):
    """How the devices that train together are laid out; the product is their number.

    Attributes:
        dp: Copies of the weights.
        fsdp: Devices that share one copy, each holding a part of every weight.
    """

    dp: _Count = 1
    fsdp: _Count = 1

    @model_validator(mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        """From the command line it comes as ``dp=2,fsdp=4``."""
        if not isinstance(value, str):
            return value
        axes = {axis: size for axis, _, size in (part.partition("=") for part in value.split(","))}
        if not all(size.isdecimal() for size in axes.values()) or not axes.keys() <= cls.model_fields.keys():
            raise ValueError("must name the axes dp and fsdp, as in dp=2,fsdp=4")
        return {axis: int(size) for axis, size in axes.items()}


class Recipe(Frozen):
    """What is trained, on what, and how.

    Attributes:
        model: A directory, a ``.gguf`` file or a hub id.
        data: A file (text, or JSON lines) or a hub id, see `llmq.qat.data`.
        quantization: The grids to train for, of weights and, with `activation`, of what linears read.
        fake_quant_after_n_steps: Steps without fake quantization, before it sets in.
        lora: Train adapters only; None trains every weight.
        distillation: A teacher; None learns from the data alone.
        epochs: Passes over the data.
        max_steps: Stop after so many steps; None stops after `epochs`.
        batch_size: Rows computed together.
        grad_accum: Batches of a step.
        lr: Peak learning rate.
        schedule: How it falls after the warm-up: to 0 in a straight line, in half a cosine, or not at all.
        warmup: Steps over which it rises from 0.
        optimizer: AdamW with float32 moments, or with such of 8 bits (backend gpu, with torchao).
        weight_decay: Of AdamW, on matrices.
        beta1, beta2: Of AdamW.
        clip: Largest norm of the gradient; None leaves it.
        seq_len: Tokens of a row.
        packed: Fill rows with several documents, which do not see each other.
        skip_bad_rows: Leave malformed rows out and count them, rather than refuse the data.
        eval_data: A file or hub id to measure on; None sets a part of `data` aside.
        eval_fraction: That part, from the end of `data`.
        max_eval_rows: Rows that are measured, at most.
        eval_every: Steps between measurements; None measures before the first and after the last step.
        baseline: Train without fake quantization first, to see what it gains.
        seed: Of the order of rows, and of adapters.
        dtype: Compute type; None takes what the device is good at. Master weights are float32.
        activation_checkpointing: Recompute activations in the backward pass rather than keep them.
        compile: Compile fake quantization (torch on a CPU); the bits are the same.
        save_every: Steps between checkpoints; None keeps none.
        keep: Checkpoints that are kept while the run lasts, the newest ones.
        mesh: Layout of the devices that train together; None shares one copy of the weights among all.
        backend: As in ``--backend``.
        device: A device of that backend.
        runtime: What the backend computes with; None takes its own framework, JAX or torch.
    """

    model: str
    data: str
    quantization: QuantizationConfig
    fake_quant_after_n_steps: Annotated[int, Field(ge=0)] = 0
    lora: Lora | None = None
    distillation: Distillation | None = None
    epochs: _Count = 1
    max_steps: _Count | None = None
    batch_size: _Count = 2
    grad_accum: _Count = 1
    lr: Annotated[FiniteFloat, Field(ge=0)] = 2e-5
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    warmup: Annotated[int, Field(ge=0)] = 0
    optimizer: OptimizerName = "adamw"
    weight_decay: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    beta1: _Share = 0.9
    beta2: _Share = 0.99
    clip: Annotated[FiniteFloat, Field(gt=0)] | None = 1.0
    seq_len: Annotated[int, Field(ge=2)] = 512
    packed: bool = True
    skip_bad_rows: bool = False
    eval_data: str | None = None
    eval_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.05
    max_eval_rows: _Count = 32
    eval_every: _Count | None = None
    baseline: bool = False
    seed: Annotated[int, Field(ge=0)] = 0
    dtype: TrainingType | None = None
    activation_checkpointing: bool = False
    compile: bool = False
    save_every: _Count | None = None
    keep: _Count = 1
    mesh: Mesh | None = None
    backend: str = "auto"
    device: str | None = None
    runtime: RuntimeName | None = None

    @model_validator(mode="after")
    def _rises_before_it_falls(self) -> Self:
        if self.max_steps is not None and self.warmup >= self.max_steps:
            raise ValueError(f"warmup={self.warmup}: must be less than the {self.max_steps} steps")
        return self

    def learning_rate(self, step: int, num_steps: int) -> float:
        """Of a step.

        Args:
            step: From 0.
            num_steps: Of the whole run.

        Returns:
            The rate.
        """
        rising = min(1.0, (step + 1) / max(1, self.warmup))
        left = 1.0 - step / num_steps
        return (
            self.lr
            * rising
            * {"linear": left, "cosine": 0.5 - 0.5 * math.cos(math.pi * left), "constant": 1.0}[self.schedule]
        )

    def is_quantized(self, step: int) -> bool:
        """Whether a step sees weights on their grids. It depends on nothing else, so any resume is right."""
        return step >= self.fake_quant_after_n_steps


def read_recipe(path: Path | None, **given: Any) -> Recipe:
    """A recipe from a file, with values given elsewhere on top.

    Args:
        path: YAML or JSON; None begins with defaults.
        **given: Fields; those of ``quantization``, ``lora`` and ``distillation`` may be given in part.

    Returns:
        The recipe.

    Raises:
        ConfigError: The file cannot be read, or a field breaks a rule.
    """
    values: dict[str, Any] = {"quantization": {"scheme": "int4_blockwise"}, **(_read(path) if path else {})}
    for field, value in given.items():
        before = values.get(field)
        values[field] = {**before, **value} if isinstance(before, dict) and isinstance(value, dict) else value
    return validated(Recipe, **values)


def write_recipe(recipe: Recipe) -> str:
    """A recipe as the YAML that `read_recipe` takes.

    Args:
        recipe: With every default written out.

    Returns:
        The text.
    """
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False)


def _read(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_bytes())
    except OSError as err:
        raise ConfigError(f"config={path}: cannot be read ({err.strerror or err}).") from err
    except yaml.YAMLError as err:
        raise ConfigError(f"config={path}: is not valid YAML ({str(err).splitlines()[0]}).") from err
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"config={path}: must hold the fields of a recipe; see llmq qat --print-config.")
    return values
