"""A real Gemma 3 against transformers, for those who have one: its terms of use keep it from being fetched."""

from pathlib import Path

import numpy as np
import pytest
import torch

from llmq.backends.base import InferenceModel, ModelOptions
from llmq.backends.registry import load_backend
from llmq.checkpoint.loader import ModelWeights, load_weights
from llmq.evaluate.perplexity import measure_perplexity
from llmq.evaluate.windows import read_text
from llmq.model.tokenizer import Tokenizer
from tests.conftest import ROOT

pytestmark = pytest.mark.slow

GEMMA3 = ROOT / ".models" / "gemma-3-270m-q4_k_m.gguf"

#: Of the first four windows of 512 tokens of WikiText-2, a BOS in front of each; bfloat16 on the CPU.
PERPLEXITY = 21.931


@pytest.fixture(scope="module")
def gemma3() -> ModelWeights:
    if not GEMMA3.is_file():
        pytest.skip(f"{GEMMA3.name} is not in .models: accept its terms of use and put it there")
    return load_weights(str(GEMMA3))


@pytest.fixture(scope="module")
def tokenizer(gemma3: ModelWeights) -> Tokenizer:
    return Tokenizer.from_files(gemma3.reader.side_files(), gemma3.config)


def opened(backend: str, weights: ModelWeights, dtype: str = "float32") -> InferenceModel:
    options = ModelOptions(device="cpu", dtype=dtype, max_len=640)
    return load_backend(backend).open_model(weights, options)


def logits_of(model: InferenceModel, tokens: list[int]) -> np.ndarray:
    state, parts = model.init_state(), []
    for start in range(0, len(tokens), model.caps.chunk_size):
        chunk = np.asarray(tokens[start : start + model.caps.chunk_size], np.int32)
        state, logits = model.extend(state, 0, chunk, start, want_logits=True)
        parts.append(logits)
    return np.concatenate(parts)


def test_logits_equal_transformers(gemma3: ModelWeights, tokenizer: Tokenizer, wikitext2: Path) -> None:
    """Of a prompt longer than the sliding window."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    prompt = tokenizer.encode(read_text(wikitext2)[:3500])[:600]
    assert len(prompt) == 600 > gemma3.config.sliding_window
    assert prompt[0] == tokenizer.bos_token_id
    config = AutoConfig.from_pretrained(GEMMA3.parent, gguf_file=GEMMA3.name)
    oracle = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tensors = load_gguf_checkpoint(str(GEMMA3), return_tensors=True, model_to_load=oracle)["tensors"]
    assert tensors.keys() == gemma3.keys()
    oracle.load_state_dict(tensors, strict=False)
    oracle.tie_weights()
    with torch.no_grad():
        expected = oracle(torch.tensor([prompt])).logits[0].numpy()
    del oracle, tensors
    for backend in ("gpu", "tpu"):
        model = opened(backend, gemma3)
        difference = np.abs(logits_of(model, prompt) - expected).max()
        print(f"{backend}: largest difference of {expected.size} logits {difference:.2e}")
        assert difference < 5e-5 * np.abs(expected).max()
        model.close()


def test_perplexity(gemma3: ModelWeights, tokenizer: Tokenizer, wikitext2: Path) -> None:
    """Of four windows, in bfloat16."""
    model = opened("gpu", gemma3, "bfloat16")
    measured = measure_perplexity(model, tokenizer, read_text(wikitext2), window=512, max_tokens=4 * 511)
    print(measured.metrics["perplexity/token"])
    assert measured.metrics["perplexity/token"].value == pytest.approx(PERPLEXITY, abs=0.05)
