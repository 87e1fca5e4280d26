"""``llmq bench``: how fast."""

import json
import os
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from llmq.commands import options
from llmq.config import validated
from llmq.errors import ConfigError, OutputError


class _ModelByDefault(TyperGroup):
    """``bench MODEL`` is ``bench model MODEL``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["model", *args]
        return super().parse_args(ctx, args)


bench = typer.Typer(cls=_ModelByDefault, help="Measure speed: of a model, or of a server.", no_args_is_help=True)


@bench.command("model")
def bench_model(
    model: options.Model,
    prompt_lens: Annotated[str, typer.Option("--prompt-lens", help="Tokens of a prompt; several with commas between.")] = "128,512",
    gen_lens: Annotated[str, typer.Option("--gen-lens", help="Tokens of an answer; several with commas between.")] = "128",
    batch_sizes: Annotated[str, typer.Option("--batch-sizes", help="Sequences at once; several with commas between.")] = "1,8",
    repeat: Annotated[int, typer.Option("--repeat", help="Measurements of each.", min=1)] = 5,
    backend: options.BackendName = "auto",
    device: options.Device = None,
    dtype: options.DType = None,
    kv_cache_dtype: options.KvCacheDtype = "auto",
    threads: options.Threads = None,
    compiled: options.Compile = False,
    as_json: options.Json = False,
) -> None:  # fmt: skip
    """Measure how fast a model reads prompts and writes answers; ``bench MODEL`` is enough."""
    lens, gens, sizes = (
        _counts(name, text, least)
        for name, text, least in (
            ("prompt_lens", prompt_lens, 1),
            ("gen_lens", gen_lens, 2),
            ("batch_sizes", batch_sizes, 1),
        )
    )
    if dtype not in (None, "bfloat16", "float16", "float32"):
        raise ConfigError(f"dtype={dtype!r}: must be bfloat16, float16 or float32.")
    if kv_cache_dtype not in ("auto", "int8"):
        raise ConfigError(f"kv_cache_dtype={kv_cache_dtype!r}: must be auto or int8.")
    from llmq.backends import speed
    from llmq.backends.base import ModelOptions
    from llmq.backends.registry import select_backend
    from llmq.checkpoint.loader import load_weights
    from llmq.commands.terminal import count_progress, print_json
    from llmq.serve.capacity import weight_bytes

    weights = load_weights(model)
    max_len = max(lens) + max(gens)
    if max_len > weights.config.max_positions:
        raise ConfigError(
            f"prompt_lens and gen_lens: {max_len} tokens are more than the model's context of "
            f"{weights.config.max_positions}; ask for fewer."
        )
    plugin, device = select_backend(backend, device)
    opened = plugin.open_model(
        weights,
        ModelOptions(
            device=device,
            dtype=dtype,
            num_slots=max(sizes),
            max_len=max_len,
            kv_int8=kv_cache_dtype == "int8",
            num_threads=threads,
            compile=compiled,
        ),
    )
    with count_progress() as progress:
        found = speed.measure(opened, lens, gens, sizes, repeat, lambda done, of: progress("runs", done, of))
    result: dict[str, Any] = {
        "model": model,
        "backend": plugin.name,
        "device": opened.caps.device,
        "dtype": opened.caps.dtype,
        "kv_dtype": opened.caps.kv_dtype,
        "kernels": list(opened.caps.kernels),
        "versions": {name: version(name) for name in ("llmq", "numpy", plugin.framework)},
        **speed.machine(),
        "weight_bytes": weight_bytes(weights, opened.caps.dtype),
        "device_bytes": opened.stats().num_bytes,
        "peak_resident_bytes": speed.peak_resident_bytes(),
        "memory_bandwidth": None if plugin.has_accelerator() else speed.memory_bandwidth(),
        "workloads": [asdict(one) for one in found],
    }
    _print_speeds(result)
    if as_json:
        print_json(result)


def _counts(name: str, text: str, least: int) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) >= least for part in parts):
        raise ConfigError(f"{name}={text!r}: must be whole numbers from {least} on, with commas between.")
    return [int(part) for part in parts]


def _print_speeds(found: dict[str, Any]) -> None:
    from llmq.commands.terminal import print_table, say

    say(f"backend {found['backend']} on {found['device']}, {found['dtype']}, cache in {found['kv_dtype']}")
    for kernel in found["kernels"]:
        say(f"  {kernel}")
    columns = ("batch", "prompt", "answer", "prefill tokens/s", "decode tokens/s", "first token ms", "step ms")
    rows = [
        (
            *(str(one[name]) for name in ("batch_size", "prompt_len", "gen_len")),
            _spread(one["prefill"]),
            _spread(one["decode"]),
            _spread(one["first_token"], 1e3),
            _spread(one["step"], 1e3),
        )
        for one in found["workloads"]
    ]
    print_table(columns, rows, numeric=columns)
    mega = 1e-6
    say(
        f"{mega * found['weight_bytes']:.0f} MB of weights, {mega * found['device_bytes']:.0f} MB with the cache, "
        f"{mega * found['peak_resident_bytes']:.0f} MB at most in this process"
    )
    if bandwidth := found["memory_bandwidth"]:
        best = min(one["step"]["median"] for one in found["workloads"])
        say(
            f"reading all weights once takes {1e3 * found['weight_bytes'] / bandwidth:.1f} ms at the {1e-9 * bandwidth:.1f} GB/s "
            f"that one thread gets; the shortest step takes {1e3 * best:.1f} ms"
        )


def _spread(spread: dict[str, float], factor: float = 1.0) -> str:
    median, lowest, highest = (factor * spread[name] for name in ("median", "lowest", "highest"))
    return f"{median:.1f} ({lowest:.1f} to {highest:.1f})"


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
