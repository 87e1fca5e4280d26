"""Hugging Face directories: whole, sharded, damaged, pickled, from the hub's cache."""

import json
import pickle
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from llmq.checkpoint.loader import load_weights
from llmq.checkpoint.reader import open_checkpoint
from llmq.errors import AlreadyQuantizedError, CheckpointError, UnsupportedModelError
from tests.tiny import random_tensors, tiny_config, write_checkpoint, write_tiny

INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_every_tensor_comes_back(num_shards: int, dtype: type, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m", num_shards=num_shards, dtype=dtype)
    weights = load_weights(str(path))
    expected = random_tensors(tiny_config(), dtype=dtype)
    assert set(weights) == set(expected)
    for name, tensor in expected.items():
        np.testing.assert_array_equal(weights[name], tensor)
    assert weights.num_bytes == sum(t.nbytes for t in expected.values())


def change_index(path: Path, change) -> None:
    index = json.loads((path / INDEX).read_text())
    change(index["weight_map"])
    (path / INDEX).write_text(json.dumps(index))


def test_the_index_is_the_authority(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m", num_shards=3)
    name = "model.norm.weight"

    original = (path / INDEX).read_text()
    change_index(path, lambda rows: rows.pop(name))
    with pytest.raises(CheckpointError, match=f"tensor {name} is not in {INDEX}"):
        open_checkpoint(str(path))

    (path / INDEX).write_text(original)
    change_index(path, lambda rows: rows.update({"ghost.weight": rows[name]}))
    with pytest.raises(CheckpointError, match=r"tensor ghost\.weight is missing"):
        open_checkpoint(str(path))

    (path / INDEX).write_text(original)
    change_index(path, lambda rows: rows.update({name: "../elsewhere.safetensors"}))
    with pytest.raises(CheckpointError, match=r"elsewhere.safetensors: is missing"):
        open_checkpoint(str(path))

    (path / INDEX).write_text("[]")
    with pytest.raises(CheckpointError, match="must hold a JSON object"):
        open_checkpoint(str(path))


def test_config_and_tensors_must_fit(tmp_path: Path) -> None:
    config, tensors = tiny_config(), random_tensors(tiny_config())
    without = {n: t for n, t in tensors.items() if "layers.1.mlp" not in n}
    path = write_checkpoint(tmp_path / "missing", config, without)
    with pytest.raises(CheckpointError, match=r"model.layers.1.mlp.gate_proj.weight, .* it is incomplete"):
        load_weights(str(path))

    path = write_checkpoint(
        tmp_path / "extra", config, {**tensors, "model.layers.0.moe.router.weight": tensors["model.norm.weight"]}
    )
    with pytest.raises(
        UnsupportedModelError, match=r"model.layers.0.moe.router.weight: not part of a LlamaForCausalLM"
    ):
        load_weights(str(path))

    path = write_checkpoint(tmp_path / "shape", {**config, "vocab_size": 321}, tensors)
    with pytest.raises(CheckpointError, match=r"model.embed_tokens.weight is \[320, 128\], not \[321, 128\]"):
        load_weights(str(path))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            UnsupportedModelError,
            "architecture MambaForCausalLM: llmq reads Llama",
        ),
        ({"architectures": None}, UnsupportedModelError, r"architecture \(none\)"),
        ({"hidden_size": None}, CheckpointError, "the field 'hidden_size' is missing"),
        ({"architectures": -1}, UnsupportedModelError, "architecture -1: llmq reads"),
        ({"architectures": [None]}, UnsupportedModelError, r"architecture \(none\)"),
        ({"hidden_size": "many"}, CheckpointError, r"config.json: hidden_size='many': input should be a valid integer"),
        ({"num_attention_heads": 0}, CheckpointError, r"config.json: num_heads=0: input should be greater than 0"),
        (
            {"num_attention_heads": float("inf")},
            CheckpointError,
            "config.json: num_heads=inf: input should be a finite",
        ),
        ({"num_key_value_heads": 3}, CheckpointError, "num_kv_heads=3: must divide the 4 heads"),
        ({"num_key_value_heads": 0}, CheckpointError, "num_kv_heads=0: input should be greater than 0"),
        ({"head_dim": 33}, CheckpointError, "head_dim=33: must be even"),
        ({"intermediate_size": 0}, CheckpointError, "intermediate_size=0"),
        ({"vocab_size": -5}, CheckpointError, "vocab_size=-5"),
        (
            {"num_hidden_layers": 1_000_000},
            CheckpointError,
            "num_layers=1000000: input should be less than or equal to 4096",
        ),
        ({"rms_norm_eps": -1}, CheckpointError, "norm_eps=-1"),
        ({"rms_norm_eps": float("nan")}, CheckpointError, "norm_eps=nan"),
        ({"rope_theta": 0}, CheckpointError, "theta=0: input should be greater than 0"),
        ({"rope_theta": float("nan")}, CheckpointError, "theta=nan"),
        ({"rope_scaling": "x"}, CheckpointError, "rope_parameters='x': must be an object"),
        (
            {"rope_scaling": {"rope_type": "linear"}},
            CheckpointError,
            "the field 'factor' of rope_type 'linear' is missing",
        ),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, CheckpointError, "factor=0: input should be greater"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2, "beta_fast": -1}}, CheckpointError, "beta_fast=-1"),
        ({"eos_token_id": float("inf")}, CheckpointError, "eos_token_ids.0=inf"),
        ({"eos_token_id": {"a": 1}}, CheckpointError, "eos_token_ids.0="),
        ({"tie_word_embeddings": "perhaps"}, CheckpointError, "tie_embeddings='perhaps'"),
        ({"quantization_config": "x"}, CheckpointError, "quantization_config='x': must be an object"),
        ({"hidden_act": "gelu"}, UnsupportedModelError, "hidden_act='gelu'"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, UnsupportedModelError, "rope_type='longrope'"),
        ({"partial_rotary_factor": 0.5}, UnsupportedModelError, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "fp8"}}, AlreadyQuantizedError, "already quantized with fp8"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            AlreadyQuantizedError,
            "already quantized with gptq",
        ),
        ({"quantization_config": {"quant_method": "awq"}}, AlreadyQuantizedError, "already quantized with awq"),
    ],
)
def test_configs_that_cannot_be_read(change: dict, error: type, message: str, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "m", tiny_config(**change), random_tensors(tiny_config()))
    with pytest.raises(error, match=message):
        load_weights(str(path))


def test_fp8_weights_without_a_word_in_the_config(tmp_path: Path) -> None:
    tensors = random_tensors(tiny_config())
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].astype(ml_dtypes.float8_e4m3fn)
    with pytest.raises(AlreadyQuantizedError, match=f"{name} is stored as float8_e4m3fn"):
        load_weights(str(write_checkpoint(tmp_path / "m", tiny_config(), tensors)))


@pytest.mark.parametrize("dtype", [np.float64, np.int8])
def test_types_of_other_tensors_are_checked_too(dtype: type, tmp_path: Path) -> None:
    config = tiny_config(attention_bias=True)
    tensors = random_tensors(config)
    name = "model.layers.0.self_attn.q_proj.bias"
    tensors[name] = tensors[name].astype(dtype)
    with pytest.raises(
        CheckpointError, match=f"tensor {name} is stored as {np.dtype(dtype).name}; llmq reads bfloat16"
    ):
        load_weights(str(write_checkpoint(tmp_path / "m", config, tensors)))


@pytest.mark.parametrize("model", ["~nobody-of-that-name/x", "a" * 5000, "nul\0byte"])
def test_paths_that_cannot_be(model: str) -> None:
    with pytest.raises(CheckpointError, match=r"is not a usable path|no such file or directory"):
        open_checkpoint(model)


@pytest.mark.parametrize("value", [None, 0, [], {}, "a" * 5000])
def test_an_index_names_files(value: object, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m", num_shards=2)
    change_index(path, lambda rows: rows.update({"model.norm.weight": value}))
    with pytest.raises(CheckpointError, match=r"weight_map names no file for model.norm.weight"):
        open_checkpoint(str(path))


def as_torch(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


def test_a_pickle_of_plain_tensors_is_read(tmp_path: Path) -> None:
    tensors = random_tensors(tiny_config())
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    torch.save({name: as_torch(t) for name, t in tensors.items()}, tmp_path / "pytorch_model.bin")
    weights = load_weights(str(tmp_path))
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(weights[name], tensor)


class Harmful:
    """Creates a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple:
        return Path.touch, (self.target,)


@pytest.mark.parametrize("save", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))])
def test_a_pickle_that_would_run_code_is_not_opened(save, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    save({"model.norm.weight": Harmful(tmp_path / "harm")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin: is not a pickle of plain tensors"):
        load_weights(str(tmp_path))
    assert not (tmp_path / "harm").exists()


def test_a_hub_id_is_read_from_the_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    repository = tmp_path / "models--someone--tiny"
    write_tiny(repository / "snapshots" / "abc123")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc123")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert open_checkpoint("someone/tiny").config["vocab_size"] == 320
    with pytest.raises(CheckpointError, match="someone/else: neither a local path nor to be had from the hub"):
        open_checkpoint("someone/else")


def test_side_files_are_everything_but_config_and_weights(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m", num_shards=2)
    kept = {"tokenizer.json": b"{}", "chat_template.jinja": b"x\r\n", "LICENSE": b"free", "tokenizer.model": b"\0\1"}
    for name, contents in {**kept, "model.onnx": b"", "old.bin": b"", ".hidden.json": b"", "photo.png": b""}.items():
        (path / name).write_bytes(contents)
    assert open_checkpoint(str(path)).side_files() == kept
