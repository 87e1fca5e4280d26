"""Text to sequences of tokens: what calibration sees.

Rows of a dataset are joined to one text, whatever their lengths, and that is cut into sequences of one
length. So there is no padding, left or right, and nothing for which it could count.
"""

from pathlib import Path

import numpy as np

from llmq.errors import ConfigError
from llmq.evaluate.windows import read_text
from llmq.model.tokenizer import Tokenizer

#: Characters to read for each wanted token where a dataset may be larger than a disk. English takes about 4.5.
_CHARS_PER_TOKEN = 8

#: Columns with text, of which the first that a row has is read.
_COLUMNS = ("text", "page")


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


def read_dataset(dataset: str, num_tokens: int) -> str:
    """The text of a dataset.

    Args:
        dataset: A file, see `llmq.evaluate.windows.read_text`; or what the datasets library loads, a directory or
            a hub id, with a column ``text`` or ``page``.
        num_tokens: How many are wanted. A file is read to its end, of other datasets about as much as they take.

    Returns:
        The text.

    Raises:
        ConfigError: It cannot be read.
    """
    path = Path(dataset)
    is_id = dataset.count("/") == 1 and not dataset.startswith((".", "~", "/"))
    if path.is_dir() or (is_id and not path.exists()):
        return _joined(dataset, num_tokens * _CHARS_PER_TOKEN)
    return read_text(path)


def _joined(dataset: str, num_chars: int) -> str:
    """The first rows of a dataset's training split, joined by newlines."""
    try:
        from datasets import load_dataset
        from datasets.exceptions import DatasetsError
    except ImportError as err:
        raise ConfigError(
            f"dataset={dataset}: is no file, and needs the datasets library; install llmq[eval]."
        ) from err
    rows: list[str] = []
    try:
        for row in load_dataset(dataset, split="train", streaming=True):
            column = next((name for name in _COLUMNS if isinstance(row.get(name), str)), None)
            if column is None:
                raise ConfigError(
                    f"dataset={dataset}: has the columns {', '.join(row)}, and none of {' or '.join(_COLUMNS)} with "
                    "text; give another dataset or a text file."
                )
            rows.append(row[column])
            num_chars -= len(row[column]) + 1
            if num_chars <= 0:
                break
    except (OSError, ValueError, DatasetsError) as err:
        reason = (str(err).strip() or type(err).__name__).splitlines()[0].rstrip(".")
        raise ConfigError(
            f"dataset={dataset}: cannot be loaded ({reason}); give a file, a directory or a hub id."
        ) from err
    return "\n".join(rows)
