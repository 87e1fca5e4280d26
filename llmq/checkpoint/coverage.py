"""What happens to every tensor, and why: decided from headers, before any work.

No tensor is passed over in silence. Each gets a row that says whether it is quantized, kept or
dropped, on which grid, for which reason and into how many bytes; the artifact carries the rows.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase

from llmq.checkpoint import layout
from llmq.checkpoint.reader import TensorInfo
from llmq.config import AUTO_GROUP_SIZES, KEEP, SCHEMES, Granularity, QuantizationConfig, Scheme
from llmq.errors import ConfigError, CoverageError
from llmq.model.config import ModelConfig
from llmq.model.names import LM_HEAD, Kind, check_tensors, droppable, expected_tensors, module_name


class Action(StrEnum):
    """What becomes of a tensor."""

    QUANTIZE = "quantize"
    KEEP = "keep"
    DROP = "drop"


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One row of the coverage.

    Attributes:
        name: Of the tensor in the source.
        kind: What it is; None for a tensor that is dropped.
        shape: Sizes.
        action: What becomes of it.
        source_bytes: Bytes it takes in the source.
        scheme: Its grid, group size settled, when it is quantized.
        reason: Why, unless it is simply quantized as configured.
        deviates: The configuration asked for something else; ``--strict`` refuses it.
        stored: Stored name -> dtype and shape, in file order.
    """

    name: str
    kind: Kind | None
    shape: tuple[int, ...]
    action: Action
    source_bytes: int
    scheme: Scheme | None = None
    reason: str = ""
    deviates: bool = False
    stored: Mapping[str, layout.Entry] = field(default_factory=dict)

    @property
    def stored_bytes(self) -> int:
        """Bytes it takes in the artifact."""
        return sum(layout.entry_bytes(entry) for entry in self.stored.values())


@dataclass(frozen=True, slots=True)
class _Choice:
    """A scheme, or the reason there is none."""

    scheme: Scheme | None
    reason: str = ""
    deviates: bool = False


def plan_coverage(
    tensors: Mapping[str, TensorInfo], model: ModelConfig, config: QuantizationConfig
) -> list[TensorPlan]:
    """Decide over every tensor of a checkpoint.

    Args:
        tensors: What it stores.
        model: Its description.
        config: What was asked for.

    Returns:
        One row per stored tensor, in the order of computation, dropped ones last.

    Raises:
        CheckpointError: Tensors are missing, unknown or of a wrong shape.
        ConfigError: A pattern matches no module, the group size does not divide a layer, or no
            linear is left to quantize.
    """
    check_tensors({name: info.shape for name, info in tensors.items()}, model)
    expected = expected_tensors(model)
    matrices = [name for name, row in expected.items() if row.kind in _QUANTIZABLE]
    chosen = _choose_names([module_name(name) for name in matrices], model, config)
    _check_group_size({name: expected[name].shape[-1] for name in matrices}, chosen, config)

    rows = []
    for name, row in expected.items():
        info = tensors[name]
        if row.kind in _QUANTIZABLE:
            choice = _choose(chosen[module_name(name)], info.shape[-1], config)
        else:
            choice = _Choice(None, _NEVER[row.kind])
        scheme = choice.scheme
        rows.append(
            TensorPlan(
                name=name,
                kind=row.kind,
                shape=info.shape,
                action=Action.QUANTIZE if scheme else Action.KEEP,
                source_bytes=info.num_bytes,
                scheme=scheme,
                reason=choice.reason,
                deviates=choice.deviates,
                stored=layout.entries(name, info.shape, scheme) if scheme else {name: (info.dtype, info.shape)},
            )
        )
    if not any(row.scheme for row in rows if row.kind is Kind.LINEAR):
        raise ConfigError("ignore, override and scheme: leave no linear to quantize; give them narrower patterns.")
    for name, info in tensors.items():
        if name not in expected:
            reason = droppable(name, model) or ""
            rows.append(TensorPlan(name, None, info.shape, Action.DROP, info.num_bytes, reason=reason))
    return rows


_QUANTIZABLE = (Kind.LINEAR, Kind.EMBEDDING, Kind.LM_HEAD)

_NEVER = {
    Kind.NORM: "norms are never quantized",
    Kind.BIAS: "biases are never quantized",
    Kind.ROUTER: "routers are never quantized",
}


@dataclass(frozen=True, slots=True)
class _Rule:
    """A scheme's name, or ``none``; the option that chose it, and a group size of its own."""

    scheme: str
    option: str
    group_size: int | None = None


_Chosen = Mapping[str, _Rule]


def _choose_names(modules: Sequence[str], model: ModelConfig, config: QuantizationConfig) -> _Chosen:
    defaults = {"model.embed_tokens": _Rule(config.embedding, "embedding"), "lm_head": _Rule(config.lm_head, "lm_head")}
    chosen = {module: defaults.get(module, _Rule(config.scheme, "scheme")) for module in modules}
    rules = [(o.pattern, _Rule(o.scheme, "override", o.group_size)) for o in config.overrides]
    rules += [(pattern, _Rule(KEEP, "ignore")) for pattern in config.ignore]
    for pattern, rule in rules:
        option = rule.option
        matches = _matcher(option, pattern)
        matched = [module for module in modules if matches(module)]
        if not matched:
            tied = model.tie_embeddings and matches(module_name(LM_HEAD))
            hint = (
                "the head is tied to the embedding, so use --embedding none"
                if tied
                else f"module names read like {modules[1]}"
            )
            raise ConfigError(f"{option}={pattern!r}: matches no linear, embedding or head; {hint}.")
        chosen.update(dict.fromkeys(matched, rule))
    return chosen


def _matcher(option: str, pattern: str) -> Callable[[str], bool]:
    if not pattern.startswith("re:"):
        return lambda module: fnmatchcase(module, pattern)
    try:
        compiled = re.compile(pattern.removeprefix("re:"))
    except re.error as err:
        raise ConfigError(f"{option}={pattern!r}: is not a valid regular expression ({err}).") from err
    return lambda module: compiled.fullmatch(module) is not None


def _check_group_size(features: Mapping[str, int], chosen: _Chosen, config: QuantizationConfig) -> None:
    """An explicit group size must divide every layer it applies to, unless fallback is allowed."""
    if config.groupsize_fallback:
        return
    for size in sorted({size for rule in chosen.values() if (size := rule.group_size or config.group_size)}):
        _check_size(size, features, chosen, config)


def _check_size(size: int, features: Mapping[str, int], chosen: _Chosen, config: QuantizationConfig) -> None:
    grouped = {
        module_name(name): num_features
        for name, num_features in features.items()
        if _is_blockwise(rule := chosen[module_name(name)]) and size == (rule.group_size or config.group_size)
    }
    refused = {module: num_features for module, num_features in grouped.items() if num_features % size}
    if not refused:
        return
    layers = collapse(refused)
    listed = ", ".join(f"{name} ({count} with {refused[first]} inputs)" for name, (count, first) in layers.items())
    fitting = [str(g) for g in (256, *AUTO_GROUP_SIZES, 16) if not any(n % g for n in grouped.values())]
    others = f"use --groupsize {' or '.join(fitting)}, " if fitting else ""
    raise ConfigError(
        f"group_size={size}: does not divide the input features of {len(refused)} of {len(grouped)} matrices: {listed}; "
        f"{others}leave --groupsize out to choose per layer, or add --groupsize-fallback."
    )


def _is_blockwise(rule: _Rule) -> bool:
    return rule.scheme != KEEP and SCHEMES[rule.scheme].granularity is Granularity.BLOCKWISE


def collapse(names: Iterable[str]) -> dict[str, tuple[int, str]]:
    """Names with their layer numbers as ``*``, for people to read.

    Args:
        names: Of tensors or modules.

    Returns:
        Collapsed name -> how many, and the first of them.
    """
    rows: dict[str, tuple[int, str]] = {}
    for name in names:
        key = re.sub(r"\.\d+\.", ".*.", name)
        count, first = rows.get(key, (0, name))
        rows[key] = (count + 1, first)
    return rows


def _choose(rule: _Rule, num_features: int, config: QuantizationConfig) -> _Choice:
    if rule.scheme == KEEP:
        return _Choice(None, f"--{rule.option.replace('_', '-')} keeps it")
    scheme = config.row(rule.scheme)
    if scheme.num_bits == 4 and num_features % 2:
        return _Choice(None, f"{num_features} input features: int4 codes are packed in pairs", deviates=True)
    if scheme.granularity is Granularity.PER_CHANNEL:
        return _Choice(scheme)
    return _choose_group(scheme, num_features, rule.group_size or config.group_size)


def _choose_group(scheme: Scheme, num_features: int, asked: int | None) -> _Choice:
    if asked and num_features % asked == 0:
        return _Choice(scheme.model_copy(update={"group_size": asked}))
    size = next((g for g in AUTO_GROUP_SIZES if num_features % g == 0), None)
    if size is None:
        return _Choice(
            None, f"none of the groups {', '.join(map(str, AUTO_GROUP_SIZES))} divides {num_features}", deviates=True
        )
    reason = f"group {asked} does not divide {num_features}" if asked else ""
    return _Choice(scheme.model_copy(update={"group_size": size}), reason, deviates=bool(asked))


def check_strict(rows: Sequence[TensorPlan]) -> None:
    """Refuse a plan with a tensor that would not be quantized as asked.

    Args:
        rows: The plan.

    Raises:
        CoverageError: There is one.
    """
    deviating = {row.name: row.reason for row in rows if row.deviates}
    if deviating:
        listed = "; ".join(
            f"{name} ({count}): {deviating[first]}" for name, (count, first) in collapse(deviating).items()
        )
        raise CoverageError(f"strict: {len(deviating)} tensors would not be quantized as asked: {listed}.")
