"""The decoder in torch, top-down. Quantization shows in `Embedding` and in `linear`, nowhere else.

Shape letters: M tokens of this call, T positions of the cache, S slots, L layers, D hidden,
H heads, K kv heads, R = H / K, h head size, V vocabulary.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from llmq.backends.gpu.linear import Linear, make_linear, to_tensor
from llmq.checkpoint.loader import ModelWeights
from llmq.model.config import ModelConfig
from llmq.model.names import EMBEDDING, FINAL_NORM, LM_HEAD, layer_prefix
from llmq.model.rotary import rotary_tables
from llmq.quant import QTensor, dequantize, quantize_vectors


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
            self._weight = to_tensor(weight).to(device=device, dtype=dtype)

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


class Layer:
    """One decoder layer.

    Args:
        weights: The model.
        index: Which layer.
        device: Where.
        dtype: Compute type.
    """

    def __init__(self, weights: ModelWeights, index: int, device: torch.device, dtype: torch.dtype) -> None:
        at = layer_prefix(index)

        def linear(name: str) -> Linear:
            bias = weights.get(f"{at}{name}.bias")
            assert not isinstance(bias, QTensor)
            return make_linear(weights[f"{at}{name}.weight"], bias, device, dtype)

        def norm(name: str) -> Tensor | None:
            key = f"{at}{name}.weight"
            return norm_weight(weights, key, device, dtype) if key in weights else None

        self.input_norm, self.mlp_norm = norm("input_layernorm"), norm("post_attention_layernorm")
        self.q_norm, self.k_norm = norm("self_attn.q_norm"), norm("self_attn.k_norm")
        self.q, self.k, self.v = linear("self_attn.q_proj"), linear("self_attn.k_proj"), linear("self_attn.v_proj")
        self.o = linear("self_attn.o_proj")
        self.gate, self.up, self.down = linear("mlp.gate_proj"), linear("mlp.up_proj"), linear("mlp.down_proj")

    @property
    def linears(self) -> list[Linear]:
        """The layer's seven linears."""
        return [self.q, self.k, self.v, self.o, self.gate, self.up, self.down]


class Cache:
    """Keys and values of every slot, `[L, S, T, K, h]` each, in the compute type or as int8 codes.

    Args:
        config: The model.
        num_slots: S.
        max_len: T.
        device: Where.
        dtype: Type of what is stored; int8 adds a float32 scale `[L, S, T, K]` to each.
    """

    def __init__(
        self, config: ModelConfig, num_slots: int, max_len: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        shape = (config.num_layers, num_slots, max_len, config.num_kv_heads, config.head_dim)
        self._stored = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(2)]
        self._scales = [torch.zeros(shape[:-1], device=device) for _ in range(2)] if dtype is torch.int8 else []

    def write(self, layer: int, slots_M: Tensor, rows_M: Tensor, *new_MKh: Tensor) -> None:
        """Store the keys and values of tokens.

        Args:
            layer: Which layer.
            slots_M: Slot of each token.
            rows_M: Row of each token.
            *new_MKh: Keys and values.
        """
        at = (layer, slots_M, rows_M)
        for index, new in enumerate(new_MKh):
            if self._scales:
                self._stored[index][at], self._scales[index][at] = quantize_vectors(new)
            else:
                self._stored[index][at] = new

    def read(self, layer: int, slots_B: Tensor, window: int) -> tuple[list[Tensor], list[Tensor]]:
        """The first rows of some slots.

        Args:
            layer: Which layer.
            slots_B: Which slots.
            window: How many rows.

        Returns:
            Keys and values, `[B, K, T, h]`, and their scales, `[B, K, 1, T]`, if there are any.
        """
        stored = [part[layer, slots_B, :window].transpose(1, 2) for part in self._stored]
        return stored, [part[layer, slots_B, :window].transpose(1, 2)[:, :, None] for part in self._scales]


@dataclass(frozen=True, slots=True)
class Place:
    """Where the tokens of a call go, and which rows each sees.

    Attributes:
        slots_M: Slot of each token; a single one, or one token each of several.
        rows_M: Row of the slot each is written to.
        positions_M: Position of each token in its sequence.
        visible_MT: Rows that each token sees, T up to the last row in use.
    """

    slots_M: Tensor
    rows_M: Tensor
    positions_M: Tensor
    visible_MT: Tensor


class Decoder:
    """The whole model.

    Args:
        weights: Read one by one.
        max_len: Positions to prepare.
        device: Where.
        dtype: Compute type.
    """

    def __init__(self, weights: ModelWeights, max_len: int, device: torch.device, dtype: torch.dtype) -> None:
        self.config = config = weights.config
        self.embedding = Embedding(weights[EMBEDDING], device, dtype)
        self.layers = [Layer(weights, index, device, dtype) for index in range(config.num_layers)]
        self.final_norm = norm_weight(weights, FINAL_NORM, device, dtype)
        head = EMBEDDING if config.tie_embeddings else LM_HEAD
        self.head = make_linear(weights[head], None, device, dtype)
        self.cos_Th, self.sin_Th = (
            torch.from_numpy(np.concatenate([table, table], axis=-1)).to(device)
            for table in rotary_tables(config, max_len)
        )

    def kernels(self) -> tuple[str, ...]:
        """How many linears, head included, run on which kernel."""
        linears = [*(linear for layer in self.layers for linear in layer.linears), self.head]
        counts = Counter(linear.kernel for linear in linears)
        return tuple(f"{count} of {len(linears)} linears: {kernel}" for kernel, count in counts.items())

    def forward(self, tokens_M: Tensor, place: Place, cache: Cache) -> Tensor:
        """Run tokens through the layers, writing their keys and values.

        Args:
            tokens_M: Ids.
            place: Where each goes and what it sees.
            cache: Written first, then attended on.

        Returns:
            `[M, D]` before the final norm.
        """
        config = self.config
        x_MD = self.embedding(tokens_M)
        cos_Mh, sin_Mh = self.cos_Th[place.positions_M][:, None], self.sin_Th[place.positions_M][:, None]
        for index, layer in enumerate(self.layers):
            inner_MD = rms_norm(x_MD, layer.input_norm, config.norm_eps)
            q_MHh = self._heads(layer.q(inner_MD), layer.q_norm, cos_Mh, sin_Mh)
            k_MKh = self._heads(layer.k(inner_MD), layer.k_norm, cos_Mh, sin_Mh)
            v_MKh = layer.v(inner_MD).unflatten(-1, (-1, config.head_dim))
            cache.write(index, place.slots_M, place.rows_M, k_MKh, v_MKh)
            x_MD = x_MD + layer.o(attend(q_MHh, cache, index, place))
            inner_MD = rms_norm(x_MD, layer.mlp_norm, config.norm_eps)
            x_MD = x_MD + layer.down(F.silu(layer.gate(inner_MD)) * layer.up(inner_MD))
        return x_MD

    def logits(self, x_MD: Tensor) -> Tensor:
        """The head.

        Args:
            x_MD: From `forward`.

        Returns:
            float32 `[M, V]`.
        """
        return self.head(rms_norm(x_MD, self.final_norm, self.config.norm_eps)).float()

    def _heads(self, x: Tensor, norm: Tensor | None, cos_Mh: Tensor, sin_Mh: Tensor) -> Tensor:
        x_MHh = x.unflatten(-1, (-1, self.config.head_dim))
        return rotate(rms_norm(x_MHh, norm, self.config.norm_eps), cos_Mh, sin_Mh)


def norm_weight(weights: ModelWeights, name: str, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A norm's weight in the compute type."""
    loaded = weights[name]
    assert not isinstance(loaded, QTensor)
    return to_tensor(loaded).to(device=device, dtype=dtype)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` in float32, rounded once; `x` itself without a weight."""
    if weight is None:
        return x
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def rotate(x_MHh: Tensor, cos_Mh: Tensor, sin_Mh: Tensor) -> Tensor:
    """Rotary positions: feature j is paired with j + h/2. In float32, rounded once."""
    first, second = x_MHh.float().chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (x_MHh.float() * cos_Mh + turned * sin_Mh).to(x_MHh.dtype)


def attend(q_MHh: Tensor, cache: Cache, layer: int, place: Place) -> Tensor:
    """Grouped-query attention of each token on its slot's cache.

    Args:
        q_MHh: Queries.
        cache: Keys and values.
        layer: Which layer's.
        place: Slot of each query, and which rows it sees.

    Returns:
        `[M, H * h]`.
    """
    num_tokens, num_heads, head_dim = q_MHh.shape
    slots_M, visible_MT = place.slots_M, place.visible_MT
    if num_tokens > 1 and bool((slots_M == slots_M[0]).all()):  # tokens of one slot share its keys
        q_BHMh, mask = q_MHh.transpose(0, 1)[None], visible_MT[None, None]
        slots_M = slots_M[:1]
    else:
        q_BHMh, mask = q_MHh[:, :, None], visible_MT[:, None, None]
    (k_BKTh, v_BKTh), scales = cache.read(layer, slots_M, visible_MT.shape[1])
    if scales:
        out_BHMh = _attend_int8(q_BHMh, k_BKTh, v_BKTh, scales[0], scales[1], mask)
    else:
        out_BHMh = F.scaled_dot_product_attention(q_BHMh, k_BKTh, v_BKTh, attn_mask=mask, enable_gqa=True)
    return out_BHMh.transpose(1, 2).reshape(num_tokens, num_heads * head_dim)


def _attend_int8(
    q_BHMh: Tensor, k_BKTh: Tensor, v_BKTh: Tensor, k_scale_BK1T: Tensor, v_scale_BK1T: Tensor, mask: Tensor
) -> Tensor:
    """Attention on codes: their scales multiply scores and probabilities, softmax in float32."""
    num_kv_heads, dtype = k_BKTh.shape[1], q_BHMh.dtype
    q_BKRMh = q_BHMh.unflatten(1, (num_kv_heads, -1)) * q_BHMh.shape[-1] ** -0.5
    scores = torch.einsum("bkrmh,bkth->bkrmt", q_BKRMh, k_BKTh.to(dtype)).float() * k_scale_BK1T[:, :, None]
    probs = scores.masked_fill(~mask[:, :, None], -torch.inf).softmax(dim=-1) * v_scale_BK1T[:, :, None]
    return torch.einsum("bkrmt,bkth->bkrmh", probs.to(dtype), v_BKTh.to(dtype)).flatten(1, 2)
