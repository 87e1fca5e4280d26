"""Tensor names: which ones a model has, what kind each is, and of what shape.

Names are those of the Hugging Face checkpoint; readers of other formats translate to them. One
row of `_rows` is one tensor of the model.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

import numpy as np

from llmq.errors import CheckpointError, UnsupportedModelError
from llmq.model.config import ModelConfig

T = TypeVar("T")


class Kind(StrEnum):
    """What a tensor is, which decides whether and how it is quantized."""

    EMBEDDING = "embedding"
    LM_HEAD = "lm_head"
    LINEAR = "linear"
    ROUTER = "router"
    BIAS = "bias"
    NORM = "norm"


@dataclass(frozen=True, slots=True)
class Expected:
    """A tensor that a model of a given config has.

    Attributes:
        kind: What it is.
        shape: Sizes, `[O, I]` for matrices.
    """

    kind: Kind
    shape: tuple[int, ...]


EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"

#: The linears of a layer that read the same input, in the order of computation.
STAGES = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)

#: The first of `STAGES` that belongs to the MLP.
MLP_STAGE = 2


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """The norms of a layer, by name.

    Attributes:
        attention: What q, k and v read.
        attended: What attention adds to the stream, if it is normed.
        mlp: What gate and up read.
        out: What the MLP adds to the stream, if it is normed.
    """

    attention: str
    attended: str | None
    mlp: str
    out: str | None


_INPUT_NORMS = LayerNorms("input_layernorm", None, "post_attention_layernorm", None)
_ALL_NORMS = LayerNorms(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)


def layer_norms(config: ModelConfig) -> LayerNorms:
    """What the norms of a model's layers are called: one name may mean different places.

    Args:
        config: The model.

    Returns:
        Their names, without the layer's prefix and ``.weight``.
    """
    return _ALL_NORMS if config.output_norms else _INPUT_NORMS


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """The experts of a layer, by name.

    Attributes:
        router: What chooses them, `[E, D]` of E experts.
        experts: Gate, up and down of each.
    """

    router: str
    experts: tuple[tuple[str, str, str], ...]


#: Architecture -> the module that holds router and experts, and what gate, up and down are called.
EXPERT_SPELLINGS = {
    "MixtralForCausalLM": ("block_sparse_moe", ("w1", "w3", "w2")),
    "Qwen3MoeForCausalLM": ("mlp", ("gate_proj", "up_proj", "down_proj")),
}


def expert_names(config: ModelConfig) -> ExpertNames | None:
    """What the experts of a model's layers are called.

    Args:
        config: The model.

    Returns:
        Their names, without the layer's prefix and ``.weight``; None where a layer has one MLP.
    """
    if config.experts is None:
        return None
    module, (gate, up, down) = EXPERT_SPELLINGS[config.architecture]
    places = [f"{module}.experts.{index}" for index in range(config.experts.num_experts)]
    return ExpertNames(f"{module}.gate", tuple((f"{at}.{gate}", f"{at}.{up}", f"{at}.{down}") for at in places))


def as_mlp(expert: tuple[str, str, str], tensors: Mapping[str, T]) -> dict[str, T]:
    """Tensors of an expert under the names that they have where a layer has one MLP.

    Args:
        expert: From `ExpertNames.experts`.
        tensors: Of its layer, by their names without the prefix.

    Returns:
        Its weights and biases.
    """
    alone = (*STAGES[MLP_STAGE], *STAGES[MLP_STAGE + 1])
    pairs = [(f"{own}.{part}", f"{name}.{part}") for own, name in zip(expert, alone, strict=True) for part in _PARTS]
    return {name: tensors[own] for own, name in pairs if own in tensors}


_PARTS = ("weight", "bias")


def across_experts(name: str) -> str:
    """A name with ``*`` for the index of an expert, a pattern of all experts of its layer; others as they are."""
    return re.sub(r"\.experts\.\d+\.", ".experts.*.", name)


def is_expert(tensor: str) -> bool:
    """Whether a tensor is of one expert of several."""
    return ".experts." in tensor


def norm_factor(config: ModelConfig, weight: np.ndarray) -> np.ndarray:
    """What a norm multiplies by.

    Args:
        config: The model.
        weight: As it is stored.

    Returns:
        The weight itself; float32 where an offset is added to it.
    """
    return weight.astype(np.float32) + np.float32(config.norm_offset) if config.norm_offset else weight


def stage_tensors(config: ModelConfig) -> tuple[frozenset[str], ...]:
    """Tensors that each stage of a block reads: what lies between the linears of `STAGES`, and behind the last.

    Args:
        config: The model.

    Returns:
        Names without the layer's prefix, a set for each stage.
    """
    norms = layer_norms(config)
    between = (
        [norms.attention],
        ["self_attn.q_norm", "self_attn.k_norm"],
        [norms.attended, norms.mlp],
        [],
        [norms.out],
    )
    modules = [{*linears, *filter(None, names)} for linears, names in zip(((), *STAGES), between, strict=True)]
    return tuple(frozenset(f"{name}.{part}" for name in names for part in _PARTS) for names in modules)


#: Endings of tensors that are recomputed from the config and never stored again.
REBUILT = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached")


def layer_prefix(layer: int) -> str:
    """What the names of layer `layer` start with."""
    return f"model.layers.{layer}."


def module_name(tensor: str) -> str:
    """The module a tensor belongs to: its name without ``.weight`` or ``.bias``."""
    return tensor.removesuffix(".weight").removesuffix(".bias")


def expected_tensors(config: ModelConfig) -> dict[str, Expected]:
    """Every tensor a checkpoint of `config` must hold, in the order of computation.

    Args:
        config: The model.

    Returns:
        Name -> kind and shape. A tied head is not listed.
    """
    expected = {EMBEDDING: Expected(Kind.EMBEDDING, (config.vocab_size, config.hidden_size))}
    for layer in range(config.num_layers):
        for name, row in _layer_rows(config):
            expected[layer_prefix(layer) + name] = row
    expected[FINAL_NORM] = Expected(Kind.NORM, (config.hidden_size,))
    if not config.tie_embeddings:
        expected[LM_HEAD] = Expected(Kind.LM_HEAD, (config.vocab_size, config.hidden_size))
    return expected


def _layer_rows(config: ModelConfig) -> Iterator[tuple[str, Expected]]:
    hidden, inner, norms = config.hidden_size, config.intermediate_size, layer_norms(config)
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield f"{norms.attention}.weight", Expected(Kind.NORM, (hidden,))
    yield from _linear("self_attn.q_proj", queries, hidden, config.attention_bias)
    yield from _linear("self_attn.k_proj", keys, hidden, config.attention_bias)
    yield from _linear("self_attn.v_proj", keys, hidden, config.attention_bias)
    if config.qk_norm:
        yield "self_attn.q_norm.weight", Expected(Kind.NORM, (config.head_dim,))
        yield "self_attn.k_norm.weight", Expected(Kind.NORM, (config.head_dim,))
    yield from _linear("self_attn.o_proj", hidden, queries, config.output_bias)
    if norms.attended:
        yield f"{norms.attended}.weight", Expected(Kind.NORM, (hidden,))
    yield f"{norms.mlp}.weight", Expected(Kind.NORM, (hidden,))
    mixture = expert_names(config)
    if mixture and config.experts:
        yield f"{mixture.router}.weight", Expected(Kind.ROUTER, (config.experts.num_experts, hidden))
    for gate, up, down in mixture.experts if mixture else (("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),):
        yield from _linear(gate, inner, hidden, config.mlp_bias)
        yield from _linear(up, inner, hidden, config.mlp_bias)
        yield from _linear(down, hidden, inner, config.mlp_bias)
    if norms.out:
        yield f"{norms.out}.weight", Expected(Kind.NORM, (hidden,))


def _linear(name: str, out_features: int, in_features: int, bias: bool) -> Iterator[tuple[str, Expected]]:
    yield f"{name}.weight", Expected(Kind.LINEAR, (out_features, in_features))
    if bias:
        yield f"{name}.bias", Expected(Kind.BIAS, (out_features,))


def droppable(name: str, config: ModelConfig) -> str | None:
    """Why a stored tensor is not part of the model, if it may be left out.

    Args:
        name: A tensor of a checkpoint.
        config: The model.

    Returns:
        The reason, or None for a tensor that must not be dropped.
    """
    if name.endswith(REBUILT):
        return "rotary table, rebuilt from the config"
    if name == LM_HEAD and config.tie_embeddings:
        return "tied to the embedding, stored once"
    return None


def check_tensors(shapes: Mapping[str, tuple[int, ...]], config: ModelConfig) -> None:
    """Hold the tensors of a checkpoint against those its config asks for.

    Args:
        shapes: Name -> shape of every stored tensor.
        config: The model.

    Raises:
        CheckpointError: Tensors are missing or have another shape; all are collected first.
        UnsupportedModelError: There are tensors no row of the table knows, or experts fused into one.
    """
    fused = [name for name in shapes if name.endswith((".mlp.experts.gate_up_proj", ".mlp.experts.down_proj"))]
    if fused:
        raise UnsupportedModelError(
            f"{_listed(fused)}: all experts of a layer in one tensor, which is read from safetensors only and with three "
            "axes; save the model with transformers' save_pretrained, which gives every expert its own."
        )
    expected = expected_tensors(config)
    missing = [name for name in expected if name not in shapes]
    if missing:
        raise CheckpointError(
            f"{_listed(missing)}: in config.json's model but not in the checkpoint; it is incomplete."
        )
    unknown = [name for name in shapes if name not in expected and not droppable(name, config)]
    if unknown:
        raise UnsupportedModelError(
            f"{_listed(unknown)}: not part of a {config.architecture}; llmq leaves no tensor unaccounted for."
        )
    wrong = [
        f"{n} is {list(shapes[n])}, not {list(row.shape)}"
        for n, row in expected.items()
        if tuple(shapes[n]) != row.shape
    ]
    if wrong:
        raise CheckpointError(f"{_listed(wrong)}: the checkpoint does not fit its config.json.")


def _listed(items: Iterable[str], limit: int = 4) -> str:
    items = list(items)
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more
