"""A session on a scripted model: what it writes where, and when it ends."""

import numpy as np
import pytest

from llmq.backends.base import Caps
from llmq.engine.generate import Session
from llmq.engine.sampling import SamplingParams
from llmq.errors import CheckpointError, ConfigError
from llmq.model.config import ModelConfig
from llmq.model.tokenizer import Tokenizer
from tests.tiny import byte_tokenizer_files, tiny_config

EOS = 2


class ScriptedModel:
    """Says a fixed text after any prompt, and keeps what was written into each slot."""

    caps = Caps("script", "float32", "float32", num_slots=2, max_len=64, vocab_size=320, kernels=())

    def __init__(self, script: list[int]) -> None:
        self.script = script
        self.calls: list[tuple[int, int]] = []

    def init_state(self) -> list[list[int]]:
        return [[], []]

    def extend(self, state, slot, tokens, start, *, want_logits=False):  # noqa: ARG002
        assert start <= len(state[slot])
        self.calls.append((start, len(tokens)))
        state[slot] = [*state[slot][:start], *tokens.tolist()]
        return state, None

    def decode(self, state, tokens, positions):
        logits = np.zeros((2, 320), np.float32)
        for slot in np.flatnonzero(positions >= 0):
            assert positions[slot] <= len(state[slot])
            state[slot] = [*state[slot][: positions[slot]], int(tokens[slot])]
            said = next((n for n in range(len(self.script)) if state[slot][-n:] == self.script[:n] and n), 0)
            logits[slot, self.script[said]] = 1
        return state, logits


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer.from_files(byte_tokenizer_files(), ModelConfig.from_dict(tiny_config()))


def test_text_streams_and_ends_at_eos(tokenizer: Tokenizer) -> None:
    text = "Paris, naïve 🗼"
    model = ScriptedModel([*tokenizer.encode(text)[1:], EOS])
    session = Session(model, tokenizer, slot=1)
    pieces = list(session.generate(tokenizer.encode("Where?"), SamplingParams(max_tokens=40)))
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
    assert len(pieces) > 5
    done = session.last
    assert (done.finish_reason, done.prompt_tokens, done.cached_tokens) == ("stop", 7, 0)
    assert done.tokens == model.script[:-1]
    assert model.calls == [(0, 6)]  # all but the last prompt token


def test_max_tokens_ends_in_the_middle_of_a_character(tokenizer: Tokenizer) -> None:
    model = ScriptedModel([*tokenizer.encode("a🗼")[1:], EOS])
    session = Session(model, tokenizer)
    text = "".join(session.generate(tokenizer.encode("x"), SamplingParams(max_tokens=3)))
    assert text.startswith("a")
    assert session.last.finish_reason == "length"
    assert len(session.last.tokens) == 3


def test_a_prompt_that_continues_the_last_one_computes_only_what_is_new(tokenizer: Tokenizer) -> None:
    model = ScriptedModel([*tokenizer.encode("ok")[1:], EOS])
    session = Session(model, tokenizer)
    first = tokenizer.encode("abc")
    list(session.generate(first, SamplingParams(max_tokens=8)))
    second = [*first, *session.last.tokens, *tokenizer.encode("def")[1:]]
    list(session.generate(second, SamplingParams(max_tokens=8)))
    assert session.last.cached_tokens == len(first) + 2
    assert model.calls == [(0, 3), (len(first) + 2, 2)]

    third = [*first[:-1], *tokenizer.encode("zz")[1:]]
    list(session.generate(third, SamplingParams(max_tokens=8)))
    assert session.last.cached_tokens == len(first) - 1
    list(session.generate(third, SamplingParams(max_tokens=8)))
    assert session.last.cached_tokens == len(third) - 1  # the last token is always decoded


def test_what_does_not_fit_is_refused_with_the_numbers(tokenizer: Tokenizer) -> None:
    session = Session(ScriptedModel([EOS]), tokenizer)
    with pytest.raises(ConfigError, match="prompt of 60 tokens and max_tokens=5: exceed the context of 64"):
        next(session.generate([5] * 60, SamplingParams(max_tokens=5)))
    with pytest.raises(ConfigError, match="prompt: has no tokens"):
        next(session.generate([], SamplingParams()))
    for outside in (320, -1):
        with pytest.raises(
            CheckpointError, match=f"token {outside}: the tokenizer gives it, but the model's vocabulary has 320"
        ):
            next(session.generate([5, outside], SamplingParams(max_tokens=5)))
