"""``llmq plan``: what a model needs and how fast it can be, before a chip is rented."""

from typing import Annotated, Any

import typer

from llmq.commands import options
from llmq.config import QuantizationConfig, validated


def plan(
    ctx: typer.Context,
    model: options.Model,
    target: Annotated[list[str] | None, typer.Option("--target", help="Chips, as v5e:2x4, v6e, h100 or h100:8. Repeatable. Default: v5e and h100.", show_default=False)] = None,
    scheme: options.SchemeName = "int4_blockwise",
    groupsize: options.GroupSize = None,
    groupsize_fallback: options.GroupSizeFallback = False,
    sym: options.Symmetric = None,
    embedding: options.EmbeddingScheme = QuantizationConfig.model_fields["embedding"].default,
    lm_head: options.HeadScheme = QuantizationConfig.model_fields["lm_head"].default,
    ignore: options.Ignore = None,
    override: options.Overrides = None,
    activation: options.Activation = QuantizationConfig.model_fields["activation"].default,
    max_model_len: Annotated[int | None, typer.Option("--max-model-len", help="Context in tokens. Default: the model's, at most 4096.", show_default=False)] = None,
    max_num_seqs: Annotated[int, typer.Option("--max-num-seqs", help="Sequences at once.")] = 8,
    kv_cache_dtype: options.KvCacheDtype = "auto",
    kernel: options.Kernel = None,
    tp: Annotated[int | None, typer.Option("--tp", help="Chips that compute a layer together. Default: all of the target.", show_default=False)] = None,
    compile_steps: Annotated[bool, typer.Option("--compile", help="Compile the steps that serving runs with the real TPU compiler; takes a minute, and the extra tpu.")] = False,
    as_json: options.Json = False,
) -> None:  # fmt: skip
    """Work out sizes, what fits which chips, and how fast it can be there, from headers alone."""
    from llmq.commands.terminal import print_json
    from llmq.plan.run import PlanOptions, make_plan

    given = options.named_fields(ctx)
    found = make_plan(
        model,
        validated(QuantizationConfig, **{"scheme": scheme, **given}) if given else None,
        validated(
            PlanOptions,
            targets=tuple(target or ("v5e", "h100")),
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            tp=tp,
            kv_cache_dtype=kv_cache_dtype,
            kernel=kernel,
            compile=compile_steps,
        ),
    )
    _print(found)
    if as_json:
        print_json(found)


def _print(found: dict[str, Any]) -> None:
    from llmq.commands.terminal import human_bytes, print_table, say

    say(f"{found['model']}: {found['architecture']}, {found['num_weights'] / 1e6:,.1f} M weights, as {found['scheme']}")
    rows = [
        (kind, str(row["count"]), human_bytes(row["before"]), human_bytes(row["after"]))
        for kind, row in found["kinds"].items()
    ]
    print_table(("tensors", "count", "before", "after"), rows, numeric=("count", "before", "after"))
    if found["conversion_bytes"]:
        say(f"llmq convert takes about {human_bytes(found['conversion_bytes'])} of host memory at most")
    cache = found["cache"]
    say(
        f"cache in {cache['dtype']}: {human_bytes(cache['bytes_per_token'])} a token, "
        f"{human_bytes(found['max_num_seqs'] * cache['context'] * cache['bytes_per_token'])} for {found['max_num_seqs']} "
        f"sequences of {cache['context']:,} tokens"
    )
    for target in found["targets"]:
        _print_target(target, cache["context"])
    say("decode and prefill: tokens/s of all sequences that no program can exceed, caches half full (roofline)")


def _print_target(target: dict[str, Any], context: int) -> None:
    from llmq.commands.terminal import human_bytes, print_table, say
    from llmq.plan.run import BATCHES

    chip = target["chip"]
    say("")
    say(
        f"{target['target']}: {target['num_chips']} x {human_bytes(int(chip['memory']))} at {chip['bandwidth'] / 1e9:,.0f} GB/s, "
        f"{chip['bf16_rate'] / 1e12:,.0f} TFLOPS bfloat16, {chip['int8_rate'] / 1e12:,.0f} TOPS int8 ({chip['source']}); "
        f"tp={target['tp']}, dp={target['dp']}"
    )
    decode = [f"decode {batch}" for batch in BATCHES]
    columns = ("scheme", "weights a chip", "fits", "most sequences", "longest context", *decode, f"prefill {context}")
    rows = [
        (
            name,
            human_bytes(row["weight_bytes"]),
            "yes" if row["fits"] else f"lacks {human_bytes(row['missing_bytes'])}",
            str(row["largest_batch"]),
            str(row["largest_context"]),
            *(f"{rate:,.0f}" for rate in row["decode"].values()),
            f"{row['prefill']:,.0f}",
        )
        for name, row in target["schemes"].items()
    ]
    print_table(columns, rows, numeric=columns[1:2] + columns[3:])
    for name, steps in target.get("compiled", {}).items():
        _print_compiled(name, steps)
    for name, row in target["schemes"].items():
        if row["last_batch_that_pays"] is not None:
            say(f"{name} makes steps shorter by 5 % or more up to batch {row['last_batch_that_pays']:,} a replica")


def _print_compiled(name: str, steps: list[dict[str, Any]]) -> None:
    from llmq.commands.terminal import human_bytes, print_table, say

    lacking = [step for step in steps if step["missing_bytes"]]
    for step in lacking:
        say(f"compiled {name}: {step['name']} does not fit by {step['missing_bytes'] / (1 << 30):.2f} GiB")
    columns = (f"compiled {name}", "arguments", "temporaries", "output", "collectives", "wider weights", "s")
    rows = [
        (
            step["name"],
            *(human_bytes(step[part]) for part in ("argument_bytes", "temporary_bytes", "output_bytes")),
            ", ".join(f"{count} {kind}" for kind, count in step["collectives"].items()) or "none",
            "; ".join(step["widened"]) or "none",
            f"{step['seconds']:.1f}",
        )
        for step in steps
        if step not in lacking
    ]
    print_table(columns, rows, numeric=("arguments", "temporaries", "output", "s"))
