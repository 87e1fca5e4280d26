"""The protocol as a client sees it: requests, streams, errors, metrics."""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import httpx
from openai import OpenAI
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

#: Greedy, and as many tokens as asked for.
FIXED = {"temperature": 0, "ignore_eos": True}

M = TypeVar("M", bound=BaseModel)


def parse_json(text: str | bytes) -> Any:
    """JSON as the standard has it: NaN and infinities are no numbers."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def strict(cls: type[M], value: Any) -> M:
    """`value` as the SDK's type: no field missing, of another type, or unknown to it."""
    parsed = cls.model_validate(value, strict=True)
    unknown = sorted(_unknown(parsed, cls.__name__))
    assert not unknown, f"fields that the protocol does not have: {', '.join(unknown)}"
    return parsed


def _unknown(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, BaseModel):
        yield from (f"{path}.{name}" for name in value.model_extra or ())
        for name in type(value).model_fields:
            yield from _unknown(getattr(value, name), f"{path}.{name}")
    elif isinstance(value, list):
        for item in value:
            yield from _unknown(item, f"{path}[]")


@dataclass(frozen=True)
class Events:
    """A stream that was read to its end."""

    chunks: Sequence[dict[str, Any]]

    def text(self, choice: int = 0) -> str:
        """What one answer said."""
        return "".join(part.get("text") or (part.get("delta") or {}).get("content") or "" for part in self.of(choice))

    def of(self, choice: int) -> list[dict[str, Any]]:
        """The parts of one answer."""
        return [part for chunk in self.chunks for part in chunk["choices"] if part["index"] == choice]

    def finish_reasons(self, choice: int = 0) -> list[str]:
        """All that were sent; there must be one."""
        return [part["finish_reason"] for part in self.of(choice) if part.get("finish_reason")]

    @property
    def usages(self) -> list[dict[str, Any]]:
        """All that were sent."""
        return [chunk["usage"] for chunk in self.chunks if chunk.get("usage")]


def parse_events(body: str) -> Events:
    """Check the framing of a whole stream, and take it apart."""
    assert body.endswith("\n\n")
    blocks = [block for block in body.replace("\r\n", "\n").split("\n\n") if block]
    blocks = [block for block in blocks if not block.startswith(":")]
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks), blocks
    assert blocks[-1] == "data: [DONE]"
    return Events([parse_json(block.removeprefix("data: ")) for block in blocks[:-1]])


class Api:
    """A server under test.

    Attributes:
        base_url: Without ``/v1``.
        key: Its API key; None when it needs none.
        http: A plain client that knows both.
    """

    def __init__(self, base_url: str, key: str | None = None) -> None:
        self.base_url, self.key = base_url, key
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self.http = httpx.Client(base_url=base_url, headers=headers, timeout=120)

    def close(self) -> None:
        """Hang up."""
        self.http.close()
        self.openai.close()

    @cached_property
    def models(self) -> list[dict[str, Any]]:
        return self.http.get("/v1/models").json()["data"]

    @cached_property
    def model(self) -> str:
        return self.models[0]["id"]

    @cached_property
    def context(self) -> int:
        """Tokens of a prompt and its answer together."""
        return self.tokenize("x")["max_model_len"]

    @cached_property
    def tokenizer(self) -> dict[str, Any]:
        return self.http.get("/tokenizer_info").json()

    @cached_property
    def openai(self) -> OpenAI:
        return OpenAI(
            base_url=f"{self.base_url}/v1", api_key=self.key or "none", max_retries=0, _strict_response_validation=True
        )

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json={"model": self.model, **body})

    def raw(self, path: str, content: str | bytes) -> httpx.Response:
        return self.http.post(path, content=content, headers={"content-type": "application/json"})

    def complete(self, prompt: Any, **body: Any) -> dict[str, Any]:
        """An answer of ``/v1/completions``, checked against the SDK's types."""
        value = _ok(self.post(COMPLETIONS, prompt=prompt, **body))
        strict(Completion, _filled(COMPLETIONS, value))
        return value

    def chat(self, messages: Any, **body: Any) -> dict[str, Any]:
        """An answer of ``/v1/chat/completions``, checked against the SDK's types."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        value = _ok(self.post(CHAT, messages=messages, **body))
        strict(ChatCompletion, value)
        return value

    def stream(self, path: str, **body: Any) -> Events:
        """A whole stream, each chunk checked against the SDK's types."""
        response = self.post(path, stream=True, **body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].split(";")[0] == "text/event-stream"
        events = parse_events(response.text)
        for chunk in events.chunks:
            strict(ChatCompletionChunk if path == CHAT else Completion, _filled(path, chunk))
        return events

    def tokenize(self, prompt: str, **body: Any) -> dict[str, Any]:
        return _ok(self.post("/tokenize", prompt=prompt, **body))

    def tokens(self, prompt: str, **body: Any) -> list[int]:
        return self.tokenize(prompt, **body)["tokens"]

    def letter(self, character: str) -> int:
        """The token of one letter."""
        ids = self.tokens(character, add_special_tokens=False)
        return ids[-1]

    def metrics(self) -> dict[str, float]:
        """Sums over labels: samples by name."""
        found: dict[str, float] = {}
        response = self.http.get("/metrics")
        assert response.status_code == 200, response.text
        for family in text_string_to_metric_families(response.text):
            for sample in family.samples:
                if "le" not in sample.labels:
                    found[sample.name] = found.get(sample.name, 0) + sample.value
        return found

    def slots_free(self) -> float:
        return self.metrics()["llmq:slots_free"]

    @contextmanager
    def streaming(self, path: str, **body: Any) -> Iterator[Iterator[str]]:
        """A stream that is open; leaving the block hangs up."""
        json = {"model": self.model, "stream": True, **body}
        with self.http.stream("POST", path, json=json) as response:
            assert response.status_code == 200, response.read()
            yield response.iter_lines()


def _filled(path: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """`value` with the nulls filled that the SDK's types of completions have no place for.

    They are a finish reason that is still open, and what there is none of before the first token.
    """
    if path == CHAT:
        return dict(value)
    choices = [{**choice, "finish_reason": choice["finish_reason"] or "stop"} for choice in value["choices"]]
    for choice in choices:
        if choice["logprobs"] is not None:
            likely, top = choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]
            choice["logprobs"] = {
                **choice["logprobs"],
                "token_logprobs": [0.0 if i == 0 and x is None else x for i, x in enumerate(likely)],
                "top_logprobs": top and [{} if i == 0 and x is None else x for i, x in enumerate(top)],
            }
    return {**value, "choices": choices}


def _ok(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].split(";")[0] == "application/json"
    return parse_json(response.text)


def refused(
    response: httpx.Response,
    status: int = 400,
    *,
    param: str | None = None,
    kind: str | None = None,
    code: str | None = None,
) -> str:
    """Check an error, and give its message."""
    assert response.status_code == status, f"{response.status_code}: {response.text[:500]}"
    error = parse_json(response.text)["error"]
    assert {"message", "type", "param", "code"} <= set(error), error
    assert isinstance(error["message"], str)
    assert error["message"]
    assert "Traceback" not in response.text
    if status == 400:
        assert error["type"] == "invalid_request_error", error
    if param is not None:
        assert error["param"] is not None, error
        assert error["param"].split(".")[0].split("[")[0] == param, error
    if kind is not None:
        assert error["type"] == kind, error
    if code is not None:
        assert error["code"] == code, error
    return error["message"]


def eventually(holds: Callable[[], bool], within: float) -> float:
    """Seconds until something holds; an error if it does not in time."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < within, f"did not happen within {within} s"
        time.sleep(0.01)
    return time.monotonic() - began


def finite(values: Sequence[float | None]) -> bool:
    """Whether all numbers are."""
    return all(value is None or math.isfinite(value) for value in values)
