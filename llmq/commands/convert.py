"""``llmq convert``: a checkpoint to an artifact, without data."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from llmq.commands import options
from llmq.config import QuantizationConfig

if TYPE_CHECKING:
    from llmq.checkpoint.record import Record
    from llmq.convert import ConversionPlan


def convert(
    ctx: typer.Context,
    model: options.Model,
    output: options.Output = None,
    scheme: options.SchemeName = "int4_blockwise",
    groupsize: options.GroupSize = None,
    groupsize_fallback: options.GroupSizeFallback = False,
    sym: options.Symmetric = None,
    embedding: options.EmbeddingScheme = QuantizationConfig.model_fields["embedding"].default,
    lm_head: options.HeadScheme = QuantizationConfig.model_fields["lm_head"].default,
    ignore: options.Ignore = None,
    override: options.Overrides = None,
    activation: options.Activation = QuantizationConfig.model_fields["activation"].default,
    dry_run: options.DryRun = False,
    strict: options.Strict = False,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Quantize a checkpoint by rounding, without data, and write an artifact."""
    from llmq.checkpoint.reader import open_checkpoint
    from llmq.checkpoint.trained import check_trained, trained_config
    from llmq.checkpoint.writer import check_target
    from llmq.commands.terminal import byte_progress
    from llmq.convert import convert, plan_conversion

    trained = trained_config(open_checkpoint(model).config)
    given = options.named_fields(ctx)
    config = check_trained(trained, given if trained else {"scheme": scheme, **given})
    plan = plan_conversion(model, config, strict=strict)
    target = output or Path(f"{Path(model).resolve().stem}-{config.scheme}")
    if dry_run:
        print_plan(plan, target, as_json=as_json)
        return
    check_target(target, plan.reader.path, force=force)
    with byte_progress("converting") as progress:
        done = convert(plan, target, force=force, command=["llmq", *sys.argv[1:]], progress=progress)
    print_written(plan, done, target, as_json=as_json)


def print_plan(plan: "ConversionPlan", target: Path, *, as_json: bool) -> None:
    """Tell what would be written.

    Args:
        plan: What would become of every tensor.
        target: Where.
        as_json: For programs too.
    """
    from llmq.commands.terminal import human_bytes, print_json, say
    from llmq.convert import coverage_row

    rows, size = [coverage_row(row).model_dump(mode="json") for row in plan.coverage], plan.artifact_bytes
    print_coverage(rows)
    say(f"{summary(rows)}; would write {human_bytes(size)} ({size:,} bytes) to {target}")
    if as_json:
        print_json({"dry_run": True, "output": str(target), "artifact_bytes": size, "coverage": rows})


def print_written(plan: "ConversionPlan", done: "Record", target: Path, *, as_json: bool) -> None:
    """Tell what was written.

    Args:
        plan: Of the source.
        done: The artifact's record.
        target: The artifact.
        as_json: For programs too.
    """
    from llmq.commands.terminal import human_bytes, print_json, say

    record = done.model_dump(mode="json")
    written = sum(file.stat().st_size for file in target.iterdir())
    print_coverage(record["coverage"])
    say(
        f"{summary(record['coverage'])}; {human_bytes(plan.source_bytes)} -> {human_bytes(written)} ({written:,} bytes) in {target}"
    )
    if as_json:
        print_json({"output": str(target), "artifact_bytes": written, **record})


def summary(coverage: Sequence[Mapping[str, Any]]) -> str:
    """How much of each quantizable kind is quantized, in a line.

    Args:
        coverage: Rows of ``llmq.json``.

    Returns:
        As in ``210 of 210 linears, 1 of 1 embeddings quantized``.
    """
    names = {"linear": "linears", "embedding": "embeddings", "lm_head": "heads"}
    counts = []
    for kind, plural in names.items():
        actions = [row["action"] for row in coverage if row["kind"] == kind]
        if actions:
            counts.append(f"{actions.count('quantize')} of {len(actions)} {plural}")
    return ", ".join(counts) + " quantized"


def print_coverage(coverage: Sequence[Mapping[str, Any]]) -> None:
    """The coverage as a table; layers that fared alike share a line.

    Args:
        coverage: Rows of ``llmq.json``, which has every tensor by itself.
    """
    from llmq.commands.terminal import human_bytes, print_table

    columns = ("tensor", "count", "becomes", "before", "after", "SQNR dB", "why")
    rows = []
    for (name, becomes, why), members in _alike(coverage).items():
        levels = [row["sqnr_db"] for row in members if row.get("sqnr_db") is not None]
        rows.append(
            (
                name,
                str(len(members)),
                becomes,
                human_bytes(sum(row["source_bytes"] for row in members)),
                human_bytes(sum(row["stored_bytes"] for row in members)),
                _range(levels),
                why,
            )
        )
    print_table(columns, rows, numeric=("count", "before", "after", "SQNR dB"))


def _alike(coverage: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str, str], list[Mapping[str, Any]]]:
    from llmq.checkpoint.coverage import collapse
    from llmq.config import Scheme

    groups: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for row in coverage:
        name = next(iter(collapse([row["name"]])))
        becomes = str(Scheme(**row["scheme"])) if row["scheme"] else {"keep": "kept", "drop": "dropped"}[row["action"]]
        groups.setdefault((name, becomes, row["reason"]), []).append(row)
    return groups


def _range(values: Sequence[float]) -> str:
    if not values:
        return ""
    low, high = f"{min(values):.1f}", f"{max(values):.1f}"
    return low if low == high else f"{low} .. {high}"
