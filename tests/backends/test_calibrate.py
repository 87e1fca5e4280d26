"""Both calibrators against the reference's own linears."""

from dataclasses import replace

import numpy as np
import pytest

from llmq.backends import reference
from llmq.backends.base import Calibrator, ModelOptions
from llmq.backends.registry import load_backend
from llmq.checkpoint.loader import ModelWeights, load_weights
from llmq.model.names import STAGES, layer_prefix
from tests.tiny import GEMMA3, write_tiny

OPTIONS = ModelOptions(device="cpu", dtype="float32", max_len=64)

FAMILIES = {
    "llama": {},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 8},
    "gemma3": GEMMA3,
}


@pytest.fixture(scope="module", params=FAMILIES)
def weights(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelWeights:
    path = tmp_path_factory.mktemp("calibrate") / request.param
    return load_weights(str(write_tiny(path, num_hidden_layers=2, **FAMILIES[request.param])))


def sequences(*lengths: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, 320, n).astype(np.int32) for n in lengths]


def block(weights: ModelWeights, layer: int) -> dict:
    prefix = layer_prefix(layer)
    return {name.removeprefix(prefix): weights[name] for name in weights if name.startswith(prefix)}


def all_moments(calibrator: Calibrator, weights: ModelWeights, tokens: list[np.ndarray]) -> dict[str, np.ndarray]:
    """Second moments of every linear's input."""
    stream, found = calibrator.start(tokens), {}
    for layer in range(weights.config.num_layers):
        for stage in range(len(STAGES) + 1):
            stream = calibrator.advance(stream, block(weights, layer), stage)
            if stage < len(STAGES):
                moments = calibrator.moments(stream)
                found.update({layer_prefix(layer) + linear: moments for linear in STAGES[stage]})
    return found


def expected_moments(weights: ModelWeights, tokens: list[np.ndarray]) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}

    def observe(name: str, x: np.ndarray, _: np.ndarray) -> None:
        found[name] = found.get(name, 0.0) + x.T @ x

    for sequence in tokens:
        reference.forward(weights, sequence.tolist(), observe)
    del found["lm_head"]
    return found


@pytest.mark.parametrize("backend", ["gpu", "tpu"])
def test_moments_are_those_of_the_reference_whatever_the_lengths(weights: ModelWeights, backend: str) -> None:
    tokens = sequences(5, 40, 17)
    found = all_moments(load_backend(backend).open_calibrator(weights, OPTIONS, 2), weights, tokens)
    expected = expected_moments(weights, tokens)
    assert found.keys() == expected.keys()
    for name, moments in expected.items():
        np.testing.assert_allclose(found[name], moments, rtol=0, atol=2e-5 * np.abs(moments).max(), err_msg=name)


@pytest.mark.parametrize("backend", ["gpu", "tpu"])
def test_a_batch_of_a_short_and_a_long_sequence_adds_up(weights: ModelWeights, backend: str) -> None:
    calibrator = load_backend(backend).open_calibrator(weights, OPTIONS, 1)
    short, long = sequences(3, 61)
    together = all_moments(calibrator, weights, [short, long])
    alone = [all_moments(calibrator, weights, [one]) for one in (short, long)]
    for name, moments in together.items():
        total = alone[0][name] + alone[1][name]
        np.testing.assert_allclose(moments, total, rtol=0, atol=2e-6 * np.abs(total).max(), err_msg=name)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> ModelWeights:
    return load_weights(str(write_tiny(tmp_path_factory.mktemp("calibrate") / "m", num_hidden_layers=2)))


@pytest.mark.parametrize("backend", ["gpu", "tpu"])
def test_neighbors_on_either_side_change_nothing(llama: ModelWeights, backend: str) -> None:
    """Whatever stands before or behind a short sequence where sequences are packed or padded."""
    weights = llama
    calibrator = load_backend(backend).open_calibrator(weights, OPTIONS, 1)
    short, long = sequences(3, 61)
    expected = all_moments(calibrator, weights, [long, short, long])
    for tokens in ([short, long, long], [long, long, short]):
        found = all_moments(calibrator, weights, tokens)
        for name, moments in expected.items():
            np.testing.assert_allclose(found[name], moments, rtol=0, atol=2e-6 * np.abs(moments).max(), err_msg=name)


def test_what_stands_in_padding_is_in_no_result(llama: ModelWeights) -> None:
    """JAX pads sequences at their ends; here with large numbers."""
    weights = llama
    calibrator = load_backend("tpu").open_calibrator(weights, OPTIONS, 1)
    start = calibrator.start(sequences(3, 61))
    (clean,) = start.batches
    noise = np.random.default_rng(1).normal(0, 100, clean.hidden_BND.shape).astype(np.float32)
    filled = replace(clean, hidden_BND=np.where(np.asarray(clean.valid_BN)[..., None], clean.hidden_BND, noise))
    found: list[list[np.ndarray]] = []
    streams = []
    for stream in (start, start._replace(batches=[filled])):
        moments = []
        for layer in range(weights.config.num_layers):
            for stage in range(len(STAGES) + 1):
                stream = calibrator.advance(stream, block(weights, layer), stage)
                if stage < len(STAGES):
                    moments.append(calibrator.moments(stream))
        found.append(moments)
        streams.append(stream)
    assert all((one == other).all() for one, other in zip(*found, strict=True))
    assert calibrator.divergence(*streams) == 0.0


def test_torch_moments_have_the_same_bits_on_any_number_of_threads(weights: ModelWeights) -> None:
    backend, tokens = load_backend("gpu"), sequences(*[60] * 80)
    one, three = (all_moments(backend.open_calibrator(weights, OPTIONS, n), weights, tokens) for n in (1, 3))
    assert all((one[name] == three[name]).all() for name in one)


class Halved(ModelWeights):
    """A model in which every other row of the up projections is half of what it was."""

    def __getitem__(self, name: str) -> np.ndarray:
        weight = super().__getitem__(name)
        if "up_proj" not in name:
            return weight
        return weight * np.where(np.arange(len(weight)) % 2, 1.0, 0.5).astype(np.float32)[:, None]


def all_inputs(weights: ModelWeights, tokens: list[np.ndarray]) -> dict[str, np.ndarray]:
    """What each linear reads, over all tokens."""
    found: dict[str, list[np.ndarray]] = {}
    for sequence in tokens:
        reference.forward(weights, sequence.tolist(), lambda name, x, _: found.setdefault(name, []).append(x))
    return {name: np.concatenate(parts) for name, parts in found.items()}


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("backend", ["gpu", "tpu"])
def test_drift_is_from_the_first_stream_to_the_second(weights: ModelWeights, backend: str, scaled: bool) -> None:
    calibrator, tokens = load_backend(backend).open_calibrator(weights, OPTIONS, 2), sequences(5, 40, 17)
    halved = Halved(weights.reader)
    inputs, moved = all_inputs(weights, tokens), all_inputs(halved, tokens)
    stream, other = (calibrator.start(tokens) for _ in range(2))
    for layer in range(weights.config.num_layers):
        for stage in range(len(STAGES)):
            stream = calibrator.advance(stream, block(weights, layer), stage)
            other = calibrator.advance(other, block(halved, layer), stage)
            name = layer_prefix(layer) + STAGES[stage][0]
            scale = np.linspace(0.5, 2, inputs[name].shape[1], dtype=np.float32) if scaled else None
            found = calibrator.drift(stream, other, scale)
            expected = (inputs[name] / (1 if scale is None else scale) - moved[name]).T @ moved[name]
            np.testing.assert_allclose(
                found, expected, rtol=0, atol=1e-4 * max(1, np.abs(expected).max()), err_msg=name
            )
        stream = calibrator.advance(stream, block(weights, layer), len(STAGES))
        other = calibrator.advance(other, block(halved, layer), len(STAGES))
    assert np.abs(expected).max() > 0.01


@pytest.mark.parametrize("backend", ["gpu", "tpu"])
def test_divergence_is_that_of_the_logits(weights: ModelWeights, backend: str) -> None:
    calibrator = load_backend(backend).open_calibrator(weights, OPTIONS, 1)
    tokens = sequences(9, 30)
    stream, other = (calibrator.start(tokens) for _ in range(2))
    halved = Halved(weights.reader)
    for layer in range(weights.config.num_layers):
        for stage in range(len(STAGES) + 1):
            stream = calibrator.advance(stream, block(weights, layer), stage)
            other = calibrator.advance(other, block(halved, layer), stage)

    kls = []
    for sequence in tokens:
        p, q = (
            logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
            for logits in (reference.forward(w, sequence.tolist()) for w in (weights, halved))
        )
        kls.append((np.exp(p) * (p - q)).sum(axis=-1))
    expected = np.concatenate(kls).mean()
    assert expected > 0.001
    assert calibrator.divergence(stream, other) == pytest.approx(expected, rel=1e-4)
    assert calibrator.divergence(stream, stream) == 0.0
