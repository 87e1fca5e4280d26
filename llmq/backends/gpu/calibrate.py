"""`base.Calibrator` in torch: whole sequences through one block at a time, without any padding.

Results do not depend on the number of threads: each thread computes whole chunks of sequences on
its own, and second moments are summed in a fixed order.

Shape letters: M tokens of a chunk, R of these, D hidden, E experts, I input features of a linear, h head size, V vocabulary.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from llmq.backends.base import ModelOptions
from llmq.backends.gpu.device import DTYPES, choose_device
from llmq.backends.gpu.linear import to_tensor
from llmq.backends.gpu.mixture import probabilities, route
from llmq.backends.gpu.model import ACTIVATIONS, Embedding, norm_tensor, norm_weight, rms_norm, rotate, rotations
from llmq.checkpoint.loader import ModelWeights
from llmq.model.names import (
    EMBEDDING,
    FINAL_NORM,
    LM_HEAD,
    MLP_STAGE,
    STAGES,
    as_mlp,
    expert_names,
    layer_norms,
    stage_tensors,
)
from llmq.quant import QTensor, dequantize

#: Tokens computed together, unless one sequence is longer.
_CHUNK_TOKENS = 2048

#: Partial sums of second moments. Fixed, because the order of addition must not depend on threads.
_NUM_LANES = 4

#: Rows of a symmetric product computed at once, so that little more than half of it is.
_GRAM_ROWS = 128

#: Rows of logits compared at once.
_HEAD_ROWS = 256

Block = Mapping[str, "np.ndarray | QTensor"]
Tensors = Mapping[str, Tensor]

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some whole sequences, one behind the other.

    Attributes:
        bounds: Where each begins, and where the last ends.
        hidden_MD: The residual stream.
        inputs_MI: What the linears of the stage read.
    """

    bounds: tuple[int, ...]
    hidden_MD: Tensor
    inputs_MI: Tensor


@dataclass(frozen=True, slots=True)
class Stream:
    """All sequences at some place of the model.

    Attributes:
        chunks: Their activations.
        layer: The block that is being run.
        picked: Whether these are tokens of one expert.
    """

    chunks: list[Chunk]
    layer: int
    picked: bool = False


class TorchCalibrator:
    """See `base.Calibrator`.

    Args:
        weights: The model; only what lies outside the blocks is read.
        options: Device, compute type and the longest sequence.
        num_threads: Threads on the CPU.
    """

    def __init__(self, weights: ModelWeights, options: ModelOptions, num_threads: int) -> None:
        self._device, dtype = choose_device(options)
        self._dtype = DTYPES[dtype]
        self._config = config = weights.config
        self._embedding = Embedding(weights[EMBEDDING], self._device, self._dtype)
        self._final_norm = norm_weight(weights, FINAL_NORM, self._device, self._dtype)
        self._head_VD = self._matrix(weights[EMBEDDING if config.tie_embeddings else LM_HEAD])
        self._norms, self._activation = layer_norms(config), ACTIVATIONS[config.activation]
        self._scale = torch.tensor(config.embedding_scale, dtype=self._dtype, device=self._device)
        self._rotations = rotations(config, options.max_len, self._device)
        num_workers = num_threads if self._device.type == "cpu" else 1
        self._pool = ThreadPoolExecutor(num_workers, initializer=torch.set_num_threads, initargs=(1,))
        self._stages = (self._attention_in, self._attended, self._mlp_in, self._gated, self._out)
        self._read, self._mixture = stage_tensors(config), expert_names(config)

    def start(self, sequences: Sequence[np.ndarray]) -> Stream:
        """See `base.Calibrator.start`."""
        return Stream(self._map(self._embed, _packed(sequences)), 0)

    def advance(self, stream: Stream, block: Block, stage: int) -> Stream:
        """See `base.Calibrator.advance`."""
        run, leaves = self._stages[stage], stage == len(STAGES)
        chunks = stream.chunks
        if self._mixture and stage > MLP_STAGE and not stream.picked:
            if not leaves:
                return stream
            chunks, run = self._mixed(chunks, block), self._add
        tensors = {name: self._tensor(name, weight) for name, weight in block.items() if name in self._read[stage]}
        chunks = self._map(lambda chunk: run(chunk, tensors, stream.layer), chunks)
        return Stream(chunks, stream.layer + leaves, stream.picked)

    def probabilities(self, stream: Stream, block: Block) -> np.ndarray:
        """See `base.Calibrator.probabilities`."""
        router_ED = self._router(block)
        parts = self._map(lambda chunk: probabilities(chunk.inputs_MI, router_ED).cpu().numpy(), stream.chunks)
        return np.concatenate(parts)

    def pick(self, stream: Stream, tokens: np.ndarray) -> Stream:
        """See `base.Calibrator.pick`. Chunks are as full as those of whole sequences."""
        bounds = np.cumsum([0, *(len(chunk.inputs_MI) for chunk in stream.chunks)])
        places = np.searchsorted(tokens, bounds)
        with torch.inference_mode():
            inputs_MI = torch.cat(
                [
                    chunk.inputs_MI[torch.from_numpy(tokens[first:last] - start).to(self._device)]
                    for chunk, start, (first, last) in zip(stream.chunks, bounds[:-1], pairwise(places), strict=True)
                ]
            )
            chunks = [Chunk((0, len(x)), x[:0], x) for x in inputs_MI.split(_CHUNK_TOKENS)]
        return Stream(chunks, stream.layer, picked=True)

    def moments(self, stream: Stream) -> np.ndarray:
        """See `base.Calibrator.moments`."""
        upper_II = self._sum(_upper_gram, [chunk.inputs_MI for chunk in stream.chunks])
        return np.triu(upper_II) + np.triu(upper_II, 1).T

    def drift(self, before: Stream, stream: Stream, scale_I: np.ndarray | None = None) -> np.ndarray:
        """See `base.Calibrator.drift`."""
        divisor_I = None if scale_I is None else torch.from_numpy(scale_I).to(self._device)

        def product(inputs: tuple[Tensor, Tensor]) -> Tensor:
            before_MI, now_MI = inputs
            expected_MI = before_MI if divisor_I is None else before_MI / divisor_I
            return (expected_MI - now_MI).to(now_MI.dtype).T @ now_MI

        pairs = zip(before.chunks, stream.chunks, strict=True)
        return self._sum(product, [(ours.inputs_MI, theirs.inputs_MI) for ours, theirs in pairs])

    def divergence(self, baseline: Stream, stream: Stream) -> float:
        """See `base.Calibrator.divergence`."""
        pairs = list(zip(baseline.chunks, stream.chunks, strict=True))
        parts = self._map(lambda pair: self._divergence(*pair), pairs)
        return sum(parts) / sum(len(chunk.hidden_MD) for chunk in stream.chunks)

    def _embed(self, sequences: list[np.ndarray]) -> Chunk:
        bounds = np.cumsum([0, *map(len, sequences)]).tolist()
        tokens_M = torch.from_numpy(np.concatenate(sequences).astype(np.int64)).to(self._device)
        hidden_MD = self._embedding(tokens_M)
        if self._config.scales_embedding:
            hidden_MD = hidden_MD * self._scale
        return Chunk(tuple(bounds), hidden_MD, hidden_MD[:0])

    def _attention_in(self, chunk: Chunk, block: Tensors, _: int) -> Chunk:
        return replace(chunk, inputs_MI=self._norm(block, self._norms.attention, chunk.hidden_MD))

    def _attended(self, chunk: Chunk, block: Tensors, layer: int) -> Chunk:
        config, kind = self._config, self._config.attention_index(layer)
        cos_Th, sin_Th = self._rotations[kind]
        q_MHh, k_MKh, v_MKh = (
            _linear(block, f"self_attn.{name}_proj", chunk.inputs_MI).unflatten(-1, (-1, config.head_dim))
            for name in "qkv"
        )
        parts = []
        for first, last in pairwise(chunk.bounds):
            cos_Mh, sin_Mh = cos_Th[: last - first, None], sin_Th[: last - first, None]
            q, k = (
                rotate(self._norm(block, f"self_attn.{name}_norm", x[first:last]), cos_Mh, sin_Mh)
                for name, x in (("q", q_MHh), ("k", k_MKh))
            )
            parts.append(_attend(q, k, v_MKh[first:last], config.attentions[kind].window, config.score_scale))
        return replace(chunk, inputs_MI=torch.cat(parts))

    def _mlp_in(self, chunk: Chunk, block: Tensors, _: int) -> Chunk:
        out_MD = self._norm(block, self._norms.attended, _linear(block, "self_attn.o_proj", chunk.inputs_MI))
        hidden_MD = chunk.hidden_MD + out_MD
        return replace(chunk, hidden_MD=hidden_MD, inputs_MI=self._norm(block, self._norms.mlp, hidden_MD))

    def _gated(self, chunk: Chunk, block: Tensors, _: int) -> Chunk:
        return replace(chunk, inputs_MI=self._gate(block, chunk.inputs_MI))

    def _gate(self, block: Tensors, x_MD: Tensor) -> Tensor:
        gate, up = (_linear(block, f"mlp.{name}_proj", x_MD) for name in ("gate", "up"))
        return self._activation(gate) * up

    def _out(self, chunk: Chunk, block: Tensors, layer: int) -> Chunk:
        return self._add(replace(chunk, inputs_MI=_linear(block, "mlp.down_proj", chunk.inputs_MI)), block, layer)

    def _mixed(self, chunks: Sequence[Chunk], block: Block) -> list[Chunk]:
        """What the experts make of their inputs, in place of these; one expert is on the device at a time."""
        assert self._mixture is not None
        experts, router_ED = self._config.experts, self._router(block)
        assert experts is not None
        weights = self._map(lambda chunk: route(chunk.inputs_MI, router_ED, experts), chunks)
        totals = [torch.zeros_like(chunk.inputs_MI, dtype=torch.float32) for chunk in chunks]
        for index, names in enumerate(self._mixture.experts):
            rows = [weight_ME[:, index].nonzero()[:, 0] for weight_ME in weights]
            if not any(map(len, rows)):
                continue
            tensors = {name: self._tensor(name, weight) for name, weight in as_mlp(names, block).items()}

            def add(place: int, index: int = index, rows: list[Tensor] = rows, see: Tensors = tensors) -> None:
                mine_R = rows[place]
                gated_RI = self._gate(see, chunks[place].inputs_MI[mine_R])
                added_RD = _linear(see, "mlp.down_proj", gated_RI).float()
                totals[place].index_add_(0, mine_R, weights[place][mine_R, index, None] * added_RD)

            self._map(add, range(len(chunks)))
        return [
            replace(chunk, inputs_MI=total_MD.to(self._dtype)) for chunk, total_MD in zip(chunks, totals, strict=True)
        ]

    def _add(self, chunk: Chunk, block: Tensors, _: int) -> Chunk:
        hidden_MD = chunk.hidden_MD + self._norm(block, self._norms.out, chunk.inputs_MI)
        return replace(chunk, hidden_MD=hidden_MD, inputs_MI=hidden_MD[:0])

    def _norm(self, block: Tensors, name: str | None, x: Tensor) -> Tensor:
        return rms_norm(x, block.get(f"{name}.weight"), self._config.norm_eps)

    def _divergence(self, baseline: Chunk, chunk: Chunk) -> float:
        total = 0.0
        for pair in zip(baseline.hidden_MD.split(_HEAD_ROWS), chunk.hidden_MD.split(_HEAD_ROWS), strict=True):
            ours, theirs = (
                F.linear(rms_norm(x, self._final_norm, self._config.norm_eps), self._head_VD).float().log_softmax(-1)
                for x in pair
            )
            total += float((ours.exp() * (ours - theirs)).sum(dtype=torch.float64))
        return total

    def _tensor(self, name: str, weight: np.ndarray | QTensor) -> Tensor:
        if name.endswith("norm.weight"):
            assert not isinstance(weight, QTensor), name
            return norm_tensor(self._config, weight, self._device, self._dtype)
        return self._matrix(weight)

    def _router(self, block: Block) -> Tensor:
        """In the type it is stored in."""
        assert self._mixture is not None
        router = block[f"{self._mixture.router}.weight"]
        assert not isinstance(router, QTensor), self._mixture.router
        return to_tensor(router).to(self._device)

    def _matrix(self, weight: np.ndarray | QTensor) -> Tensor:
        dense = dequantize(weight) if isinstance(weight, QTensor) else weight
        return to_tensor(dense).to(device=self._device, dtype=self._dtype)

    def _sum(self, product: Callable[[T], Tensor], items: Sequence[T]) -> np.ndarray:
        """Sum of a matrix over chunks, float64, in an order that does not depend on threads."""

        def lane(first: int) -> np.ndarray:
            total = product(items[first]).double()
            for item in items[first + _NUM_LANES :: _NUM_LANES]:
                total += product(item)
            return total.cpu().numpy()

        total, *others = self._map(lane, range(min(_NUM_LANES, len(items))))
        for other in others:
            total += other
        return total

    def _map(self, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """Apply to every item, each on one thread."""

        def alone(item: T) -> R:
            with torch.inference_mode():
                return function(item)

        return list(self._pool.map(alone, items))


def _packed(sequences: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
    """Sequences in chunks of about `_CHUNK_TOKENS` tokens."""
    chunks: list[list[np.ndarray]] = []
    room = 0
    for sequence in sequences:
        if not chunks or len(sequence) > room:
            chunks.append([])
            room = _CHUNK_TOKENS
        chunks[-1].append(sequence)
        room -= len(sequence)
    return chunks


def _linear(block: Tensors, name: str, x_MI: Tensor) -> Tensor:
    return F.linear(x_MI, block[f"{name}.weight"], block.get(f"{name}.bias"))


def _attend(q_THh: Tensor, k_TKh: Tensor, v_TKh: Tensor, window: int | None, scale: float | None) -> Tensor:
    """Causal attention within one sequence, `[T, H * h]`."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q_THh, k_TKh, v_TKh))
    mask_TT = None
    if window is not None and window < len(q_THh):
        mask_TT = torch.ones(len(q_THh), len(q_THh), dtype=torch.bool, device=q.device).tril().triu(1 - window)
    out_HTh = F.scaled_dot_product_attention(q, k, v, mask_TT, is_causal=mask_TT is None, enable_gqa=True, scale=scale)[
        0
    ]
    return out_HTh.transpose(0, 1).flatten(1)


def _upper_gram(inputs_MI: Tensor) -> Tensor:
    """``x^T x`` in float32 where it is not below the diagonal; further down some of it is 0."""
    x_MI = inputs_MI.float()
    gram_II = x_MI.new_zeros(x_MI.shape[1], x_MI.shape[1])
    for first in range(0, len(gram_II), _GRAM_ROWS):
        gram_II[first : first + _GRAM_ROWS, first:] = x_MI[:, first : first + _GRAM_ROWS].T @ x_MI[:, first:]
    return gram_II
