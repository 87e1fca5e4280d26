"""``llmq serve``: OpenAI's API over a model."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from llmq.commands import options
from llmq.config import QuantizationConfig, validated
from llmq.errors import ConfigError


def serve(
    model: options.Model,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="0 takes a free one.")] = 8000,
    served_model_name: Annotated[list[str] | None, typer.Option("--served-model-name", help="Name that requests use. Repeatable. Default: the model's own.", show_default=False)] = None,
    api_key_file: Annotated[Path | None, typer.Option("--api-key-file", help="A file with one API key a line. Default: LLMQ_API_KEY of the environment, else everybody may ask.", show_default=False)] = None,
    max_model_len: Annotated[int | None, typer.Option("--max-model-len", help="Context in tokens. Default: the model's own, or what fits.", show_default=False)] = None,
    max_num_seqs: Annotated[int | None, typer.Option("--max-num-seqs", help="Answers computed at once. Default: 32, on a CPU 4, or what fits.", show_default=False)] = None,
    kv_cache_dtype: options.KvCacheDtype = "auto",
    kernel: options.Kernel = None,
    scheme: Annotated[str | None, typer.Option("--scheme", help="Quantize a checkpoint first, once, into the cache directory.", show_default=False)] = None,
    groupsize: options.GroupSize = None,
    sym: options.Symmetric = None,
    backend: options.BackendName = "auto",
    device: options.Device = None,
    dtype: options.DType = None,
    threads: options.Threads = None,
    compiled: options.Compile = False,
    mesh: options.Mesh = None,
    tp: options.TensorParallel = None,
    warmup: Annotated[str, typer.Option("--warmup", help="full compiles everything before the first answer, lazy when it is needed.")] = "full",
    max_queue: Annotated[int, typer.Option("--max-queue", help="Requests that may wait; more get 429.")] = 256,
    queue_timeout: Annotated[float | None, typer.Option("--queue-timeout", help="Seconds a request may wait. Default: no limit.", show_default=False)] = None,
    request_timeout: Annotated[float | None, typer.Option("--request-timeout", help="Seconds a request may take. Default: no limit.", show_default=False)] = None,
    drain_timeout: Annotated[float, typer.Option("--drain-timeout", help="Seconds that live requests get to finish after SIGTERM.")] = 30.0,
    max_body_bytes: Annotated[int, typer.Option("--max-body-bytes", help="Largest request.")] = 8 << 20,
    cors_origin: Annotated[list[str] | None, typer.Option("--cors-origin", help="A web site whose pages may use the server. Repeatable.", show_default=False)] = None,
) -> None:  # fmt: skip
    """Serve a model: OpenAI's API, metrics and a chat page."""
    try:
        from llmq.serve.run import ServeOptions, run
    except ModuleNotFoundError as err:
        raise ConfigError(f"serve: needs {err.name}, which is not installed; pip install 'llmq[serve]'.") from err
    from llmq.commands.terminal import byte_progress, say
    from llmq.serve.logs import log_to_stderr

    wanted = validated(
        ServeOptions,
        backend=backend,
        device=device,
        dtype=dtype,
        threads=threads,
        compile=compiled,
        **options.read_mesh(mesh, tp),
        host=host,
        port=port,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        kv_cache_dtype=kv_cache_dtype,
        kernel=kernel,
        api_key_file=api_key_file,
        served_model_name=tuple(served_model_name or ()),
        max_queue=max_queue,
        queue_timeout=queue_timeout,
        request_timeout=request_timeout,
        drain_timeout=drain_timeout,
        warmup=warmup,
        max_body_bytes=max_body_bytes,
        cors_origin=tuple(cors_origin or ()),
        quantization=_quantization(scheme, groupsize, sym),
    )
    log_to_stderr()
    sys.exit(run(model, wanted, tell=say, progress=lambda: byte_progress("converting")))


def _quantization(scheme: str | None, groupsize: int | None, sym: bool | None) -> QuantizationConfig | None:
    if scheme is None:
        if groupsize is not None or sym is not None:
            raise ConfigError("groupsize and sym: need --scheme; name one, or leave them out.")
        return None
    given = {"group_size": groupsize, "symmetric": sym}
    return validated(
        QuantizationConfig, scheme=scheme, **{name: value for name, value in given.items() if value is not None}
    )
