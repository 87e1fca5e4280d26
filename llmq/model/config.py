"""What a decoder is, apart from its weights: read from ``config.json``, used by every backend.

`ModelConfig` describes a model by data. A family is a row of `FAMILIES`; what the row does not
say is read from the file, in the spelling of transformers 4 (``rope_theta``, ``torch_dtype``) or
5 (``rope_parameters``, ``dtype``).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from llmq.config import Frozen, validated
from llmq.errors import CheckpointError, ConfigError, UnsupportedModelError


@dataclass(frozen=True, slots=True)
class Family:
    """What an architecture fixes without saying so in its config.

    Attributes:
        attention_bias: Biases on q, k and v; None reads ``attention_bias``.
        output_bias: Bias on the attention output; None follows `attention_bias`.
        qk_norm: RMS norm of each q and k head before the rotation.
        sliding_window: Whether ``sliding_window`` means anything without ``use_sliding_window``.
        activation: The only ``hidden_act``.
        norm_offset: Added to the stored weight of every norm.
        output_norms: RMS norms on what attention and MLP add to the stream.
        scales_embedding: Embeddings are multiplied by the root of ``hidden_size``.
        expert_size: Field with the inner features of an expert, where layers have experts.
        defaults: Fields that ``config.json`` may leave out, and what they are then.
        neutral: Fields that change the computation in ways llmq does not compute -> values that do not.
    """

    attention_bias: bool | None = None
    output_bias: bool | None = None
    qk_norm: bool = False
    sliding_window: bool = False
    activation: str = "silu"
    norm_offset: float = 0.0
    output_norms: bool = False
    scales_embedding: bool = False
    expert_size: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict[str, tuple[Any, ...]])


#: Architecture name in ``config.json`` -> what it fixes.
FAMILIES: MappingProxyType[str, Family] = MappingProxyType(
    {
        "LlamaForCausalLM": Family(),
        "MistralForCausalLM": Family(attention_bias=False, sliding_window=True),
        "Qwen2ForCausalLM": Family(attention_bias=True, output_bias=False),
        "Qwen3ForCausalLM": Family(qk_norm=True),
        "Gemma3ForCausalLM": Family(
            qk_norm=True,
            sliding_window=True,
            activation="gelu_pytorch_tanh",
            norm_offset=1.0,
            output_norms=True,
            scales_embedding=True,
            defaults={
                "head_dim": 256,
                "tie_word_embeddings": True,
                "hidden_activation": "gelu_pytorch_tanh",
                "query_pre_attn_scalar": 256,
                "sliding_window": 4096,
                "sliding_window_pattern": 6,
                "rope_theta": 1e6,
                "rope_local_base_freq": 1e4,
            },
            neutral={
                "attn_logit_softcapping": (None,),
                "final_logit_softcapping": (None,),
                "use_bidirectional_attention": (None, False),
            },
        ),
        "MixtralForCausalLM": Family(
            attention_bias=False,
            sliding_window=True,
            expert_size="intermediate_size",
            defaults={"rope_theta": 1e6, "norm_topk_prob": True},
            neutral={"norm_topk_prob": (True,)},
        ),
        "Qwen3MoeForCausalLM": Family(
            qk_norm=True,
            expert_size="moe_intermediate_size",
            defaults={"norm_topk_prob": False},
            neutral={"use_sliding_window": (None, False)},
        ),
    }
)

#: Activation in ``config.json`` -> `ModelConfig.activation`.
_ACTIVATIONS: MappingProxyType[str, str] = MappingProxyType({"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"})


_MAX_COUNT = 4096

#: A size of a tensor, a factor, and a count that bounds a loop.
_Size = Annotated[int, Field(gt=0, le=1 << 40)]
_Factor = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(gt=0, le=_MAX_COUNT)]


class Rotary(Frozen):
    """Rotary position embedding.

    Attributes:
        kind: How long contexts are reached.
        theta: Base of the frequencies.
        factor: Context extension; 1 for ``default``.
        original_max_positions: Context the model was trained for (``llama3``, ``yarn``).
        low_freq_factor, high_freq_factor: Band that ``llama3`` blends over.
        beta_fast, beta_slow: Band that ``yarn`` blends over, in rotations.
        attention_factor: ``yarn``'s scale of cos and sin; None computes it from `factor`.
    """

    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    theta: _Factor = 10000.0
    factor: _Factor = 1.0
    original_max_positions: _Size | None = None
    low_freq_factor: _Factor = 1.0
    high_freq_factor: _Factor = 4.0
    beta_fast: _Factor = 32.0
    beta_slow: _Factor = 1.0
    attention_factor: _Factor | None = None


class Attention(NamedTuple):
    """How layers attend.

    Attributes:
        window: Positions a token sees back, itself included; None sees all.
        rotary: Position embedding.
    """

    window: int | None
    rotary: Rotary


class Experts(Frozen):
    """How the MLPs of a layer, its experts, are chosen for a token.

    Probabilities are the softmax of ``router @ x`` over all experts. The most likely ones are computed, of equal
    ones the first, and their outputs summed with their probabilities for weights.

    Attributes:
        num_experts: Of a layer.
        num_chosen: For each token.
        normalized: Divide the weights by their sum.
    """

    num_experts: _Count
    num_chosen: _Count
    normalized: bool

    @model_validator(mode="after")
    def _are_enough(self) -> Self:
        if self.num_chosen > self.num_experts:
            raise ValueError(f"num_experts_per_tok={self.num_chosen}: must be at most the {self.num_experts} experts")
        return self


class ModelConfig(Frozen):
    """A decoder of the Llama family.

    Every layer is: RMS norm, grouped-query attention with rotary positions, residual; RMS norm,
    gated MLP ``down(activation(gate(x)) * up(x))`` or a sum over several, residual. Before each residual there may be
    one more norm.

    Attributes:
        architecture: Key of `FAMILIES`.
        vocab_size, hidden_size, intermediate_size, head_dim: Sizes of the tensors; `intermediate_size` is that of an
            expert where there are several.
        num_layers, num_heads, num_kv_heads: Counts.
        max_positions: Context length.
        norm_eps: Added to the mean square before its root.
        tie_embeddings: The head is the embedding matrix.
        attention_bias, output_bias, mlp_bias: Which linears have one.
        qk_norm: RMS norm over each head of q and k.
        sliding_window: Positions a token sees back, itself included; None sees all.
        rotary: Position embedding.
        full_layers: Layers without the window, where only some have it.
        local_rotary: Position embedding of layers with the window, where it is another.
        activation: ``silu``, or ``gelu_tanh``: GELU by its tanh approximation.
        norm_offset: A norm multiplies by this plus its weight.
        output_norms: RMS norms on what attention and MLP add to the stream.
        scales_embedding: Embeddings are multiplied by the root of `hidden_size`.
        score_scale: Factor on attention scores, where it is not ``head_dim ** -0.5``.
        experts: How a token's MLPs are chosen; None where a layer has one.
        eos_token_ids: End-of-sequence tokens the config names.
        bos_token_id: Beginning-of-sequence token the config names.
    """

    architecture: str
    vocab_size: _Size
    hidden_size: _Size
    intermediate_size: _Size
    num_layers: _Count
    num_heads: _Count
    num_kv_heads: _Count
    head_dim: _Size
    max_positions: _Size
    norm_eps: Annotated[float, Field(ge=0, lt=1)]
    tie_embeddings: bool
    attention_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_window: _Size | None
    rotary: Rotary
    full_layers: tuple[int, ...] = ()
    local_rotary: Rotary | None = None
    activation: Literal["silu", "gelu_tanh"] = "silu"
    norm_offset: float = 0.0
    output_norms: bool = False
    scales_embedding: bool = False
    score_scale: _Factor | None = None
    experts: Experts | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """The ways in which layers attend: one, or without and with the window."""
        windowed = Attention(self.sliding_window, self.local_rotary or self.rotary)
        return (Attention(None, self.rotary), windowed) if self.full_layers else (windowed,)

    @property
    def attention_scale(self) -> float:
        """Factor on attention scores."""
        return self.head_dim**-0.5 if self.score_scale is None else self.score_scale

    @property
    def embedding_scale(self) -> float:
        """Factor on embeddings; it is rounded to the compute type."""
        return self.hidden_size**0.5 if self.scales_embedding else 1.0

    def attention_index(self, layer: int) -> int:
        """Which of `attentions` a layer has.

        Args:
            layer: Which layer.

        Returns:
            The index.
        """
        return int(bool(self.full_layers) and layer not in self.full_layers)

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads={self.num_kv_heads}: must divide the {self.num_heads} heads")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim}: must be even, because rotary positions turn pairs")
        return self

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "ModelConfig":
        """Read the contents of a ``config.json``.

        Args:
            raw: The parsed file.

        Returns:
            The description.

        Raises:
            UnsupportedModelError: The architecture, activation, rotary variant or window layout
                is not one llmq knows.
            CheckpointError: A field is missing or breaks a rule.
        """
        architecture = _architecture(raw)
        family = FAMILIES[architecture]
        raw = {**family.defaults, **raw}
        _check_computation(raw, architecture)
        required = [*_REQUIRED, *([family.expert_size, "num_experts_per_tok"] if family.expert_size else [])]
        missing = [field for field in required if raw.get(field) is None]
        if missing:
            raise CheckpointError(f"config.json: the field {missing[0]!r} is missing.")
        attention_bias = _first(family.attention_bias, raw.get("attention_bias"), False)
        try:
            window, full_layers = _windows(raw, family)
            rotary, local_rotary = _rotaries(raw, family)
            return validated(
                cls,
                architecture=architecture,
                vocab_size=raw["vocab_size"],
                hidden_size=raw["hidden_size"],
                intermediate_size=raw[family.expert_size or "intermediate_size"],
                num_layers=raw["num_hidden_layers"],
                num_heads=raw["num_attention_heads"],
                num_kv_heads=_first(raw.get("num_key_value_heads"), raw["num_attention_heads"]),
                head_dim=_first(raw.get("head_dim"), _quotient(raw["hidden_size"], raw["num_attention_heads"])),
                max_positions=raw["max_position_embeddings"],
                norm_eps=raw["rms_norm_eps"],
                tie_embeddings=_first(raw.get("tie_word_embeddings"), False),
                attention_bias=attention_bias,
                output_bias=_first(family.output_bias, attention_bias),
                mlp_bias=_first(raw.get("mlp_bias"), False),
                qk_norm=family.qk_norm,
                sliding_window=window,
                rotary=rotary,
                full_layers=full_layers,
                local_rotary=local_rotary if window is not None else None,
                activation=_ACTIVATIONS[family.activation],
                norm_offset=family.norm_offset,
                output_norms=family.output_norms,
                scales_embedding=family.scales_embedding,
                score_scale=_score_scale(raw, family),
                experts=_experts(raw, family, architecture),
                eos_token_ids=_token_ids(raw.get("eos_token_id")),
                bos_token_id=raw.get("bos_token_id"),
            )
        except ConfigError as err:
            raise CheckpointError(f"config.json: {err}") from err


#: Fields that every ``config.json`` must have.
_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "rms_norm_eps",
)


def architecture_of(raw: Mapping[str, Any]) -> str:
    """The first architecture that a ``config.json`` names; empty where it names none."""
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else names
    return str(name) if name else ""


def _architecture(raw: Mapping[str, Any]) -> str:
    name = architecture_of(raw)
    if name not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UnsupportedModelError(
            f"architecture {name or '(none)'}: llmq reads {known}; see CONTRIBUTING.md for adding a family."
        )
    return name


def _quotient(hidden_size: Any, num_heads: Any) -> Any:
    """Features of a head where the file does not say; what cannot be divided fails its own field's rule."""
    numbers = isinstance(hidden_size, int) and isinstance(num_heads, int) and num_heads > 0
    return hidden_size // num_heads if numbers else 2


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _token_ids(value: Any) -> Any:
    return () if value is None else value if isinstance(value, list) else (value,)


def _check_computation(raw: Mapping[str, Any], architecture: str) -> None:
    """Refuse what would change the numbers unseen."""
    family = FAMILIES[architecture]
    for key in ("hidden_act", "hidden_activation"):
        if raw.get(key, family.activation) != family.activation:
            raise UnsupportedModelError(
                f"{key}={raw[key]!r}: {architecture} is supported with {family.activation!r} only."
            )
    for key, values in family.neutral.items():
        if raw.get(key) not in values:
            raise UnsupportedModelError(f"{key}={raw[key]!r}: {architecture} is supported without it only.")


def _score_scale(raw: Mapping[str, Any], family: Family) -> float | None:
    """Factor on scores, where it is not that of the head's size."""
    scalar = raw.get("query_pre_attn_scalar") if "query_pre_attn_scalar" in family.defaults else None
    if scalar is None or scalar == raw.get("head_dim"):
        return None
    return _positive("query_pre_attn_scalar", scalar) ** -0.5


def _experts(raw: Mapping[str, Any], family: Family, architecture: str) -> Experts | None:
    """How experts are chosen; every layer must have them."""
    if family.expert_size is None:
        return None
    step, dense = _first(raw.get("decoder_sparse_step"), 1), _first(raw.get("mlp_only_layers"), [])
    if step != 1 or dense != []:
        field = f"mlp_only_layers={dense!r}" if dense != [] else f"decoder_sparse_step={step!r}"
        raise UnsupportedModelError(f"{field}: {architecture} is supported with experts in every layer only.")
    num_experts = _first(raw.get("num_experts"), raw.get("num_local_experts"), 0)
    fields = {"num_chosen": raw["num_experts_per_tok"], "normalized": raw["norm_topk_prob"]}
    return validated(Experts, num_experts=num_experts, **fields)


def _windows(raw: Mapping[str, Any], family: Family) -> tuple[Any, tuple[int, ...]]:
    """The sliding window, and the layers without it where only some have it."""
    window, num_layers = raw.get("sliding_window"), raw["num_hidden_layers"]
    if window is None or not raw.get("use_sliding_window", family.sliding_window):
        return None, ()
    if not isinstance(num_layers, int) or num_layers > _MAX_COUNT:
        return window, ()  # the number of layers is refused by its own rule
    kinds = raw.get("layer_types") or _layer_types(raw, family, num_layers)
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in known for kind in kinds):
        raise UnsupportedModelError(
            f"layer_types: llmq reads {' or '.join(known)} for each of the {num_layers} layers, and nothing else."
        )
    full = tuple(layer for layer, kind in enumerate(kinds) if kind == "full_attention")
    return (None, ()) if len(full) == num_layers else (window, full)


def _layer_types(raw: Mapping[str, Any], family: Family, num_layers: int) -> list[str]:
    """What older files say by a pattern, or by the number of layers before the first with a window."""
    if "sliding_window_pattern" in family.defaults:
        pattern = _positive("sliding_window_pattern", raw["sliding_window_pattern"])
        full = [(layer + 1) % pattern == 0 for layer in range(num_layers)]
    else:
        first = raw.get("max_window_layers") or 0
        full = [layer < _positive("max_window_layers", first) for layer in range(num_layers)] if first else []
    return ["full_attention" if is_full else "sliding_attention" for is_full in full or [False] * num_layers]


def _positive(field: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise CheckpointError(f"config.json: {field}={value!r}: must be a number above 0.")
    return value


def _rotaries(raw: Mapping[str, Any], family: Family) -> tuple[Rotary, Rotary | None]:
    """Position embeddings: of all layers or of those without a window, and of those with one."""
    theta = raw.get("rope_local_base_freq") if "rope_local_base_freq" in family.defaults else None
    params: Any = raw.get("rope_parameters")
    if isinstance(params, dict) and "full_attention" in params:
        local = {"rope_parameters": params.get("sliding_attention"), "rope_scaling": None}
        theta = _first(theta, raw.get("rope_theta"), 10000.0)
        return _rotary({**raw, "rope_parameters": params["full_attention"]}), _rotary(
            {**raw, **local, "rope_theta": theta}
        )
    return _rotary(raw), None if theta is None else validated(Rotary, theta=theta)


def _rotary(raw: Mapping[str, Any]) -> Rotary:
    params: Any = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(params, dict):
        raise CheckpointError(f"config.json: rope_parameters={params!r}: must be an object.")
    kind = params.get("rope_type", params.get("type", "default"))
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise UnsupportedModelError(f"rope_type={kind!r}: llmq reads default, linear, llama3 and yarn.")
    if raw.get("partial_rotary_factor", params.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedModelError("partial_rotary_factor: heads that rotate only in part are not supported.")
    theta = _first(params.get("rope_theta"), raw.get("rope_theta"), 10000.0)
    if kind == "default":
        return validated(Rotary, theta=theta)
    if params.get("factor") is None:
        raise CheckpointError(f"config.json: the field 'factor' of rope_type {kind!r} is missing.")
    fields = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")
    return validated(
        Rotary,
        kind=kind,
        theta=theta,
        factor=params["factor"],
        original_max_positions=_first(params.get("original_max_position_embeddings"), raw["max_position_embeddings"]),
        **{field: params[field] for field in fields if params.get(field) is not None},
    )
