"""The torch backend on a CUDA device: run these where there is one, ``pytest tests/cuda -s``; elsewhere they skip."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from llmq.backends import speed
from llmq.backends.base import ModelOptions
from llmq.backends.gpu import tinygemm
from llmq.backends.gpu.backend import GPUBackend
from llmq.backends.gpu.device import MIN_CUDA_CAPABILITY
from llmq.backends.gpu.linear import Int4Linear, make_linear, to_tensor
from llmq.checkpoint.loader import load_weights
from llmq.config import SCHEMES, Granularity, QuantizationConfig, Scheme
from llmq.quant import QTensor, quantize
from tests.backends.bounds import assert_accumulation_only
from tests.backends.quantized import QuantizedWeights
from tests.backends.test_contract import assert_rows_stand_alone
from tests.tiny import write_tiny


def _reason() -> str:
    if not torch.cuda.is_available():
        return "no CUDA device"
    return "" if torch.cuda.get_device_capability() >= MIN_CUDA_CAPABILITY else "tinygemm needs compute capability 8.0"


pytestmark = [pytest.mark.cuda, pytest.mark.skipif(bool(_reason()), reason=_reason() or "there is one")]

CUDA = torch.device("cuda")

GRIDS = [
    scheme.model_copy(update={"symmetric": symmetric, "group_size": group_size})
    for scheme in SCHEMES.values()
    for symmetric in (True, False)
    for group_size in ((32, 64) if scheme.granularity is Granularity.BLOCKWISE else (None,))
]


def codes(scheme: Scheme, num_outputs: int, num_features: int) -> QTensor:
    weight = np.random.default_rng(0).standard_normal((num_outputs, num_features)) / np.sqrt(num_features)
    return quantize(weight.astype(ml_dtypes.bfloat16), scheme)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", GRIDS, ids=str)
def test_every_grid(scheme: Scheme, dtype: torch.dtype) -> None:
    for num_features in (64, 576, 1024):
        weight = codes(scheme, 64, num_features)
        linear = make_linear(weight, None, CUDA, dtype)
        for num_rows in (1, 7, 129):
            x = torch.randn(num_rows, num_features, generator=torch.Generator().manual_seed(num_rows)).to(dtype)
            for chunk in (0, num_rows):
                y = linear(x.to(CUDA), chunk).float().cpu().numpy()
                half = {"bfloat16": dtype is torch.bfloat16, "float16": dtype is torch.float16}
                assert_accumulation_only(y, x.float().numpy(), weight, **half)


@pytest.mark.parametrize("num_features", [64, 96, 576, 1024])
def test_no_feature_is_padded(num_features: int) -> None:
    """576 = 9 * 64 takes four tiles at once, 96 two."""
    weight = codes(SCHEMES["int4_blockwise"].model_copy(update={"group_size": 32}), 64, num_features)
    packed = tinygemm.prepack(to_tensor(weight.values), CUDA)
    assert packed.nbytes == 64 * num_features // 2
    assert isinstance(make_linear(weight, None, CUDA, torch.bfloat16), Int4Linear)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kv_int8", [False, True])
def test_rows_stand_alone(kv_int8: bool, compiled: bool, tmp_path: Path) -> None:
    plain = load_weights(str(write_tiny(tmp_path / "m", num_hidden_layers=2)))
    weights = QuantizedWeights(plain, QuantizationConfig(scheme="int4_blockwise"))
    options = ModelOptions("cuda", "bfloat16", num_slots=5, max_len=140, kv_int8=kv_int8, compile=compiled)
    assert_rows_stand_alone(GPUBackend().open_model(weights, options), [5, 126])


def test_logits_are_those_of_the_cpu(tmp_path: Path) -> None:
    plain = load_weights(str(write_tiny(tmp_path / "m", num_hidden_layers=2)))
    weights = QuantizedWeights(plain, QuantizationConfig(scheme="int4_blockwise"))
    tokens, found = np.arange(1, 60, dtype=np.int32), {}
    for device in ("cpu", "cuda"):
        model = GPUBackend().open_model(weights, ModelOptions(device, "float32", max_len=64))
        _, found[device] = model.extend(model.init_state(), 0, tokens, 0, want_logits=True)
    np.testing.assert_allclose(found["cuda"], found["cpu"], atol=2e-3)  # TF32 is off by default


def test_memory_and_speed(tmp_path: Path) -> None:
    """int4 takes at most 1.15 times its codes; how fast it is against bfloat16 is printed."""
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8}
    plain = load_weights(str(write_tiny(tmp_path / "m", num_hidden_layers=4, head_dim=64, **sizes)))
    coded = QuantizedWeights(plain, QuantizationConfig(scheme="int4_blockwise", group_size=128))
    for name, weights in (("bfloat16", plain), ("int4", coded)):
        for compiled in (False, True):
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated()
            options = ModelOptions("cuda", "bfloat16", num_slots=8, max_len=640, compile=compiled)
            model = GPUBackend().open_model(weights, options)
            held = torch.cuda.memory_allocated() - before
            assert held <= 1.15 * weights.num_bytes + (32 << 20)
            state = model.warmup(model.init_state())
            for batch_size in (1, 8):
                state, (_, prompt, steps) = speed.run_once(model, state, batch_size, 512, 64)
                print(
                    f"{name}{' --compile' if compiled else ''}, batch {batch_size}: prefill {batch_size * 512 / prompt:.0f}, "
                    f"decode {batch_size * 63 / steps:.0f} tokens/s, {held / 1e6:.0f} MB of weights"
                )
            model.close()
