"""``/v1/chat/completions``: conversations, log-probabilities, streams."""

import pytest

from tests.conformance.api import CHAT, FIXED, Api, finite, refused

USER = [{"role": "user", "content": "Say something."}]


def content(answer: dict, choice: int = 0) -> str:
    return answer["choices"][choice]["message"]["content"]


class TestAnswer:
    def test_shape(self, server: Api) -> None:
        answer = server.chat(USER, max_tokens=5, **FIXED)
        assert answer["object"] == "chat.completion"
        choice = answer["choices"][0]
        assert choice["message"]["role"] == "assistant"
        assert choice["finish_reason"] == "length"
        assert choice["logprobs"] is None
        assert not choice["message"].get("tool_calls")
        assert answer["usage"]["completion_tokens"] == 5

    def test_the_sdk_reads_it(self, server: Api) -> None:
        answer = server.openai.chat.completions.create(model=server.model, messages=USER, max_tokens=5, temperature=0)
        assert answer.choices[0].message.content == content(server.chat(USER, max_tokens=5, temperature=0))

    def test_the_newer_name_of_max_tokens(self, server: Api) -> None:
        assert server.chat(USER, max_completion_tokens=3, **FIXED)["usage"]["completion_tokens"] == 3
        refused(server.post(CHAT, messages=USER, max_completion_tokens=-1))

    def test_n(self, server: Api) -> None:
        answer = server.chat(USER, n=2, max_tokens=6, temperature=100, seed=5, ignore_eos=True)
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]
        assert content(answer, 0) != content(answer, 1), "every choice has random numbers of its own"
        assert answer["usage"]["completion_tokens"] == 12


class TestMessages:
    def test_roles_and_parts(self, server: Api) -> None:
        plain = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi there"}]
        parts = [
            plain[0],
            {"role": "user", "content": [{"type": "text", "text": "Hi there"}]},
        ]
        answers = [server.chat(messages, max_tokens=6, **FIXED) for messages in (plain, parts)]
        assert content(answers[0]) == content(answers[1])
        assert answers[0]["usage"]["prompt_tokens"] == answers[1]["usage"]["prompt_tokens"]
        parts[1]["content"].append({"type": "text", "text": "How are you?"})
        assert server.chat(parts, max_tokens=1)["usage"]["prompt_tokens"] > answers[0]["usage"]["prompt_tokens"]

    def test_developer_is_system_where_the_template_lacks_it(self, server: Api) -> None:
        if "developer" in server.tokenizer["chat_template"]:
            pytest.skip("the template has the role")
        counts = {
            role: server.chat([{"role": role, "content": "Be brief."}, *USER], max_tokens=1)["usage"]["prompt_tokens"]
            for role in ("system", "developer")
        }
        assert counts["system"] == counts["developer"]

    def test_turns(self, server: Api) -> None:
        turns = [*USER, {"role": "assistant", "content": "Something."}, {"role": "user", "content": "More."}]
        longer = server.chat(turns, max_tokens=1)["usage"]["prompt_tokens"]
        assert longer > server.chat(USER, max_tokens=1)["usage"]["prompt_tokens"]

    def test_the_template_takes_arguments(self, server: Api) -> None:
        server.chat(USER, max_tokens=1, chat_template_kwargs={"enable_thinking": False})
        refused(server.post(CHAT, messages=USER, chat_template_kwargs=5), param="chat_template_kwargs")

    @pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "tools", "bos_token"])
    def test_template_arguments_may_not_replace_the_request(self, server: Api, name: str) -> None:
        response = server.post(CHAT, messages=USER, max_tokens=1, chat_template_kwargs={name: "x"})
        assert response.status_code in (200, 400), response.text
        if response.status_code == 200:
            assert (
                response.json()["usage"]["prompt_tokens"] == server.chat(USER, max_tokens=1)["usage"]["prompt_tokens"]
            )

    @pytest.mark.parametrize(
        "messages",
        [
            [],
            None,
            "x",
            {},
            [5],
            [{}],
            [{"role": "user"}],
            [{"content": "x"}],
            [{"role": "nobody", "content": "x"}],
            [{"role": "user", "content": 5}],
            [{"role": "user", "content": None}],
            [{"role": "user", "content": [{"type": "text"}]}],
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}],
            [{"role": "user", "content": ["x"]}],
            [{"role": ["user"], "content": "x"}],
        ],
    )
    def test_refused(self, server: Api, messages: object) -> None:
        refused(server.post(CHAT, messages=messages, max_tokens=1), param="messages")


class TestLogprobs:
    @pytest.mark.parametrize("top", [None, 0, 3, 20])
    def test_content(self, server: Api, top: int | None) -> None:
        asked = {} if top is None else {"top_logprobs": top}
        answer = server.chat(USER, max_tokens=4, logprobs=True, **asked, **FIXED)
        rows = answer["choices"][0]["logprobs"]["content"]
        assert len(rows) == 4
        for row in rows:
            assert finite([row["logprob"], *(item["logprob"] for item in row["top_logprobs"])])
            assert row["logprob"] <= 0
            assert len(row["top_logprobs"]) == (top or 0)
            likely = [item["logprob"] for item in row["top_logprobs"]]
            assert likely == sorted(likely, reverse=True)
            assert not top or row["logprob"] == likely[0], "greedy takes the most likely"
        spelled = b"".join(bytes(row["bytes"] or []) for row in rows)
        assert spelled.decode(errors="replace").strip("\ufffd").startswith(content(answer).strip("\ufffd")[:1])

    @pytest.mark.parametrize(
        "body",
        [
            {"top_logprobs": 3},
            {"logprobs": False, "top_logprobs": 3},
            {"logprobs": 3},
            {"logprobs": True, "top_logprobs": 21},
            {"logprobs": True, "top_logprobs": -1},
        ],
    )
    def test_refused(self, server: Api, body: dict) -> None:
        refused(server.post(CHAT, messages=USER, max_tokens=1, **body))


class TestStreams:
    @pytest.mark.parametrize(
        "options",
        [
            FIXED,
            {**FIXED, "n": 2},
            {**FIXED, "logprobs": True, "top_logprobs": 2},
            {"temperature": 1.2, "seed": 4, "ignore_eos": True},
        ],
        ids=["greedy", "n", "logprobs", "seeded"],
    )
    def test_say_what_the_whole_answer_says(self, server: Api, options: dict) -> None:
        whole = server.chat(USER, max_tokens=20, **options)
        streamed = server.stream(CHAT, messages=USER, max_tokens=20, **options)
        for choice in whole["choices"]:
            index = choice["index"]
            assert streamed.text(index) == content(whole, index)
            assert streamed.finish_reasons(index) == [choice["finish_reason"]]
            if "logprobs" in options:
                rows = [
                    row for part in streamed.of(index) if part.get("logprobs") for row in part["logprobs"]["content"]
                ]
                assert rows == choice["logprobs"]["content"]

    def test_the_role_comes_first_and_once(self, server: Api) -> None:
        streamed = server.stream(CHAT, messages=USER, max_tokens=6, n=2, **FIXED)
        for index in range(2):
            roles = [part["delta"].get("role") for part in streamed.of(index)]
            assert roles[0] == "assistant"
            assert not any(roles[1:])

    def test_usage(self, server: Api) -> None:
        streamed = server.stream(CHAT, messages=USER, max_tokens=6, stream_options={"include_usage": True}, **FIXED)
        assert [usage["completion_tokens"] for usage in streamed.usages] == [6]
        assert streamed.chunks[-1]["choices"] == []

    def test_the_sdk_reads_it(self, server: Api) -> None:
        stream = server.openai.chat.completions.create(
            model=server.model,
            messages=USER,
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert said == content(server.chat(USER, max_tokens=12, temperature=0))
        assert chunks[-1].usage is not None
