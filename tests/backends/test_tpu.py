"""The JAX decoder against the NumPy reference, and the promises of `backends.base`."""

import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from llmq.backends import base
from llmq.backends.base import ModelOptions
from llmq.backends.reference import forward
from llmq.backends.tpu import TPUBackend, device, infer
from llmq.backends.tpu.infer import CHUNK_SIZES, JaxModel, chunks
from llmq.backends.tpu.load import ACCELERATOR_LAYOUTS
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


def open_model(weights: ModelWeights) -> JaxModel:
    return TPUBackend().open_model(weights, ModelOptions(device="cpu", num_slots=3, max_len=MAX_LEN))


def logits_of(model: JaxModel, tokens: np.ndarray) -> np.ndarray:
    _, logits = model.extend(model.init_state(), 1, tokens, 0, want_logits=True)
    assert logits is not None
    return logits


def decode_one(model: JaxModel, state: base.State, slot: int, position: int) -> tuple[base.State, np.ndarray]:
    positions = np.full(3, -1)
    positions[slot] = position
    state, logits = model.decode(state, np.full(3, TOKENS[position]), positions)
    return state, logits[slot]


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
    assert model.caps.kernels[0] == "21 linears: int4 einsum, scale after each group"


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


def test_decode_continues_a_run(model: JaxModel) -> None:
    whole, state = logits_of(model, TOKENS), model.init_state()
    state, nothing = model.extend(state, 1, TOKENS[:290], 0)
    assert nothing is None
    for position in range(290, MAX_LEN):
        state, logits = decode_one(model, state, 1, position)
        np.testing.assert_allclose(logits, whole[position], rtol=0, atol=2e-5)


def test_other_slots_change_no_bit(model: JaxModel) -> None:
    def run(others: bool) -> list[np.ndarray]:
        state, rows = model.init_state(), []
        if others:
            state, _ = model.extend(state, 0, TOKENS[::-1][:200], 0)
        state, logits = model.extend(state, 1, TOKENS[:20], 0, want_logits=True)
        for step in range(3):
            active = 200 + step if others else -1
            state, out = model.decode(state, TOKENS[step : step + 3], np.array([active, 20 + step, -1]))
            rows.append(out[1])
        return [*rows, logits]

    for alone, together in zip(run(others=False), run(others=True), strict=True):
        np.testing.assert_array_equal(alone, together)


def test_an_untouched_slot_keeps_its_cache(model: JaxModel) -> None:
    state, _ = model.extend(model.init_state(), 1, TOKENS[:20], 0)
    before = np.asarray(state.k_LSTKh[:, 1])
    state, _ = model.decode(state, TOKENS[:3], np.array([0, -1, 0]))
    state, _ = model.extend(state, 2, TOKENS[:5], 0)
    np.testing.assert_array_equal(np.asarray(state.k_LSTKh[:, 1]), before)


def test_a_reused_prefix_forgets_what_followed(model: JaxModel) -> None:
    fresh = logits_of(model, TOKENS[:32])
    state, _ = model.extend(model.init_state(), 1, TOKENS[:16], 0)
    state, _ = model.extend(state, 1, TOKENS[100:250], 16)
    _, again = model.extend(state, 1, TOKENS[16:32], 16, want_logits=True)
    np.testing.assert_allclose(again, fresh[16:], rtol=0, atol=2e-5)


def test_a_padded_chunk_writes_its_tokens_only(model: JaxModel) -> None:
    state, _ = model.extend(model.init_state(), 1, TOKENS, 0)
    before = np.asarray(state.k_LSTKh)
    state, _ = model.extend(state, 1, TOKENS[280:290], 280)  # a chunk of 16 whose padding would reach 296
    after = np.asarray(state.k_LSTKh)
    np.testing.assert_array_equal(after[:, :, :280], before[:, :, :280])
    np.testing.assert_array_equal(after[:, :, 290:], before[:, :, 290:])


@pytest.mark.parametrize("num_tokens", [*range(1, 140), 1000, 3000])
def test_chunks_cover_a_run_with_little_padding(num_tokens: int) -> None:
    cut = list(chunks(num_tokens))
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


def test_compiled_programs_follow_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert device.cache_directory() == tmp_path / "llmq" / "jax"


def test_import_brings_neither_torch_nor_the_other_backend() -> None:
    code = "import sys, llmq.backends.tpu; print([m for m in ('torch', 'llmq.backends.gpu') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
