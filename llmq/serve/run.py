"""From a model's name to a server that answers: everything is checked before the long work begins."""

import asyncio
import ipaddress
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import Field

from llmq.backends.base import Backend, ComputeType, InferenceModel, KernelName, Memory, ModelOptions
from llmq.backends.host import is_first_process
from llmq.backends.registry import select_backend
from llmq.checkpoint.loader import ModelWeights, load_weights
from llmq.checkpoint.reader import Progress
from llmq.config import Frozen, QuantizationConfig
from llmq.engine.engine import EngineLimits
from llmq.engine.service import EngineService
from llmq.errors import ConfigError
from llmq.model.tokenizer import Tokenizer
from llmq.plan.roofline import cache_parts
from llmq.serve.app import Server, ServerOptions
from llmq.serve.artifacts import quantized
from llmq.serve.capacity import Capacity, bytes_per_token, plan_capacity
from llmq.serve.lifecycle import listen, serve
from llmq.serve.metrics import Metrics
from llmq.serve.params import sampling_defaults

R = TypeVar("R")

#: Holds an API key, where there is no file.
KEY_VARIABLE = "LLMQ_API_KEY"

#: Sequences held at once unless the user says: with an accelerator, and without.
_DEFAULT_SLOTS = (32, 4)

_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class ServeOptions(Frozen):
    """How to serve; fields are the options of ``llmq serve``.

    Attributes:
        backend, device, dtype, threads: Where to run, and with how many threads of a CPU; None measures.
        compile: Compile the decode step; torch only.
        dp, tp, sp: Groups of devices that have slots of their own, devices of each, and those of them that share positions.
        host, port: Where to listen.
        max_model_len, max_num_seqs: Size of the cache; None takes what fits.
        kv_cache_dtype: ``int8`` quantizes keys and values.
        kernel: Of linears with codes; None takes what the device is known to be fast with.
        api_key_file: One key a line.
        served_model_name: Names of the model; None takes its directory's.
        max_queue: Requests that may wait.
        queue_timeout, request_timeout: Seconds a request may wait, and take; None sets no limit.
        drain_timeout: Seconds that live requests get at the end.
        warmup: ``full`` compiles everything first, ``lazy`` when it is needed.
        max_body_bytes: Largest request.
        cors_origin: Web sites whose pages may use the server.
        quantization: Quantize a checkpoint first; None serves it as it is.
    """

    backend: str = "auto"
    device: str | None = None
    dtype: ComputeType | None = None
    threads: Annotated[int, Field(ge=1)] | None = None
    compile: bool = False
    dp: Annotated[int, Field(ge=1)] = 1
    tp: Annotated[int, Field(ge=1)] = 1
    sp: Annotated[int, Field(ge=1)] = 1
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, lt=65536)] = 8000
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    kv_cache_dtype: Literal["auto", "int8"] = "auto"
    kernel: KernelName | None = None
    api_key_file: Path | None = None
    served_model_name: tuple[str, ...] = ()
    max_queue: Annotated[int, Field(ge=0)] = EngineLimits.max_queue
    queue_timeout: _Seconds | None = None
    request_timeout: _Seconds | None = None
    drain_timeout: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 30.0
    warmup: Literal["full", "lazy"] = "full"
    max_body_bytes: Annotated[int, Field(ge=1024)] = 8 << 20
    cors_origin: tuple[str, ...] = ()
    quantization: QuantizationConfig | None = None


def run(
    model: str,
    options: ServeOptions,
    *,
    tell: Callable[[str], None],
    progress: Callable[[], AbstractContextManager[Progress]],
) -> int:
    """Serve a model until a signal.

    Args:
        model: An artifact, a checkpoint, or a hub id of either.
        options: How.
        tell: Told, line by line, what is served and where.
        progress: Entered while a checkpoint is quantized; what it gives is told of every tensor.

    Returns:
        The process's exit status.

    Raises:
        ConfigError: An option breaks a rule, or the port is taken.
        CheckpointError: The model cannot be read.
        BackendError: The backend cannot be used.
    """
    keys = read_keys(options.api_key_file)
    sock = listen(options.host, options.port if is_first_process() else 0)  # the others do not answer
    weights = load_weights(model)
    tokenizer = Tokenizer.from_files(weights.reader.side_files(), weights.config)
    defaults = sampling_defaults(tokenizer.generation_defaults)
    plugin, device = select_backend(options.backend, options.device)
    if options.quantization:
        weights = quantized(weights, model, options.quantization, progress)
    capacity = _capacity(weights, plugin, device, options)
    model_options = ModelOptions(
        device,
        options.dtype,
        capacity.num_slots,
        capacity.max_len,
        kv_int8=options.kv_cache_dtype == "int8",
        num_threads=options.threads,
        compile=options.compile,
        dp=options.dp,
        tp=options.tp,
        sp=options.sp,
        kernel=options.kernel,
    )
    names = options.served_model_name or (default_name(model),)
    metrics = Metrics(names[0])
    limits = EngineLimits(options.max_queue, options.queue_timeout)

    def start() -> tuple[InferenceModel, EngineService]:
        opened = plugin.open_model(weights, model_options)
        return opened, EngineService(opened, tokenizer, limits, metrics, warmup=options.warmup == "full")

    opened, service = apart(start) if is_first_process() else start()  # the others follow, and mind their own signals
    caps = opened.caps
    server_options = ServerOptions(names, keys, options.max_body_bytes, options.request_timeout, options.cors_origin)
    server = Server(service, tokenizer, caps, metrics, server_options)

    kv_bytes = caps.num_slots * caps.max_len * bytes_per_token(weights.config, caps.kv_dtype)
    tell(f"model     {', '.join(names)}: {weights.quantization.scheme if weights.quantization else 'not quantized'}")
    tell(f"backend   {plugin.name} on {caps.device}, {caps.dtype}")
    tell(f"memory    {_gb(capacity.free_bytes)} were free; weights {_gb(capacity.weight_bytes)}, cache {_gb(kv_bytes)}")
    tell(f"cache     {caps.num_slots} slots of {caps.max_len} tokens in {caps.kv_dtype}")
    tell(
        f"sampling  {', '.join(f'{name}={value}' for name, value in defaults.items())}, unless a request says otherwise"
    )
    if not keys and not _is_loopback(options.host):
        tell(
            f"warning   everybody who reaches {options.host} can use this server; set --api-key-file or {KEY_VARIABLE}"
        )
    host = f"[{options.host}]" if ":" in options.host else options.host
    url = f"http://{host}:{sock.getsockname()[1]}"
    try:
        return asyncio.run(
            serve(
                server,
                service,
                sock,
                drain_timeout=options.drain_timeout,
                on_ready=lambda: tell(f"ready     {url}/v1 answers, {url}/ is a chat page"),
            )
        )
    finally:
        if service.state == "stopped":
            opened.close()


def apart(function: Callable[[], R]) -> R:
    """Call a function on a thread that then ends.

    OpenMP keeps threads for every thread that has computed. While there are more of all of them than cores, none
    waits awake for the next kernel, and each kernel of the engine's thread pays for waking them: with a model that was
    opened on the main thread, a step of SmolLM2 in int4 takes 21 ms in place of 13 on two cores.

    Args:
        function: What to call.

    Returns:
        What it returned; what it raised is raised here.
    """
    future: Future[R] = Future()

    def call() -> None:
        try:
            future.set_result(function())
        except BaseException as err:
            future.set_exception(err)

    thread = threading.Thread(target=call, name="llmq-open", daemon=True)  # Ctrl-C does not wait for it
    thread.start()
    try:
        return future.result()
    finally:
        if future.done():
            thread.join()


def read_keys(path: Path | None) -> tuple[str, ...]:
    """The API keys, from a file or the environment.

    Args:
        path: One key a line; None reads the variable `KEY_VARIABLE`.

    Returns:
        Keys; none lets everybody in.

    Raises:
        ConfigError: The file cannot be read, or holds no usable key.
    """
    if path is None:
        text, where = os.environ.get(KEY_VARIABLE), KEY_VARIABLE
        if text is None:
            return ()
    else:
        where = f"api_key_file={path}"
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as err:
            reason = getattr(err, "strerror", None) or "it is not UTF-8 text"
            raise ConfigError(f"{where}: cannot be read ({reason}).") from err
    keys = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not keys:
        raise ConfigError(f"{where}: holds no key; write one a line.")
    if any(not key.isascii() or not key.isprintable() or " " in key for key in keys):
        raise ConfigError(f"{where}: a key must be printable ASCII without spaces, as HTTP headers are.")
    return keys


def default_name(model: str) -> str:
    """What clients call a model that was given no name.

    Args:
        model: A path or a hub id.

    Returns:
        The hub id, or the last part of the path.
    """
    return model if not Path(model).expanduser().exists() else Path(model).expanduser().resolve().stem


def _capacity(weights: ModelWeights, plugin: Backend, device: str | None, options: ServeOptions) -> Capacity:
    accelerated = plugin.has_accelerator() and device != "cpu"
    memory, sharing = plugin.memory(device), 1 if accelerated else options.dp * options.tp
    return plan_capacity(
        weights,
        Memory(memory.total // sharing, memory.free // sharing),
        dtype=options.dtype or ("bfloat16" if accelerated else "float32"),
        kv_int8=options.kv_cache_dtype == "int8",
        num_slots=options.max_num_seqs,
        max_len=options.max_model_len,
        default_slots=-(-_DEFAULT_SLOTS[0 if accelerated else 1] // options.dp) * options.dp,
        dp=options.dp,
        tp=options.tp,
        cache_parts=cache_parts(weights.config, options.tp, shares_positions=plugin.name == "tpu"),
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
