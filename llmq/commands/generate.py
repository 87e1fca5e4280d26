"""``llmq generate``: answer one prompt, a file of prompts, or a conversation."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmq.commands import options
from llmq.config import validated
from llmq.errors import ConfigError

if TYPE_CHECKING:
    from llmq.backends.base import InferenceModel
    from llmq.checkpoint.loader import ModelWeights
    from llmq.engine.generate import Session
    from llmq.engine.sampling import SamplingParams
    from llmq.model.tokenizer import Tokenizer

#: Context of an interactive conversation unless the user names one.
_CHAT_CONTEXT = 2048


def generate(
    model: options.Model,
    prompt: Annotated[str | None, typer.Argument(help="Text to continue, or with --chat to answer. None on a terminal: a conversation.", show_default=False)] = None,
    prompts_file: Annotated[Path | None, typer.Option("--prompts-file", help="A file with one prompt a line; each answer follows its prompt.", show_default=False)] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Apply the model's chat template.")] = False,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Tokens to generate at most.")] = 256,
    temperature: Annotated[float | None, typer.Option("--temperature", help="0 takes the most likely token. Default: the model's own, else 0.", show_default=False)] = None,
    top_p: Annotated[float | None, typer.Option("--top-p", help="Sample from the smallest set of this probability.", show_default=False)] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", help="Sample from this many tokens; 0 takes all.", show_default=False)] = None,
    min_p: Annotated[float | None, typer.Option("--min-p", help="Sample from tokens at least this likely, relative to the most likely one.", show_default=False)] = None,
    repetition_penalty: Annotated[float | None, typer.Option("--repetition-penalty", help="Over 1 makes tokens that were there before less likely.", show_default=False)] = None,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="Text that ends an answer and is not part of it. Repeatable.", show_default=False)] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Of the sampling. Default: one from the operating system.", show_default=False)] = None,
    max_model_len: options.MaxModelLen = None,
    backend: options.BackendName = "auto",
    device: options.Device = None,
    dtype: options.DType = None,
    kv_cache_dtype: options.KvCacheDtype = "auto",
    kernel: options.Kernel = None,
    threads: options.Threads = None,
    compiled: options.Compile = False,
    mesh: options.Mesh = None,
    tp: options.TensorParallel = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print kernels, times and tokens per second.")] = False,
) -> None:  # fmt: skip
    """Answer with a model: an artifact, or a checkpoint that was never quantized."""
    from llmq.checkpoint.loader import load_weights
    from llmq.model.tokenizer import Tokenizer

    if dtype not in (None, "bfloat16", "float16", "float32"):
        raise ConfigError(f"dtype={dtype!r}: must be bfloat16, float16 or float32.")
    if kv_cache_dtype not in ("auto", "int8"):
        raise ConfigError(f"kv_cache_dtype={kv_cache_dtype!r}: must be auto or int8.")
    if kernel not in (None, "pallas"):
        raise ConfigError(f"kernel={kernel!r}: must be pallas, or left out.")
    if prompt is not None and prompts_file is not None:
        raise ConfigError("prompt and --prompts-file: exclude each other; leave one of them out.")
    interactive = prompt is None and prompts_file is None
    if interactive and not sys.stdin.isatty():
        raise ConfigError("prompt: is missing; give one, a --prompts-file, or start on a terminal for a conversation.")

    layout = options.read_mesh(mesh, tp)
    weights = load_weights(model)
    tokenizer = Tokenizer.from_files(weights.reader.side_files(), weights.config)
    params = _sampling(
        tokenizer,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        stop=tuple(stop or ()),
        seed=seed,
    )
    texts = [] if interactive else [prompt] if prompt is not None else _read_prompts(prompts_file)
    encode = (lambda text: tokenizer.encode_chat([{"role": "user", "content": text}])) if chat else tokenizer.encode
    prompts = [encode(text) for text in texts]
    context = weights.config.max_positions
    longest = max((len(ids) for ids in prompts), default=_CHAT_CONTEXT - max_tokens)
    max_len = min(context, longest + max_tokens) if max_model_len is None else max_model_len
    if not 0 < max_len <= context:
        raise ConfigError(f"max_model_len={max_len}: must be positive and at most the model's context, {context}.")

    from llmq.engine.check import check_prompt
    from llmq.engine.generate import Session

    for ids in prompts:
        check_prompt(ids, params, max_len, weights.config.vocab_size)
    opened = _open(
        weights,
        backend,
        stats,
        device=device,
        dtype=dtype,
        max_len=max_len,
        kv_int8=kv_cache_dtype == "int8",
        kernel=kernel,
        num_threads=threads,
        compile=compiled,
        **layout,
    )
    session = Session(opened, tokenizer)
    if interactive:
        _converse(session, tokenizer, params, chat or tokenizer.has_chat_template, stats)
        return
    for text, ids in zip(texts, prompts, strict=True):
        if len(prompts) > 1:
            print(f">>> {text}")
        _answer(session, ids, params, stats)


def _sampling(tokenizer: "Tokenizer", **given: Any) -> "SamplingParams":
    """The user's parameters over the model's own defaults; what the model changes is said."""
    from llmq.commands.terminal import say
    from llmq.engine.sampling import SamplingParams

    named = {key: value for key, value in given.items() if value is not None}
    used = {key: value for key, value in tokenizer.generation_defaults.items() if key not in named}
    if used:
        say(f"sampling defaults of the model: {_listed(used)}")
    try:
        validated(SamplingParams, **used)
    except ConfigError as err:
        raise ConfigError(
            f"generation_config.json: {str(err)[:-1]}; name your own with the option of that name."
        ) from err
    return validated(SamplingParams, **{**used, **named})


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in values.items())


def _read_prompts(path: Path | None) -> list[str]:
    assert path
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"prompts_file={path}: cannot be read as UTF-8 text ({err}).") from err
    prompts = [line.removesuffix("\r") for line in text.split("\n") if line.strip()]
    if not prompts:
        raise ConfigError(f"prompts_file={path}: holds no prompt; write one a line.")
    return prompts


def _open(weights: "ModelWeights", backend: str, stats: bool, *, device: str | None, **chosen: Any) -> "InferenceModel":
    from llmq.backends.base import ModelOptions
    from llmq.backends.registry import select_backend
    from llmq.commands.terminal import say

    plugin, device = select_backend(backend, device)
    opened = plugin.open_model(weights, ModelOptions(device=device, **chosen))
    if stats or not plugin.has_accelerator():
        say(f"backend {plugin.name} on {opened.caps.device}, {opened.caps.dtype}, cache in {opened.caps.kv_dtype}")
    if stats:
        for kernel in opened.caps.kernels:
            say(f"  {kernel}")
    return opened


def _answer(session: "Session", prompt: list[int], params: "SamplingParams", stats: bool) -> str:
    from llmq.commands.terminal import say

    pieces = []
    for piece in session.generate(prompt, params):
        print(piece, end="", flush=True)
        pieces.append(piece)
    print(flush=True)
    if stats:
        done = session.last
        rate = (len(done.tokens) - 1) / done.decode_seconds if done.decode_seconds else 0.0
        seed = f", seed {done.seed}" if params.temperature else ""
        fresh = done.prompt_tokens - done.cached_tokens
        say(
            f"prompt {done.prompt_tokens} tokens ({done.cached_tokens} cached), {fresh / max(done.prefill_seconds, 1e-9):.0f} tokens/s; "
            f"generated {len(done.tokens)} tokens, {rate:.1f} tokens/s, finished by {done.finish_reason}{seed}"
        )
    return "".join(pieces)


def _converse(session: "Session", tokenizer: "Tokenizer", params: "SamplingParams", chat: bool, stats: bool) -> None:
    """A conversation on a terminal, until end of file or interrupt."""
    from llmq.commands.terminal import say

    say("A conversation: end it with Ctrl-D, interrupt an answer with Ctrl-C.")
    messages: list[dict[str, str]] = []
    while True:
        try:
            text = input("> ")
        except (EOFError, KeyboardInterrupt):
            say("")
            return
        if not text.strip():
            continue
        messages.append({"role": "user", "content": text})
        prompt = tokenizer.encode_chat(messages) if chat else tokenizer.encode(text)
        try:
            messages.append({"role": "assistant", "content": _answer(session, prompt, params, stats)})
        except KeyboardInterrupt:
            messages.pop()
            say("\n(interrupted; the question is forgotten)")
        except ConfigError as err:
            messages.pop()
            say(f"llmq: {err}")
