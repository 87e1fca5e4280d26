"""The decoder as it is trained: float32 master weights, seen by the forward pass as `straight` says.

Shape letters: B rows, N tokens of each, D hidden, H heads, K kv heads, h head size, T positions,
O output features, I input features, R rank, V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from llmq.backends.base import Adapters, TrainBatch
from llmq.backends.gpu.linear import to_tensor
from llmq.backends.gpu.model import rms_norm, rotate
from llmq.backends.gpu.straight import Seen, see, straight_through
from llmq.checkpoint.loader import ModelWeights
from llmq.config import Scheme
from llmq.model.names import EMBEDDING, FINAL_NORM, LM_HEAD, layer_prefix
from llmq.model.rotary import rotary_tables
from llmq.quant import QTensor

#: Tokens whose logits are held at once.
_HEAD_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Rows:
    """A batch on the device, and what follows from it.

    Attributes:
        tokens_BN: Ids.
        targets_M: Of the learned tokens, in order.
        learned_BN: Which these are.
        mask_B1NN: True where a token sees another; None for plain causal attention.
        cos_BN1h, sin_BN1h: Rotation of each token.
    """

    tokens_BN: Tensor
    targets_M: Tensor
    learned_BN: Tensor
    mask_B1NN: Tensor | None
    cos_BN1h: Tensor
    sin_BN1h: Tensor


@dataclass(frozen=True, slots=True)
class Taught:
    """What a teacher makes of a batch.

    Attributes:
        x_MD: What its head reads at the learned tokens.
        weight_VD: Its head.
        share: Of the divergence from it in the loss.
        temperature: Divides the logits of both.
    """

    x_MD: Tensor
    weight_VD: Tensor
    share: float
    temperature: float


class Matrix(nn.Module):
    """A master weight, with an adapter where it has one.

    Args:
        name: Of the tensor in the checkpoint.
        weight_OI: float32.
        scheme: Its grid, if it is to be quantized.
        dtype: Compute type.

    Attributes:
        name: Of the tensor in the checkpoint.
        factor: Of the adapter; 0 where there is none.
        keeps_seen: Whether what the forward pass sees is kept between passes.
    """

    def __init__(self, name: str, weight_OI: Tensor, scheme: Scheme | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.name, self.scheme, self.dtype = name, scheme, dtype
        self.weight = nn.Parameter(weight_OI)
        self.factor = 0.0
        self.keeps_seen = True
        self._quantized = False
        self._seen: Seen | None = None

    def adapt(self, adapters: Adapters) -> None:
        """Add an adapter, which changes nothing yet."""
        num_out, num_in = self.weight.shape
        self.down = nn.Parameter(torch.from_numpy(adapters.initial_down(self.name, num_in)).to(self.weight.device))
        self.up = nn.Parameter(torch.zeros(num_out, adapters.rank, device=self.weight.device))
        self.factor = adapters.alpha / adapters.rank

    def merged(self, gather: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Tensor:
        """The master weight, its adapter added: float32 `[O, I]`; `gather` makes parts whole."""
        if not self.factor:
            return gather(self.weight)
        return gather(self.weight) + self.factor * (gather(self.up) @ gather(self.down))

    def look(self, quantized: bool) -> None:
        """Choose whether the forward pass sees the grid; to be called whenever the weight has changed, too."""
        self._quantized, self._seen = quantized, None

    def seen(self) -> Tensor:
        """What the forward pass multiplies with, `[O, I]` in the compute type.

        It is computed once until the next `look`: the passes over several batches, and those that
        recompute activations, share it.
        """
        merged_OI = self.merged()
        seen = self._seen or see(merged_OI.detach(), self.scheme if self._quantized else None, self.dtype)
        self._seen = seen if self.keeps_seen else None
        return straight_through(merged_OI, seen)


class Linear(Matrix):
    """``y = x @ weight.T + bias``."""

    def __init__(
        self, name: str, weight_OI: Tensor, scheme: Scheme | None, dtype: torch.dtype, bias_O: Tensor | None
    ) -> None:
        super().__init__(name, weight_OI, scheme, dtype)
        self.bias = None if bias_O is None else nn.Parameter(bias_O)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply."""
        y = F.linear(x, self.seen())
        return y if self.bias is None else y + self.bias.to(self.dtype)


class Norm(nn.Module):
    """Root-mean-square norm.

    Args:
        name: Of the tensor in the checkpoint.
        weight_D: float32.
        eps: Added to the mean square.
    """

    def __init__(self, name: str, weight_D: Tensor, eps: float) -> None:
        super().__init__()
        self.name, self._eps = name, eps
        self.weight = nn.Parameter(weight_D)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last axis."""
        return rms_norm(x, self.weight.to(x.dtype), self._eps)


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, loader: "_Loader", index: int) -> None:
        super().__init__()
        at = layer_prefix(index)
        self._head_dim = loader.config.head_dim
        self.input_norm = loader.norm(f"{at}input_layernorm.weight")
        self.q, self.k, self.v, self.o = (loader.linear(f"{at}self_attn.{name}_proj") for name in "qkvo")
        self.q_norm, self.k_norm = (
            loader.norm(f"{at}self_attn.{name}_norm.weight") if loader.config.qk_norm else nn.Identity()
            for name in "qk"
        )
        self.mlp_norm = loader.norm(f"{at}post_attention_layernorm.weight")
        self.gate, self.up, self.down = (loader.linear(f"{at}mlp.{name}_proj") for name in ("gate", "up", "down"))

    def forward(self, x_BND: Tensor, rows: Rows) -> Tensor:
        """Attention and MLP, each added to the stream."""
        inner_BND = self.input_norm(x_BND)
        q_BNHh = rotate(self.q_norm(self._heads(self.q(inner_BND))), rows.cos_BN1h, rows.sin_BN1h)
        k_BNKh = rotate(self.k_norm(self._heads(self.k(inner_BND))), rows.cos_BN1h, rows.sin_BN1h)
        v_BNKh = self._heads(self.v(inner_BND))
        x_BND = x_BND + self.o(_attend(q_BNHh, k_BNKh, v_BNKh, rows.mask_B1NN))
        inner_BND = self.mlp_norm(x_BND)
        return x_BND + self.down(F.silu(self.gate(inner_BND)) * self.up(inner_BND))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self._head_dim))


def _attend(q_BNHh: Tensor, k_BNKh: Tensor, v_BNKh: Tensor, mask_B1NN: Tensor | None) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_BNHh, k_BNKh, v_BNKh))
    out_BHNh = F.scaled_dot_product_attention(q, k, v, mask_B1NN, is_causal=mask_B1NN is None, enable_gqa=True)
    return out_BHNh.transpose(1, 2).flatten(2)


class TrainableDecoder(nn.Module):
    """The whole model.

    Args:
        weights: An unquantized checkpoint; read one by one.
        schemes: Weight name -> its grid.
        max_len: Positions to prepare.
        device: Where.
        dtype: Compute type.
        recompute: Recompute the activations of a layer in the backward pass.
        master: Type of master weights.
    """

    def __init__(
        self,
        weights: ModelWeights,
        schemes: Mapping[str, Scheme],
        max_len: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        recompute: bool = False,
        master: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        loader = _Loader(weights, schemes, device, dtype, master)
        self.config = config = weights.config
        self._device, self._recompute = device, recompute
        self.embedding = loader.linear(EMBEDDING.removesuffix(".weight"))
        self.layers = nn.ModuleList(Layer(loader, index) for index in range(config.num_layers))
        self.final_norm = loader.norm(FINAL_NORM)
        self.head = self.embedding if config.tie_embeddings else loader.linear(LM_HEAD.removesuffix(".weight"))
        cos, sin = rotary_tables(config, max_len)
        self._cos_Th = torch.from_numpy(np.concatenate([cos, cos], axis=-1)).to(device)
        self._sin_Th = torch.from_numpy(np.concatenate([-sin, sin], axis=-1)).to(device)

    def tensors(self) -> Iterator[tuple[str, nn.Module, str]]:
        """Name in the checkpoint, module and attribute of every trained tensor, in a fixed order."""
        for module in self.modules():
            if isinstance(module, Matrix | Norm):
                yield module.name, module, "weight"
            if isinstance(module, Linear) and module.bias is not None:
                yield module.name.removesuffix("weight") + "bias", module, "bias"

    def matrices(self) -> list[Matrix]:
        """Every matrix, in a fixed order."""
        return [module for module in self.modules() if isinstance(module, Matrix)]

    def rows(self, batch: TrainBatch) -> Rows:
        """Bring a batch to the device."""
        tokens_BN, targets_BN, positions_BN, documents_BN = (
            torch.from_numpy(array.astype(np.int64)).to(self._device)
            for array in (batch.tokens, batch.targets, batch.positions, batch.documents)
        )
        learned_BN = torch.from_numpy(batch.learned).to(self._device)
        mask_B1NN = None
        if self.config.sliding_window is not None or batch.documents.max() > 1:
            mask_B1NN = self._mask(documents_BN)
        return Rows(
            tokens_BN,
            targets_BN[learned_BN],
            learned_BN,
            mask_B1NN,
            self._cos_Th[positions_BN][:, :, None],
            self._sin_Th[positions_BN][:, :, None],
        )

    def _mask(self, documents_BN: Tensor) -> Tensor:
        """Whether a token (second last axis) sees another; padding sees itself, so that no softmax is empty."""
        num_tokens = documents_BN.shape[1]
        back_NN = torch.arange(num_tokens, device=self._device)[:, None] - torch.arange(num_tokens, device=self._device)
        visible_NN = back_NN >= 0
        if self.config.sliding_window is not None:
            visible_NN &= back_NN < self.config.sliding_window
        return (visible_NN & (documents_BN[:, :, None] == documents_BN[:, None, :]))[:, None]

    def hidden(self, rows: Rows) -> Tensor:
        """What the head reads at the learned tokens, `[M, D]`."""
        x_BND = F.embedding(rows.tokens_BN, self.embedding.seen())
        for layer in self.layers:
            if self._recompute and torch.is_grad_enabled():
                x_BND = checkpoint(layer, x_BND, rows, use_reentrant=False)
            else:
                x_BND = layer(x_BND, rows)
        return self.final_norm(x_BND[rows.learned_BN])

    def forward(self, rows: Rows, taught: Taught | None = None) -> Tensor:
        """Loss of every learned token, float32 `[M]`; from the data and, where there is one, a teacher."""
        x_MD, weight_VD = self.hidden(rows), self.head.seen()
        losses = []
        for start in range(0, len(x_MD), _HEAD_TOKENS):
            part = slice(start, start + _HEAD_TOKENS)
            given = (x_MD[part], weight_VD, rows.targets_M[part], taught, part)
            losses.append(checkpoint(_losses, *given, use_reentrant=False))
        return torch.cat(losses) if losses else x_MD.sum(dim=1)


def _losses(x_MD: Tensor, weight_VD: Tensor, targets_M: Tensor, taught: Taught | None, part: slice) -> Tensor:
    logits_MV = F.linear(x_MD, weight_VD).float()
    nats_M = F.cross_entropy(logits_MV, targets_M, reduction="none")
    if taught is None:
        return nats_M
    wanted_MV = F.linear(taught.x_MD[part], taught.weight_VD).float().div(taught.temperature).log_softmax(-1)
    found_MV = logits_MV.div(taught.temperature).log_softmax(-1)
    divergence_M = (wanted_MV.exp() * (wanted_MV - found_MV)).sum(-1) * taught.temperature**2
    return (1 - taught.share) * nats_M + taught.share * divergence_M


class _Loader:
    """Reads one tensor at a time into a master weight."""

    def __init__(
        self,
        weights: ModelWeights,
        schemes: Mapping[str, Scheme],
        device: torch.device,
        dtype: torch.dtype,
        master: torch.dtype,
    ) -> None:
        self._type = master
        self.config = weights.config
        self._weights, self._schemes, self._device, self._dtype = weights, schemes, device, dtype

    def linear(self, name: str) -> Linear:
        key = f"{name}.weight"
        bias_O = self._master(f"{name}.bias") if f"{name}.bias" in self._weights else None
        return Linear(key, self._master(key), self._schemes.get(key), self._dtype, bias_O)

    def norm(self, key: str) -> Norm:
        return Norm(key, self._master(key), self.config.norm_eps)

    def _master(self, key: str) -> Tensor:
        array = self._weights[key]
        assert not isinstance(array, QTensor), key
        return to_tensor(array.astype(np.float32)).to(self._device, self._type)
