"""One suite for every backend: the protocol of `base`, against the reference decoder in float32."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmq.backends.base import Backend, InferenceModel, ModelOptions, Run
from llmq.backends.reference import forward
from llmq.backends.registry import ALIASES, backend_names, load_backend, select_backend
from llmq.checkpoint.loader import load_weights
from llmq.config import SCHEMES, QuantizationConfig
from llmq.errors import BackendError
from tests.backends.quantized import QuantizedWeights
from tests.backends.test_reference import FAMILIES
from tests.tiny import write_tiny

TOKENS = np.random.default_rng(1).integers(0, 320, 40).astype(np.int32)


@pytest.fixture(params=["gpu", "tpu", "reference"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return load_backend(request.param)


def opened(backend: Backend, weights, num_slots: int = 1, **options: Any) -> InferenceModel:
    fields = {"device": "cpu", "dtype": "float32", "num_slots": num_slots, "max_len": 64, **options}
    return backend.open_model(weights, ModelOptions(**fields))


@pytest.mark.parametrize("family", FAMILIES)
def test_families(backend: Backend, family: str, tmp_path: Path) -> None:
    weights = load_weights(str(write_tiny(tmp_path / "m", **FAMILIES[family])))
    model = opened(backend, weights)
    _, logits = model.extend(model.init_state(), 0, TOKENS, 0, want_logits=True)
    np.testing.assert_allclose(logits, forward(weights, TOKENS.tolist()), atol=5e-5)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_schemes(backend: Backend, scheme: str, symmetric: bool, tmp_path: Path) -> None:
    plain = load_weights(str(write_tiny(tmp_path / "m", attention_bias=True)))
    weights = QuantizedWeights(plain, QuantizationConfig(scheme=scheme, symmetric=symmetric))
    model = opened(backend, weights)
    _, logits = model.extend(model.init_state(), 0, TOKENS, 0, want_logits=True)
    expected = forward(weights, TOKENS.tolist())
    np.testing.assert_allclose(logits, expected, atol=5e-5)
    assert np.abs(forward(plain, TOKENS.tolist()) - expected).max() > 1e-3, "the codes made no difference"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory):
    plain = load_weights(str(write_tiny(tmp_path_factory.mktemp("contract") / "m", num_hidden_layers=2)))
    return QuantizedWeights(plain, QuantizationConfig(scheme="int4_blockwise"))


def test_pieces_and_single_steps_equal_one_run(backend: Backend, weights) -> None:
    model = opened(backend, weights, num_slots=3)
    _, whole = model.extend(model.init_state(), 0, TOKENS[:20], 0, want_logits=True)
    state = model.init_state()
    state, none = model.extend(state, 1, TOKENS[:7], 0)
    assert none is None
    state, part = model.extend(state, 1, TOKENS[7:18], 7, want_logits=True)
    np.testing.assert_allclose(part, whole[7:18], atol=1e-5)
    for position in (18, 19):
        tokens = np.array([0, TOKENS[position], 0], np.int32)
        state, logits = model.decode(state, tokens, np.array([-1, position, -1], np.int32))
        np.testing.assert_allclose(logits[1], whole[position], atol=1e-5)
        assert logits.shape == (3, 320)
        assert logits.dtype == np.float32


def test_slots_do_not_mix_and_may_be_written_again(backend: Backend, weights) -> None:
    model = opened(backend, weights, num_slots=3)
    prompts = [TOKENS[:9], TOKENS[10:30], TOKENS[30:35]]
    alone = []
    for prompt in prompts:
        state, _ = model.extend(model.init_state(), 0, prompt[:-1], 0)
        _, logits = model.decode(state, np.array([prompt[-1], 0, 0]), np.array([len(prompt) - 1, -1, -1]))
        alone.append(logits[0])

    state = model.init_state()
    for slot in range(3):  # something else first: what is overwritten must not be seen
        state, _ = model.extend(state, slot, TOKENS[::-1].copy()[:33], 0)
    for slot, prompt in enumerate(prompts):
        state, _ = model.extend(state, slot, prompt[:-1], 0)
    last = np.array([prompt[-1] for prompt in prompts], np.int32)
    state, together = model.decode(state, last, np.array([len(p) - 1 for p in prompts], np.int32))
    np.testing.assert_allclose(together, np.stack(alone), atol=1e-5)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    highest = logits.max(axis=-1, keepdims=True)
    return logits - highest - np.log(np.exp(logits - highest).sum(axis=-1, keepdims=True))


WINDOWS = [{}, {"architectures": ["MistralForCausalLM"], "sliding_window": 8}]

# Each run with its parent, in an order that mixes roots and children.
TREE = [(11, 20, None), (5, 6, None), (20, 25, 0), (2, 12, 1), (30, 31, 0), (25, 30, None)]


@pytest.mark.parametrize("changes", WINDOWS)
def test_runs_are_scored_as_if_each_stood_alone(backend: Backend, changes: dict, tmp_path: Path) -> None:
    plain = load_weights(str(write_tiny(tmp_path / "m", num_hidden_layers=2, **changes)))
    model = opened(backend, plain, num_slots=2)
    prefix, rng = TOKENS[:11], np.random.default_rng(0)
    runs, expected = [], []
    for start, end, parent in TREE:
        tokens = TOKENS[start:end]
        before = [*prefix, *([] if parent is None else runs[parent].tokens)]
        logits = forward(plain, [*before, *tokens])[len(before) :]
        likely = logits.argmax(axis=-1)
        targets = np.where(rng.random(len(tokens)) < 0.5, likely, rng.integers(0, 320, len(tokens))).astype(np.int32)
        expected.append((log_softmax(logits)[np.arange(len(tokens)), targets], likely == targets))
        runs.append(Run(tokens, targets if start != 5 else None, parent))

    state, _ = model.extend(model.init_state(), 0, TOKENS[::-1].copy()[:20], 0)  # another slot's business
    state, _ = model.extend(state, 1, prefix, 0)
    for count in (6, 1, 5):  # again and again: the prefix is still what it was
        state, scores = model.score(state, 1, len(prefix), runs[:count])
        for run, got, (logprobs, is_greedy) in zip(runs, scores, expected, strict=False):
            assert (got is None) == (run.targets is None)
            if got is not None:
                np.testing.assert_allclose(got.logprobs, logprobs, atol=5e-5)
                np.testing.assert_array_equal(got.is_greedy, is_greedy)
                assert got.logprobs.dtype == np.float32
    state, scores = model.score(state, 1, len(prefix), [Run(run.tokens, None, run.parent) for run in runs])
    assert scores == [None] * len(runs)

    # The first run may be continued, so a long text is scored in pieces.
    whole = log_softmax(forward(plain, TOKENS.tolist()))[np.arange(39), TOKENS[1:]]
    for extra in ([], [Run(TOKENS[:3], TOKENS[:3])]):
        state, first = model.score(state, 1, 0, [Run(TOKENS[:20], TOKENS[1:21]), *extra])
        state, second = model.score(state, 1, 20, [Run(TOKENS[20:39], TOKENS[21:40])])
        np.testing.assert_allclose(np.concatenate([first[0].logprobs, second[0].logprobs]), whole, atol=5e-5)


@pytest.mark.parametrize("changes", [{}, {"architectures": ["MistralForCausalLM"], "sliding_window": 8}])
def test_int8_keys_and_values(backend: Backend, changes: dict, tmp_path: Path) -> None:
    """What a run wrote is attended on as it is stored, in one run as in single steps."""
    plain = load_weights(str(write_tiny(tmp_path / "m", num_hidden_layers=2, **changes)))
    model = opened(backend, plain, num_slots=2, kv_int8=True)
    assert model.caps.kv_dtype == "int8"
    expected = forward(plain, TOKENS.tolist(), kv_int8=True)
    exact = forward(plain, TOKENS.tolist())
    state, got = model.extend(model.init_state(), 1, TOKENS[:30], 0, want_logits=True)
    for position in range(30, 40):
        state, logits = model.decode(state, np.array([0, TOKENS[position]]), np.array([-1, position]))
        got = np.concatenate([got, logits[1:]])
    # A key on the edge of two codes may fall either way in float32; that is far less than what int8 costs.
    assert np.abs(got - expected).mean() < 0.05 * np.abs(exact - expected).mean()
    assert np.abs(exact - expected).max() > 1e-3


def test_what_is_said_of_a_model(backend: Backend, weights) -> None:
    caps = opened(backend, weights, num_slots=2).caps
    assert (caps.num_slots, caps.max_len, caps.vocab_size, caps.dtype) == (2, 64, 320, "float32")
    assert caps.device
    assert caps.kernels
    rows = backend.probe()
    assert rows[0].usable
    assert all(row.usable or row.detail for row in rows)


def test_devices_that_are_not_there(backend: Backend, weights) -> None:
    with pytest.raises(BackendError, match=r"device='moon'|runs on the cpu"):
        backend.open_model(weights, ModelOptions(device="moon"))


def test_the_registry() -> None:
    assert {"gpu", "tpu", "reference"} <= set(backend_names())
    assert select_backend("cpu", None)[1] == "cpu"
    assert select_backend("auto", None)[0].name in ("gpu", "tpu")
    assert set(ALIASES) == {"cpu"}
    with pytest.raises(BackendError, match="must be one of auto, cpu, gpu, reference, tpu"):
        load_backend("npu")


def test_auto_asks_no_framework_it_does_not_take() -> None:
    code = "import sys\nfrom llmq.backends.registry import select_backend\nprint(select_backend('auto', None)[0].name, 'jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    name, jax_was_imported = done.stdout.split()
    assert jax_was_imported == str(name == "tpu")


def test_a_framework_that_cannot_be_imported_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(BackendError, match="backend='gpu': torch cannot be imported here"):
        load_backend("gpu")
