"""What a decoder is, apart from its weights: read from ``config.json``, used by every backend.

`ModelConfig` describes a model by data. A family is a row of `FAMILIES`; what the row does not
say is read from the file, in the spelling of transformers 4 (``rope_theta``, ``torch_dtype``) or
5 (``rope_parameters``, ``dtype``).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from llmq.config import Frozen
from llmq.errors import CheckpointError, UnsupportedModelError


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
    theta: float = 10000.0
    factor: float = 1.0
    original_max_positions: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None


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
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    tie_embeddings: bool
    attention_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_window: int | None
    rotary: Rotary
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

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
            CheckpointError: A field is missing or has the wrong type.
        """
        architecture = (raw.get("architectures") or ["(none)"])[0]
        family = FAMILIES.get(architecture)
        if family is None:
            raise UnsupportedModelError(
                f"architecture {architecture}: llmq reads {', '.join(FAMILIES)}; see CONTRIBUTING.md for adding a family."
            )
        activation = raw.get("hidden_act", "silu")
        if activation != "silu":
            raise UnsupportedModelError(f"hidden_act={activation!r}: {architecture} is supported with 'silu' only.")
        try:
            num_heads = int(raw["num_attention_heads"])
            attention_bias = _first(family.attention_bias, raw.get("attention_bias"), False)
            return cls(
                architecture=architecture,
                vocab_size=raw["vocab_size"],
                hidden_size=raw["hidden_size"],
                intermediate_size=raw["intermediate_size"],
                num_layers=raw["num_hidden_layers"],
                num_heads=num_heads,
                num_kv_heads=_first(raw.get("num_key_value_heads"), num_heads),
                head_dim=_first(raw.get("head_dim"), raw["hidden_size"] // num_heads),
                max_positions=raw["max_position_embeddings"],
                norm_eps=raw["rms_norm_eps"],
                tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
                attention_bias=attention_bias,
                output_bias=_first(family.output_bias, attention_bias),
                mlp_bias=bool(raw.get("mlp_bias", False)),
                qk_norm=family.qk_norm,
                sliding_window=_sliding_window(raw, family),
                rotary=_rotary(raw),
                eos_token_ids=_token_ids(raw.get("eos_token_id")),
                bos_token_id=raw.get("bos_token_id"),
            )
        except KeyError as err:
            raise CheckpointError(f"config.json: the field {err.args[0]!r} is missing.") from err
        except (TypeError, ValueError) as err:
            raise CheckpointError(f"config.json: a field has the wrong type ({str(err).splitlines()[0]}).") from err


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)


def _sliding_window(raw: Mapping[str, Any], family: Family) -> int | None:
    window = raw.get("sliding_window")
    if window is None or not raw.get("use_sliding_window", family.sliding_window):
        return None
    kinds = set(raw.get("layer_types") or ["sliding_attention"])
    if kinds == {"full_attention"}:
        return None
    if len(kinds) > 1 or 0 < raw.get("max_window_layers", 0) < raw["num_hidden_layers"]:
        raise UnsupportedModelError(
            "layer_types: layers with and without a sliding window in one model are not supported."
        )
    return int(window)


def _rotary(raw: Mapping[str, Any]) -> Rotary:
    params = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = params.get("rope_type", params.get("type", "default"))
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise UnsupportedModelError(f"rope_type={kind!r}: llmq reads default, linear, llama3 and yarn.")
    if raw.get("partial_rotary_factor", params.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedModelError("partial_rotary_factor: heads that rotate only in part are not supported.")
    theta = _first(params.get("rope_theta"), raw.get("rope_theta"), 10000.0)
    if kind == "default":
        return Rotary(theta=theta)
    fields = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")
    return Rotary(
        kind=kind,
        theta=theta,
        factor=params["factor"],
        original_max_positions=_first(params.get("original_max_position_embeddings"), raw["max_position_embeddings"]),
        **{field: params[field] for field in fields if params.get(field) is not None},
    )
