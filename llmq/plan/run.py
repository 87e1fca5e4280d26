"""The whole plan: sizes, what fits, and how fast it can be."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from llmq.backends.base import KernelName, ModelOptions, Planner
from llmq.backends.registry import load_backend
from llmq.checkpoint.coverage import Action, TensorPlan
from llmq.config import Frozen, QuantizationConfig
from llmq.errors import AlreadyQuantizedError, ConfigError
from llmq.model.config import ModelConfig
from llmq.model.shards import check_tp
from llmq.plan.chips import Target
from llmq.plan.memory import BYTES_PER_LOGIT, RESERVE, Room, bytes_per_token
from llmq.plan.roofline import Roofline, cache_parts, device_bytes, last_batch_that_pays, roofline
from llmq.plan.subject import Subject, read_subject
from llmq.quant.rows import PIECE_ELEMENTS

#: Batches that decode rates are told for.
BATCHES = (1, 8, 32, 128)

#: Context planned for when none is named, where the model has as much.
DEFAULT_CONTEXT = 4096

#: What stands beside the asked-for scheme.
COMPARED = ("int8_per_channel", "int4_blockwise")

#: The interpreter with NumPy.
_BARE_BYTES = 68_000_000

#: Bytes a thread works in for every element of its piece.
_WORK_BYTES = 40


class PlanOptions(Frozen):
    """What to plan for.

    Attributes:
        targets: Chips, as `Target.parse` reads them.
        max_model_len: Positions of a sequence; None takes the model's, at most `DEFAULT_CONTEXT`.
        max_num_seqs: Sequences at once.
        tp: Devices that compute a layer together; None takes all chips of the target.
        kv_cache_dtype: As served.
        kernel: Of linears with codes, for the compiler; None takes what the chip is known to be fast with.
        compile: Ask the TPU compiler as well.
    """

    targets: tuple[str, ...] = ("v5e",)
    max_model_len: Annotated[int, Field(ge=1)] | None = None
    max_num_seqs: Annotated[int, Field(ge=1)] = 8
    tp: Annotated[int, Field(ge=1)] | None = None
    kv_cache_dtype: Literal["auto", "int8"] = "auto"
    kernel: KernelName | None = None
    compile: bool = False


@dataclass(frozen=True, slots=True)
class Variant:
    """The model in one scheme.

    Attributes:
        name: Of the scheme.
        rows: What becomes of every tensor.
        quantization: How; None for bfloat16.
    """

    name: str
    rows: Sequence[TensorPlan]
    quantization: QuantizationConfig | None = None


def make_plan(model: str, quantization: QuantizationConfig | None, options: PlanOptions) -> dict[str, Any]:
    """Work everything out, from headers only.

    Args:
        model: A path, or a hub id.
        quantization: As asked for; None takes an artifact as it is, and `COMPARED` for a checkpoint.
        options: Where it shall run.

    Returns:
        A JSON object: model, kinds (bytes before and after), schemes (bytes), conversion_bytes (peak
        host memory; None where nothing is converted), cache and targets, with ``fits`` of every scheme and, where
        it was asked for, what the compiler made of the first scheme and of bfloat16.

    Raises:
        CheckpointError: The model cannot be read.
        ConfigError: Scheme, chips, context or split do not fit the model or each other.
        BackendError: The compiler was asked for and is not installed.
    """
    targets = [Target.parse(text) for text in options.targets]
    if options.compile:
        _check_compiled(targets)
    elif options.kernel is not None:
        raise ConfigError(f"kernel={options.kernel!r}: is of what is compiled; add --compile, or leave --kernel out.")
    subject = read_subject(model)
    if subject.artifact is not None and quantization is not None:
        raise AlreadyQuantizedError(f"{model}: is an artifact of llmq already; leave --scheme and its like out.")
    variants = _variants(subject, quantization)
    main = variants[0]
    config = subject.config
    context = options.max_model_len or min(config.max_positions, DEFAULT_CONTEXT)
    if context > config.max_positions:
        raise ConfigError(
            f"max_model_len={context}: is more than the model's context of {config.max_positions}; ask for less."
        )
    kv_dtype = "int8" if options.kv_cache_dtype == "int8" else "bfloat16"
    token_bytes = bytes_per_token(config, kv_dtype)
    on_targets = [_on(target, variants, config, options, context, token_bytes) for target in targets]
    if options.compile:
        for target, row in zip(targets, on_targets, strict=True):
            row["compiled"] = _compiled(subject, variants[:2], target, options, context, row["dp"], row["tp"])
    return {
        "model": model,
        "architecture": config.architecture,
        "num_weights": sum(math.prod(row.shape) for row in main.rows if row.kind),
        "scheme": main.name,
        "kinds": _kinds(main.rows),
        "schemes": {variant.name: _num_bytes(variant.rows, config) for variant in variants},
        "conversion_bytes": None if subject.artifact is not None else _conversion_bytes(subject, main.rows),
        "cache": {"dtype": kv_dtype, "bytes_per_token": token_bytes, "context": context},
        "max_num_seqs": options.max_num_seqs,
        "targets": on_targets,
    }


def _variants(subject: Subject, quantization: QuantizationConfig | None) -> list[Variant]:
    """The asked-for one first."""
    compared = {name: QuantizationConfig(scheme=name) for name in COMPARED}
    plain = Variant("bfloat16", subject.unquantized())
    if subject.artifact is not None:
        first = [Variant("artifact", subject.artifact, subject.quantization), plain]
    elif quantization is not None:
        first = [_variant(_name(quantization), subject, quantization), plain]
        compared = {name: config for name, config in compared.items() if config != quantization}
    else:
        first = [_variant("int4_blockwise", subject, compared.pop("int4_blockwise")), plain]
    return first + [_variant(name, subject, config) for name, config in compared.items()]


def _variant(name: str, subject: Subject, quantization: QuantizationConfig) -> Variant:
    return Variant(name, subject.quantized(quantization), quantization)


def _name(quantization: QuantizationConfig) -> str:
    """The scheme's, with what was asked beyond it."""
    asked = quantization.model_dump(exclude_defaults=True, exclude={"scheme"})
    extra = [f"g{quantization.group_size}"] * ("group_size" in asked)
    extra += ["sym" if quantization.symmetric else "asym"] * (
        quantization.symmetric != QuantizationConfig(scheme=quantization.scheme).symmetric
    )
    extra += [f"inputs {quantization.activation}"] * ("activation" in asked)
    return " ".join([quantization.scheme, *extra])


def _num_bytes(rows: Sequence[TensorPlan], config: ModelConfig, tp: int = 1) -> int:
    return math.ceil(sum(device_bytes(row, config, tp) for row in rows))


def _kinds(rows: Sequence[TensorPlan]) -> dict[str, dict[str, int]]:
    kinds: dict[str, dict[str, int]] = {}
    for row in rows:
        kind = kinds.setdefault(row.kind or "dropped", {"count": 0, "before": 0, "after": 0})
        kind["count"] += 1
        kind["before"] += row.source_bytes
        kind["after"] += row.stored_bytes
    return kinds


def _conversion_bytes(subject: Subject, rows: Sequence[TensorPlan]) -> int:
    """Peak memory of `llmq convert`: a tensor being quantized between one being read and one being written."""
    kept = [row for row in rows if row.action is not Action.DROP]
    read = [math.prod(row.shape) * subject.tensors[row.name].dtype.itemsize for row in kept]
    stored = [row.stored_bytes for row in kept]
    held = (
        now + after + made + before
        for now, after, made, before in zip(read, [*read[1:], 0], stored, [0, *stored[:-1]], strict=True)
    )
    return _BARE_BYTES + max(held) + (os.cpu_count() or 1) * PIECE_ELEMENTS * _WORK_BYTES


def _on(
    target: Target,
    variants: Sequence[Variant],
    config: ModelConfig,
    options: PlanOptions,
    context: int,
    token_bytes: int,
) -> dict[str, Any]:
    tp = options.tp or target.num_chips
    if target.num_chips % tp:
        raise ConfigError(f"tp={tp}: does not divide the {target.num_chips} chips of {target}.")
    check_tp(tp, config, _groups(variants[0].rows))
    num_replicas = target.num_chips // tp
    bounds = {
        variant.name: roofline(variant.rows, config, target.chip, token_bytes, tp, num_replicas) for variant in variants
    }
    plain = bounds["bfloat16"]
    return {
        "target": str(target),
        "chip": asdict(target.chip),
        "num_chips": target.num_chips,
        "tp": tp,
        "dp": num_replicas,
        "schemes": {
            variant.name: {
                **_fit(variant, config, options, target, tp, context, token_bytes),
                **_rates(bounds[variant.name], context),
                "last_batch_that_pays": last_batch_that_pays(bounds[variant.name], plain, context / 2)
                if variant.name != "bfloat16"
                else None,
            }
            for variant in variants
        },
    }


def _check_compiled(targets: Sequence[Target]) -> None:
    for target in targets:
        if not target.chip.is_tpu:
            raise ConfigError(f"compile: {target} is no TPU; leave that target, or --compile, out.")


def _compiled(
    subject: Subject,
    variants: Sequence[Variant],
    target: Target,
    options: PlanOptions,
    context: int,
    dp: int,
    tp: int,
) -> dict[str, list[dict[str, Any]]]:
    planner = load_backend("tpu")
    assert isinstance(planner, Planner)
    opened = ModelOptions(
        dtype="bfloat16",
        num_slots=-(-options.max_num_seqs // dp) * dp,
        max_len=context,
        kv_int8=options.kv_cache_dtype == "int8",
        dp=dp,
        tp=tp,
        kernel=options.kernel,
    )
    return {
        variant.name: [
            asdict(step)
            for step in planner.compile_steps(subject.outline(variant.rows, variant.quantization), str(target), opened)
        ]
        for variant in variants
    }


def _groups(rows: Sequence[TensorPlan]) -> Mapping[str, tuple[int, int]]:
    return {
        row.name: (row.shape[-1], row.shape[-1] // row.scheme.group_size)
        for row in rows
        if row.scheme and row.scheme.group_size
    }


def _fit(
    variant: Variant,
    config: ModelConfig,
    options: PlanOptions,
    target: Target,
    tp: int,
    context: int,
    token_bytes: int,
) -> dict[str, Any]:
    """Whether a chip holds its part, and the most of it that one would."""
    weights = _num_bytes(variant.rows, config, tp)
    room = Room(
        num_bytes=int(target.chip.memory * (1 - RESERVE)) - weights,
        token_bytes=math.ceil(token_bytes / cache_parts(config, tp, shares_positions=target.chip.is_tpu)),
        sequence_bytes=config.vocab_size * BYTES_PER_LOGIT,
        max_positions=config.max_positions,
    )
    each = math.ceil(options.max_num_seqs / (target.num_chips // tp))
    needed = weights + each * (context * room.token_bytes + room.sequence_bytes)
    return {
        "weight_bytes": weights,
        "needed_bytes": needed,
        "missing_bytes": max(0, needed - int(target.chip.memory * (1 - RESERVE))),
        "fits": room.num_sequences(context) >= each,
        "largest_batch": room.num_sequences(context) * (target.num_chips // tp),
        "largest_context": room.context(each),
    }


def _rates(bound: Roofline, context: int) -> dict[str, Any]:
    return {
        "decode": {str(batch): bound.decode_rate(batch, context / 2) for batch in BATCHES},
        "prefill": bound.prefill_rate(context),
    }
