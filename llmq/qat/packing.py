"""Examples to rows of a fixed number of tokens, and rows to the batches of a step.

A row holds one piece of an example, or, packed, as many as fit; pieces of a row do not see each
other. Which rows make up a step follows from the seed and the step alone, so that a resumed run sees
what an uninterrupted one would have.

Shape letters: B rows of a batch, N tokens of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmq.backends.base import TrainBatch
from llmq.errors import ConfigError
from llmq.qat.data import Example

#: Rows that are not packed are padded to a multiple of this, so that few shapes are compiled.
_PAD_TO = 64


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of an example that fits a row.

    Attributes:
        tokens: int32 `[n]`.
        targets: int32 `[n]`, the successor of each.
        learned: bool `[n]`, whether that counts.
    """

    tokens: np.ndarray
    targets: np.ndarray
    learned: np.ndarray


Row = list[Piece]


def cut(examples: Sequence[Example], seq_len: int) -> list[Piece]:
    """Cut examples into pieces.

    Args:
        examples: Of any length.
        seq_len: Tokens of a piece, at most.

    Returns:
        The pieces with anything to learn. Every learned token is the target of one.
    """
    pieces = []
    for example in examples:
        for start in range(0, len(example.tokens) - 1, seq_len):
            end = min(start + seq_len, len(example.tokens) - 1)
            learned = example.learned[start + 1 : end + 1]
            if learned.any():
                pieces.append(Piece(example.tokens[start:end], example.tokens[start + 1 : end + 1], learned))
    return pieces


def pack(pieces: Sequence[Piece], seq_len: int) -> list[Row]:
    """Fill rows, each piece into the first row of a few that has room.

    Args:
        pieces: None longer than a row.
        seq_len: Tokens of a row.

    Returns:
        The rows, in the order in which they were begun.
    """
    rows: list[Row] = []
    open_rows: list[tuple[int, Row]] = []  # room and row
    for piece in pieces:
        size = len(piece.tokens)
        at = next((i for i, (room, _) in enumerate(open_rows) if room >= size), None)
        if at is None:
            row: Row = []
            rows.append(row)
            open_rows = [*open_rows[-_OPEN_ROWS + 1 :], (seq_len, row)]
            at = len(open_rows) - 1
        room, row = open_rows[at]
        row.append(piece)
        open_rows[at] = (room - size, row)
    return rows


#: Rows that later pieces are tried on.
_OPEN_ROWS = 64


def batch(rows: Sequence[Row], seq_len: int, *, packed: bool) -> TrainBatch:
    """Lay rows out in arrays.

    Args:
        rows: B of them.
        seq_len: N where rows are packed, else the most it can be.
        packed: Whether they were.

    Returns:
        The batch.
    """
    longest = max(sum(len(piece.tokens) for piece in row) for row in rows)
    num_tokens = seq_len if packed else min(seq_len, -(-longest // _PAD_TO) * _PAD_TO)
    tokens, targets, documents, positions = (np.zeros((len(rows), num_tokens), np.int32) for _ in range(4))
    learned = np.zeros((len(rows), num_tokens), bool)
    for index, row in enumerate(rows):
        start = 0
        for number, piece in enumerate(row, 1):
            at = (index, slice(start, start + len(piece.tokens)))
            tokens[at], targets[at], learned[at] = piece.tokens, piece.targets, piece.learned
            documents[at], positions[at] = number, np.arange(len(piece.tokens))
            start += len(piece.tokens)
    return TrainBatch(tokens, targets, learned, documents, positions)


class Steps:
    """The batches of every step.

    Args:
        rows: All there are.
        seq_len: Tokens of a row.
        packed: Whether they were packed.
        batch_size: Rows computed together.
        grad_accum: Batches of a step.
        seed: Of the order, which is another one in each pass.

    Raises:
        ConfigError: There are fewer rows than one step takes.
    """

    def __init__(
        self, rows: Sequence[Row], seq_len: int, *, packed: bool, batch_size: int, grad_accum: int, seed: int
    ) -> None:
        self._rows, self._seq_len, self._packed = rows, seq_len, packed
        self._batch_size, self._grad_accum, self._seed = batch_size, grad_accum, seed
        self.per_epoch = len(rows) // (batch_size * grad_accum)
        if not self.per_epoch:
            raise ConfigError(
                f"data: makes {len(rows)} rows of {seq_len} tokens, a step takes {batch_size * grad_accum}; "
                "give more data or lower --batch-size, --grad-accum or --seq-len."
            )
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))

    def __getitem__(self, step: int) -> list[TrainBatch]:
        """The batches of a step, counted from 0 over all passes."""
        epoch, index = divmod(step, self.per_epoch)
        if self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng([self._seed, epoch]).permutation(len(self._rows)))
        size = self._batch_size * self._grad_accum
        chosen = self._order[1][index * size : (index + 1) * size]
        return in_batches([self._rows[i] for i in chosen], self._seq_len, self._batch_size, packed=self._packed)


def in_batches(rows: Sequence[Row], seq_len: int, batch_size: int, *, packed: bool) -> list[TrainBatch]:
    """Rows in batches, in order.

    Args:
        rows: As for `batch`.
        seq_len: As for `batch`.
        batch_size: Rows of a batch; the last one may have fewer.
        packed: As for `batch`.

    Returns:
        The batches.
    """
    starts = range(0, len(rows), batch_size)
    return [batch(rows[start : start + batch_size], seq_len, packed=packed) for start in starts]
