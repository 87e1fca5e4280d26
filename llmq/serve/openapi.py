"""The OpenAPI document, from the bodies' types and the ranges of `SamplingParams`."""

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel

from llmq.engine.sampling import SamplingParams
from llmq.serve.middleware import OPEN_PATHS
from llmq.serve.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

#: Path -> body, and what it answers.
_POSTS: Mapping[str, tuple[type[BaseModel], str]] = {
    "/v1/completions": (CompletionBody, "Text that continues a prompt."),
    "/v1/chat/completions": (ChatBody, "The next turn of a conversation."),
    "/tokenize": (TokenizeBody, "Token ids of a prompt or a conversation."),
    "/detokenize": (DetokenizeBody, "Text of token ids."),
}

_GETS: Mapping[str, str] = {
    "/v1/models": "The models there are.",
    "/v1/models/{model}": "One of them.",
    "/tokenizer_info": "Special tokens and the chat template.",
    "/health": "Whether the server lives.",
    "/ready": "Whether it takes requests.",
    "/metrics": "Metrics for Prometheus.",
    "/version": "The version of llmq.",
}

_ERRORS: Mapping[str, str] = {
    "400": "The request breaks a rule.",
    "401": "The API key is missing or wrong.",
    "404": "There is no such model or address.",
    "413": "The body is too large.",
    "429": "The queue is full.",
    "500": "The server failed.",
    "503": "The server is shutting down, or its engine is dead.",
    "504": "The request took too long.",
}

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}

#: Keywords of a JSON schema that narrow a type.
_RANGES = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "maxItems", "minLength", "maxLength")


def document(model_names: Sequence[str], needs_key: bool) -> dict[str, Any]:
    """Describe the API.

    Args:
        model_names: The only values of ``model``.
        needs_key: Whether requests carry an API key.

    Returns:
        OpenAPI 3.1.
    """
    schemas: dict[str, Any] = {"Error": _ERROR}
    paths: dict[str, Any] = {}
    for path, (body, summary) in _POSTS.items():
        schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {})
        schema["properties"]["model"] = {"enum": list(model_names)}
        _narrow(schema["properties"])
        schemas[body.__name__] = schema
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{body.__name__}"}}}
        answers = (
            {"application/json": {}, "text/event-stream": {}} if path.startswith("/v1/") else {"application/json": {}}
        )
        paths[path] = {
            "post": {
                "summary": summary,
                "requestBody": {"required": True, "content": content},
                "responses": {"200": {"description": summary, "content": answers}, **_errors(*_ERRORS)},
            }
        }
    for path, summary in _GETS.items():
        media = "text/plain" if path == "/metrics" else "application/json"
        get: dict[str, Any] = {
            "summary": summary,
            "responses": {"200": {"description": summary, "content": {media: {}}}, **_errors("401", "404", "500")},
        }
        if path in ("/health", "/ready"):
            get["responses"]["503"] = {"description": "Not now.", "content": {media: {}}}
        if path in OPEN_PATHS:
            get["security"] = []
        if "{" in path:
            name = {"name": "model", "in": "path", "required": True, "schema": {"enum": list(model_names)}}
            get["parameters"] = [name]
        paths[path] = {"get": get}
    components: dict[str, Any] = {"schemas": schemas}
    if needs_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "llmq", "version": version("llmq"), "description": "OpenAI's API over a quantized model."},
        "paths": paths,
        "components": components,
        **({"security": [{"key": []}]} if needs_key else {}),
    }


def _errors(*statuses: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {status: {"description": _ERRORS[status], "content": content} for status in statuses}


def _narrow(properties: dict[str, Any]) -> None:
    """Give the fields that are also in `SamplingParams` the ranges they have there."""
    for name, schema in SamplingParams.model_json_schema()["properties"].items():
        for branch in properties.get(name, {}).get("anyOf", []):
            for source in (schema, *schema.get("anyOf", [])):
                if source.get("type") == branch.get("type"):
                    branch.update({key: source[key] for key in _RANGES if key in source})
