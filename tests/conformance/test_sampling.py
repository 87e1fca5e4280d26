"""Every sampling parameter does what it says, whichever model answers.

A bias of 100 drowns any logit: it leaves the choice to two letters, Q and Z.
"""

import pytest

from tests.conformance.api import CHAT, COMPLETIONS, FIXED, Api, refused

PROMPT = "Once upon a time"

#: So hot that every token is about equally likely.
HOT = {"temperature": 1000, "ignore_eos": True}


def text(server: Api, max_tokens: int = 12, prompt: object = PROMPT, **options: object) -> str:
    return server.complete(prompt, max_tokens=max_tokens, **options)["choices"][0]["text"]


def letters(server: Api, z: float, max_tokens: int, **options: object) -> str:
    """What is said when only Q, with a bias of 100, and Z, with another, can be."""
    bias = {str(server.letter("Q")): 100, str(server.letter("Z")): z}
    return text(server, max_tokens, logit_bias=bias, **{**FIXED, **options}).replace(" ", "")


class TestSeeds:
    def test_the_same_seed_says_the_same(self, server: Api) -> None:
        assert text(server, seed=1, **HOT) == text(server, seed=1, **HOT)

    def test_others_say_something_else(self, server: Api) -> None:
        """mlx-lm#1620: the same random key at each step or request."""
        assert len({text(server, seed=seed, **HOT) for seed in range(4)}) == 4

    def test_without_a_seed_answers_differ(self, server: Api) -> None:
        assert len({text(server, **HOT) for _ in range(4)}) == 4

    def test_every_token_has_a_random_number_of_its_own(self, server: Api) -> None:
        """mlx-lm#1620, JetStream: a constant key draws the same quantile at each step."""
        bias = {str(server.letter(character)): 100 for character in "QZJX"}
        said = text(server, 48, logit_bias=bias, seed=3, temperature=5, ignore_eos=True).replace(" ", "")
        assert len(said) == 48
        assert set(said) == set("QZJX")
        assert len({said[i : i + 2] for i in range(47)}) > 8, "16 pairs are possible"

    @pytest.mark.parametrize("seed", [0, 1, (1 << 31) - 1, (1 << 53) - 1, (1 << 63) - 1, -1])
    def test_any_integer_is_a_seed(self, server: Api, seed: int) -> None:
        assert text(server, 4, seed=seed, **HOT) == text(server, 4, seed=seed, **HOT)

    @pytest.mark.parametrize("seed", [1.5, "1", True, 1 << 70, []])
    def test_anything_else_is_refused(self, server: Api, seed: object) -> None:
        refused(server.post(COMPLETIONS, prompt="x", seed=seed))


class TestTruncation:
    @pytest.mark.parametrize("only", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
    def test_of_all_but_the_most_likely_is_greedy(self, server: Api, only: dict) -> None:
        assert text(server, temperature=1, seed=7, ignore_eos=True, **only) == text(server, **FIXED)

    @pytest.mark.parametrize("nothing", [{"top_k": 0}, {"top_p": 1.0}, {"min_p": 0.0}])
    def test_of_nothing_changes_nothing(self, server: Api, nothing: dict) -> None:
        assert text(server, seed=7, **nothing, **HOT) == text(server, seed=7, **HOT)

    def test_top_k_leaves_k(self, server: Api) -> None:
        bias = {str(server.letter(character)): 100 for character in "QZJX"}
        said = {text(server, 1, logit_bias=bias, top_k=2, seed=seed, **HOT).strip() for seed in range(12)}
        assert len(said) == 2


class TestBiasAndPenalties:
    def test_a_bias_forces_a_token(self, server: Api) -> None:
        assert letters(server, -100, 10) == "Q" * 10

    def test_a_bias_bans_a_token(self, server: Api) -> None:
        first = server.complete(PROMPT, max_tokens=1, logprobs=1, **FIXED)["choices"][0]["text"]
        banned = {str(server.letter("Q")): 100, str(server.letter("Z")): 99}
        assert first not in ("Q", "Z")
        assert text(server, 6, logit_bias=banned, **FIXED) != text(server, 6, **FIXED)

    def test_frequency_penalty_wears_a_token_down(self, server: Api) -> None:
        """It takes 2 each time, so a lead of 40 is gone after 20 times; logits differ by less than 30."""
        assert letters(server, 60, 48) == "Q" * 48
        assert "Z" in letters(server, 60, 48, frequency_penalty=2)
        assert letters(server, 60, 48, frequency_penalty=-2) == "Q" * 48

    def test_presence_penalty_counts_once(self, server: Api) -> None:
        assert letters(server, 60, 48, presence_penalty=2) == "Q" * 48

    @pytest.mark.parametrize("penalty", [2, -2])
    def test_presence_penalty_tips_a_near_balance(self, server: Api, penalty: float) -> None:
        """At the smallest lead with which Q wins eight times (or Z once), some step is within 1 of a balance.

        The penalty of 2 tips that step, unless it is the first: then another prompt is tried.
        """
        for prompt in (PROMPT, "QZQZ", "QQQQ", "one two", "ZZZZ", "What is it?"):

            def said(lead: int, prompt: str = prompt, **options: object) -> str:
                bias = {str(server.letter("Q")): min(100, 100 + lead), str(server.letter("Z")): min(100, 100 - lead)}
                return text(server, 8, prompt, logit_bias=bias, **FIXED, **options).replace(" ", "")

            low, high = -40, 40  # not all Q at low, all Q at high
            assert said(high) == "Q" * 8
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if said(middle) == "Q" * 8 else (middle, high)
            lead = high if penalty > 0 else low
            if said(lead) != said(lead, presence_penalty=penalty):
                return
        pytest.fail(f"a presence penalty of {penalty} changed nothing")

    def test_repetition_penalty_makes_what_was_said_unlikely(self, server: Api) -> None:
        """A biased logit over 60 divided by 100 is beaten by the other letter."""
        assert letters(server, 60, 2) == "QQ"
        assert letters(server, 60, 2, repetition_penalty=100) == "QZ"

    def test_repetition_penalty_covers_the_prompt(self, server: Api) -> None:
        prompt = [*server.tokens(PROMPT), server.letter("Q")]
        bias = {str(server.letter("Q")): 100, str(server.letter("Z")): 60}
        options = {**FIXED, "logit_bias": bias, "prompt": prompt}
        assert text(server, 1, **options).strip() == "Q"
        assert text(server, 1, repetition_penalty=100, **options).strip() == "Z"


class TestEnds:
    def test_a_stop_text_is_not_part_of_the_answer(self, server: Api) -> None:
        answer = server.complete(PROMPT, max_tokens=10, stop="QQQ", logit_bias={str(server.letter("Q")): 100}, **FIXED)
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert "Q" not in answer["choices"][0]["text"]

    def test_every_position_of_a_stop(self, server: Api) -> None:
        """vllm#3574: stops that straddle tokens leaked. Whatever part of the answer is a stop, it ends there."""
        whole = text(server, 24, **FIXED)
        for start in range(min(len(whole) - 1, 12)):
            for length in (1, 2, 5):
                stop = whole[start : start + length]
                answer = server.complete(PROMPT, max_tokens=24, stop=[stop, "never said \u2603"], **FIXED)
                assert answer["choices"][0]["text"] == whole[: whole.index(stop)], repr(stop)
                assert answer["choices"][0]["finish_reason"] == "stop"

    def test_a_stop_that_never_completes_is_said(self, server: Api) -> None:
        whole = text(server, 12, **FIXED)
        for length in (1, 3):
            stop = whole[-length:] + "\u2603"
            assert server.stream(COMPLETIONS, prompt=PROMPT, max_tokens=12, stop=stop, **FIXED).text() == whole

    def test_sixteen_stops(self, server: Api) -> None:
        assert text(server, 4, stop=[f"{i}\u2603" for i in range(16)], **FIXED) == text(server, 4, **FIXED)

    def test_stop_token_ids(self, server: Api) -> None:
        bias = {str(server.letter("Q")): 100}
        answer = server.complete(PROMPT, max_tokens=9, stop_token_ids=[server.letter("Q")], logit_bias=bias, **FIXED)
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["choices"][0]["text"] == ""

    @pytest.fixture
    def eos(self, server: Api) -> int:
        return server.tokens(server.tokenizer["eos_token"], add_special_tokens=False)[0]

    def test_an_end_token_ends(self, server: Api, eos: int) -> None:
        answer = server.complete(PROMPT, max_tokens=9, temperature=0, logit_bias={str(eos): 100})
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["choices"][0]["text"] == ""

    def test_ignore_eos(self, server: Api, eos: int) -> None:
        """vllm#4589: it did not reach the end tokens of the config."""
        answer = server.complete(PROMPT, max_tokens=9, logit_bias={str(eos): 100}, **FIXED)
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 9

    def test_min_tokens(self, server: Api, eos: int) -> None:
        answer = server.complete(PROMPT, max_tokens=9, min_tokens=4, temperature=0, logit_bias={str(eos): 100})
        assert 4 <= answer["usage"]["completion_tokens"] <= 9
        stopped = server.complete(
            PROMPT,
            max_tokens=9,
            min_tokens=4,
            stop_token_ids=[server.letter("Q")],
            logit_bias={str(server.letter("Q")): 100},
            **FIXED,
        )
        assert stopped["usage"]["completion_tokens"] >= 4

    @pytest.mark.parametrize("stop", ["", [""], [5], ["x"] * 2000, {"a": 1}, ["x" * 100_000]])
    def test_stops_refused(self, server: Api, stop: object) -> None:
        refused(server.post(COMPLETIONS, prompt="x", stop=stop), param="stop")


#: Field -> values outside its range or of another type.
BROKEN = {
    "max_tokens": (-1, 1.5, "3", True, 1 << 70),
    "min_tokens": (-1, 1.5, 1 << 70),
    "n": (0, -1, 1.5, "2"),
    "temperature": (-0.1, "hot", True, []),
    "top_p": (0, -0.1, 1.1, "x"),
    "top_k": (-2, 1.5, "x"),
    "min_p": (-0.1, 1.1),
    "presence_penalty": (-2.1, 2.1, "x"),
    "frequency_penalty": (-2.1, 2.1, "x"),
    "repetition_penalty": (0, -1, "x"),
    "logit_bias": ([], "x", {"x": 1}, {"1": "x"}, {"1": 101}, {"1": -101}, {"1": None}, {"1.5": 1}),
    "stop_token_ids": ([-1], [1 << 40], ["x"], "x"),
    "ignore_eos": ("yes", 2),
    "stream": ("yes", 2),
    "echo": ("yes", 2),
    "stream_options": (5, {"include_usage": 5}),
    "response_format": (5, {}, {"type": "xml"}, {"type": "json_schema"}),
}  # fmt: skip


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in BROKEN.items() for value in values])
def test_values_that_break_a_rule(server: Api, field: str, value: object) -> None:
    refused(server.post(COMPLETIONS, prompt="x", **{"max_tokens": 1, field: value}), param=field)


@pytest.mark.parametrize(
    "field", ["temperature", "top_p", "top_k", "seed", "stop", "max_tokens", "logit_bias", "n", "user", "logprobs"]
)
def test_null_is_the_default(server: Api, field: str) -> None:
    assert server.post(COMPLETIONS, prompt="x", **{"max_tokens": 1, field: None}).status_code == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("best_of", 5),
        ("suffix", "x"),
        ("use_beam_search", True),
        ("prompt_logprobs", 3),
        ("guided_regex", "a+"),
        ("chat_template", "{{ 1 }}"),
    ],
)
def test_what_is_known_but_not_supported_is_refused(server: Api, field: str, value: object) -> None:
    refused(server.post(COMPLETIONS, prompt="x", max_tokens=1, **{field: value}), param=field)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("chat_template", "{{ 1 }}"),
        ("functions", [{"name": "f"}]),
        ("function_call", "auto"),
        ("audio", {}),
        ("modalities", ["audio"]),
    ],
)
def test_what_chats_do_not_support_is_refused(server: Api, field: str, value: object) -> None:
    refused(server.post(CHAT, messages=[{"role": "user", "content": "x"}], max_tokens=1, **{field: value}), param=field)
