"""A text as windows of tokens: what perplexity and divergence are measured on.

Without a stride the text is cut into full windows that do not overlap. The first token of each is
context only, unless the tokenizer has a BOS: then a window is the BOS and ``window - 1`` tokens of
text, all of them scored. Tokens behind the last full window are left out.

With a stride every token but the text's first is scored exactly once, ``stride`` at a time, behind
as much of the text before as the window holds: at least ``window - stride`` tokens from the second
window on.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llmq.backends.base import InferenceModel
from llmq.errors import ConfigError
from llmq.model.tokenizer import Tokenizer

#: Field of a JSON line -> what stands before the rows of it, which are joined by newlines.
#: WikiText's pages begin behind the line that its raw file starts with.
_ROWS = {"page": " \n", "text": ""}

#: Characters to tokenize for a wanted token, at first. English takes about 4.5.
_CHARS_PER_TOKEN = 8

#: Tokens at the end of a cut text that may differ from those of the whole text.
_UNSURE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Window:
    """A run of tokens to score, and what stands before it.

    Attributes:
        name: Where its targets lie in the text, in tokens: ``first:end``.
        context: int32 `[c]`, tokens before the run.
        num_cached: How many of them the window before has left in the slot.
        run: int32 `[n]`.
        targets: int32 `[n]`, for every token of the run its successor.
    """

    name: str
    context: np.ndarray
    num_cached: int
    run: np.ndarray
    targets: np.ndarray


@dataclass(frozen=True, slots=True)
class Windows:
    """A tokenized text, cut.

    Attributes:
        ids: int32 `[T]`, the text's tokens that take part.
        windows: In order.
        num_left_out: Tokens behind the last full window.
    """

    ids: np.ndarray
    windows: list[Window]
    num_left_out: int

    @property
    def num_targets(self) -> int:
        """Tokens that are scored."""
        return sum(len(window.targets) for window in self.windows)


def read_text(path: Path) -> str:
    """Read a text to measure on.

    Args:
        path: Plain text; or, when it ends in ``.jsonl``, one JSON object a line with the text in ``page``
            (WikiText's pages) or ``text``.

    Returns:
        The text.

    Raises:
        ConfigError: It is missing, not UTF-8, empty, or a line is not such an object.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"{path}: cannot be read as UTF-8 text ({getattr(err, 'strerror', None) or err}).") from err
    if path.suffix == ".jsonl":
        text = _join_rows(path, text)
    if not text.strip():
        raise ConfigError(f"{path}: is empty; give a text of some thousand words.")
    return text


def cut(
    tokenizer: Tokenizer, text: str, *, window: int = 1024, stride: int | None = None, max_tokens: int | None = None
) -> Windows:
    """Tokenize a text and cut it into windows.

    Args:
        tokenizer: The model's.
        text: The text.
        window: Tokens the model sees at once, a BOS included.
        stride: Tokens to score per window; None cuts without overlap.
        max_tokens: Take only so many tokens from the start; None takes all.

    Returns:
        The windows.

    Raises:
        ConfigError: An option is out of range, or the text is shorter than one window.
    """
    if window < 2:
        raise ConfigError(f"window={window}: must be at least 2 tokens, one to see and one to predict.")
    if stride is not None and not 0 < stride < window:
        raise ConfigError(
            f"stride={stride}: must be positive and smaller than the window, {window}; leave it out for windows "
            "that do not overlap."
        )
    bos = [tokenizer.bos_token_id] if tokenizer.adds_bos else []
    num_needed = window - len(bos)
    if max_tokens is not None and max_tokens < num_needed:
        raise ConfigError(
            f"max_tokens={max_tokens}: must fill a window, {num_needed} tokens; raise it or lower --window."
        )
    ids = _first_ids(tokenizer, text, max_tokens)
    if len(ids) < num_needed:
        raise ConfigError(
            f"window={window}: the text has only {len(ids)} tokens; give a longer text or a --window of at most "
            f"{len(ids) + len(bos)}."
        )
    spans = _spans(len(ids), num_needed, stride, 0 if bos else 1)
    prefix = np.asarray(bos, np.int32)
    windows, previous = [], -1
    for start, first, end in spans:
        tokens = np.concatenate([prefix, ids[start:end]])
        num_context = len(prefix) + first - start - 1
        cached = num_context if start == previous else 0
        name = f"{first}:{end}"
        windows.append(Window(name, tokens[:num_context], cached, tokens[num_context:-1], tokens[num_context + 1 :]))
        previous = start
    return Windows(ids[: spans[-1][2]], windows, len(ids) - spans[-1][2])


def num_known(windows: Sequence[Window], is_known: Callable[[Window], bool]) -> int:
    """Count the windows, from the first on, that need not be computed.

    A window whose context the one before has left in the slot is computed behind it, so that an
    interrupted run goes on to the same bits.

    Args:
        windows: All of them.
        is_known: Whether a window's result is there already.

    Returns:
        How many to leave out.
    """
    count = next((at for at, window in enumerate(windows) if not is_known(window)), len(windows))
    while count < len(windows) and windows[count].num_cached:
        count -= 1
    return count


def check_fits(model: InferenceModel, window: int) -> None:
    """Refuse a window that is longer than a model's slots.

    Args:
        model: Open.
        window: Tokens.

    Raises:
        ConfigError: It is longer.
    """
    if window > model.caps.max_len:
        raise ConfigError(f"window={window}: must be at most the model's context, {model.caps.max_len}.")


def _join_rows(path: Path, text: str) -> str:
    field, rows = "", []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            field = field or next(name for name in _ROWS if name in row)
            if not isinstance(row[field], str):
                raise TypeError
        except (ValueError, TypeError, KeyError, StopIteration, RecursionError) as err:
            wanted = f'"{field}"' if field else '"page" or "text"'
            raise ConfigError(f"{path}: line {number} must be a JSON object with its text in {wanted}.") from err
        rows.append(row[field])
    return _ROWS[field] + "\n".join(rows) if rows else ""


def _first_ids(tokenizer: Tokenizer, text: str, max_tokens: int | None) -> np.ndarray:
    """The text's first tokens, without a BOS; no more of the text is tokenized than they take."""
    num_chars = len(text) if max_tokens is None else _CHARS_PER_TOKEN * (max_tokens + _UNSURE_TOKENS)
    while True:
        ids = tokenizer.encode(text[:num_chars])
        if tokenizer.adds_bos and ids[:1] == [tokenizer.bos_token_id]:
            ids = ids[1:]
        if num_chars >= len(text) or (max_tokens is not None and len(ids) >= max_tokens + _UNSURE_TOKENS):
            return np.asarray(ids[:max_tokens], np.int32)
        num_chars *= 2


def _spans(num_tokens: int, num_seen: int, stride: int | None, num_unscored: int) -> list[tuple[int, int, int]]:
    """Where windows begin, where their targets begin, and where both end."""
    if stride is None:
        starts = range(0, num_tokens - num_seen + 1, num_seen)
        return [(start, start + num_unscored, start + num_seen) for start in starts]
    spans, first = [], num_unscored
    while first < num_tokens:
        end = min(first - first % stride + stride, num_tokens)
        spans.append((max(0, end - num_seen), first, end))
        first = end
    return spans
