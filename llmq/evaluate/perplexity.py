"""Perplexity of a text: how well a model predicts it.

With the loss S (in nats) of all scored tokens, and their number of tokens, words or bytes D:

    perplexity = exp(S / D)          bits per byte = S / (D ln 2)

Words are what whitespace separates, as in lm-eval's ``word_perplexity``. Standard errors take the
windows as the independent units: that of S / D as a ratio of sums over windows, times the
perplexity by the delta method, see `llmq.evaluate.statistics`.
"""

import math
from collections.abc import Sequence

import numpy as np

from llmq.backends.base import InferenceModel, Run
from llmq.checkpoint.reader import Progress, no_progress
from llmq.evaluate.journal import Journal
from llmq.evaluate.measured import Measured, mean_over_windows
from llmq.evaluate.windows import Window, check_fits, cut, num_known
from llmq.model.tokenizer import Tokenizer


def measure_perplexity(
    model: InferenceModel,
    tokenizer: Tokenizer,
    text: str,
    *,
    window: int = 1024,
    stride: int | None = None,
    max_tokens: int | None = None,
    journal: Journal | None = None,
    progress: Progress = no_progress,
) -> Measured:
    """Measure the perplexity of a text.

    Args:
        model: Has room for a window.
        tokenizer: Its tokenizer.
        text: The text.
        window: Tokens the model sees at once.
        stride: Tokens to score per window; None cuts the text without overlap.
        max_tokens: Take only so many tokens from the start; None takes all.
        journal: Holds the losses of finished windows of the same text.
        progress: Told of every window, in tokens.

    Returns:
        Perplexity per token and per word and bits per byte, with windows as items.

    Raises:
        ConfigError: An option is out of range, or the text is shorter than one window.
        BackendError: The model computes nothing useful.
    """
    check_fits(model, window)
    parts = cut(tokenizer, text, window=window, stride=stride, max_tokens=max_tokens)
    journal = Journal(None, {}) if journal is None else journal
    known = num_known(parts.windows, lambda part: journal.get(f"perplexity {part.name}") is not None)
    losses: list[float] = [journal.get(f"perplexity {part.name}") for part in parts.windows[:known]]
    state, done = model.init_state(), sum(len(part.targets) for part in parts.windows[:known])
    for part in parts.windows[known:]:
        progress(part.name, done, parts.num_targets)
        shared = len(part.context)
        if shared > part.num_cached:
            state, _ = model.extend(state, 0, part.context[part.num_cached :], part.num_cached)
        state, (scores,) = model.score(state, 0, shared, [Run(part.run, part.targets)])
        assert scores
        losses.append(-float(scores.logprobs.sum(dtype=np.float64)))
        journal.add({f"perplexity {part.name}": losses[-1]})
        done += len(part.targets)

    nats = np.array(losses)
    tokens, words, num_bytes = _sizes(tokenizer, parts.windows)
    figures = {
        "perplexity/token": mean_over_windows("perplexity/token", nats, tokens, link="exp"),
        "perplexity/word": mean_over_windows("perplexity/word", nats, words, link="exp"),
        "perplexity/bits_per_byte": mean_over_windows("perplexity/bits_per_byte", nats / math.log(2), num_bytes),
    }
    return Measured(
        metrics={name: metric for name, (metric, _) in figures.items()},
        items={name: items for name, (_, items) in figures.items()},
        item_ids={name: [part.name for part in parts.windows] for name in figures},
        counts={
            "perplexity/windows": len(losses),
            "perplexity/tokens": done,
            "perplexity/words": int(words.sum()),
            "perplexity/bytes": int(num_bytes.sum()),
            "perplexity/tokens_left_out": parts.num_left_out,
        },
    )


def _sizes(tokenizer: Tokenizer, windows: Sequence[Window]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, words and UTF-8 bytes that the targets of each window stand for."""
    texts = [_target_text(tokenizer, window) for window in windows]
    return (
        np.array([len(window.targets) for window in windows]),
        np.array([len(text.split()) for text in texts]),
        np.array([len(text.encode()) for text in texts]),
    )


def _target_text(tokenizer: Tokenizer, window: Window) -> str:
    """Decoded behind the token before, because a decoder may drop the space in front of a text."""
    before = tokenizer.decode(window.run[:1].tolist())
    return tokenizer.decode([*window.run[:1].tolist(), *window.targets.tolist()])[len(before) :]
