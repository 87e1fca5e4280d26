"""The routes: each reads a body off the event loop, asks the engine and answers in OpenAI's shape."""

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from secrets import token_hex
from typing import Any, TypeVar

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from llmq.backends.base import Caps
from llmq.engine import request as engine
from llmq.engine.sampling import SamplingParams
from llmq.engine.service import EngineService
from llmq.errors import LlmqError
from llmq.model.tokenizer import Tokenizer
from llmq.serve.answer import Answer, all_events, collect, growing
from llmq.serve.chat import ChatAnswer, prepare_chat
from llmq.serve.completions import CompletionAnswer, prepare_completion
from llmq.serve.errors import ApiError, ClientGoneError, answer_of, invalid
from llmq.serve.live import Live
from llmq.serve.messages import template_messages, template_tools
from llmq.serve.metrics import Metrics
from llmq.serve.middleware import KeyCheck, RequestLog
from llmq.serve.openapi import document
from llmq.serve.page import page
from llmq.serve.params import sampling_defaults
from llmq.serve.prompts import Prompts
from llmq.serve.protocol import Body, ChatBody, CompletionBody, DetokenizeBody, SamplingBody, TokenizeBody, parse
from llmq.serve.stream import EventStream

B = TypeVar("B", bound=Body)

#: A body that is too large is read on up to this many times the limit, so that the client, who is
#: still sending, gets to read the answer.
_READ_ON = 16

_log = logging.getLogger("llmq.serve")


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How to serve.

    Attributes:
        model_names: Names of the model; answers carry the one that was asked for.
        keys: API keys; none lets everybody in.
        max_body_bytes: Largest request.
        request_timeout: Seconds that a request may take; None sets no limit.
        cors_origins: Web sites whose pages may use the server.
    """

    model_names: tuple[str, ...]
    keys: tuple[str, ...] = ()
    max_body_bytes: int = 8 << 20
    request_timeout: float | None = None
    cors_origins: tuple[str, ...] = ()


class Server:
    """The HTTP server's state and its endpoints.

    Args:
        service: The engine.
        tokenizer: Of the same model.
        caps: The open model.
        metrics: The engine's observer.
        options: How to serve.

    Attributes:
        live: Requests being answered.
        app: The ASGI application.
    """

    def __init__(
        self, service: EngineService, tokenizer: Tokenizer, caps: Caps, metrics: Metrics, options: ServerOptions
    ) -> None:
        self._service = service
        self._tokenizer = tokenizer
        self._caps = caps
        self._metrics = metrics
        self._options = options
        self._prompts = Prompts(tokenizer, caps)
        self._defaults = sampling_defaults(tokenizer.generation_defaults)
        self._started = int(time.time())
        self.live = Live(options.request_timeout)
        metrics.watch(service.status)
        self.app = self._app()

    def _app(self) -> Starlette:
        routes = [
            Route("/v1/models", self._models),
            Route("/v1/models/{model:path}", self._model),
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/detokenize", self._detokenize, methods=["POST"]),
            Route("/tokenizer_info", self._tokenizer_info),
            Route("/health", self._health),
            Route("/ready", self._ready),
            Route("/metrics", self._scrape),
            Route("/version", self._version),
            Route("/openapi.json", self._openapi),
            Route("/", self._page),
        ]
        known = frozenset(route.path for route in routes)
        middleware = [
            Middleware(RequestLog, responded=self._metrics.responded, routes=known, refuse=_refusal),
            Middleware(KeyCheck, keys=self._options.keys, page=page, refuse=_refusal),
        ]
        if self._options.cors_origins:
            cors = Middleware(
                CORSMiddleware,
                allow_origins=self._options.cors_origins,
                allow_methods=["GET", "POST"],
                allow_headers=["Authorization", "Content-Type", "X-Request-Id"],
                expose_headers=["X-Request-Id"],
            )
            middleware.insert(1, cors)  # a preflight carries no key
        handlers = dict.fromkeys((ApiError, LlmqError, HTTPException, ClientGoneError, ClientDisconnect), _on_error)
        app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)
        app.router.redirect_slashes = False
        return app

    async def _read(self, request: Request, cls: type[B]) -> B:
        limit = self._options.max_body_bytes
        size, pieces = 0, []
        too_large = int(request.headers.get("content-length") or 0) > limit
        async for piece in request.stream():
            size += len(piece)
            too_large = too_large or size > limit
            if not too_large:
                pieces.append(piece)
            elif size > limit * _READ_ON:
                break
        if too_large:
            raise ApiError(413, f"The body is larger than {limit} bytes.", headers={"Connection": "close"})
        body, num_unknown = await self._service.run_in_pool(parse, cls, b"".join(pieces))
        if num_unknown:
            self._metrics.unknown_fields(num_unknown)
        return body

    def _name(self, wanted: str | None) -> str:
        names = self._options.model_names
        if wanted is None:
            return names[0]
        if wanted not in names:
            message = f"The model {wanted[:200]!r} does not exist; this server has {', '.join(names)}."
            raise ApiError(404, message, param="model", code="model_not_found")
        return wanted

    async def _completions(self, request: Request) -> Response:
        body = await self._read(request, CompletionBody)
        name = self._name(body.model)
        call = await self._service.run_in_pool(prepare_completion, body, self._prompts, self._defaults)
        prompts = [prompt.tokens for prompt in call.prompts]
        ident = f"cmpl-{token_hex(16)}"
        answer = CompletionAnswer(call, self._prompts, name, ident)
        return await self._answer(request, body, answer, ident, prompts, call.params, "response_format")

    async def _chat(self, request: Request) -> Response:
        body = await self._read(request, ChatBody)
        name = self._name(body.model)
        call = await self._service.run_in_pool(prepare_chat, body, self._prompts, self._defaults)
        ident = f"chatcmpl-{token_hex(16)}"
        answer = ChatAnswer(call, self._prompts, name, ident)
        grammar = "tools" if call.tools.grammar else "response_format"
        return await self._answer(request, body, answer, ident, [call.prompt], [call.params], grammar)

    async def _answer(
        self,
        request: Request,
        body: SamplingBody,
        answer: Answer,
        ident: str,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        grammar: str,
    ) -> Response:
        if body.stream_options is not None and not body.stream:
            raise invalid("stream_options: needs stream; set it to true.", "stream_options")
        salt = request.scope["state"].get("salt", "")
        requests = [
            engine.Request(tuple(prompt), one, salt, f"{ident}-{i}")
            for i, (prompt, one) in enumerate(zip(prompts, params, strict=True))
        ]
        events = all_events(self._service, requests, self._caps.num_slots, grammar)
        if body.stream:
            usage = bool(body.stream_options and body.stream_options.include_usage)
            return EventStream(self.live, growing(answer, events, include_usage=usage))
        return _json(await self.live.run(request.receive, collect(answer, events)))

    async def _tokenize(self, request: Request) -> Response:
        body = await self._read(request, TokenizeBody)
        self._name(body.model)
        tokens = await self._service.run_in_pool(self._tokens, body)
        return _json({"count": len(tokens), "max_model_len": self._caps.max_len, "tokens": tokens})

    def _tokens(self, body: TokenizeBody) -> Sequence[int]:
        if (body.prompt is None) == (body.messages is None):
            raise invalid("prompt: give it or messages, one of them.", "prompt")
        if body.messages is not None:
            return self._prompts.chat(
                template_messages(body.messages, self._prompts.template),
                tools=template_tools(body.tools) if body.tools else None,
                options=body.chat_template_kwargs or {},
                add_generation_prompt=body.add_generation_prompt is not False,
            )
        assert body.prompt is not None
        return (
            self._tokenizer.encode(body.prompt)
            if body.add_special_tokens is not False
            else self._prompts.without_bos(body.prompt)
        )

    async def _detokenize(self, request: Request) -> Response:
        body = await self._read(request, DetokenizeBody)
        self._name(body.model)
        self._prompts.check_tokens(body.tokens, "tokens")
        return _json({"prompt": await self._service.run_in_pool(self._prompts.text, body.tokens)})

    async def _tokenizer_info(self, _request: Request) -> Response:
        special = dict(self._tokenizer.special_tokens)
        eos = min(self._tokenizer.eos_token_ids, default=None)
        if "eos_token" not in special and eos is not None:
            special["eos_token"] = self._tokenizer.token_bytes(eos).decode()
        about = {
            "vocab_size": self._tokenizer.vocab_size,
            "model_max_length": self._caps.max_len,
            "add_bos_token": self._tokenizer.adds_bos,
        }
        return _json({**special, **about, "chat_template": self._tokenizer.chat_template})

    async def _models(self, _request: Request) -> Response:
        return _json({"object": "list", "data": [self._describe(name) for name in self._options.model_names]})

    async def _model(self, request: Request) -> Response:
        return _json(self._describe(self._name(request.path_params["model"])))

    def _describe(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "llmq",
            "max_model_len": self._caps.max_len,
        }

    async def _health(self, _request: Request) -> Response:
        state = self._service.state
        return _json({"status": state}, status=503 if state in ("dead", "stopped") else 200)

    async def _ready(self, _request: Request) -> Response:
        state = self._service.state
        return _json({"status": state}, status=200 if state == "ready" else 503)

    async def _scrape(self, _request: Request) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _version(self, _request: Request) -> Response:
        return _json({"version": version("llmq")})

    async def _openapi(self, _request: Request) -> Response:
        described = document(self._options.model_names, bool(self._options.keys))
        return Response(json.dumps(described), media_type="application/json")  # orjson ends at 64 bits

    async def _page(self, _request: Request) -> Response:
        return page(200)


def _json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(value), status, headers, "application/json")


def _refusal(err: ApiError) -> Response:
    return _json(err.body, err.status, dict(err.headers))


async def _on_error(_request: Request, err: Exception) -> Response:
    if isinstance(err, ClientGoneError | ClientDisconnect):
        return Response(status_code=499)  # nobody reads it
    if isinstance(err, HTTPException):
        message = "There is nothing at this address." if err.status_code == 404 else f"{err.detail}."
        err = ApiError(err.status_code, message, headers=err.headers or {})
    answer = answer_of(err)
    if answer.status == 500:
        _log.error("a request failed", exc_info=err)
    return _refusal(answer)
