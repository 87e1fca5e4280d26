"""``llmq qat``: train a checkpoint for the grid that its quantized form will lie on."""

import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmq.commands import options

if TYPE_CHECKING:
    from llmq.qat.loop import Watch
    from llmq.qat.run import Outcome


def qat(
    ctx: typer.Context,
    model: Annotated[str | None, typer.Argument(help="A model's directory, a .gguf file, or a hub id; may stand in the recipe.", show_default=False)] = None,
    data: Annotated[str | None, typer.Option("--data", help="A text, JSON lines of texts, conversations, instructions or prompts with completions, or a hub id.", show_default=False)] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Directory to create. Default: the model's name and -qat, here.", show_default=False)] = None,
    config: Annotated[Path | None, typer.Option("--config", help="A recipe; options given here come on top of it.", show_default=False)] = None,
    print_config: Annotated[bool, typer.Option("--print-config", help="Print the recipe with every default, and do nothing. With --json its schema as well.")] = False,
    scheme: Annotated[str | None, typer.Option("--scheme", help="Grid of the linears, see llmq convert. Default: int4_blockwise.", show_default=False)] = None,
    groupsize: options.GroupSize = None,
    groupsize_fallback: Annotated[bool | None, typer.Option("--groupsize-fallback", help="Let layers that --groupsize does not divide choose as without it.", show_default=False)] = None,
    sym: options.Symmetric = None,
    embedding: Annotated[str | None, typer.Option("--embedding", help="Scheme of the token embedding, or none. Default: int8_per_channel.", show_default=False)] = None,
    lm_head: Annotated[str | None, typer.Option("--lm-head", help="Scheme of an untied head, or none. Default: int8_per_channel.", show_default=False)] = None,
    activation: Annotated[str | None, typer.Option("--activation", help="int8 rounds the inputs of int8_per_channel linears as well, one scale a token. Default: none.", show_default=False)] = None,
    ignore: options.Ignore = None,
    override: options.Overrides = None,
    fake_quant_after_n_steps: Annotated[int | None, typer.Option("--fake-quant-after-n-steps", help="Steps without fake quantization before it sets in. Default: 0.", show_default=False)] = None,
    lora_rank: Annotated[int | None, typer.Option("--lora-rank", help="Train adapters of this rank; they are merged, and written beside the output for peft. Default: train every weight.", show_default=False)] = None,
    lora_alpha: Annotated[float | None, typer.Option("--lora-alpha", help="Adapters are weighed by this over the rank. Default: 16.", show_default=False)] = None,
    lora_targets: Annotated[list[str] | None, typer.Option("--lora-targets", help="Linears with an adapter, as q_proj. Repeatable. Default: all.", show_default=False)] = None,
    teacher: Annotated[str | None, typer.Option("--teacher", help="Learn from the predictions of this unquantized model as well.", show_default=False)] = None,
    kd_weight: Annotated[float | None, typer.Option("--kd-weight", help="Weight of the divergence from the teacher in the loss. Default: 0.5.", show_default=False)] = None,
    kd_temperature: Annotated[float | None, typer.Option("--kd-temperature", help="Divides the logits of both. Default: 1.", show_default=False)] = None,
    teacher_device: Annotated[str | None, typer.Option("--teacher-device", help="cpu keeps the teacher's weights off the device. Default: the device, shared with a model that gets adapters.", show_default=False)] = None,
    epochs: Annotated[int | None, typer.Option("--epochs", help="Passes over the data. Default: 1.", show_default=False)] = None,
    max_steps: Annotated[int | None, typer.Option("--max-steps", help="Stop after so many steps.", show_default=False)] = None,
    batch_size: Annotated[int | None, typer.Option("--batch-size", help="Rows computed together. Default: 2.", show_default=False)] = None,
    grad_accum: Annotated[int | None, typer.Option("--grad-accum", help="Batches of a step. Default: 1.", show_default=False)] = None,
    lr: Annotated[float | None, typer.Option("--lr", help="Peak learning rate. Default: 2e-5.", show_default=False)] = None,
    schedule: Annotated[str | None, typer.Option("--schedule", help="linear, cosine or constant. Default: linear.", show_default=False)] = None,
    warmup: Annotated[int | None, typer.Option("--warmup", help="Steps over which the learning rate rises. Default: 0.", show_default=False)] = None,
    optimizer: Annotated[str | None, typer.Option("--optimizer", help="adamw, or adamw8bit: moments of 8 bits, with torchao. Default: adamw.", show_default=False)] = None,
    weight_decay: Annotated[float | None, typer.Option("--weight-decay", help="Of matrices. Default: 0.", show_default=False)] = None,
    clip: Annotated[float | None, typer.Option("--clip", help="Largest norm of the gradient. Default: 1.", show_default=False)] = None,
    seq_len: Annotated[int | None, typer.Option("--seq-len", help="Tokens of a row. Default: 512.", show_default=False)] = None,
    packed: Annotated[bool | None, typer.Option("--packed/--not-packed", help="Fill rows with several documents, which do not see each other. Default: packed.", show_default=False)] = None,
    skip_bad_rows: Annotated[bool | None, typer.Option("--skip-bad-rows", help="Count malformed rows rather than refuse the data.", show_default=False)] = None,
    eval_data: Annotated[str | None, typer.Option("--eval-data", help="What to measure on. Default: the end of the data, which is not trained on.", show_default=False)] = None,
    eval_every: Annotated[int | None, typer.Option("--eval-every", help="Steps between measurements. Default: only at the beginning and the end.", show_default=False)] = None,
    baseline: Annotated[bool | None, typer.Option("--baseline", help="Train without fake quantization first, to see what it gains.", show_default=False)] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Of the order of rows and of adapters. Default: 0.", show_default=False)] = None,
    activation_checkpointing: Annotated[bool | None, typer.Option("--activation-checkpointing", help="Recompute activations in the backward pass: less memory, more time.", show_default=False)] = None,
    compiled: Annotated[bool | None, typer.Option("--compile", help="Compile fake quantization with torch.compile, on a CPU: faster steps of the same bits, a slower start.", show_default=False)] = None,
    mesh: Annotated[str | None, typer.Option("--mesh", help="Layout of several devices: dp copies of the weights, each shared by fsdp devices, as dp=2,fsdp=4. Default: one copy.", show_default=False)] = None,
    save_every: Annotated[int | None, typer.Option("--save-every", help="Steps between checkpoints, beside the output.", show_default=False)] = None,
    keep: Annotated[int | None, typer.Option("--keep", help="Checkpoints to keep while the run lasts. Default: 1.", show_default=False)] = None,
    tensorboard: Annotated[Path | None, typer.Option("--tensorboard", help="Write event files for TensorBoard into this directory.", show_default=False)] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint of an interrupted run to the same output.")] = False,
    quantize: Annotated[bool, typer.Option("--quantize", help="Write the artifact as well, beside the output.")] = False,
    backend: Annotated[str | None, typer.Option("--backend", help="tpu (JAX), gpu (torch), cpu (torch on the CPU), or auto. Default: auto.", show_default=False)] = None,
    device: options.Device = None,
    runtime: Annotated[str | None, typer.Option("--runtime", help="jax, torch, or torch_xla: torch on a TPU, in an environment of its own. Default: the backend's own, jax or torch.", show_default=False)] = None,
    dtype: options.DType = None,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:  # fmt: skip
    """Fine-tune a checkpoint with the weights that its quantized form will have."""
    from llmq.commands.terminal import print_json, say
    from llmq.errors import ConfigError
    from llmq.qat.recipe import Recipe, read_recipe, write_recipe

    given = {name: ctx.params[name] for name in Recipe.model_fields if ctx.params.get(name) is not None}
    if compiled is not None:
        given["compile"] = compiled
    parts = {
        "quantization": options.named_fields(ctx),
        "lora": {"rank": lora_rank, "alpha": lora_alpha, "targets": lora_targets},
        "distillation": {
            "teacher": teacher,
            "weight": kd_weight,
            "temperature": kd_temperature,
            "device": teacher_device,
        },
    }
    for part, fields in parts.items():
        if named := {name: value for name, value in fields.items() if value is not None}:
            given[part] = named
    recipe = read_recipe(config, **given)
    if print_config:
        if as_json:
            print_json({"recipe": recipe.model_dump(mode="json"), "schema": Recipe.model_json_schema()})
        else:
            print(write_recipe(recipe), end="")
        return
    if resume and not recipe.save_every:
        raise ConfigError("resume: needs the run's own --save-every, without which it keeps no checkpoint.")
    from llmq.backends.host import is_first_process
    from llmq.checkpoint.writer import check_target
    from llmq.convert import convert, plan_conversion
    from llmq.qat.adapter import adapter_directory
    from llmq.qat.loop import watch_nothing
    from llmq.qat.plan import plan_run
    from llmq.qat.run import run
    from llmq.qat.tensorboard import EventFiles

    events = EventFiles(tensorboard) if tensorboard else None
    target = output or Path(f"{Path(recipe.model).resolve().stem}-qat")
    artifact = target.with_name(f"{target.name}-{recipe.quantization.scheme}")
    plan = plan_run(recipe)
    check_target(target, plan.weights.reader.path, force=force)
    if quantize:
        check_target(artifact, plan.weights.reader.path, force=force)
    skipped = f", {plan.num_skipped} malformed rows left out" if plan.num_skipped else ""
    if is_first_process():
        say(
            f"{plan.num_steps} steps, {plan.steps.per_epoch} a pass of {plan.num_tokens:,} tokens to learn{skipped}; "
            f"{len(plan.schemes)} matrices on their grids"
        )
    command = ["llmq", *sys.argv[1:]]
    with _display(plan.num_steps) as show, events or nullcontext(watch_nothing) as note:

        def watch(event: Mapping[str, Any]) -> None:
            show(event)
            note(event)

        outcome = run(plan, target, resume=resume, force=force, command=command, watch=watch)
    if outcome.record is None:  # another process writes
        return
    say(_summary(outcome, outcome.record["result"], target))
    adapter = adapter_directory(target) if recipe.lora else None
    if adapter:
        say(f"adapter by itself in {adapter}")
    if quantize:
        convert(plan_conversion(str(target), recipe.quantization), artifact, force=force, command=command)
        say(f"quantized into {artifact}")
    if as_json:
        written = {"output": target, "artifact": artifact if quantize else None, "adapter": adapter}
        print_json({**{name: path and str(path) for name, path in written.items()}, **outcome.record})


def _summary(outcome: "Outcome", result: Mapping[str, Any], target: Path) -> str:
    loss, quantized = outcome.measured.losses
    told = (
        f"{result['codes_changed']:,} of {result['codes']:,} codes changed; held-out loss {loss:.4f}, "
        f"quantized {quantized:.4f} nats a token, in {target}"
    )
    if outcome.baseline is None or outcome.recovered is None:
        return told
    plain, rounded = outcome.baseline.losses
    gain = outcome.recovered
    compared = f"the same training without fake quantization: {plain:.4f}, rounded to the grid {rounded:.4f}"
    if gain.share is None:
        return f"{told}\n{compared}; {gain.verdict}"
    error = "" if gain.stderr is None else f" ± {gain.stderr:.0%}"
    return f"{told}\n{compared}; recovered {gain.share:.0%}{error} of that loss: {gain.verdict}"


@contextmanager
def _display(num_steps: int) -> "Generator[Watch]":
    """The run as it goes: a bar on a terminal, and a line for each measurement."""
    from llmq.commands.terminal import count_progress, human_bytes, say

    with count_progress() as progress:

        def watch(event: Mapping[str, Any]) -> None:
            name = "steps without fake quantization" if event.get("baseline") else "steps"
            if "eval_loss" in event:
                say(
                    f"{name[:4]} {event['step']}: held-out loss {event['eval_loss']:.4f}, quantized {event['eval_loss_quantized']:.4f}"
                )
                return
            figures = (
                f"loss {event['loss']:.4f}, gradient {event['grad_norm']:.3f}, learning rate {event['learning_rate']:.2e}, "
                f"{event['tokens_per_second']:.0f} tokens/s, {human_bytes(event['peak_bytes'])}"
            )
            if event["step"] % max(1, num_steps // 20) == 0:
                say(f"step {event['step']}: {figures}")
            progress(name, event["step"], num_steps)

        yield watch
