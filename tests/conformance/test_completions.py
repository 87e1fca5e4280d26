"""``/v1/completions``: kinds of prompts, echo, log-probabilities, choices, usage, streams."""

import math

import pytest

from tests.conformance.api import COMPLETIONS, FIXED, Api, finite, refused

PROMPT = "Once upon a time"


def text(answer: dict, choice: int = 0) -> str:
    return answer["choices"][choice]["text"]


class TestAnswer:
    def test_shape(self, server: Api) -> None:
        answer = server.complete(PROMPT, max_tokens=5, **FIXED)
        assert answer["object"] == "text_completion"
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["choices"][0]["logprobs"] is None
        usage = answer["usage"]
        assert usage["completion_tokens"] == 5
        assert usage["total_tokens"] == usage["prompt_tokens"] + 5

    def test_every_answer_has_an_id_of_its_own(self, server: Api) -> None:
        assert len({server.complete("x", max_tokens=1)["id"] for _ in range(4)}) == 4

    def test_the_sdk_reads_it(self, server: Api) -> None:
        answer = server.openai.completions.create(model=server.model, prompt=PROMPT, max_tokens=5, temperature=0)
        assert answer.choices[0].text == text(server.complete(PROMPT, max_tokens=5, temperature=0))

    def test_greedy_is_the_same_each_time(self, server: Api) -> None:
        answers = {text(server.complete(PROMPT, max_tokens=16, **FIXED)) for _ in range(3)}
        assert len(answers) == 1

    def test_default_max_tokens_is_openais(self, server: Api) -> None:
        assert server.complete(PROMPT, **FIXED)["usage"]["completion_tokens"] == 16


class TestPrompts:
    def test_a_list_is_answered_in_order(self, server: Api) -> None:
        prompts = ["one", "two words", "three"]
        answer = server.complete(prompts, max_tokens=6, **FIXED)
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        assert [text(answer, i) for i in range(3)] == [text(server.complete(p, max_tokens=6, **FIXED)) for p in prompts]
        assert answer["usage"]["prompt_tokens"] == sum(server.tokenize(p)["count"] for p in prompts)
        assert answer["usage"]["completion_tokens"] == 18

    def test_lists_of_ids(self, server: Api) -> None:
        ids = [server.tokens(prompt) for prompt in ("one", "two words")]
        answer = server.complete(ids, max_tokens=4, **FIXED)
        assert [text(answer, i) for i in range(2)] == [text(server.complete(p, max_tokens=4, **FIXED)) for p in ids]

    def test_indices_of_lists_with_choices(self, server: Api) -> None:
        answer = server.complete(["one", "two"], n=2, max_tokens=3, **FIXED)
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert text(answer, 0) == text(answer, 1)
        assert text(answer, 2) == text(answer, 3) == text(server.complete("two", max_tokens=3, **FIXED))

    @pytest.mark.parametrize(
        "prompt", [[], [[]], [[1], []], ["x", 1], [1, "x"], [1.5], [True], {}, 5, None, [None], [["x"]]]
    )
    def test_refused(self, server: Api, prompt: object) -> None:
        refused(server.post(COMPLETIONS, prompt=prompt, max_tokens=1), param="prompt")


class TestEchoAndLogprobs:
    def test_echo(self, server: Api) -> None:
        plain = server.complete(PROMPT, max_tokens=4, **FIXED)
        echoed = server.complete(PROMPT, max_tokens=4, echo=True, **FIXED)
        assert text(echoed) == PROMPT + text(plain)
        assert echoed["usage"]["completion_tokens"] == 4

    @pytest.mark.parametrize("asked", [0, 1, 20])
    def test_logprobs(self, server: Api, asked: int) -> None:
        answer = server.complete(PROMPT, max_tokens=5, logprobs=asked, **FIXED)
        found = answer["choices"][0]["logprobs"]
        assert [len(found[name]) for name in ("tokens", "token_logprobs", "text_offset")] == [5] * 3
        assert finite(found["token_logprobs"])
        assert max(found["token_logprobs"]) <= 0
        for chosen, token, top in zip(
            found["token_logprobs"], found["tokens"], found["top_logprobs"] or [{}] * 5, strict=True
        ):
            assert len(top) <= asked + 1
            if asked:
                assert top[token] == chosen == max(top.values()), "greedy takes the most likely"
                assert sum(map(math.exp, top.values())) <= 1 + 1e-3

    def test_echo_with_logprobs_as_lm_eval_asks(self, server: Api) -> None:
        """llama.cpp#27174: without the prompt's log-probabilities lm-eval silently reports chance."""
        ids = server.tokens(PROMPT)
        answer = server.complete(ids, max_tokens=1, echo=True, logprobs=1, temperature=0, seed=1234)
        found = answer["choices"][0]["logprobs"]
        generated = answer["usage"]["completion_tokens"]
        assert (
            len(found["token_logprobs"]) == len(found["top_logprobs"]) == len(found["tokens"]) == len(ids) + generated
        )
        assert found["token_logprobs"][0] is None
        assert not found["top_logprobs"][0]
        assert all(value is not None and -1000 < value <= 0 for value in found["token_logprobs"][1:])
        for value, top in zip(found["token_logprobs"][1:], found["top_logprobs"][1:], strict=True):
            assert value <= max(top.values())

    def test_echo_without_generating(self, server: Api) -> None:
        """vllm#9336: max_tokens=0 only scores the prompt."""
        answer = server.complete(PROMPT, max_tokens=0, echo=True, logprobs=1, temperature=0)
        assert text(answer) == PROMPT
        assert answer["usage"]["completion_tokens"] == 0
        assert answer["choices"][0]["finish_reason"] == "length"
        assert len(answer["choices"][0]["logprobs"]["token_logprobs"]) == answer["usage"]["prompt_tokens"]

    def test_an_answer_scores_the_same_as_a_prompt(self, server: Api) -> None:
        """Prefill and decode compute the same distribution; float32 leaves an error of accumulation."""
        ids = server.tokens(PROMPT)
        generated = server.complete(ids, max_tokens=8, logprobs=0, **FIXED)["choices"][0]
        whole = server.complete(ids, max_tokens=8, logprobs=0, echo=True, **FIXED)["choices"][0]
        tail = whole["logprobs"]["token_logprobs"][len(ids) :]
        assert whole["logprobs"]["tokens"][len(ids) :] == generated["logprobs"]["tokens"]
        assert tail == pytest.approx(generated["logprobs"]["token_logprobs"], abs=1e-3)

    def test_offsets_and_tokens_make_up_the_text(self, server: Api) -> None:
        choice = server.complete("plain words here", max_tokens=6, logprobs=1, echo=True, **FIXED)["choices"][0]
        found = choice["logprobs"]
        assert found["text_offset"] == sorted(found["text_offset"])
        assert "".join(found["tokens"]).endswith(choice["text"]) or "bytes:" in "".join(found["tokens"])
        assert max(found["text_offset"]) <= len(choice["text"])

    def test_log_probabilities_are_of_the_raw_distribution(self, server: Api) -> None:
        """Neither bias, penalty nor temperature change what is reported."""
        plain = server.complete(PROMPT, max_tokens=1, logprobs=5, **FIXED)["choices"][0]["logprobs"]
        changed = server.complete(
            PROMPT, max_tokens=1, logprobs=5, ignore_eos=True, temperature=3, top_k=2, repetition_penalty=2, seed=1,
            logit_bias={str(server.letter("Q")): 5},
        )["choices"][0]["logprobs"]  # fmt: skip
        best = dict(list(plain["top_logprobs"][0].items())[:5])
        assert best.items() <= changed["top_logprobs"][0].items()

    @pytest.mark.parametrize("logprobs", [-1, 21, 1 << 40, 1.5, "1", True])
    def test_logprobs_refused(self, server: Api, logprobs: object) -> None:
        refused(server.post(COMPLETIONS, prompt="x", logprobs=logprobs), param="logprobs")


class TestStreams:
    @pytest.mark.parametrize(
        "options",
        [
            FIXED,
            {**FIXED, "echo": True},
            {**FIXED, "n": 2},
            {**FIXED, "logprobs": 2},
            {**FIXED, "logprobs": 2, "echo": True},
            {"temperature": 1.5, "seed": 11, "n": 2, "ignore_eos": True},
            {**FIXED, "stop": ["e", "a", " "]},
        ],
        ids=["greedy", "echo", "n", "logprobs", "echo-logprobs", "seeded", "stops"],
    )
    def test_say_what_the_whole_answer_says(self, server: Api, options: dict) -> None:
        whole = server.complete(PROMPT, max_tokens=24, **options)
        streamed = server.stream(COMPLETIONS, prompt=PROMPT, max_tokens=24, **options)
        for choice in whole["choices"]:
            index = choice["index"]
            assert streamed.text(index) == choice["text"]
            assert streamed.finish_reasons(index) == [choice["finish_reason"]]
            if "logprobs" in options:
                parts = [part["logprobs"] for part in streamed.of(index) if part.get("logprobs")]
                for name in ("tokens", "token_logprobs", "text_offset"):
                    assert [value for part in parts for value in part[name]] == choice["logprobs"][name], name

    def test_a_list_of_prompts(self, server: Api) -> None:
        whole = server.complete(["one", "two"], max_tokens=5, **FIXED)
        streamed = server.stream(COMPLETIONS, prompt=["one", "two"], max_tokens=5, **FIXED)
        assert [streamed.text(i) for i in range(2)] == [text(whole, i) for i in range(2)]

    def test_nothing_follows_the_finish_reason(self, server: Api) -> None:
        streamed = server.stream(COMPLETIONS, prompt=PROMPT, max_tokens=8, n=2, **FIXED)
        for index in range(2):
            assert streamed.of(index)[-1]["finish_reason"]

    def test_usage_only_when_asked(self, server: Api) -> None:
        """kthena#202: usage was missing where it was asked for, or sent where it was not."""
        plain = server.stream(COMPLETIONS, prompt=PROMPT, max_tokens=4, **FIXED)
        assert plain.usages == []
        assert all("usage" not in chunk or chunk["usage"] is None for chunk in plain.chunks)
        asked = server.stream(COMPLETIONS, prompt=PROMPT, max_tokens=4, stream_options={"include_usage": True}, **FIXED)
        whole = server.complete(PROMPT, max_tokens=4, **FIXED)["usage"]
        assert [usage["completion_tokens"] for usage in asked.usages] == [4]
        assert asked.usages[0]["prompt_tokens"] == whole["prompt_tokens"]
        assert asked.chunks[-1]["choices"] == []
        assert asked.chunks[-1]["usage"] == asked.usages[0]

    def test_stream_options_without_a_stream(self, server: Api) -> None:
        refused(server.post(COMPLETIONS, prompt="x", stream_options={"include_usage": True}), param="stream_options")

    def test_chunks_share_one_id(self, server: Api) -> None:
        streamed = server.stream(COMPLETIONS, prompt=PROMPT, max_tokens=4, **FIXED)
        assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in streamed.chunks}) == 1

    def test_nobody_between_may_hold_a_stream_back(self, server: Api) -> None:
        response = server.post(COMPLETIONS, prompt="x", stream=True, max_tokens=1)
        assert "no-cache" in response.headers["cache-control"]
        assert response.headers.get("x-accel-buffering", "no") == "no"

    def test_refusals_come_before_the_stream(self, server: Api) -> None:
        response = server.post(COMPLETIONS, prompt="", stream=True)
        refused(response, param="prompt")
        assert response.headers["content-type"].startswith("application/json")


def test_cached_prompts_are_reported_and_change_nothing(server: Api) -> None:
    """vllm#3914: a reused prefix has no log-probabilities; asking for them must compute it again."""
    prompt = server.tokens("word " * 60)[: min(200, server.context - 20)]
    first = server.complete(prompt, max_tokens=8, **FIXED)
    again = server.complete(prompt, max_tokens=8, **FIXED)
    scored = server.complete(prompt, max_tokens=8, logprobs=1, echo=True, **FIXED)
    assert text(first) == text(again)
    assert text(scored).endswith(text(first))
    assert len(scored["choices"][0]["logprobs"]["token_logprobs"]) == len(prompt) + 8
    assert scored["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert 0 <= again["usage"]["prompt_tokens_details"]["cached_tokens"] < len(prompt)
