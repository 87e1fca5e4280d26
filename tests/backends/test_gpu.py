"""What only the torch backend has: rows that threads compute, and how many rows a step takes."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from llmq.backends.base import ComputeType, ModelOptions, SlotSampling
from llmq.backends.gpu.backend import GPUBackend
from llmq.backends.gpu.rows import chunks_per_run, row_counts
from llmq.backends.gpu.threads import Threads, choose_threads
from llmq.backends.registry import load_backend
from llmq.checkpoint.loader import load_weights
from llmq.config import QuantizationConfig
from llmq.errors import BackendError
from tests.backends.quantized import QuantizedWeights
from tests.backends.test_contract import assert_rows_stand_alone
from tests.tiny import write_tiny


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("kv_int8", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_row_depends_on_itself_alone_with_two_threads(dtype: ComputeType, kv_int8: bool, tmp_path: Path) -> None:
    weights = load_weights(str(write_tiny(tmp_path / "m", num_hidden_layers=2, num_key_value_heads=4)))
    options = ModelOptions(device="cpu", dtype=dtype, num_slots=5, max_len=140, kv_int8=kv_int8)
    assert_rows_stand_alone(GPUBackend().open_model(weights, options), [5, 126])


@pytest.mark.slow
@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("kv_int8", [False, True])
def test_a_row_of_a_real_model_depends_on_itself_alone(smollm2_int4: Path, kv_int8: bool) -> None:
    options = ModelOptions(device="cpu", num_slots=8, max_len=300, kv_int8=kv_int8)
    model = GPUBackend().open_model(load_weights(str(smollm2_int4)), options)
    assert_rows_stand_alone(model, [3, 126, 260])


@pytest.mark.parametrize("kv_int8", [False, True])
def test_float16(kv_int8: bool, tmp_path: Path) -> None:
    """Runs like float32 to three digits on torch; who does not compute in it says so."""
    plain = load_weights(str(write_tiny(tmp_path / "m", num_hidden_layers=2)))
    weights = QuantizedWeights(plain, QuantizationConfig(scheme="int4_blockwise"))
    tokens, logits = np.arange(1, 40, dtype=np.int32), {}
    for dtype in ("float16", "float32"):
        options = ModelOptions(device="cpu", dtype=dtype, max_len=64, kv_int8=kv_int8)
        model = GPUBackend().open_model(weights, options)
        assert (model.caps.dtype, model.caps.kv_dtype) == (dtype, "int8" if kv_int8 else dtype)
        _, logits[dtype] = model.extend(model.init_state(), 0, tokens, 0, want_logits=True)
    assert 0 < np.abs(logits["float16"] - logits["float32"]).max() < 4e-3 * np.abs(logits["float32"]).max()
    for other in ("tpu", "reference"):
        with pytest.raises(BackendError, match="dtype='float16': "):
            load_backend(other).open_model(weights, ModelOptions(device="cpu", dtype="float16"))


class Kernels:
    """Stands for a decoder: a product whose bits depend on the number of rows as given."""

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, kinds: dict[int, int | None]) -> None:
        self._kinds = kinds

    def row_functions(self):
        def kernel(x: torch.Tensor, _chunk: int) -> torch.Tensor:
            kind = self._kinds.get(len(x), 9)
            return x + (torch.arange(len(x))[:, None] if kind is None else kind)

        return [(3, lambda x, _: x), (4, kernel)]


@pytest.mark.parametrize(
    ("kinds", "num_slots", "expected"),
    [
        ({}, 4, [1, 1, 2, 3, 4]),
        ({1: 1, 2: 2, 3: 2}, 5, [4, 4, 4, 4, 4, 5]),
        ({1: 1, 2: 2, 3: 2}, 3, [2, 2, 2, 3]),
        ({5: None, 6: None, 7: None, 3: None}, 5, [1, 1, 2, 4, 4, 8]),
        ({1: 1}, 1, [1, 1]),
        (dict.fromkeys(range(2, 30)), 2, [2, 2, 2]),
    ],
)
def test_steps_take_a_number_of_rows_that_gives_the_same_bits(kinds: dict, num_slots: int, expected: list[int]) -> None:
    assert row_counts(Kernels(kinds), num_slots) == expected


def test_float32_rows_are_padded_here(tmp_path: Path) -> None:
    """The reason for all this: MKL's product of one row is not that of many."""
    weight, x = np.random.default_rng(0).standard_normal((2, 256, 256)).astype(np.float32)
    one, many = (torch.nn.functional.linear(torch.from_numpy(x[:n]), torch.from_numpy(weight)) for n in (1, 16))
    if torch.equal(one[0], many[0]):
        pytest.skip("not on this CPU")
    weights = load_weights(str(write_tiny(tmp_path / "m", num_hidden_layers=1)))
    model = GPUBackend().open_model(weights, ModelOptions(device="cpu", dtype="float32", num_slots=4))
    assert row_counts(model._decoder, 4)[1] > 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_int8", [False, True])
def test_several_chunks_at_once_give_the_bits_of_one_by_one(kv_int8: bool, dtype: ComputeType, tmp_path: Path) -> None:
    """Also where what is left behind them is computed by another kernel than they are."""
    plain = load_weights(str(write_tiny(tmp_path / "m", num_hidden_layers=3)))
    weights = QuantizedWeights(plain, QuantizationConfig(scheme="int4_blockwise"))
    options = ModelOptions(device="cpu", dtype=dtype, num_slots=1, max_len=600, kv_int8=kv_int8, num_threads=1)
    model = GPUBackend().open_model(weights, options)
    size, most = model.caps.chunk_size, model.caps.chunks_per_run
    assert most > 1 or dtype == "float32"
    text = np.random.default_rng(0).integers(0, 320, 600).astype(np.int32)
    for num_tokens in (most * size, most * size - 1, most * size - size // 2, size + 1):
        found, prompt = [], text[: num_tokens + 1]
        for step in (size, most * size):
            state = model.init_state()
            for start in range(0, num_tokens, step):
                state, _ = model.extend(state, 0, prompt[start : min(start + step, num_tokens)], start)
            state = model.set_slot(state, 0, prompt, SlotSampling())
            _, handle = model.decode(state, np.array([True]), np.zeros(1, np.float32), want_logprobs=True)
            found.append(model.fetch(handle).top_logprobs)
        np.testing.assert_array_equal(*found)


class RowsByNumber:
    """Stands for a decoder whose rows depend on how many there are."""

    device, dtype, config = torch.device("cpu"), torch.bfloat16, SimpleNamespace(experts=None)

    def __init__(self, unlike: int, joined_only: bool = False) -> None:
        self._unlike, self._joined_only, self.joined = unlike, joined_only, True

    def row_functions(self):
        return [
            (3, lambda x, _: x),
            (4, lambda x, _: x + (len(x) == self._unlike) * (self.joined or not self._joined_only)),
        ]

    def join_chunks(self, joined: bool) -> None:
        self.joined = joined


def test_chunks_are_written_at_once_only_where_that_changes_no_bit() -> None:
    assert chunks_per_run(RowsByNumber(unlike=0), 16, 4) == 4
    assert chunks_per_run(RowsByNumber(unlike=64), 16, 4) == 1
    apart = RowsByNumber(unlike=64, joined_only=True)
    assert chunks_per_run(apart, 16, 4) == 4
    assert not apart.joined
    choosing = RowsByNumber(unlike=0)
    choosing.config = SimpleNamespace(experts=object())
    assert chunks_per_run(choosing, 16, 4) == 1


def test_the_number_of_threads_changes_no_bit(tmp_path: Path) -> None:
    weights = load_weights(str(write_tiny(tmp_path / "m", num_hidden_layers=2)))
    before, outs = torch.get_num_threads(), []
    prompt = np.arange(1, 100, dtype=np.int32)
    try:
        torch.set_num_threads(2)
        for num_threads in (None, 1, 2):
            options = ModelOptions(device="cpu", num_slots=3, max_len=140, num_threads=num_threads)
            model = GPUBackend().open_model(weights, options)
            assert model.caps.kernels[-1].startswith("threads: ")
            state = model.init_state()
            state, _ = model.extend(state, 0, prompt[:-1], 0)
            state = model.set_slot(state, 0, prompt, SlotSampling())
            _, handle = model.decode(state, np.array([True, False, False]), np.zeros(3, np.float32), want_logprobs=True)
            outs.append(model.fetch(handle).top_logprobs[0])
            if num_threads is not None:
                assert torch.get_num_threads() == num_threads
    finally:
        torch.set_num_threads(before)
    for out in outs[1:]:
        np.testing.assert_array_equal(out, outs[0])


class Waiting:
    """Stands for a decoder that is slower, or computes something else, with more threads than one."""

    dtype, layers, unlike = torch.bfloat16, [None] * 30, [None]

    def __init__(self, adds: float, slow_steps: bool, slow_runs: bool, slow_head: bool | None = None) -> None:
        self._adds, self._slow = adds, {False: slow_steps, True: slow_runs}
        self._slow_head = slow_head

    def row_functions(self):
        def function(x: torch.Tensor, chunk: int) -> torch.Tensor:
            several = torch.get_num_threads() > 1
            time.sleep(0.004 if several == self._slow[chunk > 0] else 0.001)
            return x + self._adds * several

        def head(x: torch.Tensor, chunk: int) -> torch.Tensor:
            if self._slow_head is None:
                return function(x, chunk)
            time.sleep(0.02 if (torch.get_num_threads() > 1) == self._slow_head else 0.001)
            return x

        return [(3, head), (4, function)]


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    ("decoder", "expected"),
    [
        (Waiting(0.0, slow_steps=True, slow_runs=False), Threads(1, 1, 2)),
        (Waiting(0.0, slow_steps=False, slow_runs=True), Threads(2, 2, 1)),
        (Waiting(1.0, slow_steps=True, slow_runs=True), Threads(2, 2, 2)),
        (Waiting(0.0, slow_steps=True, slow_runs=True, slow_head=False), Threads(1, 1, 1)),  # 30 layers, one head
    ],
)
def test_the_faster_number_of_threads_wins_where_bits_are_equal(decoder: Waiting, expected: Threads) -> None:
    start = time.perf_counter()
    assert choose_threads(decoder, [1, 1, 2, 4, 4], 8, 16) == expected
    assert time.perf_counter() - start < 2
    assert torch.get_num_threads() == 2


#: What loading takes beside the weights: kernels' own memory, the cache of one slot, one layer on its way.
_BESIDE_WEIGHTS = 48 << 20

_LOAD = """
import sys, torch
from llmq.backends.base import ModelOptions
from llmq.backends.gpu.backend import GPUBackend
from llmq.backends.registry import load_backend
from llmq.checkpoint.loader import load_weights
from llmq.config import QuantizationConfig
from llmq.errors import BackendError
from tests.backends.quantized import QuantizedWeights

def resident(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name)) * 1024

weights = load_weights(sys.argv[1])
before = resident("VmRSS")
model = GPUBackend().open_model(weights, ModelOptions(device="cpu", max_len=64, num_threads=1))
print(weights.num_bytes, resident("VmRSS") - before, resident("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_holds_one_copy(smollm2_int4: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _LOAD, smollm2_int4], capture_output=True, text=True, check=True)
    stored, resident, most = map(int, done.stdout.split())
    assert resident <= 1.15 * stored + _BESIDE_WEIGHTS
    assert most <= 1.15 * stored + 2 * _BESIDE_WEIGHTS
