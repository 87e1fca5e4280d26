"""Tokens of one slot on their way to the device: the row each is written to, and what it sees.

Lengths are compiled, so a run is cut into chunks of a few sizes, the last ones padded.

Shape letters: N tokens.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple, Self

import numpy as np

from llmq.backends.base import Run
from llmq.backends.tpu.cache import Place

#: Lengths that runs are cut into, each compiled once.
CHUNK_SIZES = (16, 64, 256, 1024)


class Rows(NamedTuple):
    """Tokens with what `cache.Place` says of each; every array is int32 `[N]`.

    Attributes:
        token_N: The tokens.
        target_N: What to score as the successor of each.
        row_N: Where each goes, -1 for padding.
        first_N: Where its run begins.
        parent_N: Where the parent of its run begins.
        parent_size_N: Rows of that parent.
    """

    token_N: np.ndarray
    target_N: np.ndarray
    row_N: np.ndarray
    first_N: np.ndarray
    parent_N: np.ndarray
    parent_size_N: np.ndarray

    @classmethod
    def of_run(cls, run: Run, first: int, parent: int = 0, parent_size: int = 0) -> Self:
        """Place a run.

        Args:
            run: Its `parent` is not read.
            first: Row of its first token.
            parent: Row where its parent begins.
            parent_size: Rows of its parent.

        Returns:
            Its tokens.
        """
        row_N = first + np.arange(len(run.tokens))
        columns = (run.tokens, 0 if run.targets is None else run.targets, row_N, first, parent, parent_size)
        return cls(*(np.broadcast_to(np.asarray(column, np.int32), row_N.shape) for column in columns))

    def place(self, slot: int, shared: int) -> Place:
        """Where they go, as a batch of one slot.

        Args:
            slot: That slot.
            shared: Rows that every run continues.

        Returns:
            The place.
        """
        _, _, row_BN, first_BN, parent_BN, parent_size_BN = (column[None] for column in self)
        return Place(np.int32(slot), row_BN, first_BN, parent_BN, parent_size_BN, np.int32(shared))


#: What a token of padding has in each field.
PADDING = (0, 0, -1, 0, 0, 0)


def chunks(pieces: Sequence[Rows]) -> Iterator[tuple[Rows, int]]:
    """Cut tokens into lengths that are compiled.

    Args:
        pieces: Tokens to be put behind one another.

    Yields:
        Tokens, padded to a chunk size, and how many of them are no padding.
    """
    joined = [np.concatenate(column) for column in zip(*pieces, strict=True)]
    done = 0
    for size, count in chunk_sizes(sum(len(piece.token_N) for piece in pieces)):
        part = [column[done : done + count] for column in joined]
        yield Rows(*map(partial(_padded, size), part, PADDING)), count
        done += count


def _padded(size: int, column: np.ndarray, padding: int) -> np.ndarray:
    return np.pad(column, (0, size - len(column)), constant_values=padding)


def chunk_sizes(num_tokens: int) -> Iterator[tuple[int, int]]:
    """Cut a run into chunks.

    A chunk is padded only when that at most doubles its tokens, or it is of the smallest size.

    Args:
        num_tokens: Length of the run.

    Yields:
        Pairs of a chunk's size and its tokens; these add up to `num_tokens`.
    """
    while num_tokens > 0:
        size = next((size for size in CHUNK_SIZES if num_tokens <= size <= 2 * num_tokens), None)
        size = size or max((size for size in CHUNK_SIZES if size <= num_tokens), default=CHUNK_SIZES[0])
        yield size, min(size, num_tokens)
        num_tokens -= size


def place_runs(runs: Sequence[Run], shared: int) -> list[Rows]:
    """Place runs behind one another.

    Args:
        runs: As in `InferenceModel.score`.
        shared: Row of the first.

    Returns:
        Tokens of each.
    """
    first = shared + np.cumsum([0, *(len(run.tokens) for run in runs)])

    def place(index: int, run: Run) -> Rows:
        parent = () if run.parent is None else (first[run.parent], len(runs[run.parent].tokens))
        return Rows.of_run(run, first[index], *parent)

    return [place(index, run) for index, run in enumerate(runs)]
