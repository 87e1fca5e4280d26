"""The engine on a fake model, which fails wherever the protocol is broken."""

import json
import random
import time

import numpy as np
import pytest

from llmq.engine.engine import Engine, EngineLimits
from llmq.engine.observe import RequestDone
from llmq.engine.request import PromptDone
from llmq.engine.sampling import Grammar
from llmq.errors import CheckpointError, ConfigError, QueueFullError
from llmq.model.config import ModelConfig
from llmq.model.tokenizer import Tokenizer
from tests.engine.drive import TOKENIZER, Choice, Outcome, answer, ask, drive, finish, first, ids, is_last, submit
from tests.fake import BOS, EOS, DeviceLostError, FakeModel, echo, logits_of, script
from tests.tiny import byte_tokenizer_files, tiny_config


def engine_of(model: FakeModel, **limits: float) -> Engine:
    return Engine(model, TOKENIZER, EngineLimits(**limits))


class TestText:
    def test_an_answer_streams_and_ends_at_the_end_token(self) -> None:
        choice = first(ask("naïve 🗼 日本"))
        assert (choice.text, choice.finish_reason, choice.stop) == ("naïve 🗼 日本", "stop", EOS)
        assert choice.tokens == ids("naïve 🗼 日本")

    def test_a_split_character_is_kept_back_until_it_is_whole(self) -> None:
        choice = first(ask("a🗼b"))
        assert choice.pieces == ["a", "", "", "", "🗼", "b", ""]

    def test_a_character_that_is_never_completed_comes_at_the_end(self) -> None:
        choice = first(ask("a🗼", max_tokens=3))
        assert choice.pieces[:2] == ["a", ""]
        assert choice.pieces[2] == "\ufffd"
        assert (choice.finish_reason, choice.stop) == ("length", None)

    def test_a_prompt_that_ends_inside_a_character_is_continued(self) -> None:
        tokens = ids("x🗼")
        assert first(ask([BOS, *tokens[:3]]), script(*tokens[3:])).text == "🗼"


class TestStops:
    def test_a_stop_that_straddles_tokens_does_not_leak(self) -> None:
        choice = first(ask("hello world", stop=("lo w", "xyz")))
        assert choice.pieces == ["h", "e", "", "l", "", "", ""]
        assert (choice.text, choice.finish_reason, choice.stop) == ("hel", "stop", "lo w")

    def test_what_only_began_like_a_stop_is_shown(self) -> None:
        assert first(ask("hello", stop=("lo w",))).text == "hello"
        assert first(ask("hello", stop=("lo w",), max_tokens=4)).text == "hell"

    def test_a_stop_at_the_last_token_is_a_stop(self) -> None:
        choice = first(ask("hello", stop=("ll",), max_tokens=4))
        assert (choice.text, choice.finish_reason) == ("he", "stop")

    def test_a_stop_inside_a_multi_byte_text(self) -> None:
        choice = first(ask("日本語テキスト", stop=("テキ",)))
        assert (choice.text, choice.stop) == ("日本語", "テキ")

    def test_min_tokens_ignores_stops_before_it(self) -> None:
        choice = first(ask("abcabc", stop=("b",), min_tokens=3))
        assert (choice.text, choice.tokens) == ("abca", ids("abcab"))
        assert first(ask("abcabc", stop=("b",), min_tokens=2)).text == "a"


class TestEnds:
    def test_every_end_token_of_the_model_ends(self) -> None:
        config = ModelConfig.from_dict(tiny_config(eos_token_id=[2, 70, 71]))
        tokenizer = Tokenizer.from_files(byte_tokenizer_files(), config)
        for end in (2, 70, 71):
            choice = first(ask(), script(100, end, 101), tokenizer)
            assert (choice.tokens, choice.finish_reason, choice.stop) == ([100], "stop", end)

    def test_ignore_eos_goes_on(self) -> None:
        choice = first(ask(max_tokens=5, ignore_eos=True), script(100, EOS, 101))
        assert choice.tokens == [100, EOS, 101, EOS, EOS]
        assert choice.finish_reason == "length"
        assert choice.text == TOKENIZER.decode([100, 101])

    def test_stop_tokens_end_and_are_not_part_of_the_answer(self) -> None:
        for ignore_eos in (False, True):
            choice = first(ask(stop_token_ids=(101, 250), ignore_eos=ignore_eos), script(100, 101, 102))
            assert (choice.tokens, choice.finish_reason, choice.stop) == ([100], "stop", 101)

    def test_a_stop_token_may_be_an_end_token_that_is_ignored(self) -> None:
        assert first(ask(stop_token_ids=(EOS,), ignore_eos=True), script(100)).stop == EOS

    def test_min_tokens_holds_end_and_stop_tokens_back(self) -> None:
        choice = first(ask(min_tokens=4, stop_token_ids=(101,)), script(EOS, 101, EOS, 101, 101))
        assert len(choice.tokens) == 4
        assert not {EOS, 101} & set(choice.tokens)
        assert (choice.finish_reason, choice.stop) == ("stop", 101)

    def test_no_step_is_wasted_on_an_answer_of_known_length(self) -> None:
        model = FakeModel()
        engine = engine_of(model)
        submit(engine, ask("hello", max_tokens=4))
        assert len(drive(engine).popitem()[1].choices[0].tokens) == 4
        assert model.calls["decode"] == 4


class TestPromptOnly:
    def test_max_tokens_0_evaluates_the_prompt(self) -> None:
        model = FakeModel()
        engine = engine_of(model)
        request = ask("hello", max_tokens=0, prompt_logprobs=2)
        submit(engine, request)
        outcome = drive(engine)[request.id]
        assert outcome.prompt is not None
        assert len(outcome.prompt.logprobs) == 6
        assert outcome.choices == {0: Choice([""], finish_reason="length")}
        assert "decode" not in model.calls

    def test_for_each_of_n_answers(self) -> None:
        outcome = answer(ask("hello", max_tokens=0, n=3))
        assert outcome.choices == {i: Choice([""], finish_reason="length") for i in range(3)}


class TestLogprobs:
    def test_of_a_prompt(self) -> None:
        model = FakeModel(chunk_size=4, num_slots=1)
        engine = engine_of(model)
        request = ask("hello world", prompt_logprobs=3, max_tokens=1)
        submit(engine, request)
        outcome = drive(engine)[request.id]
        state = FakeModel(chunk_size=64)
        _, logits = state.extend(state.init_state(), 0, np.asarray(request.prompt, np.int32), 0, want_logits=True)
        expected = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
        none, *rows = outcome.prompt.logprobs
        assert none is None
        assert [row.token for row in rows] == list(request.prompt[1:])
        for row, right in zip(rows, expected, strict=False):
            assert row.logprob == pytest.approx(right[row.token], abs=1e-5)
            assert [i for i, _ in row.top] == np.argsort(-right, kind="stable")[:3].tolist()
            assert [p for _, p in row.top] == pytest.approx(np.sort(right)[::-1][:3], abs=1e-5)

    def test_a_prompt_of_one_token_has_none(self) -> None:
        assert answer(ask([BOS], prompt_logprobs=1)).prompt == PromptDone(0, (None,))

    def test_of_an_answer(self) -> None:
        choice = first(ask("hello", logprobs=2))
        assert [row.token for row in choice.logprobs] == choice.tokens
        for row in choice.logprobs:
            assert row.top[0] == (row.token, row.logprob)
            assert len(row.top) == 2
            assert row.top[0][1] > row.top[1][1]
        assert [row.top for row in first(ask("hello", logprobs=0)).logprobs] == [()] * 5

    def test_are_raw_whatever_the_sampling(self) -> None:
        plain = first(ask("hello", logprobs=1)).logprobs
        forced = first(ask("hello", logprobs=1, max_tokens=1, logit_bias={300: 100.0})).logprobs
        assert forced[0].token == 300
        assert forced[0].top == plain[0].top
        assert forced[0].logprob < plain[0].logprob

    def test_are_finite_where_a_probability_is_0(self) -> None:
        def say(_prompt, _answer):
            logits = np.full(320, -np.inf)
            logits[[50, 60]] = 1, 0
            return logits

        outcome = answer(ask(max_tokens=2, logprobs=5, prompt_logprobs=5), say)
        rows = [*outcome.choices[0].logprobs, *outcome.prompt.logprobs[1:]]
        assert len(rows) == 4
        values = [value for row in rows for value in (row.logprob, *(v for _, v in row.top))]
        assert np.isfinite(values).all()
        json.dumps(values, allow_nan=False)
        assert min(values) < -1e38

    def test_nobody_gets_them_unasked(self) -> None:
        engine = engine_of(FakeModel())
        asked, unasked = ask("hello", logprobs=3), ask("world")
        for request in (asked, unasked):
            submit(engine, request)
        outcomes = drive(engine)
        assert len(outcomes[asked.id].choices[0].logprobs) == 5
        assert outcomes[unasked.id].choices[0].logprobs == []
        assert outcomes[unasked.id].prompt.logprobs == ()


class TestPrefixReuse:
    """Slots of 8-token chunks; a BOS in front of every prompt."""

    def serve(self, engine: Engine, *args, **params) -> Outcome:
        request = ask(*args, **params)
        submit(engine, request)
        return drive(engine)[request.id]

    def test_full_chunks_are_reused(self) -> None:
        model = FakeModel(chunk_size=8, num_slots=2)
        engine = engine_of(model)
        text = "The quick brown fox jumps over"
        assert self.serve(engine, text).prompt.cached_tokens == 0
        again = self.serve(engine, text)
        assert again.prompt.cached_tokens == 24  # of 31: the last one is always decoded
        assert again.choices[0].text == text
        assert model.extended[4:] == [(model.extended[0][0], 24, 6)]
        longer = self.serve(engine, text + " the lazy dog")
        assert longer.prompt.cached_tokens == 24  # 24 to 30 were written as a shorter run: other bits
        assert longer.choices[0].text == text + " the lazy dog"

    def test_several_chunks_are_written_at_once_while_nobody_waits_for_a_token(self) -> None:
        model = FakeModel(chunk_size=8, chunks_per_run=3, num_slots=2)
        engine = engine_of(model)
        assert self.serve(engine, "a" * 37).prompt.cached_tokens == 0  # 38 tokens, of which 37 are written
        assert [run[1:] for run in model.extended] == [(0, 24), (24, 13)]
        assert self.serve(engine, "a" * 37).prompt.cached_tokens == 32
        self.serve(engine, "b" * 20, prompt_logprobs=1)
        assert [run[1:] for run in model.extended[2:]] == [(32, 5), (0, 8), (8, 8), (16, 4)]
        talking, prompt = ask("c" * 8, max_tokens=30), ask("d" * 20)
        submit(engine, talking)
        engine.step()
        submit(engine, prompt)
        while engine.has_work:
            engine.step()
        assert [run[1:] for run in model.extended[6:]] == [(0, 8), (0, 8), (8, 8), (16, 4)]

    def test_never_the_last_token(self) -> None:
        engine = engine_of(FakeModel(chunk_size=8, num_slots=1))
        self.serve(engine, "x" * 16)  # 17 tokens, two full chunks
        assert self.serve(engine, "x" * 16).prompt.cached_tokens == 16
        assert self.serve(engine, "x" * 15).prompt.cached_tokens == 8  # 16 tokens

    def test_what_differs_is_written_anew(self) -> None:
        engine = engine_of(FakeModel(chunk_size=8, num_slots=1))
        self.serve(engine, "a" * 40)
        assert self.serve(engine, "a" * 20 + "b" * 20).prompt.cached_tokens == 16
        assert self.serve(engine, "a" * 40).prompt.cached_tokens == 16

    def test_not_with_another_salt(self) -> None:
        engine = engine_of(FakeModel(chunk_size=8, num_slots=1))
        self.serve(engine, "a" * 40, salt="alice")
        assert self.serve(engine, "a" * 40, salt="bob").prompt.cached_tokens == 0
        assert self.serve(engine, "a" * 40, salt="bob").prompt.cached_tokens == 40
        assert self.serve(engine, "a" * 40, salt="alice").prompt.cached_tokens == 0

    def test_not_for_prompt_logprobs(self) -> None:
        engine = engine_of(FakeModel(chunk_size=8))
        fresh = self.serve(engine, "a" * 40, prompt_logprobs=1)
        assert self.serve(engine, "a" * 40).prompt.cached_tokens == 40
        assert self.serve(engine, "a" * 40, prompt_logprobs=1) == fresh
        assert fresh.prompt.cached_tokens == 0
        assert len(fresh.prompt.logprobs) == 41

    def test_the_longest_match_is_chosen_else_the_least_recently_used(self) -> None:
        model = FakeModel(chunk_size=8, num_slots=3)
        engine = engine_of(model)
        for text in ("a" * 40, "a" * 16 + "b" * 24, "c" * 40):
            self.serve(engine, text)
        slots = [model.extended[i][0] for i in (0, 5, 8)]
        assert len(set(slots)) == 2  # the second took the first one's slot, whose prefix it shared
        assert self.serve(engine, "a" * 16 + "b" * 24).prompt.cached_tokens == 40
        before = len(model.extended)
        self.serve(engine, "d" * 40)
        assert model.extended[before][0] not in slots  # never used

    def test_every_slot_of_several_answers_holds_it(self) -> None:
        engine = engine_of(FakeModel(chunk_size=8, num_slots=2))
        self.serve(engine, "a" * 40, n=2)
        requests = [ask("a" * 40), ask("a" * 40)]
        for request in requests:
            submit(engine, request)
        outcomes = drive(engine)
        assert [outcomes[request.id].prompt.cached_tokens for request in requests] == [40, 40]

    def test_of_an_aborted_prefill_what_was_written(self) -> None:
        model = FakeModel(chunk_size=8, num_slots=1)
        engine = engine_of(model)
        request = ask("a" * 40)
        submit(engine, request)
        engine.step()
        engine.step()
        engine.abort(request.id)
        drive(engine)
        assert self.serve(engine, "a" * 40).prompt.cached_tokens == 16


class TestSeveralAnswers:
    def test_each_is_what_its_random_numbers_say(self) -> None:
        request = ask("hello", n=4, temperature=1.5, seed=3, max_tokens=20)
        model = FakeModel(chunk_size=4)
        engine = engine_of(model)
        submit(engine, request)
        outcome = drive(engine)[request.id]
        assert sorted(outcome.choices) == [0, 1, 2, 3]
        assert len({tuple(choice.tokens) for choice in outcome.choices.values()}) == 4
        assert model.calls["copy_slot"] == 3
        assert len(model.extended) == 2  # the prompt is written once
        alone = answer(ask("hello", temperature=1.5, seed=3, max_tokens=20))
        assert outcome.choices[0] == alone.choices[0]
        assert answer(request) == outcome

    def test_greedy_ones_are_equal(self) -> None:
        outcome = answer(ask("hello", n=3))
        assert [outcome.choices[i].text for i in range(3)] == ["hello"] * 3

    def test_of_a_prompt_of_one_token(self) -> None:
        assert len(answer(ask([BOS], n=3)).choices) == 3

    def test_waits_for_n_slots_and_nobody_overtakes(self) -> None:
        engine = engine_of(FakeModel(num_slots=2))
        running, both, later = ask("a" * 20), ask("bb", n=2), ask("c")
        for request in (running, both, later):
            submit(engine, request)
        order = []
        while engine.has_work:
            order += [i for i, event in engine.step() if isinstance(event, PromptDone)]
        assert order == [running.id, both.id, later.id]

    def test_a_choice_that_ends_frees_its_slot(self) -> None:
        engine = engine_of(FakeModel(num_slots=2))
        request = ask("a" * 30, n=2, temperature=0.9, seed=0, stop=("aaaaaa",))
        submit(engine, request)
        frees = set()
        while engine.has_work:
            engine.step()
            frees.add(engine.status().num_free_slots)
        assert frees == {0, 1, 2}


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (ask([]), "prompt: has no tokens"),
        (ask([5] * 60, max_tokens=5), "prompt of 60 tokens and max_tokens=5: exceed the context of 64"),
        (ask(n=100, max_tokens=5), "n=100: exceeds the 4 slots"),
        (ask(min_tokens=6, max_tokens=5), "min_tokens=6: exceeds max_tokens=5"),
        (
            ask(stop_token_ids=(5, 320), max_tokens=5),
            "stop_token_ids: token 320 is outside the model's vocabulary of 320",
        ),
        (ask(logit_bias={5: 1.0, 1 << 30: 1.0}, max_tokens=5), "logit_bias: token 1073741824 is outside"),
    ],
)
def test_what_cannot_be_answered_is_refused(request_, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_of(FakeModel(max_len=64)).check(request_)


@pytest.mark.parametrize("outside", [320, -1, 1 << 40])
def test_a_token_outside_the_vocabulary_is_refused(outside: int) -> None:
    with pytest.raises(CheckpointError, match=f"token {outside}: the tokenizer gives it, but the model's vocabulary"):
        engine_of(FakeModel()).check(ask([5, outside]))


def test_the_context_can_be_filled_to_the_last_position() -> None:
    choice = first(ask([5] * 10, max_tokens=22, ignore_eos=True), max_len=32)
    assert len(choice.tokens) == 22


class TestRandomNumbers:
    def test_each_step_has_its_own(self) -> None:
        model = FakeModel(lambda _p, _a: np.zeros(320))
        engine = engine_of(model)
        submit(engine, ask(temperature=1.0, seed=0, max_tokens=64, ignore_eos=True))
        tokens = drive(engine).popitem()[1].choices[0].tokens
        assert len(set(model.uniforms)) == 64
        assert len(set(tokens)) > 40

    def test_without_a_seed_answers_differ(self) -> None:
        answers = {tuple(first(ask(temperature=5.0, max_tokens=16, ignore_eos=True)).tokens) for _ in range(4)}
        assert len(answers) == 4


class TestAbort:
    def test_frees_the_slots_at_once_wherever_the_request_is(self) -> None:
        engine = engine_of(FakeModel(num_slots=2, chunk_size=4))
        decoding, prefilling, waiting = ask("hi", n=1), ask("x" * 30), ask("y", n=2)
        for request in (decoding, prefilling, waiting):
            submit(engine, request)
        for _ in range(3):
            engine.step()
        assert (engine.status().num_running, engine.status().num_waiting) == (2, 1)
        for request, free in ((waiting, 0), (prefilling, 1), (decoding, 2)):
            engine.abort(request.id)
            assert engine.status().num_free_slots == free
        assert drive(engine) == {}

    def test_a_token_on_its_way_never_reaches_the_next_owner(self) -> None:
        model = FakeModel(num_slots=1)
        engine = engine_of(model)
        old, new = ask("old old old"), ask("new")
        submit(engine, old)
        while model.calls.get("decode", 0) < 3:
            engine.step()
        submit(engine, new)
        engine.abort(old.id)  # a step for it is in flight
        outcomes = drive(engine)
        assert list(outcomes) == [new.id]
        assert outcomes[new.id].choices[0].text == "new"

    def test_of_what_is_over_or_unknown_is_ignored(self) -> None:
        engine = engine_of(FakeModel())
        engine.abort("nobody")
        request = ask()
        submit(engine, request)
        drive(engine)
        engine.abort(request.id)
        assert engine.status().num_free_slots == 4


class TestFailures:
    def test_logits_that_are_not_finite_end_one_answer_only(self) -> None:
        def say(prompt, answer):
            return np.full(320, np.nan) if prompt[-1] == 255 and len(answer) == 2 else echo(prompt, answer)

        engine = engine_of(FakeModel(say))
        broken, fine = ask([BOS, 70, 71, 72, 255]), ask("hello")
        for request in (broken, fine):
            submit(engine, request)
        outcomes = drive(engine)
        assert outcomes[broken.id].choices[0].tokens == [70, 71]
        assert outcomes[broken.id].choices[0].finish_reason == "error"
        assert outcomes[fine.id].choices[0].text == "hello"

    def test_logits_of_a_prompt_that_are_not_finite(self) -> None:
        outcome = answer(ask("hello", prompt_logprobs=1, n=2), lambda _p, _a: np.full(320, np.nan), chunk_size=2)
        assert outcome.prompt == PromptDone(0, ())
        assert [choice.finish_reason for choice in outcome.choices.values()] == ["error", "error"]

    @pytest.mark.parametrize("method", ["extend", "set_slot", "copy_slot", "decode", "fetch"])
    def test_what_the_backend_raises_is_raised(self, method: str) -> None:
        engine = engine_of(FakeModel(fault=(method, 1)))
        submit(engine, ask("a" * 40, n=3))
        with pytest.raises(DeviceLostError):
            drive(engine)


class TestQueue:
    def test_is_limited_while_slots_are_taken(self) -> None:
        engine = engine_of(FakeModel(num_slots=1), max_queue=1)
        requests = [ask(text) for text in "abc"]
        engine.submit(requests[0])
        engine.submit(requests[1])  # waits
        assert engine.is_full(requests[2])
        engine.step()
        assert engine.is_full(requests[2])
        with pytest.raises(QueueFullError, match="queue: 1 requests wait already"):
            engine.submit(requests[2])
        finish(engine)
        assert not engine.is_full(requests[2])

    def test_of_0_takes_what_the_slots_can(self) -> None:
        engine = engine_of(FakeModel(num_slots=2), max_queue=0)
        engine.submit(ask())
        engine.submit(ask())
        with pytest.raises(QueueFullError):
            engine.submit(ask())

    def test_requests_that_waited_too_long_are_forgotten(self) -> None:
        engine = engine_of(FakeModel(num_slots=1), queue_timeout=0.05)
        running, waiting = ask("a" * 60), ask("b")
        engine.submit(running)
        engine.submit(waiting)
        engine.step()
        assert engine.expire() == []
        time.sleep(0.06)
        assert engine.expire() == [waiting.id]  # and not the one that runs
        assert list(drive(engine)) == [running.id]


class TestOverlap:
    def test_a_step_is_dispatched_before_the_last_one_is_fetched(self) -> None:
        model = FakeModel()
        engine = engine_of(model)
        submit(engine, ask("hello"))
        drive(engine)
        assert model.most_ahead == 2

    def test_not_while_a_grammar_is_followed(self) -> None:
        model = FakeModel()
        engine = engine_of(model)
        submit(engine, ask("hello", grammar=Grammar(kind="regex", source="[a-z]*")))
        drive(engine)
        assert model.most_ahead == 1

    def test_a_long_prompt_does_not_hold_up_the_others(self) -> None:
        model = FakeModel(chunk_size=4)
        engine = engine_of(model)
        submit(engine, ask([BOS], max_tokens=20, ignore_eos=True))
        engine.step()
        submit(engine, ask("b" * 60))
        for _ in range(10):
            extends, decodes = model.calls.get("extend", 0), model.calls["decode"]
            engine.step()
            assert model.calls["extend"] == extends + 1
            assert model.calls["decode"] == decodes + 1
        finish(engine)


class TestGrammars:
    def test_the_answer_matches(self) -> None:
        choice = first(ask("hello", grammar=Grammar(kind="regex", source="(yes|no)!")))
        assert choice.text in ("yes!", "no!")
        assert (choice.finish_reason, choice.stop) == ("stop", None)  # nothing could follow

    def test_a_schema_gives_json(self) -> None:
        schema = {
            "type": "object",
            "properties": {"age": {"type": "integer"}, "name": {"type": "string", "maxLength": 5}},
            "required": ["age", "name"],
            "additionalProperties": False,
        }
        grammar = Grammar(kind="json_schema", source=json.dumps(schema))
        for seed in range(10):
            choice = first(
                ask(grammar=grammar, temperature=1.5, seed=seed, max_tokens=200, logit_bias=NO_SPACE), max_len=512
            )
            if choice.finish_reason == "stop":
                assert sorted(json.loads(choice.text)) == ["age", "name"]
        assert choice.text.startswith("{")

    def test_an_answer_that_is_cut_is_of_length(self) -> None:
        choice = first(ask(grammar=Grammar(kind="regex", source="a{50}"), max_tokens=10))
        assert (choice.text, choice.finish_reason) == ("a" * 10, "length")
        choice = first(ask(grammar=Grammar(kind="regex", source="a{10}"), max_tokens=10))
        assert (choice.text, choice.finish_reason) == ("a" * 10, "stop")

    def test_ends_with_an_end_token_where_more_could_follow(self) -> None:
        choice = first(ask("aab", grammar=Grammar(kind="regex", source="a+b?c*")))
        assert (choice.text, choice.finish_reason, choice.stop) == ("aab", "stop", EOS)

    def test_lark(self) -> None:
        grammar = Grammar(kind="lark", source='start: greeting " " NAME\ngreeting: "hi" | "yo"\nNAME: /[A-C]{2}/')
        assert first(ask("yo AB", grammar=grammar)).text == "yo AB"

    def test_an_id_without_text_is_never_allowed(self) -> None:
        """259 tokens, 320 rows: the rows above would be the likeliest."""
        choice = first(ask(grammar=Grammar(kind="regex", source=".{8}")), script(*[300] * 20))
        assert len(choice.text) == 8
        assert max(choice.tokens) < 259

    def test_ignore_eos_and_min_tokens_bar_the_end_until_nothing_else_is_left(self) -> None:
        grammar = Grammar(kind="regex", source="a{0,6}")
        assert first(ask(grammar=grammar), script()).text == ""
        choice = first(ask(grammar=grammar, ignore_eos=True), script())
        assert (choice.text, choice.finish_reason) == ("aaaaaa", "stop")
        assert first(ask(grammar=grammar, min_tokens=3), script()).text == "aaa"

    def test_a_grammar_of_nothing_ends_at_once(self) -> None:
        choice = first(ask(grammar=Grammar(kind="regex", source=""), ignore_eos=True))
        assert (choice.text, choice.finish_reason) == ("", "stop")

    def test_a_stop_token_that_it_does_not_allow_does_not_end_it(self) -> None:
        choice = first(ask(grammar=Grammar(kind="regex", source="a{4}"), stop_token_ids=(100,)), script(100))
        assert choice.text == "aaaa"

    def test_several_answers_follow_it_each_for_itself(self) -> None:
        grammar = Grammar(kind="regex", source="[a-z]{3}-[0-9]{3}")
        outcome = answer(ask(grammar=grammar, n=4, temperature=5.0, seed=1))
        texts = {choice.text for choice in outcome.choices.values()}
        assert len(texts) > 1
        assert all(text[:3].isalpha() and text[3] == "-" and text[4:].isdigit() and len(text) == 7 for text in texts)

    def test_neighbours_are_not_bound_by_it(self) -> None:
        engine = engine_of(FakeModel())
        free, bound = ask("free!"), ask("bound", grammar=Grammar(kind="regex", source="[0-9]{20}"))
        for request in (free, bound):
            submit(engine, request)
        outcomes = drive(engine)
        assert outcomes[free.id].choices[0].text == "free!"
        assert outcomes[bound.id].choices[0].text.isdigit()


#: Keeps whitespace, of which JSON allows any amount, out of an answer.
NO_SPACE = {ids(character)[0]: -100.0 for character in " \n\t\r"}


def test_the_observer_is_told() -> None:
    class Watch:
        def __init__(self) -> None:
            self.told: list[tuple] = []

        def prompt_done(self, *args: float) -> None:
            self.told.append(("prompt", *args))

        def first_token(self, seconds: float) -> None:
            self.told.append(("first", seconds))

        def token_interval(self, seconds: float) -> None:
            self.told.append(("interval", seconds))

        def finished(self, done: RequestDone) -> None:
            self.told.append(("done", done))

    watch = Watch()
    engine = Engine(FakeModel(step_seconds=0.01, chunk_size=4), TOKENIZER, observer=watch)
    submit(engine, ask("hello", n=2))
    drive(engine)
    names = [row[0] for row in watch.told]
    assert names == ["prompt", "first", *["interval"] * 10, "done"]
    prompt, cached, queued, prefill = watch.told[0][1:]
    assert (prompt, cached) == (6, 0)
    assert 0 <= queued < prefill
    assert prefill > 0.03  # two runs and a step
    assert watch.told[1][1] == pytest.approx(queued + prefill)
    assert queued + prefill + sum(row[1] for row in watch.told[2:-1]) / 2 > 0.079  # two runs and six steps
    done = watch.told[-1][1]
    assert (done.prompt_tokens, done.generated_tokens, done.finish_reason) == (6, 10, "stop")
    assert done.e2e_seconds > 0.079
    assert done.decode_seconds == pytest.approx(done.e2e_seconds - watch.told[1][1], abs=1e-3)
    watch.told.clear()
    request = ask("bye")
    submit(engine, request)
    engine.abort(request.id)
    assert [row[0] for row in watch.told] == ["done"]
    assert watch.told[0][1].finish_reason == "abort"


def test_status_counts_what_is_held() -> None:
    engine = engine_of(FakeModel(num_slots=2, chunk_size=4, max_len=100))
    for text in ("a" * 9, "b" * 9, "c" * 9):
        submit(engine, ask(text))
    for _ in range(4):
        engine.step()
    status = engine.status()
    assert (status.num_running, status.num_waiting, status.num_free_slots) == (2, 1, 0)
    assert status.num_tokens_capacity == 200
    assert status.num_tokens_held == 9 + 2 + 4  # a prompt and two steps, and a run of the next
    finish(engine)


def talk(prompt, answer) -> int:
    """Letters, spaces and split characters that depend on every token so far; sometimes the end."""
    digest = 7
    for token in (*prompt, *answer):
        digest = (digest * 1103515245 + token + 12345) % (1 << 31)
    return EOS if digest % 29 == 0 else ids("abc de🗼")[digest // 64 % 10]


class TestUnderLoad:
    """Whatever else runs, an answer is what it would be alone, to the last token."""

    def random_request(self, rng: random.Random):
        params: dict = {"max_tokens": rng.randint(0, 30)}
        chance = rng.random
        if chance() < 0.5:
            params |= {"temperature": rng.choice([0.7, 1.0, 3.0]), "seed": rng.randrange(1 << 63)}
        if chance() < 0.3:
            params |= {"top_p": 0.9, "top_k": 30, "min_p": 0.01}
        if chance() < 0.3:
            params |= {"presence_penalty": 0.5, "frequency_penalty": 1.0, "repetition_penalty": 1.3}
        if chance() < 0.3:
            params["stop"] = tuple("".join(rng.choices("abc ", k=rng.randint(1, 3))) for _ in range(2))
        if chance() < 0.2:
            params["n"] = rng.randint(2, 4)
        if chance() < 0.2:
            params |= {"logprobs": rng.randint(0, 20)}
        if chance() < 0.2:
            params |= {"prompt_logprobs": rng.randint(0, 3)}
        if chance() < 0.2:
            params |= {"min_tokens": rng.randint(0, params["max_tokens"])}
        if chance() < 0.2:
            params |= {"ignore_eos": True}
        if chance() < 0.2:
            params |= {"logit_bias": {rng.randrange(320): 10.0, EOS: 3.0}}
        if chance() < 0.2:
            params |= {"grammar": Grammar(kind="regex", source=rng.choice(["[ab]{1,9}c", "(a|bc)*", ".{5}"]))}
        text = rng.choice(["", "shared prefix of some length, then "]) + "".join(
            rng.choices("abc 🗼", k=rng.randint(0, 20))
        )
        return ask(text, salt=rng.choice(["", "", "x"]), **params)

    @pytest.mark.parametrize("seed", range(6))
    def test_answers_equal_solo_answers(self, seed: int) -> None:
        rng = random.Random(seed)
        engine = engine_of(FakeModel(talk, num_slots=5, chunk_size=8))
        coming = [self.random_request(rng) for _ in range(60)]
        requests = {request.id: request for request in coming}
        outcomes: dict[str, Outcome] = {}
        running: list[str] = []  # in an order that does not hang on the ids, which are drawn
        aborted: set[str] = set()
        ends = dict.fromkeys(requests, 0)
        while coming or engine.has_work:
            if coming and rng.random() < 0.4:
                request = coming.pop()
                submit(engine, request)
                running.append(request.id)
            if running and rng.random() < 0.03:
                victim = rng.choice(running)
                engine.abort(victim)
                aborted.add(victim)
                running.remove(victim)
            for request_id, event in engine.step():
                assert request_id not in aborted
                outcomes.setdefault(request_id, Outcome()).add(event)
                ends[request_id] += is_last(event)
                if ends[request_id] == requests[request_id].params.n:
                    running.remove(request_id)
        drive(engine)
        finished = [i for i in outcomes if i not in aborted]
        assert len(finished) > 40
        assert len(aborted) > 3
        reused = 0
        for request_id in finished:
            alone, together = answer(requests[request_id], talk, chunk_size=8), outcomes[request_id]
            reused += together.prompt.cached_tokens > 0
            assert together.choices == alone.choices
            assert together.prompt.logprobs == alone.prompt.logprobs
        assert reused > 3

    def test_nobody_gets_the_text_of_another(self) -> None:
        engine = engine_of(FakeModel(num_slots=8))
        requests = [ask(f"request {i} says {i * i}") for i in range(100)]
        for request in requests:
            submit(engine, request)
        outcomes = drive(engine)
        for i, request in enumerate(requests):
            assert outcomes[request.id].choices[0].text == f"request {i} says {i * i}"


def test_the_fake_model_notices_a_mix_up() -> None:
    """The tests above prove something only if it does."""
    model = FakeModel(num_slots=2)
    state = model.init_state()
    prompt = np.asarray(ids("hello"), np.int32)
    state, _ = model.extend(state, 0, prompt[:4], 0)
    with pytest.raises(AssertionError, match="not in the slot"):
        model.set_slot(state, 1, prompt, ask().params.for_slot())
    state = model._state
    with pytest.raises(AssertionError, match="never set"):
        model.decode(state, np.array([False, True]), np.zeros(2, np.float32))
    state = model._state
    state = model.set_slot(state, 0, prompt, ask().params.for_slot())
    with pytest.raises(AssertionError, match="used twice"):
        model.set_slot(
            model.set_slot(state, 0, prompt, ask().params.for_slot()) and state, 0, prompt, ask().params.for_slot()
        )
    assert logits_of(5, 1, 320).argmax() == 5
