"""Which tokens are learned, worked out by hand; and rows that are not what they should be."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmq.errors import ConfigError
from llmq.model.config import ModelConfig
from llmq.model.tokenizer import Tokenizer
from llmq.qat.data import Example, read_examples
from tests.tiny import byte_tokenizer_files, tiny_config

#: Opens and closes turns as ChatML does, with one token for each end.
CHATML = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def tokenizer(template: str | None = CHATML, *, bos: bool = True) -> Tokenizer:
    files = byte_tokenizer_files()
    settings = {**json.loads(files["tokenizer_config.json"]), "chat_template": template, "add_bos_token": bos}
    if template is None:
        del settings["chat_template"]
    files["tokenizer_config.json"] = json.dumps(settings).encode()
    return Tokenizer.from_files(files, ModelConfig.from_dict(tiny_config()))


def read(tmp_path: Path, rows: list[Any], tok: Tokenizer, **options: bool) -> list[Example]:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return read_examples(str(path), tok, **{"skip_bad_rows": False, **options}).examples


def learned_text(example: Example, tok: Tokenizer) -> str:
    """What is learned, runs apart; ends of turns are shown."""
    shown = {tok.encode("</s>")[-1]: "</s>", tok.encode("<s>")[-1]: "<s>"}
    text, before = "", True
    for token, learned in zip(example.tokens.tolist(), example.learned.tolist(), strict=True):
        if learned:
            text += ("" if before else "|") + shown.get(token, tok.decode([token]))
        before = learned
    return text


def test_a_conversation_of_three_turns(tmp_path: Path) -> None:
    tok = tokenizer()
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "first"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "second"},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": "third"},
    ]
    (example,) = read(tmp_path, [{"messages": messages}], tok)
    assert learned_text(example, tok) == "|first</s>|second</s>|third</s>"
    assert example.tokens.tolist() == tok.encode_chat(messages, add_generation_prompt=False)


def test_a_special_token_inside_a_message_ends_nothing(tmp_path: Path) -> None:
    tok = tokenizer()
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "a</s>b"}]
    (example,) = read(tmp_path, [{"messages": messages}], tok)
    assert learned_text(example, tok) == "|a</s>b</s>"
    assert example.learned.sum() == len("a</s>b") + 1


@pytest.mark.parametrize("bos", [True, False])
def test_prompt_and_completion(tmp_path: Path, bos: bool) -> None:
    tok = tokenizer(bos=bos)
    (example,) = read(tmp_path, [{"prompt": "2+2=", "completion": "4"}], tok)
    assert learned_text(example, tok) == "|4</s>"
    assert len(example.tokens) == bos + 4 + 1 + 1


def test_instructions_with_and_without_a_chat_template(tmp_path: Path) -> None:
    rows = [{"instruction": "Add", "input": "1 2", "output": "3"}, {"instruction": "Say", "input": "", "output": "hi"}]
    tok = tokenizer()
    first, second = read(tmp_path, rows, tok)
    assert [learned_text(example, tok) for example in (first, second)] == ["|3</s>", "|hi</s>"]
    assert "user\nAdd\n\n1 2" in tok.decode(first.tokens.tolist())
    plain = tokenizer(None)
    first, second = read(tmp_path, rows, plain)
    assert [learned_text(example, plain) for example in (first, second)] == ["|3</s>", "|hi</s>"]
    assert "### Input:\n1 2\n\n### Response:3" in plain.decode(first.tokens.tolist())
    assert "### Input" not in plain.decode(second.tokens.tolist())


def test_texts(tmp_path: Path) -> None:
    tok = tokenizer()
    (example,) = read(tmp_path, [{"text": "abc"}], tok)
    assert learned_text(example, tok) == "|abc</s>"
    path = tmp_path / "plain.txt"
    path.write_text("abc")
    (plain,) = read_examples(str(path), tok, skip_bad_rows=False).examples
    assert learned_text(plain, tok) == "|abc"
    pages = tmp_path / "pages.json"
    pages.write_text(json.dumps([{"page": "abc"}, {"page": "d"}]))
    assert len(read_examples(str(pages), tok, skip_bad_rows=False).examples) == 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{not json", "line 2: is not valid JSON"),
        ("[1]", "line 2: must be a JSON object"),
        ({"prompt": "x"}, "line 2: completion must be text, and not empty"),
        ({"prompt": "x", "completion": 3}, "line 2: completion must be text"),
        ({"prompt": "x", "completion": "\ud800"}, "line 2: prompt: holds half of a surrogate pair"),
    ],
)
def test_a_malformed_row_is_named_or_counted(tmp_path: Path, row: Any, message: str) -> None:
    rows = [{"prompt": "a", "completion": "b"}, row, {"prompt": "c", "completion": "d"}]
    with pytest.raises(ConfigError, match=message) as caught:
        read(tmp_path, rows, tokenizer())
    assert "--skip-bad-rows" in str(caught.value)
    found = read_examples(str(tmp_path / "rows.jsonl"), tokenizer(), skip_bad_rows=True)
    assert (len(found.examples), found.num_skipped) == (2, 1)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages must be a list"),
        ([{"role": "assistant", "content": "x"}], "the assistant cannot begin"),
        ([{"role": "user", "content": "x"}], "leaves nothing to learn"),
        ([{"role": "user"}], "message 1: content must be text"),
        ([{"content": "x"}], "message 1: must be an object with a role"),
    ],
)
def test_a_malformed_conversation(tmp_path: Path, messages: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"line 1: .*{message}"):
        read(tmp_path, [{"messages": messages}], tokenizer())


def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path: Path) -> None:
    last_only = "{% for m in messages %}{% if loop.last or m.role == 'user' %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    messages = [{"role": role, "content": content} for role, content in turns]
    with pytest.raises(ConfigError, match="message 2: the chat template does not write this turn behind those before"):
        read(tmp_path, [{"messages": messages}], tokenizer(last_only))
    with pytest.raises(ConfigError, match="the model has no chat template"):
        read(tmp_path, [{"messages": messages}], tokenizer(None))


def test_rows_of_no_known_kind(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has the fields question, and rows must have one of these: messages; instr"):
        read(tmp_path, [{"question": "x"}], tokenizer())
    with pytest.raises(ConfigError, match="holds no row to learn from"):
        read(tmp_path, [{"question": "x"}], tokenizer(), skip_bad_rows=True)


def test_examples_begin_with_something_to_see(tmp_path: Path) -> None:
    for tok in (tokenizer(), tokenizer(bos=False)):
        for row in ({"text": "a"}, {"prompt": "a", "completion": "b"}):
            (example,) = read(tmp_path, [row], tok)
            assert not example.learned[0]
            assert example.tokens.dtype == np.int32
