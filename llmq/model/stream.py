"""Text that arrives token by token."""

from collections.abc import Callable, Sequence

#: What a decoder writes for bytes that are not, or not yet, a character.
_REPLACEMENT = "\ufffd"


class TextStream:
    """Text that grows by one token at a time.

    The pieces, joined, are ``decode(prompt + ids)`` without ``decode(prompt)``. A piece never holds
    U+FFFD for a character whose bytes are spread over tokens: those are kept back until it is whole.

    Each step decodes a window: the tokens of the last piece, which fix how the next one starts, and
    those not shown yet. ``tokenizers.DecodeStream`` works like this, but fails for good on invalid
    bytes after a byte-fallback character.

    Args:
        decode: Ids to text, without special tokens.
        prompt: What the tokens continue.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = list(prompt)
        self._num_shown = len(self._window)
        self._shown = self._decode(self._window).rstrip(_REPLACEMENT)

    def push(self, token_id: int) -> str:
        """Take the next token.

        Args:
            token_id: Its id.

        Returns:
            The text it completes, often one word; empty while a character is incomplete.
        """
        self._window.append(token_id)
        text = self._unshown()
        if not text or text.endswith(_REPLACEMENT):
            return ""
        self._window = self._window[self._num_shown :]
        self._num_shown = len(self._window)
        self._shown = self._decode(self._window)
        return text

    def finish(self) -> str:
        """The text still kept back: a character that stayed incomplete, as U+FFFD."""
        text = self._unshown()
        self._window, self._num_shown, self._shown = [], 0, ""
        return text

    def _unshown(self) -> str:
        text = self._decode(self._window)
        if text.startswith(self._shown):
            return text[len(self._shown) :]
        return self._decode(self._window[self._num_shown :])  # invalid bytes spoiled the characters before them
