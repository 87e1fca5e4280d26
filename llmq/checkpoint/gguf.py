"""GGUF files of the Llama family: the container read strictly, the model told in Hugging Face's terms.

A file is a header (metadata, then name, shape, type and offset of every tensor) and aligned
tensor data. The header is parsed here and not by ``gguf.GGUFReader``, which takes seconds over a
vocabulary and does not end on some damaged counts; block formats are decoded by ``gguf.quants``.

Rotary weights: llama.cpp rotates neighbouring features (2j, 2j + 1) where Hugging Face rotates
(j, j + head_dim / 2), so the converter of the architecture ``llama`` interleaves the rows of q and
k within each head. `unpermute` is its inverse.
"""

import json
import math
import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from llmq.checkpoint.reader import TensorInfo
from llmq.errors import CheckpointError, UnsupportedModelError
from llmq.model.config import ModelConfig
from llmq.model.names import EMBEDDING, FINAL_NORM, LM_HEAD, check_tensors, layer_prefix
from llmq.model.rotary import rotary_frequencies

T = TypeVar("T", int, float, bool, str)

MAGIC = b"GGUF"
VERSIONS = (2, 3)

#: Code of a scalar type in the header -> struct format, little-endian.
_SCALARS: MappingProxyType[int, str] = MappingProxyType(
    dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
)
_STRING, _ARRAY = 8, 9

#: Formats stored as plain numbers -> dtype.
_PLAIN = MappingProxyType(
    {
        GGMLQuantizationType.F32: np.dtype(np.float32),
        GGMLQuantizationType.F16: np.dtype(np.float16),
        GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
    }
)
#: Formats stored as blocks of codes, read as float32.
_BLOCKS = (
    GGMLQuantizationType.Q8_0,
    GGMLQuantizationType.Q4_0,
    GGMLQuantizationType.Q4_1,
    GGMLQuantizationType.Q5_0,
    GGMLQuantizationType.Q5_1,
    GGMLQuantizationType.Q2_K,
    GGMLQuantizationType.Q3_K,
    GGMLQuantizationType.Q4_K,
    GGMLQuantizationType.Q5_K,
    GGMLQuantizationType.Q6_K,
)

#: Elements of a block tensor decoded at once.
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Metadata:
    """The key-value part of a file's header, read with a check of the type.

    Attributes:
        path: The file, for messages.
        values: Key -> bool, int, float, str, or a list of one of them.
    """

    path: Path
    values: Mapping[str, Any]

    def get(self, key: str, kind: type[T]) -> T | None:
        """A scalar, or None where the file does not give it.

        Args:
            key: Full name.
            kind: bool, int, float or str; an int passes as float.

        Returns:
            The value.

        Raises:
            CheckpointError: The value has another type.
        """
        value = self.values.get(key)
        if value is None or type(value) is kind:
            return value
        if kind is float and type(value) is int:
            return kind(value)
        raise CheckpointError(f"{self.path}: {key} is a {type(value).__name__}; llmq reads it as one {kind.__name__}.")

    def require(self, key: str, kind: type[T]) -> T:
        """As `get`, for a value that must be there.

        Args:
            key: Full name.
            kind: As for `get`.

        Returns:
            The value.

        Raises:
            CheckpointError: The value is missing or has another type.
        """
        value = self.get(key, kind)
        if value is None:
            raise CheckpointError(f"{self.path}: the metadata has no {key}; convert the model to GGUF again.")
        return value

    def array(self, key: str, kind: type[T]) -> list[T] | None:
        """A list, or None where the file does not give it.

        Args:
            key: Full name.
            kind: Type of every element.

        Returns:
            The elements.

        Raises:
            CheckpointError: The value is not a list of `kind`.
        """
        value = self.values.get(key)
        if value is not None and not (isinstance(value, list) and all(type(item) is kind for item in value)):
            raise CheckpointError(f"{self.path}: {key} is not a list of {kind.__name__}.")
        return value


@dataclass(frozen=True, slots=True)
class BlockTensor:
    """Where a tensor lies.

    Attributes:
        path: File.
        type: Block format.
        shape: Sizes, slowest first.
        offset: First byte, counted from the start of the file.
    """

    path: Path
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, which is a whole number of blocks."""
        block, size = GGML_QUANT_SIZES[self.type]
        return self.shape[-1] // block * size

    @property
    def num_bytes(self) -> int:
        """Length in bytes."""
        return math.prod(self.shape[:-1]) * self.row_bytes

    @property
    def info(self) -> TensorInfo:
        """Its description."""
        return TensorInfo(self.shape, _PLAIN.get(self.type, np.dtype(np.float32)), self.num_bytes, self.path.name)

    def read(self) -> np.ndarray:
        """Decode it.

        Returns:
            The tensor, in memory of its own.

        Raises:
            CheckpointError: The file ended early.
        """
        raw = np.fromfile(self.path, np.uint8, self.num_bytes, offset=self.offset)
        if raw.size != self.num_bytes:
            raise CheckpointError(f"{self.path}: ended after {raw.size} of a tensor's {self.num_bytes} bytes.")
        if self.type in _PLAIN:
            return raw.view(_PLAIN[self.type]).reshape(self.shape)
        rows = raw.reshape(-1, self.row_bytes)
        decoded = np.empty((len(rows), self.shape[-1]), np.float32)
        step = max(1, _CHUNK // self.shape[-1])
        with np.errstate(invalid="ignore", over="ignore"):  # a damaged scale becomes a NaN or inf: seen downstream
            for start in range(0, len(rows), step):
                decoded[start : start + step] = dequantize(rows[start : start + step], self.type)
        return decoded.reshape(self.shape)


def read_header(path: Path) -> tuple[Metadata, dict[str, BlockTensor]]:
    """Read and check the header of a file.

    Args:
        path: A ``.gguf`` file.

    Returns:
        The metadata, and name -> place of every tensor.

    Raises:
        CheckpointError: The file is truncated or damaged, of an unknown version, or a part of several.
        UnsupportedModelError: A tensor is stored in a format llmq does not decode.
    """
    size = path.stat().st_size
    if size < 24:
        raise CheckpointError(f"{path}: has {size} bytes, less than the header of a GGUF file; it is truncated.")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        _check_version(path, data[:4], int.from_bytes(data[4:8], "little"))
        try:
            cursor = _Cursor(data, 8)
            num_tensors, num_values = cursor.scalar("Q"), cursor.scalar("Q")
            values = _unique((cursor.string(), cursor.value()) for _ in range(num_values))
            rows = _unique((cursor.string(), cursor.tensor()) for _ in range(num_tensors))
        except (struct.error, ValueError, OverflowError) as err:
            raise CheckpointError(f"{path}: the header is damaged or truncated ({err}).") from err
    metadata = Metadata(path, values)
    if (metadata.get("split.count", int) or 1) > 1:
        raise CheckpointError(
            f"{path}: is one of {values['split.count']} parts; join them with llama-gguf-split --merge."
        )
    alignment = metadata.get("general.alignment", int)
    alignment = 32 if alignment is None else alignment
    if alignment < 1 or alignment & (alignment - 1):
        raise CheckpointError(f"{path}: general.alignment is {alignment}, not a power of two; the header is damaged.")
    start = -(-cursor.position // alignment) * alignment
    tensors = {name: _place(path, name, start, *row) for name, row in rows.items()}
    _check_extents(path, tensors, start, size)
    return metadata, tensors


def _check_version(path: Path, magic: bytes, version: int) -> None:
    if magic != MAGIC:
        raise CheckpointError(f"{path}: does not begin with GGUF; it is not a GGUF file.")
    if version and version & 0xFFFF == 0:
        raise CheckpointError(f"{path}: is a big-endian GGUF file; llmq reads little-endian ones.")
    if version not in VERSIONS:
        raise CheckpointError(
            f"{path}: is GGUF version {version}; llmq reads versions 2 and 3, so convert the model again."
        )


class _Cursor:
    """Reads the parts of a header in order; running past the end is a ValueError or struct.error."""

    def __init__(self, data: mmap.mmap, position: int) -> None:
        self._data = data
        self.position = position

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._data, self.position)
        self.position += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        end = self.position + length
        if end > len(self._data):
            raise ValueError(f"a text of {length} bytes runs past the end")
        text = self._data[self.position : end]
        self.position = end
        return text.decode()

    def value(self) -> Any:
        kind = self.scalar("I")
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(self.scalar("I"), self.scalar("Q"))
        return self.scalar(_scalar_code(kind))

    def _array(self, kind: int, count: int) -> list[Any]:
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        code = f"<{count}{_scalar_code(kind)}"
        end = self.position + count * struct.calcsize("<" + _scalar_code(kind))
        if end > len(self._data):
            raise ValueError(f"a list of {count} numbers runs past the end")
        values = list(struct.unpack_from(code, self._data, self.position))
        self.position = end
        return values

    def tensor(self) -> tuple[tuple[int, ...], int, int]:
        """Shape slowest first, format code, and offset into the data."""
        num_dims = self.scalar("I")
        if not 1 <= num_dims <= 4:
            raise ValueError(f"a tensor of {num_dims} dimensions")
        shape = tuple(self.scalar("Q") for _ in range(num_dims))
        return shape[::-1], self.scalar("I"), self.scalar("Q")


def _scalar_code(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"unknown value type {kind}")
    return _SCALARS[kind]


def _unique(pairs: Iterator[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} appears twice")
        found[name] = value
    return found


def _place(path: Path, name: str, start: int, shape: tuple[int, ...], code: int, offset: int) -> BlockTensor:
    known = (*_PLAIN, *_BLOCKS)
    if code not in known:
        stored = {kind.value: kind.name for kind in GGMLQuantizationType}.get(code, f"format {code}")
        raise UnsupportedModelError(
            f"{path}: tensor {name!r} is stored as {stored}; llmq decodes {', '.join(t.name for t in known)}."
        )
    tensor = BlockTensor(path, GGMLQuantizationType(code), shape, start + offset)
    block = GGML_QUANT_SIZES[tensor.type][0]
    if min(shape) < 1 or shape[-1] % block:
        raise CheckpointError(
            f"{path}: tensor {name!r} has shape {list(shape)}, which {tensor.type.name} blocks of {block} do not fill."
        )
    return tensor


def _check_extents(path: Path, tensors: Mapping[str, BlockTensor], start: int, size: int) -> None:
    end = start
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
        if tensor.offset < end:
            raise CheckpointError(f"{path}: tensor {name!r} overlaps the one before it; the header is damaged.")
        end = tensor.offset + tensor.num_bytes
        if end > size:
            raise CheckpointError(f"{path}: tensor {name!r} ends at byte {end} of a {size} byte file; it is truncated.")


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

#: ``general.architecture`` -> architecture in ``config.json``.
_ARCHITECTURES = MappingProxyType(
    {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
)
#: The one whose q and k rows are interleaved.
_PERMUTED = "llama"

#: Metadata that changes the computation -> the only value llmq computes, and what others mean.
_NEUTRAL = MappingProxyType(
    {
        "expert_count": (0, "a mixture of experts"),
        "attention.causal": (True, "attention to later positions"),
        "attention.sliding_window": (0, "a sliding window"),
        "attention.scale": (0.0, "a scale of its own on the scores"),
        "attention.clamp_kqv": (0.0, "clamped projections"),
        "attention.max_alibi_bias": (0.0, "ALiBi positions"),
        "embedding_scale": (1.0, "scaled embeddings"),
        "residual_scale": (1.0, "scaled residuals"),
        "logit_scale": (1.0, "scaled logits"),
        "rope.scale_linear": (1.0, "an old spelling of rotary scaling"),
        "rope.scaling.attn_factor": (1.0, "a rotary attention factor of its own"),
        "rope.scaling.yarn_attn_factor": (1.0, "a rotary attention factor of its own"),
        "rope.scaling.yarn_ext_factor": (1.0, "partial YaRN extrapolation"),
        "rope.scaling.yarn_log_multiplier": (0.0, "a YaRN variant"),
    }
)

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
        self._stored = {_hf_name(path, name): tensor for name, tensor in stored.items()}
        self.tensors: Mapping[str, TensorInfo] = {name: tensor.info for name, tensor in self._stored.items()}
        self.config: Mapping[str, Any] = _rebuild_config(self._metadata, self.tensors)
        try:
            check_tensors({name: info.shape for name, info in self.tensors.items()}, ModelConfig.from_dict(self.config))
        except CheckpointError as err:
            raise type(err)(f"{path}: {err}") from err
        if factors is not None:
            self.config = {**self.config, "rope_scaling": _llama3_scaling(self.config, factors)}

    def read(self, name: str) -> np.ndarray:
        """One tensor, its rotary rows in Hugging Face's order; see `reader.CheckpointReader.read`."""
        array = self._stored[name].read()
        if self.config["model_type"] != _PERMUTED:
            return array
        if ".q_proj." in name:
            return unpermute(array, self.config["num_attention_heads"])
        if ".k_proj." in name:
            return unpermute(array, self.config["num_key_value_heads"])
        return array

    def side_files(self) -> dict[str, bytes]:
        """Tokenizer, chat template and generation defaults, rebuilt from the metadata."""
        from llmq.checkpoint.gguf_tokenizer import tokenizer_files

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


def _hf_name(path: Path, name: str) -> str:
    match = _LAYER_NAME.fullmatch(name)
    if match and match[2] in _LAYER:
        return f"{layer_prefix(int(match[1]))}{_LAYER[match[2]]}.{match[3]}"
    if name in _TOP:
        return _TOP[name]
    raise UnsupportedModelError(
        f"{path}: tensor {name!r} is not one of a Llama, Qwen2 or Qwen3 model; llmq leaves no tensor unaccounted for."
    )


def _rebuild_config(metadata: Metadata, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """The ``config.json`` that the converter read, as far as the model needs it."""
    path, arch = metadata.path, metadata.require("general.architecture", str)
    if arch not in _ARCHITECTURES:
        raise UnsupportedModelError(
            f"{path}: general.architecture is {arch!r}; llmq reads {', '.join(_ARCHITECTURES)} from GGUF."
        )
    for key, (neutral, meaning) in _NEUTRAL.items():
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
    return {
        "architectures": [_ARCHITECTURES[arch]],
        "model_type": arch,
        "vocab_size": tensors[EMBEDDING].shape[0],
        "hidden_size": hidden,
        "intermediate_size": count("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": count("context_length"),
        "rms_norm_eps": _decimal(metadata.require(f"{arch}.attention.layer_norm_rms_epsilon", float)),
        "rope_theta": _decimal(metadata.get(f"{arch}.rope.freq_base", float) or 10000.0),
        "tie_word_embeddings": LM_HEAD not in tensors,
        "attention_bias": f"{layer_prefix(0)}self_attn.q_proj.bias" in tensors,
        "mlp_bias": f"{layer_prefix(0)}mlp.gate_proj.bias" in tensors,
        "dtype": max((t.dtype for t in tensors.values() if len(t.shape) == 2), key=lambda d: d.itemsize).name,
        **{key: value for key, value in optional.items() if value is not None},
    }


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
