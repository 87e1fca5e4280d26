"""Inputs of linears in int8: what the artifact says, and the same numbers on every backend."""

from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from llmq.backends.base import ModelOptions
from llmq.backends.gpu import straight
from llmq.backends.gpu.linear import Int8InputLinear, make_joined
from llmq.backends.reference import forward
from llmq.backends.registry import load_backend
from llmq.backends.tpu import trainable
from llmq.checkpoint.layout import quantization_dict, read_quantization
from llmq.checkpoint.loader import ModelWeights, load_weights
from llmq.config import SCHEMES, Override, QuantizationConfig
from llmq.convert import convert, plan_conversion
from llmq.quant import QTensor, quantize, quantize_vectors
from tests.backends.bounds import assert_accumulation_only
from tests.backends.quantized import QuantizedWeights
from tests.commands.test_cli import llmq, refused
from tests.tiny import write_tiny

PROMPTS = np.random.default_rng(1).integers(0, 320, (7, 3)).astype(np.int32)
CONFIG = QuantizationConfig(scheme="int8_per_channel", activation="int8")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ModelWeights:
    return load_weights(str(write_tiny(tmp_path_factory.mktemp("tiny") / "model", attention_bias=True)))


class TestArtifact:
    def test_it_says_so_only_where_it_is_so(self) -> None:
        plain = QuantizationConfig(scheme="int8_per_channel")
        assert "activation" not in quantization_dict(plain)
        for config in (CONFIG, plain):
            assert read_quantization(quantization_dict(config)) == config

    def test_from_the_command_line_to_the_loader(self, tmp_path: Path) -> None:
        model = write_tiny(tmp_path / "model")
        llmq("convert", str(model), "--scheme", "w8a16", "--activation", "int8", "-o", str(tmp_path / "artifact"))
        weights = load_weights(str(tmp_path / "artifact"))
        rounded = [name for name in weights if weights.rounds_inputs(name)]
        assert rounded == [name for name in weights if "proj" in name]

    def test_other_schemes_refuse_it(self, tmp_path: Path) -> None:
        model = str(write_tiny(tmp_path / "model"))
        assert "activation='int8': goes with scheme int8_per_channel" in refused(
            "convert", model, "--scheme", "int4_blockwise", "--activation", "int8"
        )
        assert "activation='int4'" in refused("convert", model, "--scheme", "w8a16", "--activation", "int4")

    def test_modules_of_another_scheme_are_left_out(self, tmp_path: Path) -> None:
        overrides = (
            Override(pattern="*down_proj", scheme="int4_blockwise"),
            Override(pattern="*up_proj", scheme="none"),
        )
        config = CONFIG.model_copy(update={"overrides": overrides})
        convert(plan_conversion(str(write_tiny(tmp_path / "model")), config), tmp_path / "artifact")
        weights = load_weights(str(tmp_path / "artifact"))
        rounded = {name.split(".")[-2] for name in weights if weights.rounds_inputs(name)}
        assert rounded == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj"}
        agree(weights, "gpu")


def agree(weights: ModelWeights, backend: str) -> None:
    """But for the prompts in which a code next to a tie fell to its other side, few of them."""
    model = load_backend(backend).open_model(weights, ModelOptions("cpu", "float32", num_slots=2, max_len=64))
    declared, state = weights.quantization, model.init_state()
    wrong, moved = [], []
    for prompt in PROMPTS:
        state, found = model.extend(state, 0, prompt, 0, want_logits=True)
        weights.quantization = declared
        wrong.append(np.abs(found - forward(weights, prompt.tolist())).max())
        weights.quantization = QuantizationConfig(scheme="int8_per_channel")
        moved.append(np.abs(found - forward(weights, prompt.tolist())).max())
    weights.quantization = declared
    assert np.median(wrong) < 1e-5
    assert min(moved) > 1e-3
    assert any("inputs" in line for line in model.caps.kernels)


@pytest.mark.parametrize("backend", ["tpu", "gpu"])
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
def test_logits_are_those_of_the_reference(backend: str, symmetric: bool, tiny: ModelWeights) -> None:
    agree(QuantizedWeights(tiny, CONFIG.model_copy(update={"symmetric": symmetric})), backend)


class TestTorch:
    def codes(self, symmetric: bool, num_outputs: int = 96) -> QTensor:
        row = SCHEMES["int8_per_channel"].model_copy(update={"symmetric": symmetric})
        weight = np.random.default_rng(0).standard_normal((num_outputs, 192)).astype(ml_dtypes.bfloat16)
        return quantize(weight, row)

    @pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
    def test_product_errs_by_accumulation_only(self, symmetric: bool) -> None:
        weight, bias = self.codes(symmetric), np.linspace(-3, 3, 96).astype(ml_dtypes.bfloat16)
        x = np.random.default_rng(2).standard_normal((9, 192)).astype(np.float32)
        x[3] = 0
        values, scale = quantize_vectors(torch.from_numpy(x))
        rounded = values.numpy().astype(np.float64) * scale.numpy().astype(np.float64)[:, None]
        layer = Int8InputLinear(weight, torch.from_numpy(bias.astype(np.float32)), CPU)
        y = layer(torch.from_numpy(x)).numpy()
        assert_accumulation_only(y, rounded, weight, bias.astype(np.float64))
        np.testing.assert_array_equal(y[3], bias.astype(np.float32))

    def test_joined_rows_are_those_of_each(self) -> None:
        first, second = self.codes(True), self.codes(True, 32)
        x = torch.randn(3, 192, generator=torch.Generator().manual_seed(0))
        joined = make_joined([first, second], [None, None], CPU, torch.float32, [True, True])
        mixed = make_joined([first, second], [None, None], CPU, torch.float32, [True, False])
        alone = Int8InputLinear(first, None, CPU)(x)
        assert torch.equal(joined(x)[:, :96], alone)
        assert torch.equal(mixed(x)[:, :96], alone)
        assert mixed.kernels[0] == "int8 weights and inputs" != mixed.kernels[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gradient_passes_through_rounded_inputs(dtype: str) -> None:
    x = np.random.default_rng(0).standard_normal((5, 48)).astype(np.float32)
    x[2] = 0
    factor = np.random.default_rng(1).standard_normal((5, 48)).astype(np.float32)
    x_torch = torch.from_numpy(x).to(getattr(torch, dtype)).requires_grad_()
    y_torch = straight.round_inputs(x_torch)
    (y_torch * torch.from_numpy(factor).to(y_torch.dtype)).sum().backward()
    x_jax = jnp.asarray(x, dtype)
    y_jax, backward = jax.vjp(trainable.round_inputs, x_jax)
    (grad_jax,) = backward(jnp.asarray(factor, dtype))
    assert x_torch.grad is not None
    values, scale = quantize_vectors(x_jax)
    expected = (np.asarray(values, np.float32) * np.asarray(scale)[:, None]).astype(y_jax.dtype)
    for y, grad in ((y_torch.detach().float(), x_torch.grad.float()), (y_jax, grad_jax)):
        np.testing.assert_array_equal(np.asarray(y, np.float32), expected.astype(np.float32))
        np.testing.assert_array_equal(np.asarray(grad, np.float32), np.asarray(jnp.asarray(factor, dtype), np.float32))
    assert not np.array_equal(np.asarray(y_jax), np.asarray(x_jax))
