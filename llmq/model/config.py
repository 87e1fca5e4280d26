"""What a decoder is, apart from its weights: read from ``config.json``, used by every backend.

`ModelConfig` describes a model by data. A family is a row of `FAMILIES`; what the row does not
say is read from the file, in the spelling of transformers 4 (``rope_theta``, ``torch_dtype``) or
5 (``rope_parameters``, ``dtype``).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

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
    """

    attention_bias: bool | None = None
    output_bias: bool | None = None
    qk_norm: bool = False
    sliding_window: bool = False


#: Architecture name in ``config.json`` -> what it fixes.
FAMILIES: MappingProxyType[str, Family] = MappingProxyType(
    {
        "LlamaForCausalLM": Family(),
        "MistralForCausalLM": Family(attention_bias=False, sliding_window=True),
        "Qwen2ForCausalLM": Family(attention_bias=True, output_bias=False),
        "Qwen3ForCausalLM": Family(qk_norm=True),
    }
)


#: A size of a tensor, a factor, and a count that bounds a loop.
_Size = Annotated[int, Field(gt=0, le=1 << 40)]
_Factor = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(gt=0, le=4096)]


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


class ModelConfig(Frozen):
    """A decoder of the Llama family.

    Every layer is: RMS norm, grouped-query attention with rotary positions, residual; RMS norm,
    gated MLP ``down(silu(gate(x)) * up(x))``, residual.

    Attributes:
        architecture: Key of `FAMILIES`.
        vocab_size, hidden_size, intermediate_size, head_dim: Sizes of the tensors.
        num_layers, num_heads, num_kv_heads: Counts.
        max_positions: Context length.
        norm_eps: Added to the mean square before its root.
        tie_embeddings: The head is the embedding matrix.
        attention_bias, output_bias, mlp_bias: Which linears have one.
        qk_norm: RMS norm over each head of q and k.
        sliding_window: Positions a token sees back, itself included; None sees all.
        rotary: Position embedding.
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
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

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
        if raw.get("hidden_act", "silu") != "silu":
            raise UnsupportedModelError(
                f"hidden_act={raw['hidden_act']!r}: {architecture} is supported with 'silu' only."
            )
        missing = [field for field in _REQUIRED if raw.get(field) is None]
        if missing:
            raise CheckpointError(f"config.json: the field {missing[0]!r} is missing.")
        attention_bias = _first(family.attention_bias, raw.get("attention_bias"), False)
        try:
            return validated(
                cls,
                architecture=architecture,
                vocab_size=raw["vocab_size"],
                hidden_size=raw["hidden_size"],
                intermediate_size=raw["intermediate_size"],
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
                sliding_window=_sliding_window(raw, family),
                rotary=_rotary(raw),
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


def _architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and names else names
    if not isinstance(name, str) or name not in FAMILIES:
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


def _sliding_window(raw: Mapping[str, Any], family: Family) -> Any:
    window = raw.get("sliding_window")
    if window is None or not raw.get("use_sliding_window", family.sliding_window):
        return None
    kinds = raw.get("layer_types") or ["sliding_attention"]
    if all(kind == "full_attention" for kind in kinds):
        return None
    mixed = any(kind != "sliding_attention" for kind in kinds)
    if mixed or (raw.get("max_window_layers") or 0) not in (0, raw["num_hidden_layers"]):
        raise UnsupportedModelError(
            "layer_types: layers with and without a sliding window in one model are not supported."
        )
    return window


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
