"""From a sensitivity table and a target to a scheme for every linear."""

from collections.abc import Mapping, Sequence

from llmq.config import KEEP, Override
from llmq.convert import ConversionPlan, plan_conversion
from llmq.errors import ConfigError
from llmq.model.names import Kind, is_expert
from llmq.quantize.allocate import Allocation, Choice
from llmq.quantize.options import Target
from llmq.quantize.sensitivity import Sensitivity

#: What calibration adds to the record for each linear, beside its name, for each expert and for each stage, at most.
_RECORD_BYTES = 40

#: Plans made until one is of the wanted size: each learns from the one before what names and headers take,
#: and allows twice as much for what it cannot know, from 2^-16 of the size on.
_MAX_TRIES = 10


def plan_for_target(plan: ConversionPlan, table: Sequence[Sensitivity], target: Target) -> tuple[ConversionPlan, float]:
    """Choose a scheme for each stage of each block.

    Args:
        plan: With the configuration's own schemes; linears that ``--override`` or ``--ignore`` names stay so.
        table: What the choices cost.
        target: What to meet.

    Returns:
        The plan, and the divergence to expect of it, in nats.

    Raises:
        ConfigError: No choice meets the target.
    """
    rows = _free(plan, table)
    allocation = Allocation([[Choice(c.scheme, c.num_bytes, c.kl) for c in row.candidates] for row in rows])
    if target.max_kl is not None:
        chosen = allocation.within_loss(target.max_kl)
        if chosen is None:
            raise _unmet(target, "even the finest choices differ more")
        if all(row.candidates[index].scheme == KEEP for row, index in zip(rows, chosen, strict=True)):
            raise _unmet(target, "only the unquantized model does")
        return _mixed(plan, rows, chosen)
    budget = limit = _num_bytes(plan, target)
    fixed = _fixed_bytes(plan, rows, target, table)
    for attempt in range(_MAX_TRIES):
        chosen = allocation.within_bytes(budget - fixed)
        if chosen is None:
            raise _unmet(target, "even the coarsest choices take more")
        mixed, kl = _mixed(plan, rows, chosen)
        excess = _taken(mixed, target, table) - limit
        if excess <= 0:
            return mixed, kl
        budget -= max(excess, limit >> (16 - attempt))
    raise _unmet(target, "no choice came close enough")


def expected_kl(plan: ConversionPlan, table: Sequence[Sensitivity]) -> float:
    """The divergence to expect of a plan: the sum of its stages'.

    Args:
        plan: Of one scheme.
        table: What the choices cost.

    Returns:
        Nats a token, of the candidates nearest in size.
    """
    linears = _linear_bytes(plan)
    total = 0.0
    for row in table:
        stored = sum(linears[f"{linear}.weight"] for linear in row.linears)
        total += min(row.candidates, key=lambda c: abs(c.num_bytes - stored)).kl
    return total


def _free(plan: ConversionPlan, table: Sequence[Sensitivity]) -> list[Sensitivity]:
    """Stages of which the user has named no linear."""
    plain = plan.config.model_copy(update={"overrides": (), "ignore": ()})
    unnamed = {row.name: row for row in plan_conversion(plan.model, plain).coverage}
    named = {row.name.removesuffix(".weight") for row in plan.coverage if row != unnamed[row.name]}
    return [row for row in table if not named.intersection(row.linears)]


def _mixed(plan: ConversionPlan, rows: Sequence[Sensitivity], chosen: Sequence[int]) -> tuple[ConversionPlan, float]:
    picked = [row.candidates[index] for row, index in zip(rows, chosen, strict=True)]
    overrides = tuple(
        Override(pattern=linear, scheme=candidate.scheme, group_size=candidate.group_size)
        for row, candidate in zip(rows, picked, strict=True)
        for linear in row.patterns
    )
    config = plan.config.model_copy(update={"overrides": (*overrides, *plan.config.overrides)})
    return plan_conversion(plan.model, config), sum(candidate.kl for candidate in picked)


def _linear_bytes(plan: ConversionPlan) -> Mapping[str, int]:
    return {row.name: row.stored_bytes for row in plan.coverage if row.kind is Kind.LINEAR}


def _num_bytes(plan: ConversionPlan, target: Target) -> int:
    """Bytes the target allows: of the directory, or of the linears."""
    if target.size is not None:
        return target.size
    assert target.bits is not None
    weights = sum(row.shape[0] * row.shape[1] for row in plan.coverage if row.kind is Kind.LINEAR)
    return int(target.bits * weights / 8)


def _taken(plan: ConversionPlan, target: Target, table: Sequence[Sensitivity]) -> int:
    linears = _linear_bytes(plan)
    if target.size is None:
        return sum(linears.values())
    experts = {name.removesuffix(".weight").rpartition(".")[0] for name in linears if is_expert(name)}
    noted = (*linears, *experts, *(row.name for row in table))
    return plan.artifact_bytes + sum(len(name) + _RECORD_BYTES for name in noted)


def _fixed_bytes(
    plan: ConversionPlan, rows: Sequence[Sensitivity], target: Target, table: Sequence[Sensitivity]
) -> int:
    """Bytes that no choice changes."""
    linears = _linear_bytes(plan)
    return _taken(plan, target, table) - sum(linears[f"{linear}.weight"] for row in rows for linear in row.linears)


def _unmet(target: Target, why: str) -> ConfigError:
    return ConfigError(f"{target}: cannot be met, {why}; name a higher target or free more linears.")
