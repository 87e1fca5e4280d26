"""The oracle itself, held against the transformers library."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmq.backends.reference import forward
from llmq.checkpoint.loader import load_weights
from tests.tiny import GEMMA3, MIXTRAL, QWEN3_MOE, write_tiny

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied-bias": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "llama3-rope": {
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "transformers-5-linear": {
        "rope_theta": None,
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    },
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
    "mistral-window": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 8},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 64},
    "qwen3-windows-from-the-second-layer": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 64,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
    },
    "gemma3": GEMMA3,
    "gemma3-layer-types": {
        **GEMMA3,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "rope_scaling": None,
    },
    "gemma3-transformers-5": {
        **GEMMA3,
        "rope_theta": None,
        "rope_local_base_freq": None,
        "rope_scaling": None,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
        },
    },
    "mixtral": MIXTRAL,
    "mixtral-window": {**MIXTRAL, "sliding_window": 8, "num_local_experts": 5, "num_experts_per_tok": 1},
    "qwen3-moe": QWEN3_MOE,
    "qwen3-moe-not-normalized": {**QWEN3_MOE, "norm_topk_prob": False, "attention_bias": True},
}


#: How the oracle computes: by plain products, which float64 has too.
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    path = write_tiny(tmp_path / family, **FAMILIES[family])
    tokens = np.random.default_rng(1).integers(0, 320, 40)
    oracle = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, **EAGER).eval()
    with torch.no_grad():
        expected = oracle(torch.from_numpy(tokens)[None]).logits[0].numpy()
    np.testing.assert_allclose(forward(load_weights(str(path)), tokens.tolist()), expected, atol=2e-5)
