"""Perplexity of models on WikiText-2: what rounding alone costs.

    python benchmarks/perplexity.py MODEL ... --pages wikitext2_test_pages.jsonl [--windows 16] [--backend gpu]

The raw test text from its start, in windows of 1024 tokens without overlap or BOS; each window's
first token is context only. PAGES holds one JSON object a line, with the text in ``page``.
"""

import argparse
import json
import math
import platform
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np

from llmq.backends.base import InferenceModel, ModelOptions
from llmq.backends.registry import select_backend
from llmq.checkpoint.loader import load_weights
from llmq.model.tokenizer import Tokenizer

WINDOW = 1024


def token_windows(tokenizer: Tokenizer, pages: Path, num_windows: int) -> np.ndarray:
    """The first windows of the text, int32 `[num_windows, WINDOW]`."""
    texts = [json.loads(line)["page"] for line in pages.read_text(encoding="utf-8").splitlines()]
    text = " \n" + "\n".join(texts)
    ids = tokenizer.encode(text[: 8 * WINDOW * num_windows])[: WINDOW * num_windows]
    return np.asarray(ids, np.int32).reshape(num_windows, WINDOW)


def perplexity(model: InferenceModel, windows: np.ndarray) -> float:
    """Exponential of the mean loss over all predicted tokens."""
    state, losses = model.init_state(), []
    for window in windows:
        state, logits = model.extend(state, 0, window, 0, want_logits=True)
        assert logits is not None
        logits = logits[:-1].astype(np.float64)
        logits -= logits.max(axis=-1, keepdims=True)
        chosen = logits[np.arange(len(logits)), window[1:]]
        losses.append(np.log(np.exp(logits).sum(axis=-1)) - chosen)
    return math.exp(np.mean(losses))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--pages", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"))
    args = parser.parse_args()
    print(f"llmq {version('llmq')}, torch {version('torch')}, jax {version('jax')}, {platform.machine()}")
    backend, device = select_backend(args.backend, None)
    for name in args.models:
        weights = load_weights(name)
        tokenizer = Tokenizer.from_files(weights.reader.side_files(), weights.config)
        windows = token_windows(tokenizer, args.pages, args.windows)
        model = backend.open_model(weights, ModelOptions(device=device, dtype=args.dtype, max_len=WINDOW))
        start = time.perf_counter()
        value = perplexity(model, windows)
        seconds = time.perf_counter() - start
        print(
            f"{name}: {value:.3f} over {windows.size - len(windows)} tokens, {backend.name} {model.caps.dtype}, {seconds:.0f} s"
        )


if __name__ == "__main__":
    main()
