"""Text to sequences of tokens: what calibration sees."""

from pathlib import Path

import numpy as np

from llmq.errors import ConfigError
from llmq.evaluate.windows import read_text
from llmq.model.tokenizer import Tokenizer

#: Rows of a hub dataset that are read at once.
_HUB_ROWS = 1000


def calibration_sequences(
    tokenizer: Tokenizer, text: str, num_samples: int, seq_len: int, seed: int, name: str = ""
) -> list[np.ndarray]:
    """Cut a text into sequences that do not overlap, and draw some.

    Args:
        tokenizer: The model's.
        text: The text.
        num_samples: How many.
        seq_len: Tokens of each, a BOS included.
        seed: Of the draw.
        name: Of the text, for messages.

    Returns:
        int32 `[seq_len]` each, in the text's order.

    Raises:
        ConfigError: The text has too few tokens.
    """
    bos = [tokenizer.bos_token_id] if tokenizer.adds_bos else []
    num_new = seq_len - len(bos)
    ids = tokenizer.encode(text)
    ids = np.asarray(ids[len(bos) :] if ids[: len(bos)] == bos else ids, np.int32)
    num_blocks = len(ids) // num_new
    if num_blocks < num_samples:
        raise ConfigError(
            f"dataset={name}: has {len(ids):,} tokens, {num_samples} samples of {seq_len} take {num_samples * num_new:,}; "
            "lower --num-samples or --seq-len, or give a longer text."
        )
    drawn = np.sort(np.random.default_rng(seed).permutation(num_blocks)[:num_samples])
    prefix = np.asarray(bos, np.int32)
    return [np.concatenate([prefix, ids[i * num_new : (i + 1) * num_new]]) for i in drawn]


def hold_out(text: str) -> tuple[str, str]:
    """Set the end of a text aside, to measure on.

    Args:
        text: The text.

    Returns:
        Its first nine tenths, and the rest.
    """
    cut = len(text) * 9 // 10
    return text[:cut], text[cut:]


def read_dataset(dataset: str) -> str:
    """The text of a dataset.

    Args:
        dataset: A file, or a hub id.

    Returns:
        The text.

    Raises:
        ConfigError: It cannot be read.
    """
    path = Path(dataset)
    if path.exists() or dataset.count("/") != 1 or dataset.startswith((".", "~", "/")):
        return read_text(path)
    try:
        from datasets import load_dataset
        from datasets.exceptions import DatasetNotFoundError
    except ImportError as err:
        raise ConfigError(
            f"dataset={dataset}: is no file here, and the hub needs the datasets library; install llmq[eval]."
        ) from err
    try:
        rows = load_dataset(dataset, split="train", streaming=True).take(_HUB_ROWS)
        return "\n".join(row["text"] for row in rows)
    except (OSError, ValueError, KeyError, DatasetNotFoundError) as err:
        reason = str(err).strip().splitlines()[0].rstrip(".")
        raise ConfigError(f"dataset={dataset}: neither a file nor to be had from the hub ({reason}).") from err
