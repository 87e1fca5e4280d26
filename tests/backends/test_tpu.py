"""The JAX decoder against the NumPy reference, and the promises of `backends.base`."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from llmq.backends import base
from llmq.backends.base import Memory, ModelOptions, Run
from llmq.backends.reference import forward
from llmq.backends.tpu import TPUBackend, device, infer
from llmq.backends.tpu.infer import JaxModel
from llmq.backends.tpu.load import ACCELERATOR_LAYOUTS
from llmq.backends.tpu.model import scores
from llmq.backends.tpu.rows import CHUNK_SIZES, chunk_sizes
from llmq.checkpoint.loader import ModelWeights, load_weights
from llmq.config import SCHEMES, QuantizationConfig, Scheme
from llmq.errors import BackendError
from tests.backends.quantized import QuantizedWeights
from tests.backends.test_reference import FAMILIES
from tests.tiny import write_tiny

MAX_LEN = 300  # positions span three blocks of attention, the last one not whole
TOKENS = np.random.default_rng(1).integers(0, 320, MAX_LEN).astype(np.int32)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ModelWeights:
    return load_weights(str(write_tiny(tmp_path_factory.mktemp("tiny") / "model")))


@pytest.fixture(scope="module")
def model(tiny: ModelWeights) -> JaxModel:
    return open_model(tiny)


def open_model(weights: ModelWeights, **options: Any) -> JaxModel:
    return TPUBackend().open_model(weights, ModelOptions(device="cpu", num_slots=3, max_len=MAX_LEN, **options))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


def logits_of(model: JaxModel, tokens: np.ndarray) -> np.ndarray:
    _, logits = model.extend(model.init_state(), 1, tokens, 0, want_logits=True)
    assert logits is not None
    return logits


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_the_reference(family: str, tmp_path: Path) -> None:
    weights = load_weights(str(write_tiny(tmp_path / family, **FAMILIES[family])))
    np.testing.assert_allclose(
        logits_of(open_model(weights), TOKENS[:150]), forward(weights, TOKENS[:150].tolist()), rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantized_logits_equal_the_reference(scheme: str, tiny: ModelWeights) -> None:
    weights = QuantizedWeights(tiny, QuantizationConfig(scheme=scheme))
    model = open_model(weights)
    np.testing.assert_allclose(logits_of(model, TOKENS[:40]), forward(weights, TOKENS[:40].tolist()), rtol=0, atol=1e-4)
    assert not any("dense" in line for line in model.caps.kernels)


def test_accelerator_layouts_in_the_whole_model(tiny: ModelWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(infer, "CPU_LAYOUTS", ACCELERATOR_LAYOUTS)
    weights = QuantizedWeights(tiny, QuantizationConfig(scheme="int4_blockwise"))
    model = open_model(weights)
    np.testing.assert_allclose(logits_of(model, TOKENS[:40]), forward(weights, TOKENS[:40].tolist()), rtol=0, atol=1e-4)
    assert model.caps.kernels[0] == "21 linears: int4 einsum, dequantized in its operand"


def mixed(name: str) -> Scheme | None:
    if "layers.0" in name and "mlp" in name:
        return SCHEMES["int8_per_channel"]
    if "layers.1" in name:
        return SCHEMES["int4_blockwise"].model_copy(update={"group_size": 32})
    return None


def test_layers_of_different_structure_become_segments(tiny: ModelWeights) -> None:
    weights = QuantizedWeights(tiny, mixed)
    model = open_model(weights)
    np.testing.assert_allclose(logits_of(model, TOKENS[:40]), forward(weights, TOKENS[:40].tolist()), rtol=0, atol=1e-4)
    assert model.caps.kernels == (
        "11 linears: dense",
        "7 linears: int4 packed-nibble scan",
        "3 linears: int8 scan",
        "layers differ in structure: 3 scanned segments",
        "head: dense",
    )


def test_int4_takes_four_bits_on_the_device(tiny: ModelWeights) -> None:
    model = open_model(QuantizedWeights(tiny, QuantizationConfig(scheme="int4_per_channel")))
    (segment,) = model._params.segments
    num_codes = sum(np.prod(shape) for name, shape in tiny.shapes.items() if "proj" in name)
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(segment) if leaf.dtype == np.int8)
    assert num_bytes * 2 == num_codes


def test_a_run_in_chunks_equals_the_run_at_once(model: JaxModel) -> None:
    whole, state, parts = logits_of(model, TOKENS), model.init_state(), []
    for start, end in ((0, 1), (1, 18), (18, 149), (149, MAX_LEN)):
        state, logits = model.extend(state, 2, TOKENS[start:end], start, want_logits=True)
        parts.append(logits)
    np.testing.assert_allclose(np.concatenate(parts), whole, rtol=0, atol=2e-5)


@pytest.mark.parametrize("kv_int8", [False, True])
def test_a_reused_prefix_equals_a_fresh_one(tiny: ModelWeights, kv_int8: bool) -> None:
    model = open_model(tiny, kv_int8=kv_int8)
    size = model.caps.chunk_size

    def write(state: base.State, slot: int, tokens: np.ndarray, start: int = 0) -> tuple[base.State, np.ndarray]:
        parts = []
        for first in range(start, len(tokens), size):
            state, logits = model.extend(state, slot, tokens[first : first + size], first, want_logits=True)
            parts.append(logits)
        return state, np.concatenate(parts)

    _, fresh = write(model.init_state(), 1, TOKENS[:210])
    state, _ = write(model.init_state(), 1, np.concatenate([TOKENS[: 2 * size], TOKENS[::-1][:150]]))
    state, again = write(state, 1, TOKENS[:210], start=2 * size)
    np.testing.assert_array_equal(again, fresh[2 * size :])
    _, elsewhere = write(state, 2, TOKENS[:210])
    np.testing.assert_array_equal(elsewhere, fresh)


def test_what_a_slot_held_is_forgotten_even_where_it_is_not_finite(model: JaxModel) -> None:
    clean = logits_of(model, TOKENS[:40])
    state = model.init_state()
    cache = jax.tree.map(lambda stored: stored.at[:].set(np.nan), state.cache)
    _, logits = model.extend(state._replace(cache=cache), 1, TOKENS[:40], 0, want_logits=True)
    np.testing.assert_array_equal(logits, clean)


def test_a_padded_chunk_writes_its_tokens_only(model: JaxModel) -> None:
    state, _ = model.extend(model.init_state(), 1, TOKENS, 0)
    before = np.asarray(state.cache.k_LSTKh)
    state, _ = model.extend(state, 1, TOKENS[280:290], 280)  # a chunk of 16 whose padding would reach 296
    after = np.asarray(state.cache.k_LSTKh)
    np.testing.assert_array_equal(after[:, :, :280], before[:, :, :280])
    np.testing.assert_array_equal(after[:, :, 290:], before[:, :, 290:])


@pytest.mark.parametrize("window", [None, 20])
def test_runs_that_continue_runs(window: int | None, tmp_path: Path) -> None:
    changes = {"architectures": ["MistralForCausalLM"], "sliding_window": window} if window else {}
    model = open_model(load_weights(str(write_tiny(tmp_path / "m", **changes))))
    cuts = [(30, 60, None), (60, 160, None), (160, 170, 0), (170, 185, 1), (185, 200, None), (200, 215, 0)]
    runs = [Run(TOKENS[a:b], TOKENS[a + 1 : b + 1] if a != 60 else None, parent) for a, b, parent in cuts]
    state, _ = model.extend(model.init_state(), 1, TOKENS[:30], 0)
    _, scores = model.score(state, 1, 30, runs)
    assert scores[1] is None
    for run, score in zip(runs, scores, strict=True):
        if run.targets is None:
            continue
        parent = () if run.parent is None else runs[run.parent].tokens
        alone = log_softmax(logits_of(model, np.concatenate([TOKENS[:30], parent, run.tokens]).astype(np.int32)))
        rows = alone[-len(run.tokens) :]
        np.testing.assert_allclose(score.logprobs, rows[range(len(rows)), run.targets], rtol=0, atol=2e-5)
        np.testing.assert_array_equal(score.is_greedy, rows.argmax(axis=-1) == run.targets)


def test_runs_without_targets_go_without_the_head(model: JaxModel, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def spy(dtype: str, params: Any, x_BND: jax.Array, target_BN: np.ndarray) -> Any:
        seen.append(target_BN.shape[1])
        return scores(dtype, params, x_BND, target_BN)

    monkeypatch.setattr(infer, "scores", spy)
    scored = Run(TOKENS[:10], TOKENS[1:11], parent=0)
    model.score(model.init_state(), 0, 0, [Run(TOKENS[:120]), scored, Run(TOKENS[:60]), scored])
    assert sum(seen) == 32  # 20 tokens in chunks of 16


@pytest.mark.parametrize("num_tokens", [*range(1, 140), 1000, 3000])
def test_chunks_cover_a_run_with_little_padding(num_tokens: int) -> None:
    cut = list(chunk_sizes(num_tokens))
    assert sum(count for _, count in cut) == num_tokens
    assert all(size in CHUNK_SIZES and 0 < count <= size for size, count in cut)
    assert all(size == count for size, count in cut[:-1])
    assert sum(size for size, _ in cut) <= max(CHUNK_SIZES[0], 2 * num_tokens)


def test_bfloat16_on_the_cpu_is_refused(tiny: ModelWeights) -> None:
    with pytest.raises(BackendError, match=r"dtype='bfloat16': .* use float32"):
        TPUBackend().open_model(tiny, ModelOptions(device="cpu", dtype="bfloat16"))


@pytest.mark.skipif(device.has_tpu_chip(), reason="there is a TPU here")
def test_a_missing_device_is_refused_in_a_sentence(tiny: ModelWeights) -> None:
    with pytest.raises(BackendError, match=r"device='tpu': .* no TPU chip .* use --device cpu\."):
        TPUBackend().open_model(tiny, ModelOptions(device="tpu"))
    with pytest.raises(BackendError, match=r"device='npu': .* cpu, tpu, gpu"):
        TPUBackend().open_model(tiny, ModelOptions(device="npu"))


def test_chips_are_found_by_their_device_nodes(tmp_path: Path) -> None:
    (tmp_path / "vfio").mkdir()
    (tmp_path / "vfio" / "vfio").touch()
    assert not device.has_tpu_chip(tmp_path)
    (tmp_path / "vfio" / "0").touch()
    assert device.has_tpu_chip(tmp_path)


def test_probe_tells_the_accelerator_apart() -> None:
    rows = {row.name: row for row in TPUBackend().probe()}
    assert list(rows) == ["jax", "accelerator", "tpu compiler"]
    assert rows["jax"].usable
    assert jax.__version__ in rows["jax"].detail
    assert rows["accelerator"].usable == device.has_tpu_chip()


def test_memory_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    class Chip:
        platform = "tpu"

        def memory_stats(self) -> dict[str, int]:
            return {"bytes_limit": 16, "bytes_in_use": 5}

    assert 0 < TPUBackend().memory("cpu").free < TPUBackend().memory("cpu").total
    monkeypatch.setattr(device, "open_device", lambda _: Chip())
    assert TPUBackend().memory("tpu") == Memory(total=16, free=11)


START = """
import collections, sys
import jax
events = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: events.update([event]))
from llmq.backends.base import ModelOptions
from llmq.backends.tpu import TPUBackend
from llmq.checkpoint.loader import load_weights
model = TPUBackend().open_model(load_weights(sys.argv[1]), ModelOptions(device="cpu"))
model.warmup(model.init_state())
print(*(events["/jax/compilation_cache/" + what] for what in ("cache_hits", "cache_misses")))
"""


@pytest.mark.slow
def test_a_second_start_compiles_nothing(tmp_path: Path) -> None:
    path, programs = write_tiny(tmp_path / "model"), tmp_path / "xdg" / "llmq" / "jax"
    unset = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}

    def start(**environment: str) -> tuple[int, int]:
        command = [sys.executable, "-c", START, str(path)]
        variables = {**unset, "XDG_CACHE_HOME": str(tmp_path / "xdg"), **environment}
        done = subprocess.run(command, env=variables, check=True, capture_output=True, text=True)
        found, compiled = map(int, done.stdout.split())
        return found, compiled

    start(JAX_COMPILATION_CACHE_DIR=str(tmp_path / "elsewhere"))
    assert not programs.exists()
    _, compiled = start()
    kept = {file.name.split("-")[0] for file in programs.glob("*-cache")}
    assert kept >= {"jit_forward", "jit_decode", "jit_take_sampled"}
    assert compiled >= len(kept)
    assert start() == (compiled, 0)


def test_import_brings_neither_torch_nor_the_other_backend() -> None:
    code = "import sys, llmq.backends.tpu; print([m for m in ('torch', 'llmq.backends.gpu') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
