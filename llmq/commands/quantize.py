"""``llmq quantize``: a checkpoint to an artifact, with codes chosen by an algorithm."""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmq.commands import options
from llmq.config import QuantizationConfig, validated

if TYPE_CHECKING:
    from llmq.convert import ConversionPlan
    from llmq.quantize.blocks import QuantizedBlock


def quantize(
    ctx: typer.Context,
    model: options.Model,
    output: options.Output = None,
    scheme: options.SchemeName = "int4_blockwise",
    algorithm: Annotated[str | None, typer.Option("--algorithm", help="rtn, mse and hqq need no data; awq, gptq and awq+gptq calibrate on --dataset. Default: gptq; rtn for a checkpoint that was trained for its grid.", show_default=False)] = None,
    dataset: Annotated[str | None, typer.Option("--dataset", help="Text to calibrate on: a file, plain or JSON lines with a page or text each; or a directory or hub id that the datasets library loads.", show_default=False)] = None,
    num_samples: Annotated[int, typer.Option("--num-samples", help="Sequences of the text.")] = 128,
    seq_len: Annotated[int, typer.Option("--seq-len", help="Tokens of each.")] = 512,
    seed: Annotated[int, typer.Option("--seed", help="Chooses the sequences.")] = 0,
    target_bits: Annotated[float | None, typer.Option("--target-bits", help="Mix schemes to this average of bits per linear weight, scales included.", show_default=False)] = None,
    target_size: Annotated[str | None, typer.Option("--target-size", help="Mix schemes so that the artifact takes at most this, as in 90MB.", show_default=False)] = None,
    max_kl: Annotated[float | None, typer.Option("--max-kl", help="Mix schemes so that predictions diverge at most this much on held-out text, in nats a token.", show_default=False)] = None,
    report_sensitivity: Annotated[Path | None, typer.Option("--report-sensitivity", help="Measure what each scheme costs each linear, into this JSON file and a page beside it. A target measures it too, into a file beside the output.", show_default=False)] = None,
    groupsize: options.GroupSize = None,
    groupsize_fallback: options.GroupSizeFallback = False,
    sym: options.Symmetric = None,
    embedding: options.EmbeddingScheme = QuantizationConfig.model_fields["embedding"].default,
    lm_head: options.HeadScheme = QuantizationConfig.model_fields["lm_head"].default,
    ignore: options.Ignore = None,
    override: options.Overrides = None,
    activation: options.Activation = QuantizationConfig.model_fields["activation"].default,
    backend: options.BackendName = "auto",
    device: options.Device = None,
    dtype: options.DType = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an interrupted run to the same output stopped.")] = False,
    dry_run: options.DryRun = False,
    strict: options.Strict = False,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:  # fmt: skip
    """Quantize a checkpoint with an algorithm that searches or calibrates, and write an artifact."""
    from llmq.checkpoint.reader import open_checkpoint
    from llmq.checkpoint.trained import check_trained, trained_config
    from llmq.quantize.options import choose_algorithm

    given = options.named_fields(ctx)
    trained = trained_config(open_checkpoint(model).config)
    config = check_trained(trained, {"scheme": scheme, **given} if trained is None else given)
    algorithm = choose_algorithm(algorithm, is_trained=trained is not None)
    from llmq.checkpoint.writer import check_target
    from llmq.commands.convert import print_plan, print_written
    from llmq.commands.terminal import count_progress, say
    from llmq.convert import plan_conversion
    from llmq.quantize.bounded import quantize_to_divergence
    from llmq.quantize.mixed import plan_mixed
    from llmq.quantize.options import ALGORITHMS, QuantizeOptions, Target
    from llmq.quantize.run import check_algorithm, quantize
    from llmq.quantize.setup import Run

    wanted = validated(
        QuantizeOptions,
        algorithm=algorithm,
        dataset=dataset,
        num_samples=num_samples,
        seq_len=seq_len,
        seed=seed,
        backend=backend,
        device=device,
        dtype=dtype,
        target=Target.parse(target_bits, target_size, max_kl),
        sensitivity=report_sensitivity,
    )
    plan = uniform = plan_conversion(model, config, strict=strict)
    sensitivity: Mapping[str, float] = {}
    check_algorithm(plan, wanted)
    target = output or Path(f"{Path(model).resolve().stem}-{config.scheme}-{algorithm}")
    with count_progress() as progress:
        run = Run(force, resume, ["llmq", *sys.argv[1:]], progress=progress, tell=_print_block)
        if not dry_run:
            check_target(target, plan.reader.path, force=force)
        if wanted.holds_out:
            mixed = plan_mixed(plan, wanted, target, run)
            plan, sensitivity = mixed.plan, mixed.sensitivity
            say(f"{_mix(plan)}; expected divergence {mixed.kl:.4f} nats a token")
        if dry_run:
            print_plan(plan, target, as_json=as_json)
            return
        if ALGORITHMS[algorithm].fold and any(row.kind == "router" for row in plan.coverage):
            say("experts: scales go from each down into its up; none into the norm, which the router reads too")
        if wanted.target.max_kl is None:
            done = quantize(plan, wanted, target, run, sensitivity)
        else:
            done, kl = quantize_to_divergence(uniform, wanted, target, run)
            say(f"divergence {kl:.4f} nats a token on held-out text")
    print_written(plan, done, target, as_json=as_json)
    if done.calibration and (few := done.calibration.few_tokens):
        say(
            f"experts: {len(few)} were chosen by fewer tokens than their linears have input features, "
            f"{list(few.values()).count(0)} by none; they were calibrated on others too, the likeliest to choose them"
        )


def _mix(plan: "ConversionPlan") -> str:
    counts = Counter(str(row.scheme or "kept") for row in plan.coverage if row.kind == "linear")
    return ", ".join(f"{count} linears {scheme}" for scheme, count in sorted(counts.items()))


def _print_block(block: "QuantizedBlock") -> None:
    from llmq.commands.terminal import say
    from llmq.model.names import across_experts

    alike: dict[str, list[float]] = {}
    for name, error in block.errors.items():
        alike.setdefault(across_experts(name), []).append(error)
    errors = ", ".join(f"{_short(name)} {_range(found)}" for name, found in alike.items())
    few = f"; {len(block.few_tokens)} experts chosen by few tokens" if block.few_tokens else ""
    say(f"block {block.index}: output error {errors or 'none, nothing to quantize'}{few}")


def _short(name: str) -> str:
    """As in ``q``, or ``experts down``."""
    *module, linear, _ = name.split(".")
    return f"{'experts ' if '*' in module else ''}{linear.removesuffix('_proj')}"


def _range(errors: Sequence[float]) -> str:
    least, most = (f"{error:.2%}" for error in (min(errors), max(errors)))
    return least if len(errors) == 1 else f"{least} to {most}"
