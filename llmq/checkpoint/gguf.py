"""GGUF checkpoints of the Llama family and of Gemma 3, told in Hugging Face's terms.

Rotary weights: llama.cpp rotates neighbouring features (2j, 2j + 1) where Hugging Face rotates
(j, j + head_dim / 2), so the converter of the architecture ``llama`` interleaves the rows of q and
k within each head. `unpermute` is its inverse.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from llmq.checkpoint.gguf_file import BlockTensor, Metadata, read_header
from llmq.checkpoint.gguf_tokenizer import tokenizer_files
from llmq.checkpoint.reader import TensorInfo
from llmq.errors import CheckpointError, UnsupportedModelError
from llmq.model.config import FAMILIES, ModelConfig
from llmq.model.names import EMBEDDING, FINAL_NORM, LM_HEAD, check_tensors, layer_prefix
from llmq.model.rotary import rotary_frequencies

#: Per-pair divisors of the rotary frequencies, how GGUF stores the scaling of Llama 3.1.
_ROPE_FACTORS = "rope_freqs.weight"

_TOP = MappingProxyType({"token_embd.weight": EMBEDDING, "output_norm.weight": FINAL_NORM, "output.weight": LM_HEAD})
_LAYER = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
)
_LAYER_NAME = re.compile(r"blk\.(0|[1-9][0-9]*)\.(\w+)\.(weight|bias)")

#: Names that mean another place in a layer with norms behind attention and MLP.
_FOUR_NORMS = MappingProxyType(
    {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)


@dataclass(frozen=True, slots=True)
class _Architecture:
    """What an architecture of GGUF is in Hugging Face's terms.

    Attributes:
        name: Key of `FAMILIES`.
        model_type: In ``config.json``.
        layer: Names of its tensors where they are not those of `_LAYER`.
        is_permuted: Rows of q and k are interleaved.
        fields: Makes what its ``config.json`` has beside the fields of all, from the metadata and those.
    """

    name: str
    model_type: str
    layer: Mapping[str, str] = field(default_factory=dict[str, str])
    is_permuted: bool = False
    fields: Callable[[Metadata, Mapping[str, Any]], dict[str, Any]] = lambda _metadata, _config: {"hidden_act": "silu"}


def _gemma3_fields(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of Gemma 3.

    Source:
        llama.cpp ``llama-model.cpp``, ``LLM_ARCH_GEMMA3``: what it takes for granted, and the scale of scores,
        which follows from the number of layers.
    """
    arch, is_27b = "gemma3", config["num_hidden_layers"] == 62
    local_theta = metadata.get(f"{arch}.rope.freq_base_swa", float)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"]
        if is_27b
        else config["head_dim"],
        "sliding_window": _count(metadata, arch, "attention.sliding_window"),
        "sliding_window_pattern": _count(metadata, arch, "attention.sliding_window_pattern", 6),
        "rope_local_base_freq": 10000.0 if local_theta is None else _decimal(local_theta),
    }


#: By ``general.architecture``.
_ARCHITECTURES = MappingProxyType(
    {
        "llama": _Architecture("LlamaForCausalLM", "llama", is_permuted=True),
        "qwen2": _Architecture("Qwen2ForCausalLM", "qwen2"),
        "qwen3": _Architecture("Qwen3ForCausalLM", "qwen3"),
        "gemma3": _Architecture("Gemma3ForCausalLM", "gemma3_text", _FOUR_NORMS, fields=_gemma3_fields),
    }
)

#: Metadata that changes the computation -> the only value llmq computes, and what others mean.
_NEUTRAL = MappingProxyType(
    {
        "expert_count": (0, "a mixture of experts"),
        "attention.causal": (True, "attention to later positions"),
        "attention.scale": (0.0, "a scale of its own on the scores"),
        "attention.clamp_kqv": (0.0, "clamped projections"),
        "attention.max_alibi_bias": (0.0, "ALiBi positions"),
        "embedding_scale": (1.0, "scaled embeddings"),
        "residual_scale": (1.0, "scaled residuals"),
        "logit_scale": (1.0, "scaled logits"),
        "attn_logit_softcapping": (0.0, "capped scores"),
        "final_logit_softcapping": (0.0, "capped logits"),
        "rope.scale_linear": (1.0, "an old spelling of rotary scaling"),
        "rope.scaling.attn_factor": (1.0, "a rotary attention factor of its own"),
        "rope.scaling.yarn_attn_factor": (1.0, "a rotary attention factor of its own"),
        "rope.scaling.yarn_ext_factor": (1.0, "partial YaRN extrapolation"),
        "rope.scaling.yarn_log_multiplier": (0.0, "a YaRN variant"),
    }
)

#: The same, of architectures without a window.
_NO_WINDOW = MappingProxyType({"attention.sliding_window": (0, "a sliding window")})

#: Tokens that end a turn or a text.
_END_TOKENS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))

#: Metadata -> name in ``generation_config.json``.
_SAMPLING = MappingProxyType(
    {
        "general.sampling.temp": "temperature",
        "general.sampling.top_p": "top_p",
        "general.sampling.top_k": "top_k",
        "general.sampling.min_p": "min_p",
        "general.sampling.penalty_repeat": "repetition_penalty",
    }
)


class GGUFCheckpoint:
    """Reads a file as `reader.CheckpointReader`.

    Args:
        path: A ``.gguf`` file.

    Raises:
        CheckpointError: It is damaged, truncated, incomplete or one part of several.
        UnsupportedModelError: Its architecture, or something that changes the computation, is
            not one llmq reads.
    """

    format = "gguf"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: Mapping[str, Path] = {path.name: path}
        self._metadata, stored = read_header(path)
        factors = stored.pop(_ROPE_FACTORS, None)
        self._architecture = _architecture(self._metadata)
        self._stored = {_hf_name(path, name, self._architecture): tensor for name, tensor in stored.items()}
        self.tensors: Mapping[str, TensorInfo] = {name: tensor.info for name, tensor in self._stored.items()}
        self.config: Mapping[str, Any] = _rebuild_config(self._metadata, self.tensors, self._architecture)
        try:
            check_tensors({name: info.shape for name, info in self.tensors.items()}, ModelConfig.from_dict(self.config))
        except CheckpointError as err:
            raise type(err)(f"{path}: {err}") from err
        if factors is not None:
            self.config = {**self.config, "rope_scaling": _llama3_scaling(self.config, factors)}

    def read(self, name: str) -> np.ndarray:
        """One tensor, rotary rows and norms as Hugging Face has them; see `reader.CheckpointReader.read`."""
        array = self._stored[name].read()
        offset = FAMILIES[self._architecture.name].norm_offset
        if offset and name.endswith("norm.weight"):
            return (array.astype(np.float32) - np.float32(offset)).astype(array.dtype)
        if not self._architecture.is_permuted:
            return array
        if ".q_proj." in name:
            return unpermute(array, self.config["num_attention_heads"])
        if ".k_proj." in name:
            return unpermute(array, self.config["num_key_value_heads"])
        return array

    def side_files(self) -> dict[str, bytes]:
        """Tokenizer, chat template and generation defaults, rebuilt from the metadata."""
        return {**tokenizer_files(self._metadata), "generation_config.json": _generation_config(self._metadata)}


def unpermute(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo the interleaving of rotary rows: within each head, even rows first, then odd ones.

    Args:
        array: Weight `[num_heads * head_dim, I]` or bias `[num_heads * head_dim]`.
        num_heads: Heads along the first axis.

    Returns:
        A copy in Hugging Face's order.

    Source:
        llama.cpp ``convert_hf_to_gguf.py``, ``LlamaModel.permute``.
    """
    pairs = array.reshape(num_heads, -1, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)


def _architecture(metadata: Metadata) -> _Architecture:
    arch = metadata.require("general.architecture", str)
    if arch not in _ARCHITECTURES:
        raise UnsupportedModelError(
            f"{metadata.path}: general.architecture is {arch!r}; llmq reads {', '.join(_ARCHITECTURES)} from GGUF."
        )
    return _ARCHITECTURES[arch]


def _hf_name(path: Path, name: str, architecture: _Architecture) -> str:
    match, layer = _LAYER_NAME.fullmatch(name), {**_LAYER, **architecture.layer}
    if match and match[2] in layer:
        return f"{layer_prefix(int(match[1]))}{layer[match[2]]}.{match[3]}"
    if name in _TOP:
        return _TOP[name]
    raise UnsupportedModelError(
        f"{path}: tensor {name!r} is not one of a {architecture.name}; llmq leaves no tensor unaccounted for."
    )


def _rebuild_config(
    metadata: Metadata, tensors: Mapping[str, TensorInfo], architecture: _Architecture
) -> dict[str, Any]:
    """The ``config.json`` that the converter read, as far as the model needs it."""
    path, arch = metadata.path, metadata.require("general.architecture", str)
    neutrals = {} if FAMILIES[architecture.name].sliding_window else _NO_WINDOW
    for key, (neutral, meaning) in {**_NEUTRAL, **neutrals}.items():
        value = metadata.get(f"{arch}.{key}", type(neutral))
        if value not in (None, neutral):
            raise UnsupportedModelError(
                f"{path}: {arch}.{key} is {value}, {meaning}, which llmq does not read from GGUF."
            )
    if EMBEDDING not in tensors:
        raise CheckpointError(f"{path}: has no tensor token_embd.weight; it is incomplete.")
    count = partial(_count, metadata, arch)
    layers, heads, hidden = count("block_count"), count("attention.head_count"), count("embedding_length")
    if layers > len(tensors):
        raise CheckpointError(
            f"{path}: {arch}.block_count is {layers} for {len(tensors)} tensors; the file is damaged."
        )
    head_dim = count("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if count(key, head_dim) != head_dim:
            raise UnsupportedModelError(
                f"{path}: {arch}.{key} is {count(key)} where heads have {head_dim} features; llmq reads equal ones."
            )
    optional = {
        "rope_scaling": _rope_scaling(metadata, arch),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": _end_tokens(metadata),
    }
    config = {
        "architectures": [architecture.name],
        "model_type": architecture.model_type,
        "vocab_size": tensors[EMBEDDING].shape[0],
        "hidden_size": hidden,
        "intermediate_size": count("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": count("context_length"),
        "rms_norm_eps": _decimal(metadata.require(f"{arch}.attention.layer_norm_rms_epsilon", float)),
        "rope_theta": _decimal(metadata.get(f"{arch}.rope.freq_base", float) or 10000.0),
        "tie_word_embeddings": LM_HEAD not in tensors,
        "attention_bias": f"{layer_prefix(0)}self_attn.q_proj.bias" in tensors,
        "mlp_bias": f"{layer_prefix(0)}mlp.gate_proj.bias" in tensors,
        "dtype": max((t.dtype for t in tensors.values() if len(t.shape) == 2), key=lambda d: d.itemsize).name,
        **{key: value for key, value in optional.items() if value is not None},
    }
    return {**config, **architecture.fields(metadata, config)}


def _count(metadata: Metadata, arch: str, key: str, default: int | None = None) -> int:
    name = f"{arch}.{key}"
    value = metadata.get(name, int)
    if value is None:
        value = metadata.require(name, int) if default is None else default
    if value < 1:
        raise CheckpointError(f"{metadata.path}: {name} is {value}; it must be 1 or more.")
    return value


def _decimal(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-5, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _end_tokens(metadata: Metadata) -> int | list[int] | None:
    ids = list(dict.fromkeys(i for i in (metadata.get(key, int) for key in _END_TOKENS) if i is not None))
    return ids if len(ids) > 1 else next(iter(ids), None)


def _generation_config(metadata: Metadata) -> bytes:
    sampling = {name: metadata.get(key, int if name == "top_k" else float) for key, name in _SAMPLING.items()}
    sampling = {
        name: value if name == "top_k" else _decimal(value) for name, value in sampling.items() if value is not None
    }
    ids = {"bos_token_id": metadata.get("tokenizer.ggml.bos_token_id", int), "eos_token_id": _end_tokens(metadata)}
    known = {key: value for key, value in ids.items() if value is not None}
    return json.dumps({**known, **({"do_sample": True} if sampling else {}), **sampling}, indent=2).encode()


def _rope_scaling(metadata: Metadata, arch: str) -> dict[str, Any] | None:
    prefix = f"{arch}.rope.scaling"
    kind = metadata.get(f"{prefix}.type", str)
    if kind in (None, "none"):
        return None
    if kind not in ("linear", "yarn"):
        raise UnsupportedModelError(
            f"{metadata.path}: {prefix}.type is {kind!r}; llmq reads none, linear and yarn from GGUF."
        )
    scaling = {
        "rope_type": kind,
        "factor": _decimal(metadata.require(f"{prefix}.factor", float)),
        "original_max_position_embeddings": metadata.get(f"{prefix}.original_context_length", int),
        "beta_fast": metadata.get(f"{prefix}.yarn_beta_fast", float),
        "beta_slow": metadata.get(f"{prefix}.yarn_beta_slow", float),
    }
    return {key: value for key, value in scaling.items() if value is not None}


def _llama3_scaling(config: Mapping[str, Any], tensor: BlockTensor) -> dict[str, Any]:
    """The parameters of Llama 3.1's scaling behind its per-pair divisors, which they must reproduce.

    A divisor is ``1 / ((1 - s) / factor + s)`` with s, clipped to [0, 1], ``(context / wavelength
    - low) / (high - low)``. Scaling context, low and high together changes nothing, so ``low = 1``
    and ``high = 4`` as Meta publishes them, and any pair inside the band gives the context.
    """
    refusal = UnsupportedModelError(
        f"{tensor.path}: {_ROPE_FACTORS} does not follow the rotary scaling of Llama 3.1; llmq reads no other divisors."
    )
    factors = tensor.read().astype(np.float64).ravel()
    plain, _ = rotary_frequencies(ModelConfig.from_dict(config))
    if "rope_scaling" in config or factors.size != plain.size or not np.all(np.isfinite(factors) & (factors >= 1)):
        raise refusal
    factor = factors.max()
    inside = np.flatnonzero((factors > 1) & (factors < factor))
    if not inside.size:
        raise refusal
    pair = inside[0]
    smooth = (1 / factors[pair] - 1 / factor) / (1 - 1 / factor)
    context = (3 * smooth + 1) * 2 * math.pi / plain[pair]
    scaling = {
        "rope_type": "llama3",
        "factor": _decimal(factor),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": round(context),
    }
    scaled, _ = rotary_frequencies(ModelConfig.from_dict({**config, "rope_scaling": scaling}))
    if not np.allclose(plain / scaled, factors, rtol=2e-5, atol=0):
        raise refusal
    return scaling
