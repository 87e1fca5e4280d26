"""Log-probabilities in the shape of completions."""

from hypothesis import given
from hypothesis import strategies as st

from llmq.engine.request import TokenLogprobs
from llmq.serve.logprobs import LegacyLogprobs, chat_logprobs, joined, token_text
from tests.fake import BOS, byte_tokenizer

TOKENIZER = byte_tokenizer()


def rows(tokens: list[int]) -> list[TokenLogprobs]:
    return [TokenLogprobs(token, -1.0, ((token, -1.0),)) for token in tokens]


@given(st.text(max_size=12), st.text(max_size=12))
def test_offsets_point_to_the_character_of_each_token(prompt: str, answer: str) -> None:
    """A token of a byte begins at the character that its byte belongs to, or after it for the last byte."""
    echoed, said = TOKENIZER.encode(prompt), TOKENIZER.encode(answer)[1:]
    legacy = LegacyLogprobs(TOKENIZER, prompt)
    found = joined([legacy.prompt(echoed, [None, *rows(echoed[1:])]), legacy.answer(rows(said))])
    expected = [0]  # BOS, which the text does not have
    for i, character in enumerate(prompt + answer):
        expected += [i] * len(character.encode())
    assert found["text_offset"] == expected
    assert found["token_logprobs"][0] is None


def test_a_part_of_a_character_is_told_as_bytes() -> None:
    first, second = TOKENIZER.encode("é")[1:]
    assert token_text(TOKENIZER, first) == "bytes:\\xc3"
    assert token_text(TOKENIZER, second) == "bytes:\\xa9"
    assert token_text(TOKENIZER, BOS) == "<s>"


def test_the_chosen_token_is_among_the_alternatives() -> None:
    row = TokenLogprobs(10, -5.0, ((11, -0.1), (12, -0.2)))
    top = LegacyLogprobs(TOKENIZER).answer([row])["top_logprobs"][0]
    assert list(top.values()) == [-0.1, -0.2, -5.0]


def test_infinity_is_not_json() -> None:
    row = TokenLogprobs(10, float("-inf"), ((11, float("-inf")),))
    assert LegacyLogprobs(TOKENIZER).answer([row])["token_logprobs"] == [-9999.0]
    assert chat_logprobs(TOKENIZER, [row])["content"][0]["top_logprobs"][0]["logprob"] == -9999.0
