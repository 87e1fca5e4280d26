"""Log-probabilities in OpenAI's two shapes."""

import codecs
from collections.abc import Sequence
from typing import Any

from llmq.engine.request import TokenLogprobs
from llmq.model.tokenizer import Tokenizer

#: JSON has no infinity.
_LOWEST = -9999.0


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """A token as text.

    Args:
        tokenizer: The model's.
        token: Its id.

    Returns:
        Its text; ``bytes:`` and escapes where it is only a part of a character.
    """
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(tokenizer: Tokenizer, found: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """The shape of chat completions.

    Args:
        tokenizer: The model's.
        found: One for each token.

    Returns:
        The contents of ``logprobs``.
    """
    rows = []
    for row in found:
        top = [_entry(tokenizer, token, logprob) for token, logprob in row.top]
        rows.append({**_entry(tokenizer, row.token, row.logprob), "top_logprobs": top})
    return {"content": rows, "refusal": None}


def _entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    return {
        "token": token_text(tokenizer, token),
        "logprob": max(logprob, _LOWEST),
        "bytes": list(tokenizer.token_bytes(token)),
    }


class LegacyLogprobs:
    """The shape of completions, for one choice; remembers where in the text it is.

    Args:
        tokenizer: The model's.
        echo: The prompt as it is repeated in front of the answer; empty when it is not.
    """

    def __init__(self, tokenizer: Tokenizer, echo: str = "") -> None:
        self._tokenizer = tokenizer
        self._echo = echo
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def prompt(self, tokens: Sequence[int], found: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """Rows of the prompt's tokens.

        Args:
            tokens: Of the prompt.
            found: One for each; None for the first.

        Returns:
            The contents of ``logprobs``.
        """
        rows = self._rows(tokens, found)
        self._offset = len(self._echo)
        self._decoder.reset()
        return rows

    def answer(self, found: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Rows of tokens that were generated.

        Args:
            found: One for each.

        Returns:
            The contents of ``logprobs``.
        """
        return self._rows([row.token for row in found], found)

    def _rows(self, tokens: Sequence[int], found: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        names = [token_text(self._tokenizer, token) for token in tokens]
        return {
            "tokens": names,
            "token_logprobs": [max(row.logprob, _LOWEST) if row else None for row in found],
            "top_logprobs": [self._top(row) if row else None for row in found],
            "text_offset": [self._advance(token) for token in tokens],
        }

    def _top(self, row: TokenLogprobs) -> dict[str, float]:
        """By text, the chosen token always among them; of equal texts the likelier one."""
        top: dict[str, float] = {}
        for token, logprob in (*row.top, (row.token, row.logprob)):
            top.setdefault(token_text(self._tokenizer, token), max(logprob, _LOWEST))
        return top

    def _advance(self, token: int) -> int:
        start = self._offset
        piece = self._decoder.decode(self._tokenizer.token_bytes(token))
        if not self._tokenizer.is_special(token) or self._echo.startswith(piece, start):
            self._offset += len(piece)
        return start


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several runs of rows as one.

    Args:
        parts: Each as from `LegacyLogprobs`.

    Returns:
        The same shape.
    """
    keys = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {key: [row for part in parts for row in part[key]] for key in keys}
