"""The decoder as it is trained, read top-down; its weights are those of `master`.

Shape letters: B rows, N tokens of each, D hidden, H heads, K kv heads, h head size, T positions,
V vocabulary, M tokens whose loss is computed or, inside a layer, all B x N, E experts.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from llmq.backends.base import TrainBatch
from llmq.backends.gpu import xla
from llmq.backends.gpu.linear import to_tensor
from llmq.backends.gpu.master import Linear, Matrix, Norm
from llmq.backends.gpu.mixture import route
from llmq.backends.gpu.model import ACTIVATIONS, rotate, rotations
from llmq.checkpoint.loader import ModelWeights
from llmq.config import Scheme
from llmq.model.names import (
    EMBEDDING,
    FINAL_NORM,
    LM_HEAD,
    STAGES,
    ExpertNames,
    expert_names,
    layer_norms,
    layer_prefix,
)
from llmq.quant import QTensor

#: Tokens whose logits are held at once.
_HEAD_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Rows:
    """A batch on the device, and what follows from it.

    Attributes:
        tokens_BN: Ids.
        targets_M: Of the tokens whose loss is computed, in order.
        taken: Which of all B x N these are.
        learned_M: Which of these count; None where all do.
        attentions: For each of `ModelConfig.attentions`, True where a token sees another, `[B, 1, N, N]`, or None
            for plain causal attention; and cosine and sine of each token's rotation, `[B, N, 1, h]`.
    """

    tokens_BN: Tensor
    targets_M: Tensor
    taken: Tensor | slice
    learned_M: Tensor | None
    attentions: list[tuple[Tensor | None, Tensor, Tensor]]


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


class Expert(nn.Module):
    """A gated MLP: that of a layer, or one of several."""

    def __init__(self, loader: "_Loader", at: str, names: Sequence[str]) -> None:
        super().__init__()
        self._activation = ACTIVATIONS[loader.config.activation]
        self.gate, self.up, self.down = (loader.linear(at + name) for name in names)

    def forward(self, x_MD: Tensor) -> Tensor:
        """Of any number of tokens, or none."""
        Matrix.see_together((self.gate, self.up, self.down))
        return self.down(self._activation(self.gate(x_MD)) * self.up(x_MD))


class Mixture(nn.Module):
    """The experts of a layer, each computed for the tokens that chose it, and the router that they choose by.

    One that no token chose is computed for none: its gradient is 0, on this process as on the others. Where a
    computation must not depend on values, on XLA, each is computed for all.
    """

    def __init__(self, loader: "_Loader", at: str, names: ExpertNames) -> None:
        super().__init__()
        assert loader.config.experts is not None
        self._config = loader.config.experts
        self.router = loader.linear(at + names.router)
        self.experts = nn.ModuleList(Expert(loader, at, each) for each in names.experts)

    def forward(self, x_BND: Tensor) -> Tensor:
        """The sum is one of float32, rounded once."""
        x_MD = x_BND.flatten(0, 1)
        weight_ME = route(x_MD, self.router.seen(), self._config)
        y_MD = torch.zeros_like(x_MD, dtype=torch.float32)
        for weight_M, expert in zip(weight_ME.T, self.experts, strict=True):
            if x_MD.device.type == "xla":
                y_MD = y_MD + weight_M[:, None] * expert(x_MD).float()
            else:
                rows = weight_M.nonzero().flatten()
                y_MD = y_MD.index_add(0, rows, weight_M[rows, None] * expert(x_MD[rows]).float())
        return y_MD.to(x_BND.dtype).view_as(x_BND)


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, loader: "_Loader", index: int) -> None:
        super().__init__()
        at, norms = layer_prefix(index), layer_norms(loader.config)
        self._config, self._attention = loader.config, loader.config.attention_index(index)
        self.input_norm = loader.norm(f"{at}{norms.attention}.weight")
        self.q, self.k, self.v, self.o = (loader.linear(f"{at}self_attn.{name}_proj") for name in "qkvo")
        self.q_norm, self.k_norm = (
            loader.norm(f"{at}self_attn.{name}_norm.weight") if loader.config.qk_norm else nn.Identity()
            for name in "qk"
        )
        self.attended_norm = loader.norm(f"{at}{norms.attended}.weight") if norms.attended else nn.Identity()
        self.mlp_norm = loader.norm(f"{at}{norms.mlp}.weight")
        self.out_norm = loader.norm(f"{at}{norms.out}.weight") if norms.out else nn.Identity()
        mixture = expert_names(loader.config)
        self.mlp = Mixture(loader, at, mixture) if mixture else Expert(loader, at, STAGES[2] + STAGES[3])

    def forward(self, x_BND: Tensor, rows: Rows) -> Tensor:
        """Attention and MLP, each added to the stream."""
        Matrix.see_together((self.q, self.k, self.v, self.o))
        inner_BND = self.input_norm(x_BND)
        mask_B1NN, cos_BN1h, sin_BN1h = rows.attentions[self._attention]
        q_BNHh = rotate(self.q_norm(self._heads(self.q(inner_BND))), cos_BN1h, sin_BN1h)
        k_BNKh = rotate(self.k_norm(self._heads(self.k(inner_BND))), cos_BN1h, sin_BN1h)
        v_BNKh = self._heads(self.v(inner_BND))
        out_BND = self.o(_attend(q_BNHh, k_BNKh, v_BNKh, mask_B1NN, self._config.score_scale))
        x_BND = x_BND + self.attended_norm(out_BND)
        inner_BND = self.mlp_norm(x_BND)
        return x_BND + self.out_norm(self.mlp(inner_BND))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self._config.head_dim))


def _attend(q_BNHh: Tensor, k_BNKh: Tensor, v_BNKh: Tensor, mask_B1NN: Tensor | None, scale: float | None) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_BNHh, k_BNKh, v_BNKh))
    out_BHNh = F.scaled_dot_product_attention(
        q, k, v, mask_B1NN, is_causal=mask_B1NN is None, enable_gqa=True, scale=scale
    )
    return out_BHNh.transpose(1, 2).flatten(2)


class TrainableDecoder(nn.Module):
    """The whole model.

    Args:
        weights: An unquantized checkpoint; read one by one.
        schemes: Weight name -> its grid.
        rounded_inputs: Names of the weights whose linears take their inputs in int8.
        max_len: Positions to prepare.
        device: Where.
        dtype: Compute type.
        recompute: Recompute the activations of a layer in the backward pass.
        static: Compute the loss of every token and mask the attention of every batch, so that the computation
            depends on the shape of a batch only.
        master: Type of master weights.
        compiled: As for `straight.see`.
    """

    def __init__(
        self,
        weights: ModelWeights,
        schemes: Mapping[str, Scheme],
        rounded_inputs: Collection[str],
        max_len: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        recompute: bool = False,
        static: bool = False,
        master: torch.dtype = torch.float32,
        compiled: bool = False,
    ) -> None:
        super().__init__()
        loader = _Loader(weights, schemes, rounded_inputs, device, dtype, master, compiled=compiled)
        self.config = config = weights.config
        self._device, self._recompute, self._static = device, recompute, static
        self.embedding = loader.linear(EMBEDDING.removesuffix(".weight"))
        self.layers = nn.ModuleList(Layer(loader, index) for index in range(config.num_layers))
        self.final_norm = loader.norm(FINAL_NORM)
        self.head = self.embedding if config.tie_embeddings else loader.linear(LM_HEAD.removesuffix(".weight"))
        self._scale = torch.tensor(config.embedding_scale, dtype=dtype, device=device)
        self._rotations = rotations(config, max_len, device)

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
        learned = torch.from_numpy(batch.learned.ravel()).to(self._device)
        masked = self._static or batch.documents.max() > 1
        attentions = [
            (
                self._mask(documents_BN, attention.window) if attention.window or masked else None,
                cos_Th[positions_BN][:, :, None],
                sin_Th[positions_BN][:, :, None],
            )
            for attention, (cos_Th, sin_Th) in zip(self.config.attentions, self._rotations, strict=True)
        ]
        taken, learned_M = (slice(None), learned) if self._static else (learned, None)
        return Rows(tokens_BN, targets_BN.flatten()[taken], taken, learned_M, attentions)

    def _mask(self, documents_BN: Tensor, window: int | None) -> Tensor:
        """Whether a token (second last axis) sees another; padding sees itself, so that no softmax is empty."""
        num_tokens = documents_BN.shape[1]
        back_NN = torch.arange(num_tokens, device=self._device)[:, None] - torch.arange(num_tokens, device=self._device)
        visible_NN = back_NN >= 0
        if window is not None:
            visible_NN &= back_NN < window
        return (visible_NN & (documents_BN[:, :, None] == documents_BN[:, None, :]))[:, None]

    def hidden(self, rows: Rows) -> Tensor:
        """What the head reads at the tokens whose loss is computed, `[M, D]`."""
        x_BND = F.embedding(rows.tokens_BN, self.embedding.seen())
        if self.config.scales_embedding:
            x_BND = x_BND * self._scale
        for layer in self.layers:
            if self._recompute and torch.is_grad_enabled():
                x_BND = _recomputed(layer, x_BND, rows)
            else:
                x_BND = layer(x_BND, rows)
        return self.final_norm(x_BND.flatten(0, 1)[rows.taken])

    def forward(self, rows: Rows, taught: Taught | None = None) -> Tensor:
        """Loss of every token that counts, float32 `[M]`; from the data and, where there is one, a teacher."""
        x_MD, weight_VD = self.hidden(rows), self.head.seen()
        losses = []
        for start in range(0, len(x_MD), _HEAD_TOKENS):
            part = slice(start, start + _HEAD_TOKENS)
            given = (x_MD[part], weight_VD, rows.targets_M[part], taught, part)
            losses.append(_recomputed(_losses, *given))
        losses_M = torch.cat(losses) if losses else x_MD.sum(dim=1)
        return losses_M if rows.learned_M is None else losses_M.where(rows.learned_M, 0.0)


def _recomputed(function: Callable[..., Tensor], x: Tensor, *given: Any) -> Tensor:
    """``function(x, *given)``, computed anew in the backward pass rather than kept."""
    if x.device.type == "xla":
        return xla.recomputed(function, x, *given)
    return checkpoint(function, x, *given, use_reentrant=False)


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
        rounded_inputs: Collection[str],
        device: torch.device,
        dtype: torch.dtype,
        master: torch.dtype,
        *,
        compiled: bool,
    ) -> None:
        self._type, self._rounded_inputs, self._compiled = master, rounded_inputs, compiled
        self.config = weights.config
        self._weights, self._schemes, self._device, self._dtype = weights, schemes, device, dtype

    def linear(self, name: str) -> Linear:
        key = f"{name}.weight"
        bias_O = self._master(f"{name}.bias") if f"{name}.bias" in self._weights else None
        return Linear(
            key,
            self._master(key),
            self._schemes.get(key),
            self._dtype,
            bias_O,
            rounds_inputs=key in self._rounded_inputs,
            compiled=self._compiled,
        )

    def norm(self, key: str) -> Norm:
        return Norm(key, self._master(key), self.config.norm_eps, self.config.norm_offset)

    def _master(self, key: str) -> Tensor:
        array = self._weights[key]
        assert not isinstance(array, QTensor), key
        return to_tensor(array.astype(np.float32)).to(self._device, self._type)
