"""Whatever is sent, the event loop goes on: /health tells."""

import json
import threading
import time
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.conformance.api import CHAT, COMPLETIONS, Api, refused
from tests.serve.conftest import fake

MEBI = 1 << 20

#: Raw bodies, each hard on something else: of about the largest size that is read, and just within the limits.
BODIES = {
    "some lists": b'{"prompt": [' + b"[]," * 99_000 + b"[]]}",
    "some objects": b'{"messages": [' + b'{"role":"user","content":"x"},' * 8000 + b'{"role":"user","content":"x"}]}',
    "some numbers": b'{"prompt": [' + b"55," * 990_000 + b"5]}",
    "some text": b'{"prompt": "' + b"a" * MEBI + b'"}',
    "lists": b'{"prompt": [' + b"[]," * (7 * MEBI // 3) + b"[]]}",
    "objects": b'{"messages": [' + b'{"role":"user","content":"x"},' * (7 * MEBI // 30) + b"{}]}",
    "numbers": b'{"prompt": [' + b"5," * (7 * MEBI // 2) + b"5]}",
    "text": b'{"prompt": "' + b"a" * (7 * MEBI) + b'"}',
    "fields": b"{" + b",".join(b'"f%d":0' % i for i in range(500_000)) + b"}",
    "deep": b'{"prompt":' + b"[" * (7 * MEBI),
    "deep and closed": b'{"prompt":' + b"[" * 1000 + b"]" * 1000 + b"}",
    "deep schema": json.dumps({"prompt": "x"}).encode()[:-1] + b',"response_format":{"type":"json_schema","json_schema":{"schema":' + b'{"items":' * 300 + b"{}" + b"}" * 303,
    "surrogates": b'{"prompt": "\\ud800"}',
    "nan": b'{"prompt": "x", "temperature": NaN}',
}  # fmt: skip


class Watch(threading.Thread):
    """Asks /health all the time, and notes how long it takes."""

    def __init__(self, api: Api) -> None:
        super().__init__(daemon=True)
        self._url = api.base_url
        self._over = threading.Event()
        self.seconds: list[float] = []
        self.start()

    def run(self) -> None:
        with httpx.Client(base_url=self._url) as client:
            while not self._over.is_set():
                began = time.monotonic()
                assert client.get("/health").status_code == 200
                self.seconds.append(time.monotonic() - began)
                time.sleep(0.005)

    def p99(self) -> float:
        while len(self.seconds) < 20 and self.is_alive():
            time.sleep(0.01)
        self._over.set()
        self.join()
        return float(np.quantile(self.seconds, 0.99))


@pytest.mark.slow
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize"])
@pytest.mark.parametrize("name", BODIES)
def test_hard_bodies(server: Api, path: str, name: str) -> None:
    watch = Watch(server)
    for _ in range(3):
        response = server.raw(path, BODIES[name])
        assert response.status_code in (200, 400), response.text[:300]
        if response.status_code == 400:
            refused(response)
    p99 = watch.p99()
    print(f"{path} {name}: /health p99 {p99 * 1000:.0f} ms, worst {max(watch.seconds) * 1000:.0f} ms")
    assert p99 < 0.2


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_of_64_mib(server: Api, chunked: bool) -> None:
    body = b'{"prompt": "' + b"a" * (64 * MEBI) + b'"}'
    watch = Watch(server)
    for _ in range(3):
        content = (body[i : i + MEBI] for i in range(0, len(body), MEBI)) if chunked else body
        refused(server.http.post(COMPLETIONS, content=content), 413)
    p99 = watch.p99()
    print(f"64 MiB: /health p99 {p99 * 1000:.0f} ms, worst {max(watch.seconds) * 1000:.0f} ms")
    assert p99 < 0.2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "stall"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", 0.2),
        # Making a text of hundreds of megabytes is one operation, which nothing interrupts.
        ("{% set ns = namespace(x='x') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}", 0.2),
        ("{{ 9 ** 9 ** 9 }}", 0.2),
        ("{{ 'x' * 10 ** 12 }}", 0.2),
        ("{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}", 0.2),
    ],
)
def test_a_hostile_template_in_the_artifact(template: str, stall: float, tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text(template)
    with fake("--chat-template", path) as (_, api):
        watch = Watch(api)
        began = time.monotonic()
        message = refused(api.post(CHAT, messages=[{"role": "user", "content": "x"}]))
        assert "chat template" in message
        assert time.monotonic() - began < 10
        assert watch.p99() < stall
        assert api.complete("still there", max_tokens=1)
