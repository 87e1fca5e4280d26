"""The torch trainer on XLA's CPU, held against the same trainer on torch's own."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from llmq.backends.base import Adapters, ModelOptions, TrainBatch, Trainer, TrainOptions
from llmq.backends.gpu import xla
from llmq.backends.gpu.straight import see_traced
from llmq.backends.gpu.train import TorchTrainer
from llmq.backends.tpu.chips import has_tpu_chip
from llmq.checkpoint.loader import ModelWeights, load_weights
from llmq.config import Scheme
from llmq.errors import BackendError
from llmq.qat.loop import read_metrics
from llmq.qat.output import METRICS
from llmq.quant import dequantize, quantize
from llmq.quant.gradient import is_clipped
from tests.backends.test_train import GRIDS, matrices, one_document, schemes_for, tiny
from tests.tiny import byte_tokenizer_files, write_tiny

torch_xla = pytest.importorskip("torch_xla", reason="needs the environment of `make test-xla`")

#: int4_blockwise, asymmetric.
GRID = GRIDS[-1]


@pytest.fixture(scope="module", autouse=True)
def device() -> torch.device:
    """Opened before any backward pass, as autograd wants it."""
    return xla.choose_device(ModelOptions(device="cpu"))[0]


def open_trainer(runtime: str, weights: ModelWeights, **options: object) -> Trainer:
    values = {"device": "cpu", "dtype": "float32", "max_len": 64, "schemes": schemes_for(weights, GRID), **options}
    return TorchTrainer(weights, TrainOptions(runtime=runtime, **values))


def batches(step: int, num: int = 2) -> list[TrainBatch]:
    """Of one shape, unlike in what is learned and in how many documents a row holds."""
    made = []
    for seed in range(num):
        batch = one_document(10 * step + seed, rows=2, tokens=32)
        batch.learned[seed, : 3 + step] = False
        if step % 2:
            batch.documents[:, 20:], batch.positions[:, 20:] = 2, np.arange(12)
        made.append(batch)
    return made


def metric(name: str) -> int:
    """Samples of one of torch_xla's metrics so far."""
    from torch_xla.debug import metrics

    data = metrics.metric_data(name)
    return data[0] if data else 0


def counters() -> dict[str, int]:
    """How often torch_xla left XLA for torch's own operators."""
    from torch_xla.debug import metrics

    return {name: metrics.counter_value(name) for name in metrics.counter_names() if name.startswith("aten::")}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_tiny(tmp_path_factory.mktemp("xla") / "m", num_hidden_layers=2, dtype=np.float32)
    for name, contents in byte_tokenizer_files().items():
        (path / name).write_bytes(contents)
    return path


def qat(model: Path, output: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    data = output.with_name("data.txt")
    data.write_text("".join(f"{n} and {n + 1} make {2 * n + 1}.\n" for n in range(400)))
    command = [sys.executable, "-m", "llmq", "qat", model, "--data", data, "-o", output, *arguments]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, timeout=500)


def test_five_steps_are_those_of_the_cpu(model: Path, tmp_path: Path) -> None:
    """With the grid setting in behind the second, by ``llmq qat`` as a user calls it."""
    options = ("--max-steps", 5, "--fake-quant-after-n-steps", 2, "--seq-len", 64, "--groupsize", 32, "--lr", 1e-4)
    runs = {
        "cpu": ("--backend", "cpu", "--dtype", "float32"),
        "xla": ("--backend", "tpu", "--runtime", "torch_xla", "--device", "cpu"),
    }
    events: dict[str, list[Mapping[str, float]]] = {}
    for name, where in runs.items():
        done = qat(model, tmp_path / name, *options, *where, "--json")
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)["result"]
        assert result["device"] == {"cpu": "cpu", "xla": "CPU (torch_xla 2.9.0)"}[name]
        assert result["dtype"] == "float32"
        events[name] = read_metrics(tmp_path / name / METRICS)
    assert [event["quantized"] for event in events["cpu"] if "loss" in event] == [False, False, True, True, True]
    for one, other in zip(events["cpu"], events["xla"], strict=True):
        for field in ("loss", "grad_norm", "eval_loss", "eval_loss_quantized"):
            if field in one:
                print(f"step {one['step']}  {field:20}  cpu {one[field]:.7f}  xla {other[field]:.7f}")
                assert abs(one[field] - other[field]) < 1e-4
    trained = {name: load_weights(str(tmp_path / name)) for name in runs}
    for name in trained["cpu"]:
        assert np.abs(trained["cpu"][name] - trained["xla"][name]).max() < 1e-4


def test_a_run_compiles_two_steps_and_reads_only_their_results(tmp_path: Path) -> None:
    weights = tiny(tmp_path)
    trainer = open_trainer("torch_xla", weights)
    compiles, reads = [], []
    for step, quantized in enumerate((False, False, True, True, False, True)):
        before, left = metric("CompileTime"), counters().get("aten::_local_scalar_dense", 0)
        trainer.step(batches(step), 1e-3 * (1 - step / 5), quantized=quantized)  # the last rate is 0
        compiles.append(metric("CompileTime") - before)
        reads.append(counters()["aten::_local_scalar_dense"] - left)
    assert compiles == [1, 0, 1, 0, 0, 0]
    assert reads == [3] * 6  # the losses of two batches, and the gradient's norm
    assert set(counters()) == {"aten::_local_scalar_dense"}
    compiles = []
    for step, quantized in enumerate((False, True, True, False)):
        before = metric("CompileTime")
        trainer.evaluate(batches(step)[0], quantized=quantized)
        compiles.append(metric("CompileTime") - before)
    assert compiles == [1, 1, 0, 0]


def test_a_state_goes_on_anywhere(tmp_path: Path) -> None:
    """What is saved on XLA is whole, and trains on there and on the CPU as if it had never been saved."""
    weights = tiny(tmp_path)
    trainer = open_trainer("torch_xla", weights)
    for step in range(2):
        trainer.step(batches(step), 1e-4, quantized=True)
    state = trainer.state()
    assert all(isinstance(array, np.ndarray) and array.dtype == np.float32 for array in state.values())
    expected = trainer.step(batches(2), 1e-4, quantized=True)
    before = metric("CompileTime")
    again = open_trainer("torch_xla", weights)
    again.load_state(2, state)
    assert again.step(batches(2), 1e-4, quantized=True) == expected
    assert metric("CompileTime") == before  # the program is the one that was compiled
    cpu = open_trainer("torch", weights)
    assert cpu.state().keys() == state.keys()
    cpu.load_state(2, state)
    assert cpu.step(batches(2), 1e-4, quantized=True).loss == pytest.approx(expected.loss, abs=1e-5)
    for name in weights:
        np.testing.assert_allclose(cpu.weight(name), again.weight(name), rtol=0, atol=1e-4)


CASES = {
    "adapters, tied, recomputed": ({"tie_word_embeddings": True}, {"recompute": True, "adapters": "q_proj"}),
    "biases, a teacher": ({"architectures": ["Qwen2ForCausalLM"]}, {"teacher": True, "kd_temperature": 2.0}),
    "a window, recomputed, decay": (
        {"architectures": ["MistralForCausalLM"], "sliding_window": 8},
        {"recompute": True, "weight_decay": 0.1, "clip": None},
    ),
    "inputs in int8": ({}, {"rounded_inputs": "proj"}),
}


@pytest.mark.parametrize("case", CASES)
def test_every_option_computes_what_it_does_on_the_cpu(case: str, tmp_path: Path) -> None:
    changes, options = CASES[case]
    weights = tiny(tmp_path, **changes)
    if options.get("teacher"):
        options = {**options, "teacher": tiny(tmp_path / "teacher")}
    if target := options.get("rounded_inputs"):
        options = {**options, "rounded_inputs": frozenset(name for name in matrices(weights) if target in name)}
    if target := options.get("adapters"):
        targets = frozenset(name for name in matrices(weights) if target in name)
        options = {**options, "adapters": Adapters(rank=4, alpha=8.0, targets=targets, seed=0)}
    trainers = [open_trainer(runtime, weights, **options) for runtime in ("torch", "torch_xla")]
    for step in range(2):
        one, other = (trainer.step(batches(step, 1), 1e-4, quantized=True) for trainer in trainers)
        assert one.loss == pytest.approx(other.loss, abs=1e-5)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-4)
    for name in weights:
        cpu, traced = (trainer.weight(name) for trainer in trainers)
        np.testing.assert_allclose(cpu, traced, rtol=0, atol=1e-4)
        assert np.array_equal(traced, weights[name]) == ("adapters" in options and target not in name), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scheme", GRIDS, ids=str)
def test_fake_quantization_has_the_bits_of_the_artifact(scheme: Scheme, dtype: str, device: torch.device) -> None:
    weight = (np.random.default_rng(0).standard_normal((48, 128)) * 0.05).astype(np.float32)
    weight[0], weight[1], weight[2] = 0.0, 3.0, weight[2] * 1e-30
    seen = see_traced(torch.from_numpy(weight).to(device), scheme, getattr(torch, dtype))
    codes = quantize(weight, scheme)
    np.testing.assert_array_equal(seen.weight_OI.cpu().float().numpy(), dequantize(codes, dtype).astype(np.float32))
    np.testing.assert_array_equal(seen.clipped.cpu().numpy(), is_clipped(weight, codes))


def test_bfloat16_trains(tmp_path: Path) -> None:
    trainer = open_trainer("torch_xla", tiny(tmp_path), dtype="bfloat16")
    batch = batches(0, 1)
    losses = [trainer.step(batch, 1e-3, quantized=True).loss for _ in range(3)]
    assert losses[2] < losses[1] < losses[0]


def test_what_the_device_cannot_do_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = tiny(tmp_path)
    with pytest.raises(BackendError, match="device='cuda': torch_xla computes on cpu and tpu;"):
        open_trainer("torch_xla", weights, device="cuda")
    with pytest.raises(BackendError, match="optimizer='adamw8bit': not with runtime torch_xla"):
        open_trainer("torch_xla", weights, optimizer="adamw8bit")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(BackendError, match="runtime='torch_xla': trains in one process, not in 2;"):
        open_trainer("torch_xla", weights)


@pytest.mark.skipif(has_tpu_chip(), reason="there is a TPU here")
def test_a_missing_tpu_is_told_in_a_sentence(model: Path, tmp_path: Path) -> None:
    done = qat(model, tmp_path / "out", "--seq-len", 64, "--runtime", "torch_xla", "--device", "tpu")
    assert done.returncode == 2
    assert "llmq: device='tpu': torch_xla cannot compute on it here" in done.stderr.splitlines()[-1]
    assert "use --device cpu" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "out").exists()
