"""Special tokens that messages spell out: they must stay text.

A chat template pastes messages between special tokens. Were its output encoded as it is, a message
could end its own turn and begin one of the system. So what messages spell out is hidden while
the template runs, and afterwards only what the template wrote is marked as special.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from llmq.errors import ConfigError

#: Private-use characters: one that no message holds marks the template's own special tokens.
_MARKS = tuple(chr(code) for code in range(0xE000, 0xF900))


class Hidden:
    """A request whose messages spell out special tokens.

    Args:
        given: Messages and tools, as JSON holds them.
        special_tokens: Of the tokenizer, longest first.

    Attributes:
        spelled: The special tokens found.
    """

    def __init__(self, given: Any, special_tokens: Sequence[str]) -> None:
        self._given = given
        self._texts = list(_texts(given))
        self.spelled = [token for token in special_tokens if any(token in text for text in self._texts)]

    def stand_ins(self) -> tuple[Any, dict[str, str]]:
        """The request with plain letters in place of special tokens.

        Returns:
            A copy of the request, and what each stand-in stands for.
        """
        word = self._unused(f"Qz{i}Z" for i in range(len(self._texts) + 1_000_000))
        standing = {token: f"{word}{i}X" for i, token in enumerate(self.spelled)}
        return replaced(self._given, standing), {word: token for token, word in standing.items()}

    def mark(self) -> str:
        """A character that the request does not hold.

        Returns:
            One of the private use area.

        Raises:
            ConfigError: It holds all of them.
        """
        return self._unused(_MARKS)

    def _unused(self, candidates: Iterable[str]) -> str:
        for candidate in candidates:
            if not any(candidate in text for text in self._texts):
                return candidate
        raise ConfigError("messages: hold special tokens and every private-use character; leave one of them out.")


def replaced(value: Any, table: Mapping[str, str]) -> Any:
    """A copy with texts replaced, wherever they are.

    Args:
        value: As JSON holds it.
        table: Text -> other text, applied in order.

    Returns:
        The same structure.
    """
    if isinstance(value, str):
        for text, other in table.items():
            value = value.replace(text, other)
        return value
    if isinstance(value, Mapping):
        return {key: replaced(item, table) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [replaced(item, table) for item in value]
    return value


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _texts(item)
