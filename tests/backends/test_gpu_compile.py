"""The compiled decode step of the torch backend against the eager one, on every path that a slot can take."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from llmq.backends.base import InferenceModel, ModelOptions, SlotSampling
from llmq.backends.gpu import compiler
from llmq.backends.gpu.backend import GPUBackend
from llmq.backends.registry import load_backend
from llmq.checkpoint.loader import load_weights
from llmq.config import QuantizationConfig
from llmq.errors import BackendError
from tests.backends.quantized import QuantizedWeights
from tests.backends.test_contract import assert_rows_stand_alone
from tests.tiny import GEMMA3, write_tiny

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def _programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if reason := compiler.compiler_refusal(CPU):
        pytest.skip(f"torch.compile {reason}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("programs")))
        yield


def steps(model: InferenceModel, num_steps: int) -> list[np.ndarray]:
    """Log-probabilities of some steps: of one slot, of three, and of two that are no neighbours."""
    state, found = model.warmup(model.init_state()), []
    for slot in range(3):
        prompt = np.arange(1 + slot, 70 + 3 * slot, dtype=np.int32)
        state, _ = model.extend(state, slot, prompt[:-1], 0)
        state = model.set_slot(state, slot, prompt, SlotSampling())
    for active in ([True, False, False], [True] * 3, [True, False, True]) * num_steps:
        state, handle = model.decode(state, np.array(active), np.zeros(3, np.float32), want_logprobs=True)
        found.append(model.fetch(handle).top_logprobs[active])
    return found


@pytest.mark.slow
def test_compiled_steps_are_those_of_eager_mode_and_rows_stand_alone(tmp_path: Path) -> None:
    plain = load_weights(str(write_tiny(tmp_path / "m", num_hidden_layers=2, **GEMMA3)))
    weights = QuantizedWeights(plain, QuantizationConfig(scheme="int4_blockwise"))
    found = []
    for compile_it in (False, True):
        options = ModelOptions("cpu", "bfloat16", num_slots=3, max_len=140, kv_int8=True, compile=compile_it)
        model = GPUBackend().open_model(weights, options)
        num_compiles = model.stats().num_compiles
        assert (num_compiles > 0) == compile_it
        found.append(steps(model, 2))
        assert model.stats().num_compiles == num_compiles, "nothing is compiled once a model is open"
    for eager, same in zip(*found, strict=True):
        np.testing.assert_allclose(eager, same, atol=0.05)
    assert_rows_stand_alone(model, [5, 126])


def test_without_a_compiler_a_sentence_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    weights = load_weights(str(write_tiny(tmp_path / "m", num_hidden_layers=2)))
    with pytest.raises(BackendError) as refused:
        GPUBackend().open_model(weights, ModelOptions(device="cpu", compile=True))
    assert str(refused.value) == (
        "compile: needs a C++ compiler, and no-such-compiler is not here; install it, or leave --compile out."
    )
    monkeypatch.setenv("CXX", shutil.which("true") or sys.executable)
    monkeypatch.setattr(compiler.sysconfig, "get_path", lambda _: str(tmp_path))
    assert "Python's C headers" in compiler.compiler_refusal(CPU)
    assert compiler.compiler_refusal(torch.device("cuda")) == ""


def test_backends_that_need_no_compiling_say_so(tmp_path: Path) -> None:
    weights = load_weights(str(write_tiny(tmp_path / "m", num_hidden_layers=1)))
    for name in ("tpu", "reference"):
        with pytest.raises(BackendError, match="leave --compile out"):
            load_backend(name).open_model(weights, ModelOptions(device="cpu", compile=True))
