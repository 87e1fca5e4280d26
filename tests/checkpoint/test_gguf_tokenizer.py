"""Tokenizers rebuilt from GGUF metadata, held against transformers and independent expectations."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st

from llmq.checkpoint.gguf import GGUFCheckpoint
from llmq.checkpoint.gguf_file import Metadata
from llmq.checkpoint.gguf_tokenizer import build_tokenizer, implied_merges, tokenizer_files
from llmq.errors import CheckpointError, UnsupportedModelError
from llmq.model.config import ModelConfig
from llmq.model.tokenizer import Tokenizer

TEXTS = [
    "",
    "a",
    " a",
    "  leading and trailing  ",
    "The capital of France is Paris.",
    "it's we'll I'D don't",
    "12345 a 12 3.14159",
    "def f(x):\n    return x + 1  # ok\n\n\n\tend",
    "a\r\nb\r\n\r\nc",
    "日本語のテキストと中文文本",
    "مرحبا بالعالم",
    "Привет, мир! Ünïcödé naïve",
    "e\u0301 Å",
    "👩‍👩‍👧‍👦 🇫🇷 😀 👍🏽",
    "\u00a0x\u3000y\u200b",
    "\x00\x01\x7f",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "<p class='x'>&amp;</p> https://example.org/?q=1#top",
]


def metadata(values: dict[str, Any]) -> Metadata:
    return Metadata(Path("m.gguf"), {f"tokenizer.ggml.{key}": value for key, value in values.items()})


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> Tokenizer:
    checkpoint = GGUFCheckpoint(smollm2_gguf)
    return Tokenizer.from_files(checkpoint.side_files(), ModelConfig.from_dict(checkpoint.config))


@pytest.fixture(scope="module")
def oracle(smollm2_gguf: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)


class TestSmolLM2:
    @pytest.mark.parametrize("text", TEXTS)
    def test_ids_equal_transformers(self, text: str, smollm2: Tokenizer, oracle: Any) -> None:
        ids = smollm2.encode(text)
        assert ids == oracle.encode(text)
        assert smollm2.decode(ids) == oracle.decode(ids, skip_special_tokens=True)

    def test_digits_after_spaces(self, smollm2: Tokenizer) -> None:
        """Digits are cut out first, as llama.cpp does and transformers 5.24 forgets for GGUF."""
        ids = smollm2.encode("a  12")
        assert [smollm2.decode([i]) for i in ids] == ["a", "  ", "1", "2"]

    @pytest.mark.parametrize("generation_prompt", [True, False])
    def test_chat_equals_transformers(self, generation_prompt: bool, smollm2: Tokenizer, oracle: Any) -> None:
        chat = [
            {"role": "user", "content": "Hi, what is 3 + 4?"},
            {"role": "assistant", "content": "7 😀"},
            {"role": "user", "content": "Danke!\n\n  Grüße"},
        ]
        for messages in (chat, [{"role": "system", "content": "Be brief."}, *chat]):
            text = oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation_prompt)
            assert smollm2.render_chat(messages, generation_prompt) == text
            assert smollm2.encode_chat(messages, add_generation_prompt=generation_prompt) == oracle.encode(
                text, add_special_tokens=False
            )

    def test_special_tokens(self, smollm2: Tokenizer) -> None:
        assert (smollm2.bos_token_id, smollm2.adds_bos, smollm2.eos_token_ids) == (1, False, {2})
        assert smollm2.vocab_size == 49152

    def test_side_files_serve_transformers(self, smollm2_gguf: Path, smollm2: Tokenizer, tmp_path: Path) -> None:
        from transformers import AutoTokenizer

        checkpoint = GGUFCheckpoint(smollm2_gguf)
        for name, contents in checkpoint.side_files().items():
            (tmp_path / name).write_bytes(contents)
        (tmp_path / "config.json").write_text(json.dumps(checkpoint.config))
        saved = AutoTokenizer.from_pretrained(tmp_path)
        for text in [*TEXTS, "a  12"]:
            assert saved.encode(text) == smollm2.encode(text)
        messages = [{"role": "user", "content": "Hi"}]
        text = saved.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert text == smollm2.render_chat(messages)


def byte_level(pre: str | None, **values: Any) -> Metadata:
    """The 256 bytes, a few merges, and the control tokens <s> and </s>."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges = ["a b", "ab c", "1 2", "12 3"]
    tokens = [*alphabet, *(merge.replace(" ", "") for merge in merges), "<s>", "</s>", "<think>"]
    defaults = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "merges": merges,
        "token_type": [*[1] * (len(tokens) - 3), 3, 3, 4],
        "bos_token_id": len(tokens) - 3,
        "eos_token_id": len(tokens) - 2,
    }
    return metadata({key: value for key, value in {**defaults, **values}.items() if value is not None})


#: Text -> words under each way to split. Digits and apostrophes tell them apart.
WORDS = {
    "gpt-2": {"12345": ["12345"], "it'S ok\n\n x": ["it", "'", "S", " ok", "\n\n", " x"]},
    "smollm": {"12345": ["1", "2", "3", "4", "5"], "a  7": ["a", "  ", "7"]},
    "default": {"12345": ["123", "45"], "a+b|c": ["a", "+", "b", "|", "c"]},
    "llama-bpe": {"12345": ["123", "45"], "it'S ok\n\n x": ["it", "'S", " ok", "\n\n", " x"]},
    "qwen2": {"12345": ["1", "2", "3", "4", "5"], "it'S ok\n\n x": ["it", "'S", " ok", "\n\n", " x"]},
}


class TestByteLevel:
    @pytest.mark.parametrize(("pre", "text"), [(pre, text) for pre, cases in WORDS.items() for text in cases])
    def test_words(self, pre: str, text: str) -> None:
        splitter = build_tokenizer(byte_level(pre)).pre_tokenizer
        assert splitter is not None
        words = [text[start:end] for _, (start, end) in splitter.pre_tokenize_str(text)]
        assert words == WORDS[pre][text]

    def test_llama3_takes_whole_words_without_their_merges(self) -> None:
        without = byte_level("llama-bpe", merges=[], bos_token_id=None)
        assert build_tokenizer(without).encode("abc").tokens == ["abc"]
        assert build_tokenizer(byte_level("gpt-2", merges=[])).encode("abc").tokens == ["a", "b", "c"]

    def test_qwen2_composes_characters(self) -> None:
        tokenizer = build_tokenizer(byte_level("qwen2"))
        assert tokenizer.encode("e\u0301").ids == tokenizer.encode("\u00e9").ids

    @pytest.mark.parametrize(
        ("pre", "declared", "adds"),
        [("llama-bpe", None, True), ("llama-bpe", False, False), ("gpt-2", None, False), ("gpt-2", True, True)],
    )
    def test_bos(self, pre: str, declared: bool | None, adds: bool) -> None:
        tokenizer = build_tokenizer(byte_level(pre, add_bos_token=declared))
        assert tokenizer.encode("abc").tokens == [*(["<s>"] if adds else []), "abc"]

    def test_eos_behind_and_in_pairs(self) -> None:
        tokenizer = build_tokenizer(byte_level("gpt-2", add_bos_token=True, add_eos_token=True))
        assert tokenizer.encode("abc").tokens == ["<s>", "abc", "</s>"]
        assert tokenizer.encode("abc", "ab").tokens == ["<s>", "abc", "</s>", "<s>", "ab", "</s>"]

    def test_control_tokens_are_skipped_and_user_defined_ones_kept(self) -> None:
        tokenizer = build_tokenizer(byte_level("gpt-2"))
        ids = tokenizer.encode("<s>ab<think>ab</s>").ids
        assert [tokenizer.id_to_token(i) for i in ids] == ["<s>", "ab", "<think>", "ab", "</s>"]
        assert tokenizer.decode(ids, skip_special_tokens=True) == "ab<think>ab"

    def test_named_ids_are_control_tokens_in_files_without_types(self) -> None:
        tokenizer = build_tokenizer(byte_level("gpt-2", token_type=None))
        assert tokenizer.decode(tokenizer.encode("<s>ab</s>").ids, skip_special_tokens=True) == "ab"


# Pieces of a small SentencePiece vocabulary, best first.
PIECES = ["▁a", "he", "▁t", "▁the", "re", "in", "▁there", "er", "ing", "▁▁", "the", "ther", "th", "▁▁▁▁", "ea", "ed"]
LETTERS = "▁abcdeghinrt"


def sentencepiece(**values: Any) -> Metadata:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, *LETTERS, "<tool>"]
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(PIECES) + len(LETTERS)), 4]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(PIECES) + len(LETTERS) + 1)]
    defaults = {
        "model": "llama",
        "tokens": tokens,
        "token_type": kinds,
        "scores": scores,
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return metadata({key: value for key, value in {**defaults, **values}.items() if value is not None})


def expected_pieces(text: str) -> list[str]:
    """SentencePiece's BPE by its definition: join the best-scored adjacent pair, leftmost first."""
    pieces = list("▁" + text.replace(" ", "▁")) if text else []
    while pairs := [(PIECES.index(a + b), i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in PIECES]:
        _, i = min(pairs)
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
    known = set(LETTERS) | set(PIECES)
    return [p for piece in pieces for p in ([piece] if piece in known else [f"<0x{b:02X}>" for b in piece.encode()])]


class TestSentencePiece:
    @given(text=st.text(alphabet=" abcdeghinrtzé😀", max_size=30))
    @example(text="")
    @example(text=" ")
    @example(text="the there  then")
    @example(text="    in the 😀z")
    def test_pieces(self, text: str) -> None:
        tokenizer = build_tokenizer(sentencepiece(add_bos_token=False))
        assert tokenizer.encode(text).tokens == expected_pieces(text)

    @given(text=st.text(max_size=30))
    def test_decoding_gives_the_text_back(self, text: str) -> None:
        tokenizer = build_tokenizer(sentencepiece())
        for token in ("<unk>", "<s>", "</s>"):
            text = text.replace(token, "")
        if "▁" not in text:
            assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=True) == text

    def test_bos_unless_the_file_says_otherwise(self) -> None:
        assert build_tokenizer(sentencepiece()).encode("the").tokens == ["<s>", "▁the"]
        assert build_tokenizer(sentencepiece(add_bos_token=False)).encode("the").tokens == ["▁the"]
        assert build_tokenizer(sentencepiece(add_eos_token=True)).encode("the").tokens == ["<s>", "▁the", "</s>"]

    def test_space_prefix(self) -> None:
        with_prefix = build_tokenizer(sentencepiece(add_bos_token=False))
        without = build_tokenizer(sentencepiece(add_bos_token=False, add_space_prefix=False))
        assert with_prefix.encode("the</s>the").tokens == ["▁the", "</s>", "▁the"]
        assert without.encode("the the").tokens == ["the", "▁the"]
        assert without.decode(without.encode(" the").ids) == " the"
        assert with_prefix.decode(with_prefix.encode(" the").ids) == " the"

    def test_user_defined_tokens_are_matched_first(self) -> None:
        assert build_tokenizer(sentencepiece(add_bos_token=False)).encode("in<tool>").tokens == ["▁", "in", "<tool>"]

    def test_merges_come_best_first_and_only_from_normal_pieces(self) -> None:
        tokens, scores = ["a", "b", "c", "ab", "bc", "abc", "<c>"], [-9.0, -9.0, -9.0, -2.0, -1.0, -3.0, 0.0]
        assert implied_merges(tokens, scores, [1] * 6 + [3]) == [("b", "c"), ("a", "b"), ("ab", "c"), ("a", "bc")]
        assert implied_merges(tokens, scores, [1, 1, 1, 1, 6, 1, 3]) == [("a", "b"), ("ab", "c")]

    def test_equals_transformers_on_plain_text(self) -> None:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

        values = {key.removeprefix("tokenizer.ggml."): value for key, value in sentencepiece().values.items()}
        oracle, _ = convert_gguf_tokenizer("llama", {**values, "tokenizer_type": "llama"})
        tokenizer = build_tokenizer(sentencepiece(add_bos_token=False))
        for text in ("the there then", "a  thing in the rain", "zebra 😀 é"):
            assert tokenizer.encode(text).ids == oracle.encode(text, add_special_tokens=False).ids


REFUSED = {
    "model": (byte_level("gpt-2", model="bert"), UnsupportedModelError, "model is 'bert'; llmq reads gpt2, llama"),
    "pre": (byte_level("deepseek-v3"), UnsupportedModelError, "pre is 'deepseek-v3'; llmq splits text like gpt-2"),
    "no pre": (byte_level(None), CheckpointError, "the metadata has no tokenizer.ggml.pre"),
    "twice": (byte_level("gpt-2", tokens=["a", "a"]), CheckpointError, "lists a token twice"),
    "types": (byte_level("gpt-2", token_type=[1]), CheckpointError, "token_type has 1 entries for 263 tokens"),
    "merge": (byte_level("gpt-2", merges=["a b c"]), CheckpointError, "is not two pieces"),
    "pieces": (byte_level("gpt-2", merges=["a zz"]), CheckpointError, "do not fit each other"),
    "id": (
        byte_level("gpt-2", bos_token_id=263),
        CheckpointError,
        "bos_token_id is 263, outside the vocabulary of 263",
    ),
    "scores": (sentencepiece(scores=[0.0]), CheckpointError, "scores has 1 entries for"),
    "no scores": (sentencepiece(scores=None), CheckpointError, "scores has 0 entries for"),
    "list": (byte_level("gpt-2", tokens=[1, 2]), CheckpointError, "tokens is not a list of str"),
}


class TestFiles:
    @pytest.mark.parametrize("case", REFUSED)
    def test_refused(self, case: str) -> None:
        source, error, message = REFUSED[case]
        with pytest.raises(error, match=rf"^m\.gguf: .*{message}"):
            tokenizer_files(source)

    def test_no_vocabulary(self) -> None:
        assert tokenizer_files(metadata({})) == {}

    def test_tokenizer_config(self) -> None:
        config = json.loads(tokenizer_files(sentencepiece())["tokenizer_config.json"])
        assert config == {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "add_bos_token": True,
            "add_eos_token": False,
            "clean_up_tokenization_spaces": False,
        }

    def test_templates(self) -> None:
        def template(**values: Any) -> Any:
            files = tokenizer_files(Metadata(Path("m.gguf"), {**byte_level("gpt-2").values, **values}))
            return json.loads(files["tokenizer_config.json"]).get("chat_template")

        default, tools = {"tokenizer.chat_template": "Ü"}, {"tokenizer.chat_template.tool_use": "T"}
        names = {"tokenizer.chat_templates": ["tool_use"]}
        assert template() is None
        assert template(**default) == "Ü"
        assert template(**default, **tools, **names) == [
            {"name": "default", "template": "Ü"},
            {"name": "tool_use", "template": "T"},
        ]
        assert template(**tools, **names) == [{"name": "tool_use", "template": "T"}]

    def test_an_embedded_tokenizer_json_is_taken_as_it_is(self) -> None:
        source = Metadata(Path("m.gguf"), {**byte_level("gpt-2").values, "tokenizer.huggingface.json": '{"é": 1}'})
        assert tokenizer_files(source)["tokenizer.json"] == '{"é": 1}'.encode()
