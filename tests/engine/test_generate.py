"""A session: one answer at a time, straight from the engine."""

import pytest

from llmq.engine.generate import Session
from llmq.engine.sampling import Grammar, SamplingParams
from llmq.errors import CheckpointError, ConfigError
from tests.engine.drive import TOKENIZER, ids
from tests.fake import DeviceLostError, FakeModel, script


def session_of(model: FakeModel) -> Session:
    return Session(model, TOKENIZER)


def test_text_streams_and_ends_at_the_end_token() -> None:
    text = "Paris, naïve 🗼"
    session = session_of(FakeModel(script(*ids(text)), num_slots=1))
    pieces = list(session.generate(TOKENIZER.encode("Where?"), SamplingParams(max_tokens=40)))
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
    assert len(pieces) > 5
    done = session.last
    assert (done.finish_reason, done.prompt_tokens, done.cached_tokens) == ("stop", 7, 0)
    assert done.tokens == ids(text)
    assert done.seed is not None


def test_times_are_those_of_the_prompt_and_of_the_tokens_after_the_first() -> None:
    session = session_of(FakeModel(step_seconds=0.01, chunk_size=2))
    list(session.generate(TOKENIZER.encode("12345"), SamplingParams()))
    assert session.last.prefill_seconds > 0.035  # three runs and a step
    assert session.last.prefill_seconds + session.last.decode_seconds > 0.085  # and five steps after it


def test_a_conversation_computes_only_what_is_new() -> None:
    session = session_of(FakeModel(chunk_size=4))
    prompt = TOKENIZER.encode("hello you")
    text = "".join(session.generate(prompt, SamplingParams()))
    list(session.generate([*prompt, *ids(text), *ids("and then")], SamplingParams()))
    assert session.last.cached_tokens == 8


def test_leaving_early_aborts_the_answer() -> None:
    model = FakeModel()
    session = session_of(model)
    for piece in session.generate(TOKENIZER.encode("hello"), SamplingParams()):
        assert piece == "h"
        break
    assert "".join(session.generate(TOKENIZER.encode("next"), SamplingParams())) == "next"
    assert session.last.tokens == ids("next")


@pytest.mark.parametrize("method", ["extend", "decode", "fetch"])
def test_a_step_that_fails_or_is_interrupted_leaves_a_session_that_works(method: str) -> None:
    session = session_of(FakeModel(fault=(method, 0)))
    with pytest.raises(DeviceLostError):
        list(session.generate(TOKENIZER.encode("hello"), SamplingParams()))
    assert "".join(session.generate(TOKENIZER.encode("next"), SamplingParams())) == "next"


def test_max_tokens_0_has_no_text() -> None:
    session = session_of(FakeModel())
    assert list(session.generate(TOKENIZER.encode("hello"), SamplingParams(max_tokens=0))) == []
    assert session.last.finish_reason == "length"


def test_follows_a_grammar() -> None:
    params = SamplingParams(grammar=Grammar(kind="regex", source="[0-9]{3}"))
    assert "".join(session_of(FakeModel()).generate(TOKENIZER.encode("hello"), params)).isdigit()


def test_what_cannot_be_answered_is_refused() -> None:
    session = session_of(FakeModel(max_len=64))
    with pytest.raises(ConfigError, match="prompt of 60 tokens and max_tokens=5: exceed the context of 64"):
        next(session.generate([5] * 60, SamplingParams(max_tokens=5)))
    with pytest.raises(ConfigError, match="n=2: a session gives one answer"):
        next(session.generate([5], SamplingParams(max_tokens=5, n=2)))
    with pytest.raises(CheckpointError, match="token 320"):
        next(session.generate([5, 320], SamplingParams(max_tokens=5)))
    with pytest.raises(ConfigError, match="grammar"):
        next(session.generate([5], SamplingParams(max_tokens=5, grammar=Grammar(kind="regex", source="(("))))
