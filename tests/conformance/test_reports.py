"""What users of other servers reported: each a test of its own, in as far as it can be seen from outside.

The others are tests of the engine: what a report is about is said in each docstring.
"""

import concurrent.futures
import json
import random
import threading
import time

import httpx
import pytest

from tests.conformance.api import CHAT, COMPLETIONS, FIXED, Api, eventually, finite, parse_events, parse_json, refused

PROMPT = "Once upon a time"
USER = [{"role": "user", "content": "Hi"}]


def answers(server: Api) -> None:
    """The server lives, and nothing is left of the request before."""
    assert httpx.get(f"{server.base_url}/health").status_code == 200
    assert server.complete("x", max_tokens=2, **FIXED)["usage"]["completion_tokens"] == 2


class TestText:
    def test_characters_split_over_tokens(self, server: Api) -> None:
        """ferrox#124, dynamo#12630: a multi-byte character over several tokens became U+FFFD in a stream."""
        for character in ("\u6771", "\U0001f680", "e\u0301", "\U0001f468\u200d\U0001f469\u200d\U0001f467"):
            ids = server.tokens(character, add_special_tokens=False)
            if "\ufffd" in server.post("/detokenize", tokens=ids).json()["prompt"]:
                continue
            for cut in range(1, len(ids)):
                prompt = [*server.tokens(PROMPT), *ids[:cut]]
                whole = server.complete(prompt, max_tokens=8, **FIXED)["choices"][0]["text"]
                streamed = server.stream(COMPLETIONS, prompt=prompt, max_tokens=8, **FIXED)
                assert streamed.text() == whole
        echoed = server.stream(COMPLETIONS, prompt="\u6771\u4eac \U0001f680", max_tokens=0, echo=True, temperature=0)
        assert echoed.text() == "\u6771\u4eac \U0001f680"

    def test_a_stream_never_takes_a_replacement_back(self, server: Api) -> None:
        """ferrox#124: at a temperature where bytes come at random, the parts still add up to the whole."""
        for seed in range(6):
            options = {"temperature": 1000, "seed": seed, "ignore_eos": True, "max_tokens": 40}
            whole = server.complete(PROMPT, **options)["choices"][0]["text"]
            assert server.stream(COMPLETIONS, prompt=PROMPT, **options).text() == whole

    def test_leading_spaces(self, server: Api) -> None:
        """transformers#22710, mlx-lm#1754: sentencepiece's leading space was lost or added."""
        for prompt in (" x", "  x", "x", "x "):
            assert server.complete(prompt, max_tokens=0, echo=True, temperature=0)["choices"][0]["text"] == prompt
        whole = server.complete(PROMPT, max_tokens=6, **FIXED)["choices"][0]["text"]
        ids = server.tokens(PROMPT + whole)
        if ids[: len(server.tokens(PROMPT))] == server.tokens(PROMPT):
            assert server.complete(PROMPT, max_tokens=6, echo=True, **FIXED)["choices"][0]["text"] == PROMPT + whole

    def test_bos_exactly_once(self, server: Api) -> None:
        """vllm#2012, lm-eval#2676: a doubled or missing BOS, in completions, chats and prompts that contain it."""
        name = server.tokenizer.get("bos_token")
        if not name:
            pytest.skip("the tokenizer has no BOS")
        bos = server.tokens(name, add_special_tokens=False)[0]
        plain = server.tokens("Hi")
        has = plain[0] == bos
        assert plain.count(bos) == int(has)
        assert server.tokens(f"{name}Hi").count(bos) == 1
        chat = server.http.post("/tokenize", json={"messages": USER}).json()["tokens"]
        assert chat[:2].count(bos) == 1 if has else chat[:2].count(bos) <= 1  # templates may begin turns with it
        assert server.chat(USER, max_tokens=1)["usage"]["prompt_tokens"] == len(chat)
        assert server.complete(f"{name}Hi", max_tokens=1)["usage"]["prompt_tokens"] == len(server.tokens(f"{name}Hi"))
        if has:
            assert len(server.tokens(f"{name}Hi")) == len(plain)

    def test_special_tokens_in_what_users_say(self, server: Api) -> None:
        """llama.cpp#26273: text of a message that spells a control token became that token."""
        for kind in ("eos_token", "bos_token"):
            name = server.tokenizer.get(kind)
            if not name:
                continue
            special = server.tokens(name, add_special_tokens=False)[0]
            rendered = [
                server.http.post("/tokenize", json={"messages": [{"role": "user", "content": content}]}).json()[
                    "tokens"
                ]
                for content in ("ab", f"a{name}b")
            ]
            assert rendered[0].count(special) == rendered[1].count(special), name
            assert len(rendered[1]) > len(rendered[0]) + 1, "it is spelled out"


class TestPrompts:
    @pytest.mark.parametrize("prompt", ["", [], [[]], [""], ["x", ""]])
    def test_empty(self, server: Api, prompt: object) -> None:
        """vllm#7283: an empty prompt killed the server."""
        refused(server.post(COMPLETIONS, prompt=prompt, max_tokens=1), param="prompt")
        answers(server)

    @pytest.mark.parametrize("max_tokens", [None, 1, 10])
    def test_too_long_is_refused_with_both_numbers(self, server: Api, max_tokens: int | None) -> None:
        """ollama#17889: it was cut silently. sglang#3910: it killed the server."""
        for extra in (0, 1, 1000):
            ids = [server.letter("Q")] * (server.context + extra)
            message = refused(
                server.post(COMPLETIONS, prompt=ids, max_tokens=max_tokens), code="context_length_exceeded"
            )
            assert str(server.context) in message.replace(",", "")
            assert str(len(ids)) in message.replace(",", "")
        answers(server)

    def test_prompt_and_answer_together(self, server: Api) -> None:
        ids = [server.letter("Q")] * 10
        room = server.context - len(ids)
        message = refused(server.post(COMPLETIONS, prompt=ids, max_tokens=room + 1), code="context_length_exceeded")
        assert str(server.context) in message.replace(",", "")
        assert server.complete(ids, max_tokens=room, **FIXED)["usage"]["completion_tokens"] == room

    def test_the_longest_prompt(self, server: Api) -> None:
        ids = [server.letter("Q")] * (server.context - 1)
        assert server.complete(ids, max_tokens=1, **FIXED)["usage"]["total_tokens"] == server.context

    def test_too_long_a_chat(self, server: Api) -> None:
        messages = [{"role": "user", "content": "word " * (2 * server.context)}]
        for stream in (False, True):
            message = refused(server.post(CHAT, messages=messages, stream=stream), code="context_length_exceeded")
            assert str(server.context) in message.replace(",", "")

    def test_max_tokens_zero(self, server: Api) -> None:
        """vllm#9336: scoring a prompt needs no generation."""
        answer = server.complete(PROMPT, max_tokens=0, temperature=0)
        assert answer["choices"][0]["text"] == ""
        assert answer["usage"]["completion_tokens"] == 0
        streamed = server.stream(COMPLETIONS, prompt=PROMPT, max_tokens=0, echo=True, temperature=0)
        assert streamed.text() == PROMPT

    @pytest.mark.parametrize("token", [-1, 1 << 30, (1 << 31) - 1, 1 << 31, 1 << 63, 1 << 70])
    def test_ids_outside_the_vocabulary(self, server: Api, token: int) -> None:
        """sglang#36856: they killed the server."""
        refused(server.post(COMPLETIONS, prompt=[1, token], max_tokens=1), param="prompt")
        answers(server)


class TestNumbers:
    @pytest.mark.parametrize(("field", "value"), [("n", 1 << 20), ("n", 1 << 62), ("n", 1000), ("logprobs", 1 << 20)])
    def test_huge(self, server: Api, field: str, value: int) -> None:
        """sglang#36856: huge n and top_logprobs killed the server."""
        refused(server.post(COMPLETIONS, prompt="x", max_tokens=1, **{field: value}), param=field)
        refused(
            server.post(CHAT, messages=USER, max_tokens=1, logprobs=True, top_logprobs=1 << 20), param="top_logprobs"
        )
        answers(server)

    @pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1e-999"])
    @pytest.mark.parametrize(
        "field", ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
    )
    def test_floats_that_are_none(self, server: Api, field: str, value: str) -> None:
        """llama.cpp#19367: unvalidated floats."""
        body = f'{{"model": {json.dumps(server.model)}, "prompt": "x", "max_tokens": 1, "{field}": {value}}}'
        response = server.raw(COMPLETIONS, body)
        if value == "1e-999" and field not in ("top_p", "repetition_penalty"):
            assert response.status_code == 200, "it is 0"
        else:
            refused(response)

    @pytest.mark.parametrize("bias", [{"-1": 1}, {str(1 << 30): 1}, {str(1 << 62): 1}, {str(1 << 80): 1}, {"": 1}])
    def test_biases_outside_the_vocabulary(self, server: Api, bias: dict) -> None:
        """vllm#16529: they killed the engine."""
        refused(server.post(COMPLETIONS, prompt="x", max_tokens=1, logit_bias=bias), param="logit_bias")
        answers(server)

    def test_log_probabilities_are_numbers(self, server: Api) -> None:
        """sglang#5984: -inf is not JSON; banning and masking must not put it there."""
        first = server.complete(PROMPT, max_tokens=1, logprobs=20, **FIXED)["choices"][0]["logprobs"]
        assert finite(list(first["top_logprobs"][0].values()))
        banned = {str(token): -100 for token in range(100)}
        options = {"max_tokens": 3, "logprobs": 20, "logit_bias": banned, "response_format": {"type": "json_object"}}
        response = server.post(COMPLETIONS, prompt=PROMPT, temperature=0, **options)
        found = parse_json(response.text)["choices"][0]["logprobs"]
        assert finite([*found["token_logprobs"], *(value for top in found["top_logprobs"] for value in top.values())])

    def test_temperature_zero_and_almost(self, server: Api) -> None:
        """gemma#562: temperature 0 divided by zero."""
        greedy = server.complete(PROMPT, max_tokens=8, **FIXED)["choices"][0]["text"]
        for temperature in (1e-300, 1e-9, 1e-6):
            answer = server.complete(PROMPT, max_tokens=8, temperature=temperature, seed=1, ignore_eos=True)
            assert answer["choices"][0]["text"] == greedy


class TestBodies:
    @pytest.mark.parametrize(
        "body",
        [
            b"",
            b"{",
            b"nonsense",
            b"[]",
            b"5",
            b"null",
            b'"x"',
            b"\xff\xfe",
            b'{"a": 1} x',
            b'{"prompt": "x", }',
            b"{" * 10_000,
            b'{"a":' * 5000,
            b"[" * 100_000,
        ],
        ids=lambda body: repr(body[:12]) + str(len(body)),
    )
    @pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
    def test_malformed_and_deep(self, server: Api, path: str, body: bytes) -> None:
        refused(server.raw(path, body))

    def test_deep_schemas(self, server: Api) -> None:
        """Nesting inside a field that is passed on."""
        for depth in (50, 400, 5000):
            deep = '{"type": "object", "properties": {"a": ' * depth + "{}" + "}}" * depth
            form = f'{{"type": "json_schema", "json_schema": {{"name": "x", "schema": {deep}}}}}'
            body = f'{{"model": {json.dumps(server.model)}, "prompt": "x", "max_tokens": 1, "response_format": {form}}}'
            response = server.raw(COMPLETIONS, body)
            assert response.status_code in (200, 400), response.text
        answers(server)

    @pytest.mark.parametrize("text", ['"\\ud800"', '"\\udfffx"', '"a\\ud83d"'])
    def test_lone_surrogates(self, server: Api, text: str) -> None:
        model = json.dumps(server.model)
        refused(server.raw(COMPLETIONS, f'{{"model": {model}, "prompt": {text}}}'))
        refused(server.raw(CHAT, f'{{"model": {model}, "messages": [{{"role": "user", "content": {text}}}]}}'))
        refused(server.raw("/tokenize", f'{{"prompt": {text}}}'))

    def test_too_large(self, server: Api) -> None:
        refused(server.raw(COMPLETIONS, b'{"prompt": "' + b"x" * (64 << 20) + b'"}'), 413)
        answers(server)

    def test_too_large_without_saying_how_large(self, server: Api) -> None:
        def body():
            for _ in range(64):
                yield b" " * (1 << 20)

        try:
            response = server.http.post(COMPLETIONS, content=body(), headers={"content-type": "application/json"})
            refused(response, 413)
        except httpx.TransportError:
            pass  # hung up on before everything was sent: as good
        answers(server)

    def test_template_errors_are_the_clients(self, server: Api) -> None:
        """sglang#892: a template that refuses was a 500."""
        turns = [
            {"role": "assistant", "content": "x"},
            {"role": "assistant", "content": "y"},
            {"role": "tool", "content": "z"},
        ]
        for messages in (turns, [{"role": "tool", "content": "x"}], [{"role": "system", "content": "x"}]):
            response = server.post(CHAT, messages=messages, max_tokens=1)
            assert response.status_code in (200, 400), response.text
            if response.status_code == 400:
                refused(response)


class TestConcurrency:
    def test_concurrent_requests_do_not_touch_each_other(self, server: Api) -> None:
        """mlx-lm#965, vllm#51226: answers of one request in another; seeded ones that depend on their neighbours."""
        rng = random.Random(5)
        jobs = [
            (f"{rng.choice(['one', 'two', 'three four', 'the end of'])} {i % 5}", options)
            for i, options in enumerate(
                [FIXED, {"temperature": 1, "seed": 3, "ignore_eos": True}, {**FIXED, "repetition_penalty": 1.3}] * 6
            )
        ]

        def ask(job: tuple[str, dict]) -> str:
            return server.complete(job[0], max_tokens=12, **job[1])["choices"][0]["text"]

        alone = [ask(job) for job in jobs]
        with concurrent.futures.ThreadPoolExecutor(len(jobs)) as pool:
            assert list(pool.map(ask, jobs)) == alone

    def test_a_slow_reader_holds_nobody_up(self, server: Api) -> None:
        """opencode#16697: slow readers filled memory, or stopped the engine."""
        room = server.context - 20
        with server.streaming(COMPLETIONS, prompt="x", max_tokens=room, **FIXED) as lines:
            next(lines)
            began = time.monotonic()
            answers(server)
            assert time.monotonic() - began < 20
            rest = "\n".join(lines)
        assert "[DONE]" in rest

    def test_health_answers_while_the_engine_works(self, server: Api) -> None:
        """vllm#24910: tokenizing on the event loop froze /health."""
        long = "many words " * 40_000
        worst = 0.0
        stop = threading.Event()

        def work() -> None:
            while not stop.is_set():
                server.post("/tokenize", prompt=long)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            with httpx.Client(base_url=server.base_url) as client:
                for _ in range(20):
                    began = time.monotonic()
                    assert client.get("/health").status_code == 200
                    worst = max(worst, time.monotonic() - began)
        finally:
            stop.set()
            thread.join()
        assert worst < 0.5


class TestDisconnects:
    """llama.cpp#24496: a client that hung up left its request generating."""

    @pytest.fixture(autouse=True)
    def _idle(self, slow_server: Api):
        eventually(lambda: slow_server.metrics()["llmq:num_requests_running"] == 0, 10)
        self.free = slow_server.slots_free()
        yield
        eventually(lambda: slow_server.slots_free() == self.free, 10)

    def long(self, slow_server: Api) -> dict:
        return {"prompt": "x", "max_tokens": slow_server.context - 10, **FIXED}

    @pytest.mark.parametrize("n", [1, 2])
    def test_while_streaming(self, slow_server: Api, n: int) -> None:
        with slow_server.streaming(COMPLETIONS, **self.long(slow_server), n=n) as lines:
            next(lines)
            eventually(lambda: slow_server.slots_free() == self.free - n, 0.3)
        eventually(lambda: slow_server.slots_free() == self.free, 0.3)

    def test_before_the_first_token(self, slow_server: Api) -> None:
        ids = [slow_server.letter("Q")] * (slow_server.context - 2)
        with slow_server.streaming(COMPLETIONS, prompt=ids, max_tokens=1, **FIXED):
            pass
        eventually(lambda: slow_server.slots_free() == self.free, 1.0)

    def test_of_a_request_that_is_not_streamed(self, slow_server: Api) -> None:
        """An `@app.middleware("http")` hides it: the slot was freed after 11.5 s."""
        with (
            pytest.raises(httpx.ReadTimeout),
            httpx.Client(base_url=slow_server.base_url, headers=slow_server.http.headers) as client,
        ):
            client.post(COMPLETIONS, json={"model": slow_server.model, **self.long(slow_server)}, timeout=0.3)
        eventually(lambda: slow_server.slots_free() == self.free, 0.3)

    def test_generation_ends_with_it(self, slow_server: Api) -> None:
        with slow_server.streaming(COMPLETIONS, **self.long(slow_server)) as lines:
            next(lines)
            eventually(lambda: slow_server.slots_free() < self.free, 1)
        eventually(lambda: slow_server.slots_free() == self.free, 0.3)
        names = ("llmq:engine_steps_total", "llmq:generation_tokens_total")
        before = [slow_server.metrics()[name] for name in names]
        time.sleep(0.3)
        assert [slow_server.metrics()[name] for name in names] == before

    def test_a_stream_read_to_the_end_is_whole(self, slow_server: Api) -> None:
        with slow_server.streaming(COMPLETIONS, prompt="x", max_tokens=20, **FIXED) as lines:
            events = parse_events("\n".join(lines) + "\n")
        assert events.text() == slow_server.complete("x", max_tokens=20, **FIXED)["choices"][0]["text"]
