"""``llmq bench``: how fast."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from llmq.commands import options
from llmq.config import validated
from llmq.errors import ConfigError, OutputError

bench = typer.Typer(help="Measure speed.", no_args_is_help=True)


@bench.command()
def serve(
    url: Annotated[str, typer.Argument(help="Of a running server, like http://localhost:8000.", show_default=False)],
    model: Annotated[str | None, typer.Option("--model", help="A name from /v1/models. Default: the first one there.", show_default=False)] = None,
    concurrency: Annotated[int, typer.Option("--concurrency", help="Closed loop: keep this many requests in flight.")] = 8,
    rate: Annotated[float | None, typer.Option("--rate", help="Open loop: send this many requests a second at random times (Poisson), whether or not answers keep up.", show_default=False)] = None,
    num_requests: Annotated[int | None, typer.Option("--num-requests", help="Stop after this many. Default: 64, or what --duration allows.", show_default=False)] = None,
    duration: Annotated[float | None, typer.Option("--duration", help="Send for this many seconds, then wait for the answers under way.", show_default=False)] = None,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", help="Length of random prompts.")] = 128,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Length of every answer; end tokens are ignored.")] = 64,
    dataset: Annotated[Path | None, typer.Option("--dataset", help="JSON lines, each with a prompt or messages and whatever else a request may hold, in place of random prompts.", show_default=False)] = None,
    api_key_file: Annotated[Path | None, typer.Option("--api-key-file", help="A file whose first line is the server's key. Default: the environment's LLMQ_API_KEY.", show_default=False)] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of prompts and arrivals.")] = 0,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="JSON file for the results.", show_default=False)] = None,
    as_json: options.Json = False,
) -> None:  # fmt: skip
    """Put load on a server and measure throughput, latency and errors; Ctrl-C shows what was measured so far."""
    try:
        from llmq.serve.load import LoadOptions, run_load
        from llmq.serve.load_summary import summarize
    except ModuleNotFoundError as err:
        raise ConfigError(f"{err.name}: is not installed; pip install 'llmq[serve]'.") from err
    from llmq.commands.terminal import count_progress, print_json

    wanted = validated(
        LoadOptions,
        url=url.rstrip("/").removesuffix("/v1"),
        model=model,
        concurrency=concurrency,
        rate=rate,
        num_requests=64 if num_requests is None and duration is None else num_requests,
        duration=duration,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        dataset=dataset,
        seed=seed,
    )
    if output is not None and not output.parent.is_dir():
        raise OutputError(f"output={output}: its directory does not exist; create it first.")
    key = _read_key(api_key_file)
    with count_progress() as progress:
        num_ended = 0

        def ended(_: object) -> None:
            nonlocal num_ended
            num_ended += 1
            progress("requests", num_ended, wanted.num_requests or num_ended)

        summary = summarize(run_load(wanted, key, ended))
    _print_summary(summary)
    if output is not None:
        output.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    if as_json:
        print_json(summary)


def _read_key(path: Path | None) -> str | None:
    if path is None:
        return os.environ.get("LLMQ_API_KEY")
    with suppress(OSError, UnicodeDecodeError):
        if key := path.read_text(encoding="utf-8").partition("\n")[0].strip():
            return key
    raise ConfigError(f"api_key_file={path}: cannot be read, or its first line is empty.")


def _print_summary(found: dict[str, Any]) -> None:
    from llmq.commands.terminal import print_table, say

    columns = ("mean", "p50", "p90", "p99", "max")
    rows = [
        (name.replace("_", " "), *(f"{1000 * spread[column]:.1f}" for column in columns))
        for name, spread in {**found["latency"], "send_delay": found["client"]["send_delay"]}.items()
        if spread is not None
    ]
    print_table(("milliseconds", *columns), rows, numeric=columns)
    errors = ", ".join(f"{count} {kind}" for kind, count in found["errors"].items()) or "none"
    cut = f", {found['num_cut']} cut short" if found["num_cut"] else ""
    say(found["arrivals"])
    say(
        f"{found['num_complete']} of {found['num_requests']} requests complete in {found['seconds']:.1f} s{cut}; errors: {errors}"
    )
    if found["num_complete"]:
        say(
            f"{found['requests_per_second']:.2f} requests/s, {found['output_tokens_per_second']:.1f} output tokens/s; "
            f"the client used {found['client']['cpu_share']:.0%} of a core"
        )
