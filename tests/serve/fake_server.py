"""A real server in front of a model that is not: ``python -m tests.serve.fake_server --port N``."""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from llmq.engine.engine import EngineLimits
from llmq.engine.service import EngineService
from llmq.errors import LlmqError
from llmq.model.config import ModelConfig
from llmq.model.tokenizer import Tokenizer
from llmq.serve.app import Server, ServerOptions
from llmq.serve.lifecycle import listen, serve
from llmq.serve.logs import log_to_stderr
from llmq.serve.metrics import Metrics
from tests.fake import FakeModel, echo, script
from tests.tiny import byte_tokenizer_files, tiny_config

MODEL = "fake"

#: Like the tokenizer's own, and with tools.
TEMPLATE = (
    "{% if tools %}[tools]{{ tools | tojson }}{# calls come as <tool_call> #}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--api-key-file", type=Path)
    parser.add_argument("--served-model-name", action="append")
    parser.add_argument("--max-num-seqs", type=int, default=4)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--max-queue", type=int, default=64)
    parser.add_argument("--queue-timeout", type=float)
    parser.add_argument("--request-timeout", type=float)
    parser.add_argument("--drain-timeout", type=float, default=30)
    parser.add_argument("--max-body-bytes", type=int, default=8 << 20)
    parser.add_argument("--cors-origin", action="append", default=[])
    parser.add_argument("--step-seconds", type=float, default=0.002, help="what a step takes")
    parser.add_argument("--fault", help="METHOD:CALL that fails, as in decode:5")
    parser.add_argument("--answer", type=Path, help="what it says, instead of the prompt again")
    parser.add_argument("--chat-template", type=Path, help="instead of the tokenizer's own")
    return parser.parse_args(arguments)


def build(given: argparse.Namespace) -> tuple[Server, EngineService]:
    files = byte_tokenizer_files()
    files["chat_template.jinja"] = given.chat_template.read_bytes() if given.chat_template else TEMPLATE.encode()
    tokenizer = Tokenizer.from_files(files, ModelConfig.from_dict(tiny_config()))
    method, _, call = (given.fault or "").partition(":")
    said = tokenizer.encode(given.answer.read_text())[1:] if given.answer else None
    model = FakeModel(
        echo if said is None else script(*said),
        num_slots=given.max_num_seqs,
        max_len=given.max_model_len,
        step_seconds=given.step_seconds,
        fault=(method, int(call)) if method else None,
    )
    names = tuple(given.served_model_name or [MODEL])
    metrics = Metrics(names[0])
    service = EngineService(model, tokenizer, EngineLimits(given.max_queue, given.queue_timeout), metrics)
    keys = tuple(given.api_key_file.read_text().split()) if given.api_key_file else ()
    server = Server(
        service,
        tokenizer,
        model.caps,
        metrics,
        ServerOptions(names, keys, given.max_body_bytes, given.request_timeout, tuple(given.cors_origin)),
    )
    return server, service


def main() -> int:
    given = options()
    log_to_stderr()
    try:
        sock = listen(given.host, given.port)
    except LlmqError as err:
        print(f"llmq: {err}", file=sys.stderr)
        return 2
    server, service = build(given)

    def ready() -> None:
        print(f"http://{given.host}:{sock.getsockname()[1]}", flush=True)

    return asyncio.run(serve(server, service, sock, drain_timeout=given.drain_timeout, on_ready=ready))


if __name__ == "__main__":
    sys.exit(main())
