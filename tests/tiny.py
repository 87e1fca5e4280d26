"""Tiny random models, written as Hugging Face checkpoints."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from llmq.checkpoint.safetensors import write_file
from llmq.model.config import ModelConfig
from llmq.model.names import Kind, expected_tensors

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}

#: Changes that make it a Gemma 3: a window on every other layer, with a rotation of its own; no factor is what it
#: would be by default.
GEMMA3: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_act": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "head_dim": 64,
    "query_pre_attn_scalar": 48,
    "sliding_window": 8,
    "sliding_window_pattern": 2,
    "rope_theta": 100000.0,
    "rope_local_base_freq": 1000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 4.0},
}

#: Changes that make it a Mixtral, and a Qwen3-MoE.
MIXTRAL: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 64,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def tiny_config(**changes: Any) -> dict[str, Any]:
    """A ``config.json``; a change of None removes the field."""
    return {key: value for key, value in {**TINY, **changes}.items() if value is not None}


def random_tensors(config: dict[str, Any], seed: int = 0, dtype: Any = ml_dtypes.bfloat16) -> dict[str, np.ndarray]:
    """Weights of a plausible scale: norms multiply by about 1, matrices keep activations near 1."""
    rng = np.random.default_rng(seed)
    tensors, model = {}, ModelConfig.from_dict(config)
    for name, row in expected_tensors(model).items():
        if row.kind is Kind.NORM:
            values = 1 - model.norm_offset + 0.1 * rng.standard_normal(row.shape)
        elif row.kind is Kind.EMBEDDING:
            values = rng.standard_normal(row.shape) / model.embedding_scale
        else:
            values = rng.standard_normal(row.shape) / np.sqrt(row.shape[-1])
        tensors[name] = values.astype(dtype)
    return tensors


def write_checkpoint(path: Path, config: dict[str, Any], tensors: dict[str, np.ndarray], num_shards: int = 1) -> Path:
    """Write a checkpoint directory, sharded with an index when `num_shards` is over 1."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    names = list(tensors)
    if num_shards == 1:
        write_file(path / "model.safetensors", tensors.items(), {"format": "pt"})
        return path
    weight_map = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        mine = names[shard::num_shards]
        write_file(path / file, [(name, tensors[name]) for name in mine], {"format": "pt"})
        weight_map.update(dict.fromkeys(mine, file))
    total = sum(t.nbytes for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def write_tiny(path: Path, seed: int = 0, num_shards: int = 1, dtype: Any = ml_dtypes.bfloat16, **changes: Any) -> Path:
    """A tiny random checkpoint with `changes` to its config."""
    config = tiny_config(**changes)
    return write_checkpoint(path, config, random_tensors(config, seed, dtype), num_shards)


def byte_tokenizer_files() -> dict[str, bytes]:
    """Side files of a tokenizer with one token per byte: <pad> 0, <s> 1, </s> 2, then the bytes."""
    import tokenizers
    from tokenizers import AddedToken, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<pad>", "<s>", "</s>")])
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "chat_template": template}
    return {"tokenizer.json": backend.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}
