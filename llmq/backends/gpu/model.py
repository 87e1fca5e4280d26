"""The decoder in torch, top-down. Quantization shows in `Embedding` and in `linear`, nowhere else.

Shape letters: M tokens of this call, T positions, D hidden, H heads, K kv heads, h head size,
E = (H + 2K) * h, V vocabulary.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from llmq.backends.gpu.attention import Place, RunPlace
from llmq.backends.gpu.device import release_freed_memory
from llmq.backends.gpu.linear import Linear, make_joined, make_linear, to_compute, to_tensor
from llmq.backends.gpu.mixture import Expert, Mixture
from llmq.backends.gpu.parallel import AnyWeights, GatheredLinear, ShardedWeights, SummedLinear, Team
from llmq.model.config import ModelConfig
from llmq.model.names import (
    EMBEDDING,
    FINAL_NORM,
    LM_HEAD,
    STAGES,
    expert_names,
    layer_norms,
    layer_prefix,
    norm_factor,
)
from llmq.model.rotary import rotary_tables
from llmq.quant import QTensor, dequantize

#: `ModelConfig.activation` -> what it is.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}

#: Cosine and sine of the positions of some tokens.
Turn = tuple[Tensor, Tensor]

#: A number of features, and a function of `[M, features]` and `Place.chunk`.
RowFunction = tuple[int, Callable[[Tensor, int], Tensor]]


class Embedding:
    """Rows of the embedding matrix; from codes, only the rows looked up are dequantized.

    Args:
        weight: `[V, D]`, codes or an array.
        device: Where.
        dtype: Compute type.
    """

    def __init__(self, weight: np.ndarray | QTensor, device: torch.device, dtype: torch.dtype) -> None:
        self._dtype = dtype
        if isinstance(weight, QTensor):
            zero = None if weight.zero is None else to_tensor(weight.zero).to(device)
            values, scale = to_tensor(weight.values).to(device), to_tensor(weight.scale).to(device)
            self._weight: Tensor | QTensor = QTensor(values, scale, zero, weight.num_bits)
        else:
            self._weight = to_compute(weight, device, dtype)

    def __call__(self, tokens_M: Tensor) -> Tensor:
        """Look up.

        Args:
            tokens_M: Ids.

        Returns:
            `[M, D]` in the compute type.
        """
        if isinstance(self._weight, Tensor):
            return self._weight[tokens_M]
        table = self._weight
        zero = None if table.zero is None else table.zero[tokens_M]
        rows = QTensor(table.values[tokens_M], table.scale[tokens_M], zero, table.num_bits)
        return dequantize(rows, str(self._dtype).removeprefix("torch."))

    @property
    def num_bytes(self) -> int:
        """Bytes of the table as it is held."""
        if isinstance(self._weight, Tensor):
            return self._weight.nbytes
        return sum(
            part.nbytes for part in (self._weight.values, self._weight.scale, self._weight.zero) if part is not None
        )


class Layer:
    """One decoder layer.

    Args:
        weights: The model.
        index: Which layer.
        device: Where.
        dtype: Compute type.
        team: Who shares the layer.
    """

    def __init__(
        self, weights: AnyWeights, index: int, device: torch.device, dtype: torch.dtype, team: Team | None = None
    ) -> None:
        at = layer_prefix(index)

        def array(name: str) -> np.ndarray | None:
            found = weights.get(f"{at}{name}")
            assert not isinstance(found, QTensor)
            return found

        def linear(names: Sequence[str]) -> Linear:
            biases = [array(f"{name}.bias") for name in names]
            matrices = [f"{at}{name}.weight" for name in names]
            rounds = [weights.rounds_inputs(name) for name in matrices]
            return make_joined([weights[name] for name in matrices], biases, device, dtype, rounds)

        def norm(name: str | None) -> Tensor | None:
            here = f"{at}{name}.weight"
            return norm_weight(weights, here, device, dtype) if name and here in weights else None

        names = layer_norms(weights.config)
        self.input_norm, self.attended_norm = norm(names.attention), norm(names.attended)
        self.mlp_norm, self.out_norm = norm(names.mlp), norm(names.out)
        self.q_norm, self.k_norm = norm("self_attn.q_norm"), norm("self_attn.k_norm")

        def summed(names: Sequence[str]) -> Linear:
            return SummedLinear(linear(names), team) if team else linear(names)

        def expert(gate_up: Sequence[str], down: Sequence[str]) -> Expert:
            return Expert(linear(gate_up), summed(down), ACTIVATIONS[weights.config.activation])

        self.qkv, self.o = linear(STAGES[0]), summed(STAGES[1])

        mixture = expert_names(weights.config)
        if mixture is None or weights.config.experts is None:
            self.mlp: Expert | Mixture = expert(*STAGES[2:])
        else:
            router = array(f"{mixture.router}.weight")
            assert router is not None
            experts = [expert((gate, up), (down,)) for gate, up, down in mixture.experts]
            self.mlp = Mixture(to_tensor(router).to(device), experts, weights.config.experts)

    @property
    def linears(self) -> list[Linear]:
        """What multiplies, in the order of computation; a router is none of them."""
        return [self.qkv, self.o, *self.mlp.linears]


class Decoder:
    """The whole model.

    Args:
        weights: Read one by one.
        max_len: Positions to prepare.
        device: Where.
        dtype: Compute type.
        team: Who shares it.

    Attributes:
        num_compiles: Programs made for it.
    """

    num_compiles = 0

    def __init__(
        self, weights: AnyWeights, max_len: int, device: torch.device, dtype: torch.dtype, team: Team | None = None
    ) -> None:
        self.config = config = weights.config
        self.device, self.dtype = device, dtype
        table = weights[EMBEDDING]
        self.embedding = Embedding(table, device, dtype)
        self.layers: list[Layer] = []
        for index in range(config.num_layers):
            self.layers.append(Layer(weights, index, device, dtype, team))
            release_freed_memory()
        self.final_norm = norm_weight(weights, FINAL_NORM, device, dtype)
        if team and isinstance(weights, ShardedWeights):
            self.head: Linear = GatheredLinear(make_linear(weights.head(), None, device, dtype), team)
        else:
            self.head = make_linear(table if config.tie_embeddings else weights[LM_HEAD], None, device, dtype)
        self._scale = torch.tensor(config.embedding_scale, dtype=dtype, device=device)
        self._attention = [config.attention_index(layer) for layer in range(config.num_layers)]
        self._rotations = rotations(config, max_len, device)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights as they are held."""
        linears = [*(linear for layer in self.layers for linear in layer.linears), self.head]
        return self.embedding.num_bytes + sum(linear.num_bytes for linear in linears)

    @property
    def unlike(self) -> list[Layer]:
        """One of each kind of layer."""
        kinds = {tuple((linear.kernels, linear.num_bytes) for linear in layer.linears): layer for layer in self.layers}
        return list(kinds.values())

    def join_chunks(self, joined: bool) -> None:
        """Choose whether the whole chunks of a run are multiplied as one, rather than apart."""
        for linear in (linear for layer in self.layers for linear in layer.linears):
            for member in linear.members:
                member.joins_chunks = joined

    def kernels(self) -> tuple[str, ...]:
        """How many linears, head included, run on which kernel; those on one kernel together count once."""
        linears = [*(linear for layer in self.layers for linear in layer.linears), self.head]
        counts = Counter(kernel for linear in linears for kernel in linear.kernels)
        return tuple(f"{count} of {counts.total()} linears: {kernel}" for kernel, count in counts.items())

    def forward(self, tokens_M: Tensor, positions_M: Tensor, place: Place) -> Tensor:
        """Run tokens through the layers, writing their keys and values.

        Args:
            tokens_M: Ids.
            positions_M: Position of each token in its sequence.
            place: Where each goes and what it sees.

        Returns:
            `[M, D]` before the final norm.
        """
        x_MD, heads = self._to_last(tokens_M, positions_M, place)
        return self.close_layer(self.layers[-1], x_MD, place.attend(len(self.layers) - 1, *heads), place.chunk)

    def write(self, tokens_M: Tensor, positions_M: Tensor, place: RunPlace) -> None:
        """As `forward`, where nobody reads what comes out: of the last layer, only keys and values are computed.

        Args:
            tokens_M: Ids.
            positions_M: Position of each token in its sequence.
            place: Where each goes and what it sees.
        """
        _, (_, *new) = self._to_last(tokens_M, positions_M, place)
        place.write(len(self.layers) - 1, *new)

    def embed(self, tokens_M: Tensor, positions_M: Tensor) -> tuple[Tensor, list[Turn]]:
        """What the first layer reads, and how each layer turns its heads.

        Args:
            tokens_M: Ids.
            positions_M: Of each token.

        Returns:
            `[M, D]`; cosine and sine `[M, 1, h]` for every layer.
        """
        x_MD = self.embedding(tokens_M)
        if self.config.scales_embedding:
            x_MD = x_MD * self._scale
        turns = [(cos_Th[positions_M][:, None], sin_Th[positions_M][:, None]) for cos_Th, sin_Th in self._rotations]
        return x_MD, [turns[kind] for kind in self._attention]

    def open_layer(self, layer: Layer, x_MD: Tensor, turn: Turn, chunk: int = 0) -> tuple[Tensor, ...]:
        """A layer up to its attention.

        Args:
            layer: One of `layers`.
            x_MD: From `embed` or `close_layer`.
            turn: From `embed`.
            chunk: See `Place`.

        Returns:
            Queries `[M, H, h]`, keys and values `[M, K, h]`.
        """
        qkv_ME = layer.qkv(rms_norm(x_MD, layer.input_norm, self.config.norm_eps), chunk)
        return self._heads(layer, qkv_ME, *turn)

    def close_layer(self, layer: Layer, x_MD: Tensor, attended_MA: Tensor, chunk: int = 0) -> Tensor:
        """A layer from its attention on.

        Args:
            layer: One of `layers`.
            x_MD: What the layer read.
            attended_MA: `[M, H * h]`.
            chunk: See `Place`.

        Returns:
            `[M, D]`.
        """
        x_MD = x_MD + rms_norm(layer.o(attended_MA, chunk), layer.attended_norm, self.config.norm_eps)
        return x_MD + self._mlp(layer, x_MD, chunk)

    def logits(self, x_MD: Tensor, chunk: int = 0) -> Tensor:
        """The head.

        Args:
            x_MD: From `forward`.
            chunk: See `Place`.

        Returns:
            float32 `[M, V]`.
        """
        return self.head(rms_norm(x_MD, self.final_norm, self.config.norm_eps), chunk).float()

    def row_functions(self) -> list[RowFunction]:
        """What the model computes row by row: everything but attention; of like layers, one.

        Returns:
            The head, then the others.
        """
        functions: list[RowFunction] = [(self.config.hidden_size, self.logits)]
        for layer in self.unlike:
            functions += [(self.config.hidden_size, f) for f in (layer.qkv, partial(self._mlp, layer))]
            if isinstance(layer.mlp, Mixture):  # rows that are equal choose few of them
                functions += [(self.config.hidden_size, expert) for expert in layer.mlp.unlike]
            functions.append((self.config.num_heads * self.config.head_dim, layer.o))
        return functions

    def _to_last(self, tokens_M: Tensor, positions_M: Tensor, place: Place) -> tuple[Tensor, tuple[Tensor, ...]]:
        """What the last layer reads, and its queries, keys and values."""
        x_MD, turns = self.embed(tokens_M, positions_M)
        heads = self.open_layer(self.layers[0], x_MD, turns[0], place.chunk)
        for index, (closed, opened) in enumerate(itertools.pairwise(self.layers)):
            x_MD = self.close_layer(closed, x_MD, place.attend(index, *heads), place.chunk)
            heads = self.open_layer(opened, x_MD, turns[index + 1], place.chunk)
        return x_MD, heads

    def _mlp(self, layer: Layer, x_MD: Tensor, chunk: int = 0) -> Tensor:
        out_MD = layer.mlp(rms_norm(x_MD, layer.mlp_norm, self.config.norm_eps), chunk)
        return rms_norm(out_MD, layer.out_norm, self.config.norm_eps)

    def _heads(self, layer: Layer, qkv_ME: Tensor, cos_Mh: Tensor, sin_Mh: Tensor) -> tuple[Tensor, ...]:
        """Queries `[M, H, h]`, keys and values `[M, K, h]`, in their positions."""
        sizes, eps = [self.config.num_heads, self.config.num_kv_heads], self.config.norm_eps
        qkv = qkv_ME.view(len(qkv_ME), -1, self.config.head_dim)
        qk, v = qkv.split_with_sizes([sum(sizes), sizes[1]], dim=1)
        if layer.q_norm is not None:
            q, k = qk.split_with_sizes(sizes, dim=1)
            qk = torch.cat([rms_norm(q, layer.q_norm, eps), rms_norm(k, layer.k_norm, eps)], dim=1)
        return *rotate(qk, cos_Mh, sin_Mh).split_with_sizes(sizes, dim=1), v


def norm_weight(weights: AnyWeights, name: str, device: torch.device, dtype: torch.dtype) -> Tensor:
    """What a norm multiplies by, in the compute type; in float32 where an offset is part of it."""
    loaded = weights[name]
    assert not isinstance(loaded, QTensor)
    return norm_tensor(weights.config, loaded, device, dtype)


def norm_tensor(config: ModelConfig, weight: np.ndarray, device: torch.device, dtype: torch.dtype) -> Tensor:
    """As `norm_weight`, of an array."""
    return to_compute(norm_factor(config, weight), device, torch.float32 if config.norm_offset else dtype)


def rotations(config: ModelConfig, num_positions: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Cosine and sine as `rotate` takes them, `[T, h]` each, for each of `ModelConfig.attentions`."""
    tables = zip(*rotary_tables(config, num_positions), strict=True)
    return [
        (
            torch.from_numpy(np.concatenate([cos, cos], axis=-1)).to(device),
            torch.from_numpy(np.concatenate([-sin, sin], axis=-1)).to(device),
        )
        for cos, sin in tables
    ]


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` in float32, rounded once; `x` itself without a weight."""
    if weight is None:
        return x
    if weight.dtype is x.dtype:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)


def rotate(x_MHh: Tensor, cos_Mh: Tensor, sin_Mh: Tensor) -> Tensor:
    """Rotary positions: feature j is paired with j + h/2, whose sine has the other sign. In float32, rounded once."""
    x32 = x_MHh.float()
    return torch.addcmul(x32 * cos_Mh, x32.roll(x32.shape[-1] // 2, -1), sin_Mh).to(x_MHh.dtype)
