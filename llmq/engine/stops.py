"""Stop texts: where an answer ends, and which of its last characters could still become an end.

The stop that is complete first, character by character, wins; of several that are complete at the
same character, the longest. So the answer does not depend on how tokens cut the text. Each stop
runs its own matcher (Knuth, Morris and Pratt, 1977), whose state is the length of the longest
prefix of the stop that the text ends with: the longest of them all is what has to be withheld.
"""

from collections.abc import Sequence

#: A stop text, and for each of its prefixes the length of the longest proper border.
StopTable = tuple[str, tuple[int, ...]]


def stop_tables(stops: Sequence[str]) -> tuple[StopTable, ...]:
    """Prepare stop texts, once for all answers of a request.

    Args:
        stops: Each at least one character.

    Returns:
        What `StopMatcher` takes.
    """
    return tuple((stop, _borders(stop)) for stop in dict.fromkeys(stops))


def _borders(stop: str) -> tuple[int, ...]:
    borders = [0]
    for character in stop[1:]:
        length = borders[-1]
        while length and stop[length] != character:
            length = borders[length - 1]
        borders.append(length + (stop[length] == character))
    return tuple(borders)


class StopMatcher:
    """Watches one answer.

    Args:
        tables: From `stop_tables`.
    """

    def __init__(self, tables: Sequence[StopTable]) -> None:
        self._tables = tables
        self._matched = [0] * len(tables)
        self._withheld = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Take more text.

        Args:
            text: What the answer grew by.

        Returns:
            Text that is certainly not part of a stop, and the stop that ended the answer, if one did;
            the matcher must not be used after it.
        """
        if not self._tables:
            return text, None
        whole = self._withheld + text
        for end, character in enumerate(text, len(self._withheld) + 1):
            stop = self._advance(character)
            if stop is not None:
                return whole[: end - len(stop)], stop
        num_withheld = max(self._matched)
        self._withheld = whole[len(whole) - num_withheld :]
        return whole[: len(whole) - num_withheld], None

    def _advance(self, character: str) -> str | None:
        """Move every stop's matcher; the longest stop that is complete now."""
        found = None
        for i, (stop, borders) in enumerate(self._tables):
            length = self._matched[i]
            while length and stop[length] != character:
                length = borders[length - 1]
            length += stop[length] == character
            self._matched[i] = length
            if length == len(stop) and (found is None or length > len(found)):
                found = stop
        return found

    def finish(self) -> str:
        """The text still withheld: the answer ended before it became a stop."""
        return self._withheld
