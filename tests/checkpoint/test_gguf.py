"""Reading GGUF: every block format, the rotary rows, the rebuilt config, and damaged files."""

import re
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Format
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmq.backends.reference import forward
from llmq.checkpoint.gguf import GGUFCheckpoint, unpermute
from llmq.checkpoint.loader import ModelWeights, load_weights
from llmq.checkpoint.reader import open_checkpoint
from llmq.errors import CheckpointError, LlmqError, UnsupportedModelError
from llmq.model.config import ModelConfig
from llmq.model.rotary import rotary_frequencies
from tests.tiny import GEMMA3, random_tensors, tiny_config, write_checkpoint

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
DOWN = "model.layers.0.mlp.down_proj.weight"  # rows of 256: whole K-quant blocks
#: Metadata to add to a file, or tensors by their GGUF names.
Extra = dict[str, Any]


#: What a layer with four norms calls them, by architecture.
FOUR_NORMS = {
    "gemma3": {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    }
}


def gguf_name(name: str, arch: str = "llama") -> str:
    for long, short in {**NAMES, **FOUR_NORMS.get(arch, {})}.items():
        name = name.replace(long, short)
    return name


def permute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k of a Llama."""
    return weight.reshape(num_heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    config: dict[str, Any],
    tensors: dict[str, np.ndarray],
    arch: str = "llama",
    formats: dict[str, Format] | None = None,
    metadata: Extra | None = None,
) -> Path:
    """Write a Hugging Face model as llama.cpp's converter would."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if arch == "gemma3":
        writer.add_sliding_window(config["sliding_window"])
    for key, value in (metadata or {}).items():
        add_value(writer, key.format(arch=arch), value)
    for name, tensor in tensors.items():
        kind = (formats or {}).get(name, Format.F32 if "norm" in name else Format.BF16)
        if arch == "llama" and ".q_proj." in name:
            tensor = permute(tensor, config["num_attention_heads"])
        if arch == "llama" and ".k_proj." in name:
            tensor = permute(tensor, config["num_key_value_heads"])
        if arch == "gemma3" and "norm" in name:
            tensor = tensor.astype(np.float32) + 1
        raw = tensor if tensor.dtype == np.uint8 else gguf.quants.quantize(tensor.astype(np.float32), kind)
        writer.add_tensor(gguf_name(name, arch), raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    adders: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    if key == "general.architecture":
        writer.kv_data[0][key].value = value
    elif key in writer.kv_data[0]:
        del writer.kv_data[0][key]
        adders[type(value)](key, value)
    else:
        adders[type(value)](key, value)


def tiny_gguf(path: Path, arch: str = "llama", metadata: Extra | None = None, **changes: Any) -> Path:
    config = tiny_config(**changes)
    return write_gguf(path, config, random_tensors(config), arch, metadata=metadata)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small valid file with a tokenizer."""
    path = tmp_path_factory.mktemp("whole") / "model.gguf"
    tokens = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": ["a", "b", "ab"],
        "tokenizer.ggml.token_type": [1, 1, 1],
        "tokenizer.ggml.merges": ["a b"],
    }
    tiny_gguf(path, metadata=tokens, num_hidden_layers=1, vocab_size=32, hidden_size=64, intermediate_size=32)
    return path.read_bytes()


class TestRealModel:
    def test_opening_is_quick(self, smollm2_gguf: Path) -> None:
        GGUFCheckpoint(smollm2_gguf)
        start = time.process_time()
        checkpoint = GGUFCheckpoint(smollm2_gguf)
        assert time.process_time() - start < 1
        assert len(checkpoint.tensors) == 272
        assert sum(info.num_bytes for info in checkpoint.tensors.values()) == pytest.approx(96.6e6, rel=0.01)

    def test_config(self, smollm2_gguf: Path) -> None:
        assert open_checkpoint(str(smollm2_gguf)).config == {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "hidden_act": "silu",
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_theta": 100000.0,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "mlp_bias": False,
            "dtype": "float32",
            "bos_token_id": 1,
            "eos_token_id": 2,
        }

    @pytest.mark.slow
    def test_every_tensor_equals_transformers(self, smollm2_gguf: Path) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

        config = AutoConfig.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(config)
        oracle = load_gguf_checkpoint(str(smollm2_gguf), return_tensors=True, model_to_load=empty)["tensors"]
        checkpoint = GGUFCheckpoint(smollm2_gguf)
        assert set(checkpoint.tensors) == set(oracle)
        for name in oracle:
            np.testing.assert_array_equal(checkpoint.read(name), oracle[name].numpy(), name)


class TestFormats:
    @pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
    def test_quantizable_format(self, kind: str, tmp_path: Path) -> None:
        config = tiny_config(num_hidden_layers=1)
        tensors = random_tensors(config)
        path = write_gguf(tmp_path / "m.gguf", config, tensors, formats={DOWN: Format[kind]})
        stored = gguf.quants.quantize(tensors[DOWN].astype(np.float32), Format[kind])
        self.check(path, Format[kind], stored)

    @pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
    def test_k_quant(self, kind: str, tmp_path: Path) -> None:
        config = tiny_config(num_hidden_layers=1)
        tensors = random_tensors(config)
        _, size = gguf.GGML_QUANT_SIZES[Format[kind]]
        rng = np.random.default_rng(3)
        tensors[DOWN] = rng.integers(0, 256, (config["hidden_size"], size), dtype=np.uint8)
        path = write_gguf(tmp_path / "m.gguf", config, tensors, formats={DOWN: Format[kind]})
        self.check(path, Format[kind], tensors[DOWN])

    def check(self, path: Path, kind: Format, stored: np.ndarray) -> None:
        checkpoint = GGUFCheckpoint(path)
        with np.errstate(all="ignore"):
            expected = gguf.quants.dequantize(stored.view(np.uint8), kind)
        info, array = checkpoint.tensors[DOWN], checkpoint.read(DOWN)
        dtypes = {Format.F16: np.float16, Format.BF16: ml_dtypes.bfloat16}
        assert (info.shape, info.num_bytes, info.file) == ((128, 256), stored.nbytes, "m.gguf")
        assert array.dtype == info.dtype == dtypes.get(kind, np.float32)
        assert array.shape == info.shape
        assert array.flags.writeable
        np.testing.assert_array_equal(array.astype(np.float32), expected.astype(np.float32))

    @pytest.mark.parametrize(("kind", "dtype"), [("BF16", "bfloat16"), ("F16", "float16"), ("Q8_0", "float32")])
    def test_dtype_is_that_of_the_matrices(self, kind: str, dtype: str, tmp_path: Path) -> None:
        config = tiny_config(num_hidden_layers=1)
        tensors = random_tensors(config)
        formats = {name: Format[kind] for name in tensors if "norm" not in name}
        assert (
            GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", config, tensors, formats=formats)).config["dtype"] == dtype
        )

    def test_rows_are_decoded_in_chunks_without_a_seam(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        config = tiny_config(num_hidden_layers=1)
        tensors = random_tensors(config)
        path = write_gguf(tmp_path / "m.gguf", config, tensors, formats={DOWN: Format.Q4_1})
        expected = GGUFCheckpoint(path).read(DOWN)
        monkeypatch.setattr("llmq.checkpoint.gguf_file._CHUNK", 3 * 256)
        np.testing.assert_array_equal(GGUFCheckpoint(path).read(DOWN), expected)


ARCHITECTURES = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True},
    "llama-biases": {"attention_bias": True, "mlp_bias": True},
    "llama-head_dim": {"head_dim": 64},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 64},
    "gemma3": {
        **GEMMA3,
        "query_pre_attn_scalar": 64,
        "sliding_window_pattern": None,
        "rope_local_base_freq": None,
        "num_hidden_layers": 7,
        "rope_scaling": None,
    },
}


def gguf_arch(config: dict[str, Any]) -> str:
    return config["model_type"].removesuffix("_text")


class TestModel:
    @pytest.mark.parametrize("family", ARCHITECTURES)
    def test_logits_equal_the_original_checkpoint(self, family: str, tmp_path: Path) -> None:
        config = tiny_config(**ARCHITECTURES[family])
        tensors = random_tensors(config)
        original = write_checkpoint(tmp_path / "original", config, tensors)
        path = write_gguf(tmp_path / "m.gguf", config, tensors, gguf_arch(config))
        tokens = [1, 17, 250, 3, 99, 4, 1, 5, 250, 8, 9, 31]
        np.testing.assert_array_equal(
            forward(load_weights(str(path)), tokens), forward(load_weights(str(original)), tokens)
        )

    @pytest.mark.parametrize("family", ARCHITECTURES)
    def test_description_equals_that_of_the_original_config(self, family: str, tmp_path: Path) -> None:
        config = tiny_config(bos_token_id=None, eos_token_id=None, **ARCHITECTURES[family])
        path = write_gguf(tmp_path / "m.gguf", config, random_tensors(config), gguf_arch(config))
        assert ModelConfig.from_dict(GGUFCheckpoint(path).config) == ModelConfig.from_dict(config)

    def test_unpermute_inverts_the_converter(self) -> None:
        weight, bias = np.arange(48.0).reshape(16, 3), np.arange(16)
        np.testing.assert_array_equal(unpermute(permute(weight, 2), 2), weight)
        np.testing.assert_array_equal(unpermute(permute(bias, 4), 4), bias)
        assert list(unpermute(np.array([0, 4, 1, 5, 2, 6, 3, 7]), 1)) == list(range(8))

    @pytest.mark.parametrize("eps", [1e-5, 1e-6, 9.999999974752427e-07, 1.25e-5])
    def test_eps_is_the_shortest_decimal(self, eps: float, tmp_path: Path) -> None:
        read = GGUFCheckpoint(tiny_gguf(tmp_path / "m.gguf", rms_norm_eps=eps)).config["rms_norm_eps"]
        assert read == pytest.approx(eps, rel=1e-7)
        assert len(repr(read)) <= len("1.25e-05")

    def test_every_end_token_is_named(self, tmp_path: Path) -> None:
        ids = {"tokenizer.ggml.eos_token_id": 5, "tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 5}
        checkpoint = GGUFCheckpoint(tiny_gguf(tmp_path / "m.gguf", metadata=ids))
        assert checkpoint.config["eos_token_id"] == [5, 7]
        assert b'"eos_token_id": [\n    5,\n    7\n  ]' in checkpoint.side_files()["generation_config.json"]

    def test_sampling_advice_becomes_generation_defaults(self, tmp_path: Path) -> None:
        import json

        advice = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20, "general.sampling.top_p": 0.95}
        files = GGUFCheckpoint(tiny_gguf(tmp_path / "m.gguf", metadata=advice)).side_files()
        expected = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20}
        assert json.loads(files["generation_config.json"]) == expected

    def test_without_a_vocabulary_there_is_no_tokenizer(self, tmp_path: Path) -> None:
        assert list(GGUFCheckpoint(tiny_gguf(tmp_path / "m.gguf")).side_files()) == ["generation_config.json"]


def llama3_divisors(head_dim: int, theta: float, factor: float, context: int, high: float = 4.0) -> np.ndarray:
    """llama.cpp's converter, in float32."""
    import torch

    divisors = []
    for freq in 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim):
        wavelength = 2 * np.pi / freq
        if wavelength < context / high:
            divisors.append(1.0)
        elif wavelength > context:
            divisors.append(factor)
        else:
            smooth = (context / wavelength - 1.0) / (high - 1.0)
            divisors.append(float(1 / ((1 - smooth) / factor + smooth)))
    return np.array(divisors, np.float32)


class TestRotaryScaling:
    @pytest.mark.parametrize(
        ("head_dim", "theta", "factor", "context"),
        [
            (128, 5e5, 8.0, 8192),
            (64, 5e5, 32.0, 8192),
            (128, 5e5, 32.0, 8192),
            (64, 1e4, 8.0, 64),
            (64, 1e4, 2.5, 1000),
        ],
    )
    def test_llama3_divisors_give_their_parameters(
        self, head_dim: int, theta: float, factor: float, context: int, tmp_path: Path
    ) -> None:
        divisors = llama3_divisors(head_dim, theta, factor, context)
        config = tiny_config(num_hidden_layers=1, head_dim=head_dim, rope_theta=theta)
        tensors = {**random_tensors(config), "rope_freqs.weight": divisors}
        path = write_gguf(tmp_path / "m.gguf", config, tensors, formats={"rope_freqs.weight": Format.F32})
        checkpoint = GGUFCheckpoint(path)
        assert checkpoint.config["rope_scaling"] == {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": context,
        }
        assert "rope_freqs.weight" not in checkpoint.tensors
        plain, _ = rotary_frequencies(ModelConfig.from_dict(config))
        scaled, _ = rotary_frequencies(ModelWeights(checkpoint).config)
        np.testing.assert_allclose(plain / scaled, divisors, rtol=2e-5)

    @pytest.mark.parametrize(
        "divisors",
        [
            np.linspace(1, 8, 32, dtype=np.float32),
            np.ones(32, np.float32),
            np.ones(8, np.float32),
            np.full(32, np.nan, np.float32),
            llama3_divisors(64, 1e4, 8.0, 1024, high=6.0),
        ],
        ids=["linear", "ones", "short", "nan", "other-band"],
    )
    def test_other_divisors_are_refused(self, divisors: np.ndarray, tmp_path: Path) -> None:
        config = tiny_config(num_hidden_layers=1, head_dim=64)
        tensors = {**random_tensors(config), "rope_freqs.weight": divisors}
        path = write_gguf(tmp_path / "m.gguf", config, tensors, formats={"rope_freqs.weight": Format.F32})
        with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight does not follow"):
            GGUFCheckpoint(path)

    def test_linear_and_yarn(self, tmp_path: Path) -> None:
        linear = {"{arch}.rope.scaling.type": "linear", "{arch}.rope.scaling.factor": 4.0}
        config = GGUFCheckpoint(tiny_gguf(tmp_path / "linear.gguf", metadata=linear)).config
        assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
        yarn = {**linear, "{arch}.rope.scaling.type": "yarn", "{arch}.rope.scaling.original_context_length": 128}
        config = GGUFCheckpoint(tiny_gguf(tmp_path / "yarn.gguf", metadata=yarn)).config
        assert config["rope_scaling"] == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
        none = {"{arch}.rope.scaling.type": "none"}
        assert "rope_scaling" not in GGUFCheckpoint(tiny_gguf(tmp_path / "none.gguf", metadata=none)).config


REFUSED = {
    "architecture": ({"general.architecture": "gemma2"}, UnsupportedModelError, "general.architecture is 'gemma2'"),
    "experts": ({"{arch}.expert_count": 8}, UnsupportedModelError, "llama.expert_count is 8, a mixture of experts"),
    "window": ({"{arch}.attention.sliding_window": 4096}, UnsupportedModelError, "sliding_window is 4096"),
    "logits": ({"{arch}.logit_scale": 8.0}, UnsupportedModelError, "logit_scale is 8.0"),
    "partial": (
        {"{arch}.rope.dimension_count": 16},
        UnsupportedModelError,
        "dimension_count is 16 where heads have 32",
    ),
    "longrope": ({"{arch}.rope.scaling.type": "longrope"}, UnsupportedModelError, "type is 'longrope'"),
    "split": ({"split.count": 3}, CheckpointError, "one of 3 parts"),
    "alignment": ({"general.alignment": 24}, CheckpointError, "alignment is 24"),
    "list": ({"{arch}.attention.head_count": [4, 2]}, CheckpointError, "head_count is a list"),
    "zero": ({"{arch}.attention.head_count": 0}, CheckpointError, "head_count is 0"),
    "layers": ({"{arch}.block_count": 4_000_000_000}, CheckpointError, "block_count is 4000000000 for 30 tensors"),
    "missing": ({"{arch}.block_count": 4}, CheckpointError, "model.layers.3.input_layernorm.weight"),
    "shape": ({"{arch}.embedding_length": 64, "{arch}.attention.key_length": 32}, CheckpointError, r"\[320, 128\]"),
}


class TestRefused:
    @pytest.mark.parametrize("case", REFUSED)
    def test_metadata(self, case: str, tmp_path: Path) -> None:
        metadata, error, message = REFUSED[case]
        path = tiny_gguf(tmp_path / "m.gguf", metadata=metadata)
        with pytest.raises(error, match=f"^{re.escape(str(path))}: .*{message}"):
            GGUFCheckpoint(path)

    def test_unknown_tensor(self, tmp_path: Path) -> None:
        config = tiny_config(num_hidden_layers=1)
        tensors = {**random_tensors(config), "blk.0.attn_sinks.weight": np.ones(4, np.float32)}
        with pytest.raises(UnsupportedModelError, match=r"attn_sinks\.weight' is not one of"):
            GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", config, tensors))

    def test_unknown_block_format(self, tmp_path: Path) -> None:
        config = tiny_config(num_hidden_layers=1)
        tensors = random_tensors(config)
        tensors[DOWN] = np.zeros((128, 66), np.uint8)
        path = write_gguf(tmp_path / "m.gguf", config, tensors, formats={DOWN: Format.IQ2_XXS})
        with pytest.raises(UnsupportedModelError, match=r"ffn_down\.weight' is stored as IQ2_XXS; llmq decodes F32"):
            GGUFCheckpoint(path)


def edit(data: bytes, at: int, code: str, *values: int) -> bytes:
    new = struct.pack("<" + code, *values)
    return data[:at] + new + data[at + len(new) :]


def after(data: bytes, text: bytes, skip: int = 0) -> int:
    return data.index(text) + len(text) + skip


DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda d: d[:0], "has 0 bytes"),
    "magic": (lambda d: b"GGML" + d[4:], "not a GGUF file"),
    "version 1": (lambda d: edit(d, 4, "I", 1), "GGUF version 1"),
    "version 9": (lambda d: edit(d, 4, "I", 9), "GGUF version 9"),
    "big-endian": (lambda d: edit(d, 4, "I", 3 << 24), "big-endian"),
    "tensor count": (lambda d: edit(d, 8, "Q", 2**63), "damaged or truncated"),
    "value count": (lambda d: edit(d, 16, "Q", 2**64 - 1), "damaged or truncated"),
    "key length": (lambda d: edit(d, 24, "Q", 2**64 - 1), "text of 18446744073709551615 bytes runs past the end"),
    "value type": (lambda d: edit(d, after(d, b"general.architecture"), "I", 77), "unknown value type 77"),
    "list length": (lambda d: edit(d, after(d, b"ggml.token_type", 8), "Q", 2**60), "runs past the end"),
    "list type": (lambda d: edit(d, after(d, b"ggml.token_type", 4), "I", 9), "unknown value type 9"),
    "text list length": (lambda d: edit(d, after(d, b"ggml.tokens", 8), "Q", 2**60), "damaged or truncated"),
    "not utf-8": (lambda d: d.replace(b"general.architecture", b"general.archite\xff\xfe\xfd\xfc\xfb"), "utf-8"),
    "twice": (lambda d: d.replace(b"blk.0.attn_k.weight", b"blk.0.attn_q.weight"), "attn_q.weight' appears twice"),
    "dimensions": (lambda d: edit(d, after(d, b"token_embd.weight"), "I", 2**31), "2147483648 dimensions"),
    "no elements": (lambda d: edit(d, after(d, b"output_norm.weight", 4), "Q", 0), r"has shape \[0\]"),
    "huge shape": (lambda d: edit(d, after(d, b"output_norm.weight", 4), "Q", 2**62), "is truncated"),
    "offset": (lambda d: edit(d, after(d, b"output_norm.weight", 16), "Q", 2**63), "is truncated"),
    "overlap": (lambda d: edit(d, after(d, b"output_norm.weight", 16), "Q", 0), "overlaps"),
    "format": (lambda d: edit(d, after(d, b"output_norm.weight", 12), "I", 200), "stored as format 200"),
}


class TestDamaged:
    @pytest.mark.parametrize("case", DAMAGE)
    def test_is_one_sentence_that_names_the_file(self, case: str, whole: bytes, tmp_path: Path) -> None:
        damage, message = DAMAGE[case]
        path = tmp_path / "m.gguf"
        path.write_bytes(damage(whole))
        start = time.process_time()
        with pytest.raises(CheckpointError, match=f"^{re.escape(str(path))}: .*{message}"):
            GGUFCheckpoint(path)
        assert time.process_time() - start < 1

    @pytest.mark.parametrize("percent", [0.1, 1, 3, 10, 30, 60, 90, 99.99])
    def test_truncated(self, percent: float, whole: bytes, tmp_path: Path) -> None:
        path = tmp_path / "m.gguf"
        path.write_bytes(whole[: int(len(whole) * percent / 100)])
        with pytest.raises(CheckpointError, match="truncated"):
            GGUFCheckpoint(path)

    def test_truncated_after_opening(self, whole: bytes, tmp_path: Path) -> None:
        path = tmp_path / "m.gguf"
        path.write_bytes(whole)
        checkpoint = GGUFCheckpoint(path)
        path.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(CheckpointError, match="ended after"):
            [checkpoint.read(name) for name in checkpoint.tensors]

    @settings(max_examples=200, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(edits=st.lists(st.tuples(st.integers(0, 2500), st.integers(0, 255)), min_size=1, max_size=4))
    def test_any_bytes_read_or_are_refused(self, edits: list[tuple[int, int]], whole: bytes, tmp_path: Path) -> None:
        data = bytearray(whole)
        for position, byte in edits:
            data[position] = byte
        path = tmp_path / "m.gguf"
        path.write_bytes(data)
        error = None
        try:
            checkpoint = GGUFCheckpoint(path)
            for name in checkpoint.tensors:
                checkpoint.read(name)
            checkpoint.side_files()
        except LlmqError as err:
            error = str(err)
        assert error is None or (str(path) in error and "\n" not in error)
