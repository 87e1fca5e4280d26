"""What a run will do, decided from model, data and recipe before anything is trained."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llmq.backends.base import Adapters, TrainBatch, TrainOptions
from llmq.backends.registry import select_backend
from llmq.checkpoint.coverage import TensorPlan, plan_coverage
from llmq.checkpoint.layout import rounds_inputs
from llmq.checkpoint.loader import ModelWeights, load_weights
from llmq.config import Scheme
from llmq.errors import AlreadyQuantizedError, ConfigError
from llmq.model.names import Kind, module_name
from llmq.model.tokenizer import Tokenizer
from llmq.qat.data import Examples, read_examples
from llmq.qat.packing import Piece, Row, Steps, cut, in_batches, pack
from llmq.qat.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything a run needs, checked before anything is trained.

    Attributes:
        recipe: What is asked for.
        weights: The model.
        coverage: What is quantized, and how; one row a tensor.
        steps: Batches of every step.
        num_steps: Of the run.
        held_out: Rows to measure on.
        num_skipped: Malformed rows of the data that were left out.
        num_tokens: Learned tokens of one pass.
    """

    recipe: Recipe
    weights: ModelWeights
    coverage: Sequence[TensorPlan]
    steps: Steps
    num_steps: int
    held_out: list[TrainBatch]
    num_skipped: int
    num_tokens: int

    @property
    def schemes(self) -> dict[str, Scheme]:
        """Weight name -> its grid."""
        return {row.name: row.scheme for row in self.coverage if row.scheme}

    @property
    def rounded_inputs(self) -> frozenset[str]:
        """Names of the weights whose linears take their inputs in int8, as they will in the artifact."""
        asked = self.recipe.quantization
        return frozenset(row.name for row in self.coverage if rounds_inputs(row.name, row.stored, asked))

    @property
    def facts(self) -> dict[str, Any]:
        """What must be the same for a run to be resumed."""
        facts = self.recipe.model_dump(mode="json", exclude={"keep", "save_every", "eval_every", "mesh", "compile"})
        sizes = {name: path.stat().st_size for name, path in self.weights.reader.files.items()}
        return {**facts, "num_steps": self.num_steps, "files": sizes, "tokens": _hash(self.steps[0])}


def plan_run(recipe: Recipe) -> Plan:
    """Read model and data, and decide everything.

    Args:
        recipe: What is asked for.

    Returns:
        The plan.

    Raises:
        LlmqError: The model, the data or the recipe cannot be used, or do not fit each other.
    """
    select_backend(recipe.backend, recipe.device, recipe.runtime)  # refuses what is not here
    weights = load_weights(recipe.model)
    if weights.quantization is not None:
        raise AlreadyQuantizedError(f"{recipe.model}: is an artifact; training needs the checkpoint it was made from.")
    if recipe.seq_len > weights.config.max_positions:
        raise ConfigError(
            f"seq_len={recipe.seq_len}: must be at most the model's context, {weights.config.max_positions}."
        )
    coverage = plan_coverage(weights.reader.tensors, weights.config, recipe.quantization)
    tokenizer = Tokenizer.from_files(weights.reader.side_files(), weights.config)
    examples = read_examples(recipe.data, tokenizer, skip_bad_rows=recipe.skip_bad_rows)
    pieces, held_out = _split(recipe, tokenizer, examples)
    steps = Steps(
        _rows(recipe, pieces),
        recipe.seq_len,
        packed=recipe.packed,
        batch_size=recipe.batch_size,
        grad_accum=recipe.grad_accum,
        seed=recipe.seed,
    )
    rows = _rows(recipe, held_out)[: recipe.max_eval_rows]
    return Plan(
        recipe=recipe,
        weights=weights,
        coverage=coverage,
        steps=steps,
        num_steps=recipe.max_steps or recipe.epochs * steps.per_epoch,
        held_out=in_batches(rows, recipe.seq_len, recipe.batch_size, packed=recipe.packed),
        num_skipped=examples.num_skipped,
        num_tokens=sum(int(piece.learned.sum()) for piece in pieces),
    )


def _split(recipe: Recipe, tokenizer: Tokenizer, examples: Examples) -> tuple[list[Piece], list[Piece]]:
    """Pieces to learn from, and others to measure on."""
    pieces = cut(examples.examples, recipe.seq_len)
    if recipe.eval_data is not None:
        other = read_examples(recipe.eval_data, tokenizer, skip_bad_rows=recipe.skip_bad_rows)
        return pieces, cut(other.examples, recipe.seq_len)
    num_held_out = max(1, round(recipe.eval_fraction * len(pieces)))
    if num_held_out >= len(pieces):
        raise ConfigError(
            f"data: makes {len(pieces)} pieces of {recipe.seq_len} tokens, too few to hold some out; give more data, "
            "a smaller --seq-len, or --eval-data."
        )
    return pieces[:-num_held_out], pieces[-num_held_out:]


def _rows(recipe: Recipe, pieces: Sequence[Piece]) -> list[Row]:
    return pack(pieces, recipe.seq_len) if recipe.packed else [[piece] for piece in pieces]


def train_options(plan: Plan, device: str | None) -> TrainOptions:
    """How a backend is to train.

    Args:
        plan: The run.
        device: Of the backend.

    Returns:
        Its options.

    Raises:
        LlmqError: An adapter's target matches no linear, or the teacher does not fit.
    """
    recipe = plan.recipe
    return TrainOptions(
        device=device,
        runtime=recipe.runtime,
        mesh=(recipe.mesh.dp, recipe.mesh.fsdp) if recipe.mesh else None,
        dtype=recipe.dtype,
        max_len=recipe.seq_len,
        schemes=plan.schemes,
        rounded_inputs=plan.rounded_inputs,
        adapters=_adapters(plan),
        optimizer=recipe.optimizer,
        betas=(recipe.beta1, recipe.beta2),
        weight_decay=recipe.weight_decay,
        clip=recipe.clip,
        recompute=recipe.activation_checkpointing,
        compile=recipe.compile,
        **_lessons(plan),
    )


def _lessons(plan: Plan) -> dict[str, Any]:
    wanted = plan.recipe.distillation
    if wanted is None:
        return {}
    teacher = plan.weights if wanted.teacher == plan.recipe.model else load_weights(wanted.teacher)
    if teacher.quantization is not None:
        raise AlreadyQuantizedError(f"{wanted.teacher}: is an artifact; a teacher is an unquantized checkpoint.")
    sizes = teacher.config.vocab_size, plan.weights.config.vocab_size
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"distillation.teacher={wanted.teacher!r}: has a vocabulary of {sizes[0]}, the model one of {sizes[1]}; "
            "give a model of the same family."
        )
    if plan.recipe.seq_len > teacher.config.max_positions:
        raise ConfigError(
            f"seq_len={plan.recipe.seq_len}: must be at most the teacher's context, {teacher.config.max_positions}."
        )
    return {
        "teacher": teacher,
        "teacher_device": wanted.device,
        "kd_weight": wanted.weight,
        "kd_temperature": wanted.temperature,
    }


def _adapters(plan: Plan) -> Adapters | None:
    lora = plan.recipe.lora
    if lora is None:
        return None
    linears = [row.name for row in plan.coverage if row.kind is Kind.LINEAR]
    for target in lora.targets:
        if not any(module_name(name).endswith(f".{target}") for name in linears):
            raise ConfigError(f"lora.targets={target!r}: matches no linear; names end like {module_name(linears[0])}.")
    chosen = frozenset(name for name in linears if module_name(name).rsplit(".", 1)[1] in lora.targets)
    return Adapters(lora.rank, lora.alpha, chosen, plan.recipe.seed)


def _hash(batches: Sequence[TrainBatch]) -> str:
    digest = hashlib.sha256()
    for batch in batches:
        digest.update(batch.tokens.tobytes())
    return digest.hexdigest()
