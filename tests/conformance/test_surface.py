"""Every endpoint: what is there, what it says of itself, and who may ask."""

import subprocess
from pathlib import Path

import httpx
import pytest
from openai.types import Model

from tests.conformance.api import CHAT, COMPLETIONS, FIXED, Api, parse_events, parse_json, refused, strict

#: Names of the metrics, without the prefix: vLLM's, and two of ours.
METRICS = (
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
    "prefix_cache_queries_total", "prefix_cache_hits_total", "prompt_tokens_total", "generation_tokens_total",
    "request_success_total", "time_to_first_token_seconds_count", "time_per_output_token_seconds_count",
    "e2e_request_latency_seconds_count", "request_queue_time_seconds_count", "request_prefill_time_seconds_count",
    "request_decode_time_seconds_count", "compile_total", "slots_free",
)  # fmt: skip

GETS = ("/v1/models", "/tokenizer_info", "/ready", "/metrics", "/version", "/", "/openapi.json")
POSTS = (COMPLETIONS, CHAT, "/tokenize", "/detokenize")


class TestModels:
    def test_list(self, server: Api) -> None:
        value = parse_json(server.http.get("/v1/models").text)
        assert value["object"] == "list"
        assert value["data"]
        for row in value["data"]:
            parsed = Model.model_validate(row, strict=True)
            assert parsed.object == "model"
            assert parsed.created > 1_600_000_000

    def test_the_sdk_lists_and_retrieves(self, server: Api) -> None:
        listed = server.openai.models.list().data
        assert [model.id for model in listed] == [row["id"] for row in server.models]
        for model in listed:
            assert server.openai.models.retrieve(model.id).id == model.id

    def test_one(self, server: Api) -> None:
        assert parse_json(server.http.get(f"/v1/models/{server.model}").text)["id"] == server.model

    @pytest.mark.parametrize("name", ["no-such-model", "no/such/model", "%2e%2e", "x" * 300])
    def test_unknown(self, server: Api, name: str) -> None:
        refused(server.http.get(f"/v1/models/{name}"), 404)

    @pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
    def test_requests_for_an_unknown_model(self, server: Api, path: str) -> None:
        body = {"prompt": "x"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
        response = server.http.post(path, json={"model": "no-such-model", **body})
        assert "no-such-model" in refused(response, 404, code="model_not_found")

    def test_answers_name_the_model_that_was_asked(self, server: Api) -> None:
        for row in server.models:
            answer = server.post(COMPLETIONS, prompt="x", max_tokens=1) if row["id"] == server.model else None
            assert answer is None or answer.json()["model"] == row["id"]


class TestOperations:
    def test_health_needs_no_key(self, server: Api) -> None:
        assert httpx.get(f"{server.base_url}/health").status_code == 200

    def test_ready(self, server: Api) -> None:
        assert server.http.get("/ready").status_code == 200

    def test_version(self, server: Api) -> None:
        assert isinstance(parse_json(server.http.get("/version").text)["version"], str)

    def test_the_page(self, server: Api) -> None:
        response = server.http.get("/")
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/html")
        assert "<html" in response.text
        for reach in ('src="http', 'href="http', "@import", "//cdn"):
            assert reach not in response.text, "the page must work offline"

    def test_metrics_have_vllms_names(self, server: Api) -> None:
        server.complete("x", max_tokens=3, **FIXED)
        found = server.metrics()
        assert [name for name in METRICS if f"llmq:{name}" not in found] == []

    def test_metrics_count(self, server: Api) -> None:
        before = server.metrics()
        usage = server.complete("count these", max_tokens=5, **FIXED)["usage"]
        after = server.metrics()
        grown = {name: after[f"llmq:{name}"] - before.get(f"llmq:{name}", 0) for name in METRICS}
        assert grown["prompt_tokens_total"] == usage["prompt_tokens"]
        assert grown["generation_tokens_total"] == usage["completion_tokens"] == 5
        for name in ("request_success_total", "time_to_first_token_seconds_count", "e2e_request_latency_seconds_count"):
            assert grown[name] == 1, name
        assert grown["compile_total"] == 0
        assert grown["slots_free"] == 0
        assert after["llmq:num_requests_running"] == after["llmq:num_requests_waiting"] == 0

    @pytest.mark.parametrize("path", ["/nowhere", "/v1", "/v1/nowhere", "/v2/models", "/health/x", "/../etc/passwd"])
    def test_unknown_addresses(self, server: Api, path: str) -> None:
        refused(server.http.get(path), 404)
        refused(server.http.post(path, json={}), 404)

    @pytest.mark.parametrize("path", POSTS)
    def test_wrong_methods(self, server: Api, path: str) -> None:
        response = server.http.get(path)
        refused(response, 405)
        assert response.headers["allow"] == "POST"

    def test_the_document_lists_every_endpoint(self, server: Api) -> None:
        paths = set(server.http.get("/openapi.json").json()["paths"])
        wanted = {*POSTS, "/v1/models", "/tokenizer_info", "/health", "/ready", "/metrics", "/version"}
        assert wanted <= paths
        assert any(path.startswith("/v1/models/{") for path in paths)

    def test_unknown_fields_are_ignored_and_counted(self, server: Api) -> None:
        before = server.metrics()
        server.complete("x", max_tokens=1, a_field_nobody_knows=1)
        grown = {name for name, value in server.metrics().items() if value > before.get(name, 0)}
        assert any("unknown" in name or "ignored" in name for name in grown), sorted(grown)


class TestKeys:
    @pytest.fixture(autouse=True)
    def _needs_a_key(self, server: Api) -> None:
        if server.key is None:
            pytest.skip("the server needs no key")

    @pytest.mark.parametrize(
        "header",
        [None, "", "Bearer", "Bearer wrong", "Basic {key}", "{key}", "Bearer {key}x", "Bearer \xe9"],
    )
    @pytest.mark.parametrize("path", [*GETS, "/nowhere", "/docs"])
    def test_everything_but_health_needs_the_key(self, server: Api, path: str, header: str | None) -> None:
        """vllm#58144: what lies outside /v1 was open to everyone."""
        sent = {} if header is None else {"authorization": header.replace("{key}", server.key or "").encode("latin-1")}
        response = httpx.get(f"{server.base_url}{path}", headers=sent)
        refused(response, 401)
        assert server.key not in response.text

    @pytest.mark.parametrize("path", POSTS)
    def test_posts_need_it_before_their_body_is_read(self, server: Api, path: str) -> None:
        refused(httpx.post(f"{server.base_url}{path}", content=b"{"), 401)

    def test_the_scheme_has_no_case(self, server: Api) -> None:
        assert (
            httpx.get(f"{server.base_url}/v1/models", headers={"authorization": f"bearer {server.key}"}).status_code
            == 200
        )

    def test_the_key_is_in_no_answer(self, server: Api) -> None:
        for path in GETS:
            assert server.key not in server.http.get(path).text, path


def test_curl_reads_a_stream(server: Api, tmp_path: Path) -> None:
    (tmp_path / "headers").write_text(f"authorization: Bearer {server.key}\ncontent-type: application/json\n")
    body = f'{{"model": "{server.model}", "prompt": "x", "max_tokens": 6, "stream": true, "temperature": 0, "ignore_eos": true}}'
    command = ["curl", "-sN", "--fail", "-H", f"@{tmp_path / 'headers'}", "-d", body, server.base_url + COMPLETIONS]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    events = parse_events(done.stdout)
    assert events.text() == server.complete("x", max_tokens=6, **FIXED)["choices"][0]["text"]
    assert events.finish_reasons() == ["length"]


class TestTokens:
    TEXTS = (
        "x",
        "Hello, world!",
        " leading and trailing ",
        "naïve café 東京 \U0001f680\U0001f468\u200d\U0001f469",
        "a\n\n\tb\r\nc",
        "\x00\x7f",
    )

    @pytest.mark.parametrize("text", TEXTS)
    def test_detokenize_inverts_tokenize(self, server: Api, text: str) -> None:
        ids = server.tokens(text, add_special_tokens=False)
        assert server.post("/detokenize", tokens=ids).json() == {"prompt": text}

    def test_count_and_context(self, server: Api) -> None:
        value = server.tokenize("Hello, world!")
        assert value["count"] == len(value["tokens"]) > 1
        assert value["max_model_len"] >= 64

    def test_no_model_needs_to_be_named(self, server: Api) -> None:
        """lm-eval's remote tokenizer does not."""
        ids = server.http.post("/tokenize", json={"prompt": "Hello", "add_special_tokens": False}).json()["tokens"]
        assert server.http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "Hello"}

    def test_tokenizer_info(self, server: Api) -> None:
        """What lm-eval reads: names of special tokens that are one token each, and the template."""
        info = server.tokenizer
        assert isinstance(info["chat_template"], str)
        for name in ("eos_token", "bos_token", "pad_token"):
            if info.get(name) is not None:
                assert len(server.tokens(info[name], add_special_tokens=False)) == 1, name
        assert info["eos_token"] is not None

    @pytest.mark.parametrize("text", TEXTS)
    def test_usage_counts_what_tokenize_says(self, server: Api, text: str) -> None:
        assert server.complete(text, max_tokens=1)["usage"]["prompt_tokens"] == server.tokenize(text)["count"]
        messages = [{"role": "user", "content": text}]
        rendered = server.http.post("/tokenize", json={"messages": messages}).json()
        assert server.chat(messages, max_tokens=1)["usage"]["prompt_tokens"] == rendered["count"]

    def test_ids_and_text_are_the_same_prompt(self, server: Api) -> None:
        text = "The quick brown fox"
        as_text, as_ids = (
            server.complete(prompt, max_tokens=8, logprobs=1, echo=True, **FIXED)
            for prompt in (text, server.tokens(text))
        )
        for name in ("tokens", "token_logprobs", "top_logprobs"):
            assert as_text["choices"][0]["logprobs"][name] == as_ids["choices"][0]["logprobs"][name], name
        assert as_text["usage"]["prompt_tokens"] == as_ids["usage"]["prompt_tokens"]

    def test_chat_sends_what_tokenize_renders(self, server: Api) -> None:
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi there"}]
        ids = server.http.post("/tokenize", json={"messages": messages}).json()["tokens"]
        answer = server.chat(messages, max_tokens=8, **FIXED)
        assert (
            server.complete(ids, max_tokens=8, **FIXED)["choices"][0]["text"]
            == answer["choices"][0]["message"]["content"]
        )

    @pytest.mark.parametrize(
        "body", [{}, {"prompt": 5}, {"prompt": None}, {"prompt": "x", "messages": []}, {"messages": "x"}]
    )
    def test_tokenize_refuses(self, server: Api, body: dict) -> None:
        refused(server.http.post("/tokenize", json=body))

    @pytest.mark.parametrize("tokens", [None, "x", [-1], [1 << 31], [1 << 70], [1.5], ["a"], [[1]], [None]])
    def test_detokenize_refuses(self, server: Api, tokens: object) -> None:
        refused(server.http.post("/detokenize", json={"tokens": tokens}), param="tokens")


def test_models_name_their_owner(server: Api) -> None:
    for row in server.models:
        extra = set(row) - set(Model.model_fields)
        assert extra <= {"root", "parent", "max_model_len", "permission"}, extra
        strict(Model, {name: value for name, value in row.items() if name in Model.model_fields})
