"""The key/value cache, and attention on it. Write first, then attend on what was stored.

A call is a `RunPlace`, tokens of one slot that share its keys, or a `StepPlace`, one token each of
several slots. How a row of a step is computed does not depend on the others: each attends on a
window of its slot whose size follows from its own position. Neighbouring slots with equal windows
are computed by one kernel, in place.

Shape letters: M tokens of a run, B rows of a step, T rows of a slot, S slots, L layers, H heads,
K kv heads, R = H / K, h head size.
"""

import itertools
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from llmq.model.config import ModelConfig
from llmq.quant import quantize_vectors

#: Rows that windows of a step are multiples of; where they are long, of up to a quarter of their size.
_WINDOW_STEP = 64


class Cache:
    """Keys and values of every slot, `[L, S, K, T, h]` each, in the compute type or as int8 codes.

    Args:
        config: The model.
        num_slots: S.
        max_len: T.
        device: Where.
        dtype: Type of what is stored; int8 adds a float32 scale `[L, S, K, T]` to each.
        compute_dtype: Type of queries.

    Attributes:
        stored: Keys and values.
        scales: Of keys and values, or nothing.
        max_len: T.
        num_kv_heads: K.
        num_repeats: Heads that share keys, R.
        windows: Positions a token sees back, itself included, or None for all: of each of `ModelConfig.attentions`.
        attention: Which of these each layer has.
        score_scale: Factor on scores; None is ``h ** -0.5``.
        compute_dtype: Type of queries.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_slots: int,
        max_len: int,
        device: torch.device,
        dtype: torch.dtype,
        compute_dtype: torch.dtype,
    ) -> None:
        shape = (config.num_layers, num_slots, config.num_kv_heads, max_len, config.head_dim)
        self.stored = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(2)]
        self.scales = [torch.zeros(shape[:-1], device=device) for _ in range(2)] if dtype is torch.int8 else []
        self._by_layer = list(zip(*(part.flatten(1, 3).unbind() for part in self._parts), strict=True))
        self.max_len, self.num_kv_heads = max_len, config.num_kv_heads
        self.num_repeats = config.num_heads // config.num_kv_heads
        self.windows = [attention.window for attention in config.attentions]
        self.attention = [config.attention_index(layer) for layer in range(config.num_layers)]
        self.score_scale = config.score_scale
        self.compute_dtype = compute_dtype

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.stored[0].device

    @property
    def num_bytes(self) -> int:
        """Bytes of everything stored."""
        return sum(part.nbytes for part in self._parts)

    @property
    def _parts(self) -> list[Tensor]:
        return [*self.stored, *self.scales]

    def window(self, position: int) -> int:
        """How many rows a step at a position attends on."""
        step = max(_WINDOW_STEP, 1 << position.bit_length() >> 3)
        return min((position // step + 1) * step, self.max_len)

    def rows(self, slots: np.ndarray, positions: np.ndarray) -> Tensor:
        """Where `write` puts the vectors of some tokens, head by head."""
        heads = slots[:, None] * self.num_kv_heads + np.arange(self.num_kv_heads)
        return send((heads * self.max_len + positions[:, None]).ravel(), self.device)

    def read(self, slots: slice, rows: slice) -> list[tuple[Tensor, ...]]:
        """For every layer, what is stored in some rows of neighbouring slots, in place.

        Args:
            slots: B slots.
            rows: T rows.

        Returns:
            For each, keys and values `[B, K, T, h]`, then their scales if they have any.
        """
        return list(zip(*(part[:, slots, :, rows].unbind() for part in self._parts), strict=True))

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first rows of a slot to another."""
        for part in self._parts:
            part[:, target, :, :num_tokens] = part[:, source, :, :num_tokens]

    def clear(self, slot: int, start: int) -> None:
        """Write zeros from a row of a slot on."""
        for part in self._parts:
            part[:, slot, :, start:] = 0

    def write(self, layer: int, rows: Tensor, k_MKh: Tensor, v_MKh: Tensor) -> None:
        """Store keys and values.

        Args:
            layer: Which layer's.
            rows: From `rows`, of these tokens.
            k_MKh: Keys.
            v_MKh: Values.
        """
        new = [k_MKh.flatten(0, 1), v_MKh.flatten(0, 1)]
        if self.scales:
            codes, scales = zip(*map(quantize_vectors, new), strict=True)
            new = [*codes, *scales]
        for part, vectors in zip(self._by_layer[layer], new, strict=True):
            part.index_copy_(0, rows, vectors)


def attend(q_BKMh: Tensor, stored: tuple[Tensor, ...], mask: Tensor, scale: float | None = None) -> Tensor:
    """Attention on what is stored.

    Args:
        q_BKMh: Queries of each slot; those of the heads that share keys may stand behind one another.
        stored: Of one layer, from `Cache.read`.
        mask: 0 where a query sees a row, -inf elsewhere; broadcasts to `[B, K, M, T]`.
        scale: Factor on scores; None is ``h ** -0.5``.

    Returns:
        Like the queries.
    """
    if len(stored) == 2:
        return F.scaled_dot_product_attention(q_BKMh, *stored, attn_mask=mask, scale=scale)
    return _attend_int8(q_BKMh, stored, mask, q_BKMh.shape[-1] ** -0.5 if scale is None else scale)


def _attend_int8(q_BKMh: Tensor, stored: tuple[Tensor, ...], mask: Tensor, scale: float) -> Tensor:
    """Attention on codes: their scales multiply scores and probabilities, softmax in float32."""
    k_BKTh, v_BKTh, k_scale_BKT, v_scale_BKT = stored
    dtype = q_BKMh.dtype
    q_BKMh = q_BKMh * scale
    scores_BKMT = (q_BKMh @ k_BKTh.to(dtype).mT).float() * k_scale_BKT[:, :, None] + mask
    probs_BKMT = scores_BKMT.softmax(dim=-1) * v_scale_BKT[:, :, None]
    return probs_BKMT.to(dtype) @ v_BKTh.to(dtype)


class Place(Protocol):
    """Where the tokens of a call go, and what each sees.

    Attributes:
        chunk: Size of the chunks that a run of one slot's tokens may be cut into, see `linear.Linear`; 0 for a
            step, whose rows must not depend on each other.
    """

    chunk: int

    def attend(self, layer: int, q_MHh: Tensor, k_MKh: Tensor, v_MKh: Tensor) -> Tensor:
        """Store the tokens' keys and values, then attend.

        Args:
            layer: Which layer.
            q_MHh: Queries.
            k_MKh: Keys.
            v_MKh: Values.

        Returns:
            `[M, H * h]`.
        """
        ...


class RunPlace:
    """Tokens written behind one another into a slot.

    Args:
        cache: Keys and values.
        slot: Which slot.
        start: Row of the first token.
        visibles_MT: Rows that each token sees, T up to the last token's; for each of `Cache.windows`.
        parts: Tokens that attend apart, and rows that hold all they see.
        chunk: See `Place`.
    """

    def __init__(
        self,
        cache: Cache,
        slot: int,
        start: int,
        visibles_MT: Sequence[Tensor],
        parts: Sequence[tuple[slice, slice]],
        chunk: int,
    ) -> None:
        self.chunk = chunk
        self._cache, end = cache, visibles_MT[0].shape[1]
        self._rows, dtype = cache.rows(np.array([slot]), np.arange(start, end)), cache.compute_dtype
        self._parts = [
            (
                tokens,
                cache.read(slice(slot, slot + 1), rows),
                [_additive(visible_MT[tokens, rows], dtype).repeat(cache.num_repeats, 1) for visible_MT in visibles_MT],
            )
            for tokens, rows in parts
        ]

    def write(self, layer: int, k_MKh: Tensor, v_MKh: Tensor) -> None:
        """Store the tokens' keys and values.

        Args:
            layer: Which layer.
            k_MKh: Keys.
            v_MKh: Values.
        """
        self._cache.write(layer, self._rows, k_MKh, v_MKh)

    def attend(self, layer: int, q_MHh: Tensor, k_MKh: Tensor, v_MKh: Tensor) -> Tensor:
        """See `Place.attend`."""
        self.write(layer, k_MKh, v_MKh)
        kind, scale, outs = self._cache.attention[layer], self._cache.score_scale, []
        for tokens, stored, masks in self._parts:
            q_HMh = q_MHh[tokens].transpose(0, 1)
            q_KMh = q_HMh.reshape(k_MKh.shape[1], -1, q_HMh.shape[-1])  # the R heads of a key in turn
            out_KMh = attend(q_KMh[None], stored[layer], masks[kind], scale)[0]
            outs.append(out_KMh.reshape(q_HMh.shape).transpose(0, 1).flatten(1))
        return outs[0] if len(outs) == 1 else torch.cat(outs)


class StepPlace:
    """One token for each of several slots.

    Args:
        cache: Keys and values.
        slots: Ascending.
        positions: Row of each slot's token.
    """

    chunk = 0

    def __init__(self, cache: Cache, slots: np.ndarray, positions: np.ndarray) -> None:
        self._cache, self._num_rows = cache, len(slots)
        self._rows = cache.rows(slots, positions)
        self._groups = [
            _Group(cache, slots[rows], positions[rows], rows) for rows in _neighbours(cache, slots, positions)
        ]

    def attend(self, layer: int, q_MHh: Tensor, k_MKh: Tensor, v_MKh: Tensor) -> Tensor:
        """See `Place.attend`. Rows beyond the slots are padding: nothing is stored, and what comes back is 0."""
        self._cache.write(layer, self._rows, k_MKh[: self._num_rows], v_MKh[: self._num_rows])
        num_tokens, num_heads, head_dim = q_MHh.shape
        q_MKRh = q_MHh.view(num_tokens, -1, self._cache.num_repeats, head_dim)
        kind, scale = self._cache.attention[layer], self._cache.score_scale
        outs = [attend(q_MKRh[g.rows], g.stored[layer], g.masks[kind], scale) for g in self._groups]
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        if num_tokens > self._num_rows:
            out = F.pad(out, (0, 0, 0, 0, 0, 0, 0, num_tokens - self._num_rows))
        return out.reshape(num_tokens, num_heads * head_dim)


class _Group:
    """Rows of a step whose slots are neighbours and whose windows are equal."""

    def __init__(self, cache: Cache, slots: np.ndarray, positions: np.ndarray, rows: slice) -> None:
        self.rows = rows
        window = cache.window(int(positions[0]))
        self.stored = cache.read(slice(int(slots[0]), int(slots[-1]) + 1), slice(window))
        back = np.arange(window)
        self.masks = []
        for size in cache.windows:
            visible = back <= positions[:, None]
            if size is not None:
                visible &= positions[:, None] - back < size
            self.masks.append(_additive(send(visible, cache.device), cache.compute_dtype)[:, None, None])


def _neighbours(cache: Cache, slots: np.ndarray, positions: np.ndarray) -> list[slice]:
    """Rows that one kernel computes.

    On the CPU in float32, a row's last bits depend on which rows share the call as soon as there are
    two threads (torch 2.13; not in bfloat16), so each is computed alone.
    """
    windows = np.array([cache.window(int(position)) for position in positions])
    alone = cache.device.type == "cpu" and cache.compute_dtype is torch.float32
    cuts = np.flatnonzero((np.diff(slots) != 1) | (np.diff(windows) != 0) | alone) + 1
    edges = [0, *cuts.tolist(), len(slots)]
    return [slice(*edge) for edge in itertools.pairwise(edges)]


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)


def send(array: np.ndarray, device: torch.device) -> Tensor:
    """A NumPy array on a device, without waiting for it.

    Args:
        array: Small.
        device: Where.

    Returns:
        The tensor.
    """
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
