"""A real model through everything: both backends against transformers and against the reference."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.perplexity import WINDOW, perplexity, token_windows
from llmq.backends.base import ModelOptions
from llmq.backends.reference import forward
from llmq.backends.registry import load_backend
from llmq.checkpoint.inspect import describe
from llmq.checkpoint.loader import ModelWeights, load_weights
from llmq.config import SCHEMES, QuantizationConfig
from llmq.convert import convert, plan_conversion
from llmq.engine.generate import Session
from llmq.engine.sampling import SamplingParams
from llmq.model.tokenizer import Tokenizer
from llmq.quant import dequantize
from tests.backends.bounds import assert_accumulation_only
from tests.backends.quantized import QuantizedWeights

pytestmark = pytest.mark.slow

TEXT = (
    "The Eiffel Tower was built for the World's Fair of 1889. It stands on the Champ de Mars in Paris, and for forty "
    "years nothing made by people was taller. Engineers doubted it at first, artists protested against it, and the city "
    "meant to take it down again after twenty years."
)


def open_model(backend: str, weights: ModelWeights, dtype: Any = "float32", max_len: int = 160):
    return load_backend(backend).open_model(weights, ModelOptions(device="cpu", dtype=dtype, max_len=max_len))


def tokenizer_of(weights: ModelWeights) -> Tokenizer:
    return Tokenizer.from_files(weights.reader.side_files(), weights.config)


def greedy(backend: str, weights: ModelWeights, prompt: list[int], count: int) -> list[int]:
    session = Session(open_model(backend, weights), tokenizer_of(weights))
    list(session.generate(prompt, SamplingParams(max_tokens=count, ignore_eos=True)))
    return session.last.tokens


@pytest.fixture(scope="module")
def oracle(smollm2_gguf: Path):
    """The same file as the transformers library reads it, float32."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tensors = load_gguf_checkpoint(str(smollm2_gguf), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert missing == ["lm_head.weight"]
    assert unexpected == []
    model.tie_weights()
    return model


class TestUnquantized:
    def test_logits_equal_transformers(self, smollm2: ModelWeights, oracle) -> None:
        prompt = tokenizer_of(smollm2).encode(TEXT)[:64]
        assert len(prompt) == 64
        with torch.no_grad():
            expected = oracle(torch.tensor([prompt])).logits[0].numpy()
        for backend in ("gpu", "tpu"):
            model = open_model(backend, smollm2)
            _, logits = model.extend(model.init_state(), 0, np.asarray(prompt, np.int32), 0, want_logits=True)
            difference = np.abs(logits - expected).max()
            print(f"{backend}: largest difference of {logits.size} logits {difference:.2e}")
            assert difference < 1e-3

    def test_greedy_tokens_equal_transformers(self, smollm2: ModelWeights, oracle) -> None:
        prompt = tokenizer_of(smollm2).encode("The capital of France is")
        tokens = greedy("gpu", smollm2, prompt, 64)
        assert greedy("tpu", smollm2, prompt, 64) == tokens
        # One pass over them tells the same as decoding: each must be what follows the ones before it.
        with torch.no_grad():
            logits = oracle(torch.tensor([[*prompt, *tokens]])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(dim=-1).tolist() == tokens


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_linears_of_two_layers_err_by_accumulation_only(smollm2: ModelWeights, scheme: str, symmetric: bool) -> None:
    """Each of the first fourteen linears, fed what the reference decoder feeds it."""
    from llmq.backends.gpu.linear import make_linear
    from llmq.backends.tpu.linear import EinsumLinear, ScanLinear

    weights = QuantizedWeights(smollm2, QuantizationConfig(scheme=scheme, symmetric=symmetric))
    prompt = tokenizer_of(smollm2).encode(TEXT)[:12]
    fed: dict[str, np.ndarray] = {}
    forward(weights, prompt, observe=lambda name, x, _: fed.update({name: x.astype(np.float32)}), num_layers=2)
    fed.pop("lm_head")
    assert len(fed) == 14
    cpu = torch.device("cpu")
    for name, x in fed.items():
        weight = weights[f"{name}.weight"]
        for dtype in (torch.float32, torch.bfloat16):
            x_seen = torch.from_numpy(x).to(dtype)
            y = make_linear(weight, None, cpu, dtype)(x_seen).float().numpy()
            assert_accumulation_only(y, x_seen.float().numpy(), weight, bfloat16=dtype is torch.bfloat16)
        for layout in (ScanLinear, EinsumLinear):
            y = np.asarray(layout.from_qtensor(weight, None)(x))
            assert_accumulation_only(y, x, weight)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_logits_of_every_scheme_equal_the_reference(smollm2: ModelWeights, scheme: str) -> None:
    weights = QuantizedWeights(smollm2, QuantizationConfig(scheme=scheme))
    weights.config = weights.config.model_copy(update={"num_layers": 2})
    prompt = np.asarray(tokenizer_of(smollm2).encode(TEXT)[:12], np.int32)
    expected = forward(weights, prompt.tolist())
    for backend in ("gpu", "tpu"):
        model = open_model(backend, weights)
        _, logits = model.extend(model.init_state(), 0, prompt, 0, want_logits=True)
        np.testing.assert_allclose(logits, expected, atol=2e-5 * np.abs(expected).max())


class TestInt4Artifact:
    def test_is_complete_and_of_the_planned_size(self, smollm2_gguf: Path, smollm2_int4: Path) -> None:
        found = describe(str(smollm2_int4), verify=True)
        kinds = [(row["kind"], row["action"]) for row in found["coverage"]]
        assert kinds.count(("linear", "quantize")) == 210
        assert kinds.count(("embedding", "quantize")) == 1
        plan = plan_conversion(str(smollm2_gguf), QuantizationConfig(scheme="int4_blockwise"))
        actual = sum(file.stat().st_size for file in smollm2_int4.iterdir())
        assert actual == pytest.approx(plan.artifact_bytes, rel=0.02)

    def test_answers_on_both_backends(self, smollm2_int4: Path) -> None:
        weights = load_weights(str(smollm2_int4))
        tokenizer = tokenizer_of(weights)
        prompt = tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
        for backend in ("gpu", "tpu"):
            session = Session(open_model(backend, weights, dtype=None), tokenizer)
            assert "Paris" in "".join(session.generate(prompt, SamplingParams(max_tokens=32)))
            assert session.last.finish_reason == "stop"

    def test_greedy_text_is_the_same_on_both_backends(self, smollm2_int4: Path) -> None:
        weights = load_weights(str(smollm2_int4))
        for text in ("The capital of France is", "Once upon a time", "def fibonacci(n):"):
            prompt = tokenizer_of(weights).encode(text)
            assert greedy("gpu", weights, prompt, 32) == greedy("tpu", weights, prompt, 32)


def test_groups_of_32_reproduce_the_q4_1_source(smollm2_gguf: Path, smollm2: ModelWeights, tmp_path: Path) -> None:
    """Q4_1 is an asymmetric int4 grid of groups of 32; only its float16 scales round to bfloat16."""
    plan = plan_conversion(str(smollm2_gguf), QuantizationConfig(scheme="int4_blockwise", group_size=32))
    convert(plan, tmp_path / "out")
    restored = load_weights(str(tmp_path / "out"))
    names = [row.name for row in plan.coverage if row.kind == "linear"]
    squared_error = squared_weight = worst = 0.0
    for name in names:
        source, codes = smollm2[name], restored[name]
        error = dequantize(codes) - source
        squared_error += float(np.vdot(error, error))
        squared_weight += float(np.vdot(source, source))
        worst = max(worst, float(np.abs(error / np.repeat(codes.scale.astype(np.float32), 32, axis=-1)).max()))
    relative = math.sqrt(squared_error / squared_weight)
    print(f"{len(names)} linears: relative error {relative:.5f}, worst {worst:.4f} steps")
    assert relative < 0.0050
    assert worst < 0.1


#: Perplexity of the first four windows of WikiText-2 (see benchmarks/perplexity.py), bfloat16 on the CPU.
PERPLEXITY = {"none": 23.198, "int8_per_channel": 23.314, "int4_blockwise": 31.931}


@pytest.mark.parametrize("scheme", PERPLEXITY)
def test_perplexity(scheme: str, smollm2: ModelWeights, wikitext2: Path) -> None:
    weights = smollm2
    if scheme != "none":
        group_size = 64 if scheme == "int4_blockwise" else None
        weights = QuantizedWeights(smollm2, QuantizationConfig(scheme=scheme, group_size=group_size))
    model = open_model("gpu", weights, "bfloat16", max_len=WINDOW)
    measured = perplexity(model, token_windows(tokenizer_of(smollm2), wikitext2, 4))
    print(f"{scheme}: {measured:.3f}")
    assert measured == pytest.approx(PERPLEXITY[scheme], abs=0.05)
