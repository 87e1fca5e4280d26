"""Stop texts against an oracle that looks at every character."""

import random
import time

from hypothesis import given
from hypothesis import strategies as st

from llmq.engine.stops import StopMatcher, stop_tables


def oracle(text: str, stops: list[str]) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def withheld(text: str, stops: list[str]) -> int:
    """Length of the longest end of a text that begins a stop."""
    return max(
        (n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])),
        default=0,
    )


def check(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stop_tables(stops))
    shown = seen = ""
    expected, expected_stop = oracle("".join(pieces), stops)
    for piece in pieces:
        text, stop = matcher.push(piece)
        shown, seen = shown + text, seen + piece
        if stop is not None:
            assert (shown, stop) == (expected, expected_stop)
            return
        assert len(shown) == len(seen) - withheld(seen, stops)
    assert expected_stop is None
    assert shown + matcher.finish() == expected


def test_forty_thousand_random_cases() -> None:
    rng = random.Random(0)
    for _ in range(40_000):
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 5))) for _ in range(rng.randint(0, 4))]
        pieces = ["".join(rng.choices("abc", [4, 4, 1], k=rng.randint(0, 4))) for _ in range(rng.randint(0, 5))]
        check(pieces, stops)


@given(st.lists(st.text(max_size=6), max_size=8), st.lists(st.text(min_size=1, max_size=4), max_size=4))
def test_any_text(pieces: list[str], stops: list[str]) -> None:
    check(pieces, stops)


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=6), max_size=4), st.data())
def test_where_tokens_cut_the_text_does_not_matter(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    check([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)], stops)
    check(list(text), stops)


def test_the_first_to_be_complete_wins_over_the_first_to_begin() -> None:
    assert StopMatcher(stop_tables(["abcd", "bc"])).push("xabcd") == ("xa", "bc")
    assert StopMatcher(stop_tables(["bc", "abc"])).push("xabc") == ("x", "abc")


def test_the_largest_stops_allowed_are_quick() -> None:
    """64 stops of 1024 characters, made so that every character falls back."""
    start = time.process_time()
    matcher = StopMatcher(stop_tables(["a" * 1000 + chr(200 + i) * 24 for i in range(64)]))
    for _ in range(100):
        matcher.push("a" * 9 + "b")
    assert time.process_time() - start < 2
