"""Prompts, chats, end tokens, and text that arrives token by token."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from llmq.errors import CheckpointError, ConfigError
from llmq.model.config import ModelConfig
from llmq.model.tokenizer import Tokenizer
from tests.tiny import tiny_config

BOS, EOS, END = "<s>", "</s>", "<|im_end|>"
CHAT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
MESSAGES = [{"role": "user", "content": "hi"}]
USER = "[user]hi[assistant]"


def byte_level(adds_bos: bool = False, special: tuple[str, ...] = (BOS, EOS, END)) -> tokenizers.Tokenizer:
    """One token per byte, then the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single=[BOS, "$A"], special_tokens=[(BOS, 256)])
    return tokenizer


def byte_fallback() -> tokenizers.Tokenizer:
    """As Llama 2: bytes 3 to 258, then a few pieces."""
    tokens = ["<unk>", BOS, EOS, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "▁b", "ab"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = [("▁", "a"), ("▁", "b"), ("a", "b")]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens[:3]])
    return tokenizer


def make(backend: tokenizers.Tokenizer | None = None, files: dict[str, Any] | None = None, **config: Any) -> Tokenizer:
    """From a backend, side files (JSON by name, or text) and changes to a tiny config."""
    contents = {"tokenizer.json": (backend or byte_level()).to_str()}
    contents |= {name: value if isinstance(value, str) else json.dumps(value) for name, value in (files or {}).items()}
    model = ModelConfig.from_dict(tiny_config(**{"bos_token_id": None, "eos_token_id": None, **config}))
    return Tokenizer.from_files({name: value.encode() for name, value in contents.items()}, model)


def with_config(backend: tokenizers.Tokenizer | None = None, **settings: Any) -> Tokenizer:
    return make(backend, {"tokenizer_config.json": settings})


class TestBOS:
    @pytest.mark.parametrize("template", [CHAT, "{{ bos_token }}" + CHAT], ids=["without", "with"])
    @pytest.mark.parametrize(
        ("processor", "declared", "adds"),
        [
            (False, None, False),
            (True, None, True),
            (False, True, True),
            (True, True, True),
            (False, False, False),
            (True, False, False),
        ],
    )
    def test_exactly_one(self, template: str, processor: bool, declared: bool | None, adds: bool) -> None:
        settings = {"bos_token": BOS, "chat_template": template}
        tokenizer = with_config(
            byte_level(processor), **settings, **({} if declared is None else {"add_bos_token": declared})
        )
        assert tokenizer.adds_bos is adds
        assert tokenizer.encode("hi").count(256) == adds
        assert tokenizer.encode(f"{BOS}hi").count(256) == 1
        assert tokenizer.encode("") == ([256] if adds else [])
        chat = tokenizer.encode_chat(MESSAGES)
        assert chat.count(256) == (adds or "bos_token" in template)
        assert tokenizer.decode(chat) == USER
        assert 256 not in chat[1:]

    def test_none_where_the_tokenizer_has_no_such_token(self) -> None:
        tokenizer = with_config(bos_token=None, add_bos_token=True)
        assert (tokenizer.bos_token_id, tokenizer.adds_bos) == (None, False)
        assert 256 not in tokenizer.encode("hi")

    def test_written_as_an_added_token(self) -> None:
        token = {"content": BOS, "lstrip": False, "normalized": False}
        assert with_config(bos_token=token, add_bos_token=True).encode("")[0] == 256

    def test_from_the_config_where_the_files_name_none(self) -> None:
        assert make(byte_level(adds_bos=True), bos_token_id=256).encode("") == [256]

    def test_special_tokens_map_is_read_too(self) -> None:
        assert make(byte_level(adds_bos=True), {"special_tokens_map.json": {"bos_token": BOS}}).bos_token_id == 256

    def test_no_end_token_behind_a_prompt(self) -> None:
        backend = byte_level()
        backend.post_processor = processors.TemplateProcessing(single=["$A", EOS], special_tokens=[(EOS, 257)])
        assert 257 not in with_config(backend, eos_token=EOS, add_eos_token=True).encode("hi")


class TestEndTokens:
    def test_every_source_counts(self) -> None:
        files = {
            "generation_config.json": {"eos_token_id": [2, 32000, 32007]},
            "tokenizer_config.json": {"eos_token": EOS, "chat_template": CHAT + "{{ '<|im_end|>' }}"},
        }
        assert make(None, files, eos_token_id=[7, 8]).eos_token_ids == {2, 32000, 32007, 7, 8, 257, 258}

    def test_single_ids(self) -> None:
        assert make(None, {"generation_config.json": {"eos_token_id": 2}}, eos_token_id=3).eos_token_ids == {2, 3}

    def test_turn_tokens_need_both_template_and_vocabulary(self) -> None:
        assert with_config(chat_template=CHAT).eos_token_ids == frozenset()
        assert with_config(chat_template=CHAT + "<|eot_id|>").eos_token_ids == frozenset()
        assert with_config(byte_level(special=("<|eot_id|>",)), chat_template="<|eot_id|>").eos_token_ids == {256}

    def test_smollm2(self, smollm2_tokenizer: Tokenizer) -> None:
        assert smollm2_tokenizer.eos_token_ids == {2}


class TestTemplate:
    @pytest.mark.parametrize(
        "files",
        [
            {"chat_template.jinja": CHAT},
            {"chat_template.jinja": CHAT, "tokenizer_config.json": {"chat_template": "wrong"}},
            {"tokenizer_config.json": {"chat_template": CHAT}},
            {"tokenizer_config.json": {"chat_template": CHAT}, "chat_template.json": {"chat_template": "wrong"}},
            {
                "tokenizer_config.json": {
                    "chat_template": [{"name": "rag", "template": "x"}, {"name": "default", "template": CHAT}]
                }
            },
            {"chat_template.json": {"chat_template": CHAT}},
        ],
    )
    def test_sources(self, files: dict[str, Any]) -> None:
        tokenizer = make(None, files)
        assert tokenizer.has_chat_template
        assert tokenizer.render_chat(MESSAGES) == USER
        assert tokenizer.render_chat(MESSAGES, add_generation_prompt=False) == "[user]hi"

    @pytest.mark.parametrize(
        "settings", [{}, {"chat_template": None}, {"chat_template": [{"name": "rag", "template": "x"}]}]
    )
    def test_missing(self, settings: dict[str, Any]) -> None:
        tokenizer = with_config(**settings)
        assert not tokenizer.has_chat_template
        with pytest.raises(ConfigError, match="has no chat template"):
            tokenizer.encode_chat(MESSAGES)

    @pytest.mark.parametrize(
        ("template", "text"),
        [
            ("{% if true %}\n  a\n  {%- endif %}\n", "  a"),
            ("  {% if true %}b{% endif %}", "b"),
            ("{{ {'ü': ['<', 1]} | tojson }}", '{"ü": ["<", 1]}'),
            ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
            ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
            ("{% generation %}x{{ messages[0].content }}{% endgeneration %}y", "xhiy"),
            ("{{ tools is none }}{{ documents is none }}{{ nothing }}", "TrueTrue"),
            ("{{ strftime_now('%Y') | length }}", "4"),
            ("{{ eos_token }}{{ pad_token }}", "</s>"),
        ],
    )
    def test_environment(self, template: str, text: str) -> None:
        assert with_config(chat_template=template, eos_token=EOS, pad_token=None).render_chat(MESSAGES) == text

    @pytest.mark.parametrize(
        ("template", "message"),
        [
            ("{{ raise_exception('roles must alternate.') }}", r"refuses them \(roles must alternate\)"),
            ("{{ messages[0].content + 1 }}", "refuses them"),
            ("{{ 1 / 0 }}", r"refuses them \(division by zero\)"),
            ("{{ nothing.at.all }}", "'nothing' is undefined"),
            ("{{ messages.append(1) }}", "refuses them"),
            ("{{ ''.__class__.__mro__ }}", "refuses them"),
            ("{% for m in messages %}", "not valid Jinja"),
        ],
    )
    def test_failures_are_one_sentence(self, template: str, message: str) -> None:
        with pytest.raises(ConfigError, match=message) as raised:
            with_config(chat_template=template).encode_chat(MESSAGES)
        assert "\n" not in str(raised.value)

    @pytest.mark.parametrize("template", [{"default": CHAT}, [CHAT], [{"name": "default"}]])
    def test_malformed(self, template: Any) -> None:
        with pytest.raises((CheckpointError, ConfigError)):
            with_config(chat_template=template).render_chat(MESSAGES)


class TestFiles:
    def test_missing_tokenizer(self) -> None:
        with pytest.raises(CheckpointError, match=r"tokenizer.json: the model has none; save it"):
            Tokenizer.from_files({}, ModelConfig.from_dict(tiny_config()))

    @pytest.mark.parametrize("contents", ["", "{}", "[1]", '{"version": "1.0"}'])
    def test_damaged_tokenizer(self, contents: str) -> None:
        with pytest.raises(CheckpointError, match=r"tokenizer\.json: is not a tokenizer"):
            make(None, {"tokenizer.json": contents})

    @pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json", "special_tokens_map.json"])
    @pytest.mark.parametrize(("contents", "message"), [("{", "not valid JSON"), ("[]", "must hold a JSON object")])
    def test_damaged_settings(self, name: str, contents: str, message: str) -> None:
        with pytest.raises(CheckpointError, match=f"{name}: .*{message}"):
            make(None, {name: contents})

    def test_saved_truncation_and_padding_are_undone(self) -> None:
        backend = byte_level()
        backend.enable_truncation(4)
        backend.enable_padding(length=9)
        assert len(make(backend).encode("123456")) == 6

    def test_vocab_size_counts_added_tokens(self) -> None:
        assert make().vocab_size == 259

    def test_half_a_surrogate_pair_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="surrogate"):
            make().encode("a\ud83d")

    def test_generation_defaults(self) -> None:
        advice = {"temperature": 0.6, "top_p": 0.9, "top_k": 50, "repetition_penalty": 1.1, "max_length": 4096}
        tokenizer = make(None, {"generation_config.json": {"do_sample": True, **advice}})
        assert dict(tokenizer.generation_defaults) == {
            key: value for key, value in advice.items() if key != "max_length"
        }
        assert not make(None, {"generation_config.json": advice}).generation_defaults
        assert not make().generation_defaults


def stream(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None) -> list[str]:
    text = tokenizer.stream(prompt or [])
    return [*(text.push(i) for i in ids), text.finish()]


CONFIG = ModelConfig.from_dict(tiny_config(bos_token_id=None, eos_token_id=None))
BYTE_LEVEL, FALLBACK = make(byte_level()), make(byte_fallback())
#: GPT-2's spelling of bytes: printable ones as they are, the others from U+0100 on.
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
SPELLING = {**{byte: byte for byte in PRINTABLE}, **{byte: 256 + i for i, byte in enumerate(OTHERS)}}
PIECES = {"▁": 259, "a": 260, "b": 261, "▁a": 262, "▁b": 263}


def byte_ids(data: bytes) -> list[int]:
    """Ids of bytes under `byte_level`, which orders them by their spelling."""
    order = sorted(SPELLING.values())
    return [order.index(SPELLING[byte]) for byte in data]


def fallback_ids(text: str | bytes) -> list[int]:
    return [3 + byte for byte in (text if isinstance(text, bytes) else text.encode())]


class TestStream:
    @settings(deadline=None)
    @given(ids=st.lists(st.integers(0, 49151), max_size=60))
    def test_pieces_join_to_the_whole_for_any_ids(self, ids: list[int], smollm2_tokenizer: Tokenizer) -> None:
        assert "".join(stream(smollm2_tokenizer, ids)) == smollm2_tokenizer.decode(ids)

    @settings(deadline=None)
    @given(text=st.text(st.characters(exclude_categories=("Cc", "Cs", "Cn")), max_size=40))
    @example(text="👩‍👩‍👧‍👦 and 🇫🇷, 日本語 ½")
    @example(text=" leading")
    def test_no_replacement_character_in_valid_text(self, text: str, smollm2_tokenizer: Tokenizer) -> None:
        pieces = stream(smollm2_tokenizer, smollm2_tokenizer.encode(text))
        assert "".join(pieces) == text
        assert ("\ufffd" in text) is any("\ufffd" in piece for piece in pieces)

    @given(text=st.text(alphabet="ab é€😀", max_size=20))
    @example(text="😀😀")
    @example(text="é€😀 a")
    def test_byte_fallback(self, text: str) -> None:
        ids = FALLBACK.encode(text)
        pieces = stream(FALLBACK, ids)
        assert "".join(pieces) == FALLBACK.decode(ids) == text
        assert not any("\ufffd" in piece for piece in pieces)

    @given(data=st.binary(max_size=12))
    @example(data=b"\xe2\x82\xac\xff")
    @example(data=b"\xff\xe2\x82\xacb")
    def test_invalid_bytes_never_fail(self, data: bytes) -> None:
        assert "".join(stream(BYTE_LEVEL, byte_ids(data))) == data.decode(errors="replace")
        assert "".join(stream(FALLBACK, [*fallback_ids(data), PIECES["a"]])).endswith("a")

    def test_characters_appear_when_they_are_whole(self) -> None:
        ids = fallback_ids("€😀")
        assert stream(FALLBACK, ids) == ["", "", "€", "", "", "", "😀", ""]

    def test_invalid_byte_after_a_shown_character(self) -> None:
        ids = [*fallback_ids(b"\xe2\x82\xac\xff"), PIECES["b"]]
        assert stream(FALLBACK, ids) == ["", "", "€", "", "\ufffdb", ""]

    def test_incomplete_end_is_shown_at_the_end(self) -> None:
        assert stream(BYTE_LEVEL, byte_ids(b"a\xf0\x9f")) == ["a", "", "", "\ufffd"]
        assert stream(FALLBACK, [PIECES["a"], *fallback_ids(b"\xf0")]) == ["a", "", "\ufffd"]

    def test_a_real_replacement_character_is_kept(self) -> None:
        assert "".join(stream(BYTE_LEVEL, byte_ids("x\ufffd".encode()))) == "x\ufffd"

    def test_prompt_keeps_the_space_of_the_first_word(self) -> None:
        ids = [PIECES["▁a"], PIECES["▁b"]]
        assert stream(FALLBACK, ids) == ["a", " b", ""]
        assert stream(FALLBACK, ids, prompt=[1, PIECES["▁b"]]) == [" a", " b", ""]

    def test_prompt_that_ends_inside_a_character(self) -> None:
        assert stream(BYTE_LEVEL, byte_ids(b"\xac!"), prompt=byte_ids(b"ok\xe2\x82")) == ["€", "!", ""]

    def test_special_tokens_are_skipped(self) -> None:
        assert "".join(stream(FALLBACK, [1, PIECES["▁a"], 2, PIECES["▁b"], 2])) == "a b"

    @given(prompt=st.text(max_size=10), text=st.text(max_size=10))
    def test_continues_any_prompt(self, prompt: str, text: str) -> None:
        before, after = byte_ids(prompt.encode()), byte_ids(text.encode())
        assert "".join(stream(BYTE_LEVEL, after, before)) == text

    def test_cost_does_not_grow_with_the_text(self) -> None:
        decoded: list[int] = []

        class Counting(Tokenizer):
            def decode(self, ids: Sequence[int]) -> str:
                decoded.append(len(ids))
                return super().decode(ids)

        stream(
            Counting.from_files({"tokenizer.json": byte_level().to_str().encode()}, CONFIG), byte_ids(b"words " * 100)
        )
        assert max(decoded) <= 2
