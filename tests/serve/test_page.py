"""The chat page, in a browser where there is one."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmq.serve.page import page
from tests.conformance.api import Api, eventually
from tests.serve.browser import PROGRAMS, Browser, browser, is_installed
from tests.serve.conftest import fake

ANSWER = """# Title

Some **bold**, *slanted* and `code` text.

1. one
2. two
   - inner

```python
print("<b>not bold</b>")
```

<img src=x onerror="document.title='owned'"> <script>document.title='owned'</script> [a link](javascript:alert(1))
"""

ENTER = "\ue007"
DONE = "return document.querySelector('[data-again]') !== null"


def test_everything_is_inside_and_nothing_else_may_run() -> None:
    response = page(200)
    body, policy = bytes(response.body).decode(), response.headers["content-security-policy"]
    assert "{{" not in body
    assert not re.search(r"""(src|href|action)=["']?(https?:)?//""", body)
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert "innerHTML" not in body


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if not is_installed():
        pytest.skip(f"there is no {' and '.join(PROGRAMS)} here")
    with browser(str(tmp_path_factory.mktemp("profile"))) as opened:
        yield opened


@pytest.fixture
def chat(window: Browser, tmp_path: Path) -> Iterator[tuple[Browser, Api]]:
    (tmp_path / "answer.md").write_text(ANSWER)
    with fake("--answer", tmp_path / "answer.md", "--step-seconds", 0.005) as (_, api):
        window.open(api.base_url + "/")
        window.until("return document.querySelector('#model').value === 'fake'")
        window.click("#toggle")
        window.type("#temperature", "0")
        yield window, api


def test_an_answer_is_shown_as_it_comes_and_as_text(chat: tuple[Browser, Api]) -> None:
    window, _ = chat
    window.log()
    window.type("#input", "Hello" + ENTER)
    window.until("return document.querySelectorAll('.assistant h2').length === 1")
    assert window.run("return document.querySelector('#stop').hidden") is False, "it is not over yet"
    window.until(DONE)
    shown = window.run("return document.querySelector('.assistant .content').innerHTML")
    assert "<h2>Title</h2>" in shown
    assert "<p>Some <strong>bold</strong>, <em>slanted</em> and <code>code</code> text.</p>" in shown
    assert "<li>two<ul><li>inner</li></ul></li>" in shown
    assert window.run("return document.querySelector('.block pre').textContent") == 'print("<b>not bold</b>")'
    assert "&lt;img src=x onerror=" in shown
    assert window.run("return document.querySelectorAll('.content :is(img, script, a)').length") == 0
    assert window.run("return document.title") == "llmq chat"
    assert "tokens/s" in window.run("return document.querySelector('.meta').textContent")
    assert window.log() == [], "the console has nothing to complain of"


def test_stop_frees_the_slot(chat: tuple[Browser, Api]) -> None:
    window, api = chat
    window.type("#input", "Hello" + ENTER)
    window.until("return document.querySelectorAll('.assistant h2').length === 1")
    window.click("#stop")
    eventually(lambda: api.slots_free() == 4, 0.5)
    window.until(DONE)
    assert "stopped" in window.run("return document.querySelector('.meta').textContent")


def test_settings_and_the_conversation_are_sent(chat: tuple[Browser, Api]) -> None:
    window, _ = chat
    window.type("#system", "Be brief.")
    window.type("#max_tokens", "2")
    for count in (1, 2):
        window.type("#input", f"Question {count}" + ENTER)
        window.until(
            f"return document.querySelectorAll('.assistant').length === {count} && {DONE.removeprefix('return ')}"
        )
    window.until("return [...document.querySelectorAll('.meta')].at(-1).textContent.includes('cut at the token limit')")
    sent = window.run("return JSON.parse(body())")
    assert [message["role"] for message in sent["messages"]] == ["system", "user", "assistant", "user", "assistant"]
    assert (sent["max_tokens"], sent["temperature"]) == (2, 0)
    assert "top_p" not in sent


def test_a_key_is_asked_for_and_kept_in_the_tab(window: Browser, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("sk-right\n")
    with fake("--api-key-file", tmp_path / "key") as (_, api):
        window.open(api.base_url + "/")
        window.until("return document.querySelector('#gate').open")
        window.type("#key", "sk-wrong" + ENTER)
        window.until("return document.querySelector('#gate-error').textContent.includes('wrong')")
        window.type("#key", "sk-right" + ENTER)
        window.until(
            "return !document.querySelector('#gate').open && document.querySelector('#model').value === 'fake'"
        )
        assert window.run("return [sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]
        window.open(api.base_url + "/")
        window.until("return document.querySelector('#model').value === 'fake'")


@pytest.mark.parametrize("width", [320, 768, 1280])
def test_it_fits_every_width(chat: tuple[Browser, Api], width: int) -> None:
    window, _ = chat
    window.click("#toggle")
    window.type("#input", "Hello" + ENTER)
    window.until(DONE)
    window.resize(width, 700)
    assert window.run("return document.documentElement.scrollWidth") <= width
    assert (
        window.run("return document.querySelector('#log').scrollWidth - document.querySelector('#log').clientWidth")
        <= 0
    )
