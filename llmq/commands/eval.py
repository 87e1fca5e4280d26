"""``llmq eval``: what a model can do, and what quantization cost it."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmq.commands import options
from llmq.config import validated
from llmq.errors import ConfigError

if TYPE_CHECKING:
    from llmq.evaluate.results import Results


def evaluate(
    model: Annotated[str | None, typer.Argument(help="A model's directory, a .gguf file, or a hub id like organization/name.", show_default=False)] = None,
    tasks: Annotated[str | None, typer.Option("--tasks", help="Tasks of lm-eval, with commas between; list shows their names.", show_default=False)] = None,
    limit: Annotated[int | None, typer.Option("--limit", help="Take this many items of each task. Default: all.", show_default=False)] = None,
    num_fewshot: Annotated[int | None, typer.Option("--num-fewshot", help="Examples in front of each prompt. Default: each task's own number.", show_default=False)] = None,
    apply_chat_template: Annotated[bool, typer.Option("--apply-chat-template", help="Write prompts as conversations.")] = False,
    data_dir: Annotated[Path | None, typer.Option("--data-dir", help="Read the tasks' data from files here and use no network.", show_default=False)] = None,
    include_path: Annotated[Path | None, typer.Option("--include-path", help="A directory with task definitions of your own.", show_default=False)] = None,
    batch_size: Annotated[str, typer.Option("--batch-size", help="Continuations computed at once; auto goes by memory.")] = "auto",
    log_samples: Annotated[bool, typer.Option("--log-samples", help="Keep every item's prompts and answers in the results.")] = False,
    seed: Annotated[int, typer.Option("--seed", help="Of whatever a task draws, such as its examples.")] = 1234,
    perplexity: Annotated[Path | None, typer.Option("--perplexity", help="Measure perplexity on this text: plain, or JSON lines with a page or text each.", show_default=False)] = None,
    window: Annotated[int, typer.Option("--window", help="Tokens of the text seen at once.")] = 1024,
    stride: Annotated[int | None, typer.Option("--stride", help="Tokens scored per window. Default: windows do not overlap.", show_default=False)] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", help="Take this many tokens of the text. Default: all.", show_default=False)] = None,
    reference: Annotated[str | None, typer.Option("--reference", help="Measure how far the model's predictions on the text are from those of this model.", show_default=False)] = None,
    reference_cache: Annotated[Path | None, typer.Option("--reference-cache", help="Keep the reference's predictions in this file, so that it runs once.", show_default=False)] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="JSON file for the results; llmq report compares such files.", show_default=False)] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an interrupted run with the same --output stopped.")] = False,
    as_json: options.Json = False,
    backend: options.BackendName = "auto",
    device: options.Device = None,
    dtype: options.DType = None,
    threads: options.Threads = None,
    kv_cache_dtype: options.KvCacheDtype = "auto",
    kernel: options.Kernel = None,
    max_model_len: Annotated[int | None, typer.Option("--max-model-len", help="Context in tokens. Default: the model's own, at most 2048.", show_default=False)] = None,
) -> None:  # fmt: skip
    """Measure a model: tasks of lm-eval, perplexity of a text, divergence from a reference."""
    names = tuple(name.strip() for name in (tasks or "").split(",") if name.strip())
    if names == ("list",):
        _list_tasks(data_dir, include_path, as_json)
        return
    if model is None:
        raise ConfigError("model: is missing; name a directory, a .gguf file or a hub id.")
    from llmq.evaluate.options import EvalOptions

    wanted = validated(
        EvalOptions,
        tasks=names,
        limit=limit,
        num_fewshot=num_fewshot,
        apply_chat_template=apply_chat_template,
        log_samples=log_samples,
        data_dir=data_dir,
        include_path=include_path,
        batch_size=_batch_size(batch_size),
        seed=seed,
        perplexity=perplexity,
        reference=reference,
        reference_cache=reference_cache,
        window=window,
        stride=stride,
        max_tokens=max_tokens,
        backend=backend,
        device=device,
        dtype=dtype,
        threads=threads,
        kv_cache_dtype=kv_cache_dtype,
        kernel=kernel,
        max_model_len=max_model_len,
    )
    from llmq.commands.terminal import count_progress, print_json, say
    from llmq.evaluate.run import evaluate

    with count_progress() as progress:
        results = evaluate(model, wanted, output=output, resume=resume, progress=progress, tell=say)
    _print_metrics(results)
    if truncated := results.counts.get("tasks/truncated_prompts"):
        say(
            f"{truncated} of {results.counts['tasks/requests']} prompts were longer than the context, "
            f"{results.config['max_length']} tokens, and lost their beginning"
        )
    if output:
        say(f"results in {output}")
    if as_json:
        print_json(results.model_dump(mode="json"))


def _batch_size(text: str) -> int | None:
    try:
        return None if text == "auto" else int(text)
    except ValueError as err:
        raise ConfigError(f"batch_size={text!r}: must be auto or a number of continuations.") from err


def _list_tasks(data_dir: Path | None, include_path: Path | None, as_json: bool) -> None:
    from llmq.commands.terminal import print_json
    from llmq.evaluate.tasks import require_lm_eval, task_names

    require_lm_eval()
    names: Sequence[str] = task_names(data_dir, include_path)
    if as_json:
        print_json(names)
    else:
        print("\n".join(names))


def _print_metrics(results: "Results") -> None:
    from llmq.commands.terminal import print_table

    columns = ("metric", "value", "error", "better", "items")
    rows = [
        (
            name,
            f"{metric.value:.4f}",
            "" if metric.stderr is None else f"{metric.stderr:.4f}",
            "higher" if metric.higher_is_better else "lower",
            str(len(results.items[name])) if name in results.items else "",
        )
        for name, metric in results.metrics.items()
    ]
    print_table(columns, rows, numeric=("value", "error", "items"))
