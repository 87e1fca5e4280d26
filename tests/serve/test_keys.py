"""API keys: who gets in, and that they are told to nobody."""

from pathlib import Path

import httpx
import pytest

from llmq.errors import ConfigError
from llmq.serve.middleware import OPEN_PATHS
from llmq.serve.run import KEY_VARIABLE, read_keys
from tests.conformance.api import COMPLETIONS, FIXED, Api, refused
from tests.serve.conftest import fake
from tests.serve.fake_server import build, options


def test_every_route_but_the_open_ones_needs_a_key(tmp_path: Path) -> None:
    """Routes as the application has them, so that a new one cannot be forgotten."""
    path = tmp_path / "keys"
    path.write_text("one\ntwo\n")
    server, service = build(options(["--api-key-file", str(path)]))
    service.stop()
    routes = [(route.path, next(iter(route.methods))) for route in server.app.routes]
    assert len(routes) > 10
    with fake("--api-key-file", path) as (_, api):
        for route, method in [*routes, ("/nowhere", "GET"), ("/health/", "GET"), ("//health", "GET")]:
            url = api.base_url + route.replace("{model:path}", "fake")
            answers = [httpx.request(method, url, headers=h) for h in ({}, {"authorization": "Bearer three"})]
            for answer in answers:
                assert answer.status_code == (200 if route in OPEN_PATHS else 401), route
        for key in ("one", "two"):
            assert httpx.get(f"{api.base_url}/v1/models", headers={"authorization": f"Bearer {key}"}).is_success


def test_a_browser_gets_the_page_that_asks_for_the_key(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("secret\n")
    with fake("--api-key-file", path) as (_, api):
        answer = httpx.get(f"{api.base_url}/", headers={"accept": "text/html,*/*"})
        assert answer.status_code == 401
        assert answer.headers["content-type"].startswith("text/html")
        refused(httpx.get(f"{api.base_url}/"), 401)


def test_no_key_and_no_text_is_logged(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("sk-secret\n")
    with fake("--api-key-file", path) as (process, api):
        client = Api(api.base_url, "sk-secret")
        client.complete("a-private-prompt", max_tokens=40, **FIXED)
        client.http.get("/v1/models?key=sk-secret")
        client.http.get("/sk-secret")
        httpx.get(api.base_url, headers={"authorization": "Bearer sk-wrong"})
        client.http.post(COMPLETIONS, content=b'{"prompt": "a-private-prompt')
        shown = process.output() + client.http.get("/metrics").text
        client.http.close()
    assert "POST /v1/completions 200" in shown
    for hidden in ("sk-secret", "sk-wrong", "a-private-prompt"):
        assert hidden not in shown


def test_prompts_are_reused_under_the_same_key_only(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("one\ntwo\n")
    prompt = "a prompt of more than two chunks of sixteen"
    with fake("--api-key-file", path) as (_, api):
        cached = []
        for key in ("one", "one", "two", "two"):
            client = Api(api.base_url, key)
            usage = client.complete(prompt, max_tokens=1, **FIXED)["usage"]
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
            client.http.close()
    assert cached == [0, 32, 0, 32]


def test_request_ids() -> None:
    with fake() as (_, api):
        for given, kept in (("abc-1", True), ("x" * 65, False), ("a b", False)):
            answer = api.http.get("/health", headers={"x-request-id": given}).headers["x-request-id"]
            assert (answer == given) is kept
        assert len({api.http.get("/health").headers["x-request-id"] for _ in range(3)}) == 3


def test_pages_of_other_sites_need_permission() -> None:
    site = {"origin": "https://example.com", "access-control-request-method": "POST"}
    with fake() as (_, api):
        assert "access-control-allow-origin" not in api.http.get("/v1/models", headers=site).headers
        assert api.http.options(COMPLETIONS, headers=site).status_code == 405
    with fake("--cors-origin", "https://example.com") as (_, api):
        assert api.http.options(COMPLETIONS, headers=site).headers["access-control-allow-origin"] == site["origin"]
        other = api.http.get("/v1/models", headers={"origin": "https://example.org"})
        assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize(
    ("text", "rule"),
    [("", "holds no key"), ("\n \n", "holds no key"), ("k\u00e9y\n", "printable ASCII"), ("a b\n", "without spaces")],
)
def test_files_without_usable_keys(text: str, rule: str, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rule):
        read_keys(path)


def test_keys_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert read_keys(None) == ()
    monkeypatch.setenv(KEY_VARIABLE, "one")
    assert read_keys(None) == ("one",)
    monkeypatch.setenv(KEY_VARIABLE, "")
    with pytest.raises(ConfigError, match=KEY_VARIABLE):
        read_keys(None)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(tmp_path / "missing")
