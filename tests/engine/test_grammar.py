"""Grammars are checked before they are used, and their work is bounded."""

import json
import sys
import time

import numpy as np
import pytest

from llmq.engine.grammar import MAX_CHARACTERS, compile_grammar
from llmq.engine.sampling import Grammar
from llmq.errors import ConfigError
from llmq.model.config import ModelConfig
from llmq.model.tokenizer import Tokenizer
from tests.engine.drive import TOKENIZER, ids
from tests.fake import EOS
from tests.tiny import byte_tokenizer_files, tiny_config


def compiled(kind: str, source: str):
    return compile_grammar(TOKENIZER, Grammar(kind=kind, source=source))


def allowed(matcher) -> set[int]:
    mask = matcher.allowed()
    assert mask.dtype == np.uint32
    return {token for token in range(32 * len(mask)) if mask[token // 32] >> (token % 32) & 1}


def test_a_mask_holds_what_may_come_next() -> None:
    matcher = compiled("regex", "ab?")
    assert allowed(matcher) == set(ids("a"))
    assert not matcher.may_end
    assert matcher.accept(*ids("a"))
    assert allowed(matcher) == {*ids("b"), EOS}
    assert matcher.may_end
    assert not matcher.is_complete
    other = matcher.copy()
    assert matcher.accept(*ids("b"))
    assert matcher.is_complete
    assert allowed(other) == {*ids("b"), EOS}
    assert not other.accept(*ids("c"))
    assert not other.is_complete
    assert allowed(other) == set()


def test_every_end_token_of_the_model_is_one() -> None:
    tokenizer = Tokenizer.from_files(byte_tokenizer_files(), ModelConfig.from_dict(tiny_config(eos_token_id=[0, 2])))
    assert allowed(compile_grammar(tokenizer, Grammar(kind="regex", source=""))) == {0, 2}


@pytest.mark.parametrize(
    ("kind", "source", "reason"),
    [
        ("regex", "a((", "unclosed group"),
        ("regex", "(" * 30_000 + ")" * 30_000, "is not a valid regex"),
        ("lark", "start: nobody", "unknown name"),
        ("lark", "start: " + "(" * 30_000, "is not a valid lark"),
        ("json_schema", "{nope", "Expecting property name"),
        ("json_schema", "[]", "must be a JSON object"),
        ("json_schema", '{}, {"lark_grammar": "start: /.*/"}', "Extra data"),
        ("json_schema", '{"type": "nope"}', "Invalid type: nope"),
        ("json_schema", '{"$ref": "http://example.com/x"}', "is not a valid json_schema"),
        ("json_schema", '{"not":' * 3000 + "{}" + "}" * 3000, "is not a valid json_schema"),
        ("json_schema", '{"not":' * 400 + "{}" + "}" * 400, "is not a valid json_schema"),
        ("json_schema", '{"type":"integer","multipleOf":1000003,"minimum":1,"maximum":1000000000000}', "fuel"),
    ],
)
def test_a_bad_one_is_refused_in_a_sentence(kind: str, source: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=r"^grammar: .*\.$") as error:
        compiled(kind, source)
    assert reason in str(error.value)
    assert len(str(error.value)) < 300
    assert "\n" not in str(error.value)


def test_a_long_one_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"has {MAX_CHARACTERS + 1} characters; at most {MAX_CHARACTERS}"):
        compiled("regex", "a" * (MAX_CHARACTERS + 1))


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("regex", "((a{1000}){1000}){1000}"),
        ("regex", "(.*a.{200}|.*b.{300}){5}"),
        ("json_schema", json.dumps({"enum": [f"value {i}" for i in range(4000)]})),
        ("json_schema", json.dumps({"type": "string", "minLength": 1_000_000, "maxLength": 2_000_000})),
        ("json_schema", json.dumps({"type": "array", "minItems": 100_000, "items": {"$ref": "#"}})),
    ],
)
def test_a_monster_takes_bounded_time(kind: str, source: str) -> None:
    start = time.process_time()
    try:
        matcher = compiled(kind, source)
    except ConfigError:
        pass
    else:
        matcher.accept(min(allowed(matcher)))  # may exceed a limit
        matcher.allowed()
    assert time.process_time() - start < 5


def test_without_an_end_token_there_are_none() -> None:
    tokenizer = Tokenizer.from_files(byte_tokenizer_files(), ModelConfig.from_dict(tiny_config()))
    tokenizer.eos_token_ids = frozenset()
    with pytest.raises(ConfigError, match="end-of-sequence"):
        compile_grammar(tokenizer, Grammar(kind="regex", source="a"))


def test_without_llguidance_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match=r"pip install 'llmq\[serve\]'"):
        compiled("regex", "a")
