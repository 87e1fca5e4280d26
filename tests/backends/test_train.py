"""What every trainer promises, held against the reference and against what is written afterwards."""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from llmq.backends import reference
from llmq.backends.base import Adapters, ModelOptions, Run, TrainBatch, Trainer, TrainOptions
from llmq.backends.gpu.compiler import compiler_refusal
from llmq.backends.gpu.optimizer import AdamW8bit
from llmq.backends.registry import load_backend
from llmq.checkpoint.loader import ModelWeights, load_weights
from llmq.config import SCHEMES, QuantizationConfig, Scheme
from llmq.errors import BackendError
from llmq.model.names import Kind, expected_tensors
from llmq.quant import dequantize, quantize
from tests.backends.quantized import QuantizedWeights
from tests.tiny import GEMMA3, MIXTRAL, QWEN3_MOE, write_checkpoint, write_tiny

#: XLA takes seconds to compile each of these steps.
BACKENDS = ["gpu", pytest.param("tpu", marks=pytest.mark.slow)]

FAMILIES = {
    "llama": {},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 8},
    "tied": {"tie_word_embeddings": True},
    "gemma3": GEMMA3,
    "mixtral": MIXTRAL,
    "qwen3-moe": QWEN3_MOE,
}

GRIDS = [
    scheme.model_copy(update={"symmetric": symmetric, "group_size": 32 if scheme.granularity == "blockwise" else None})
    for scheme in SCHEMES.values()
    for symmetric in (True, False)
]


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> ModelWeights:
    return tiny(tmp_path_factory.mktemp("train"))


def tiny(path: Path, **changes: object) -> ModelWeights:
    return load_weights(str(write_tiny(path / "m", num_hidden_layers=2, dtype=np.float32, **changes)))


def matrices(weights: ModelWeights) -> list[str]:
    rows = expected_tensors(weights.config)
    return [name for name, row in rows.items() if row.kind in (Kind.LINEAR, Kind.EMBEDDING, Kind.LM_HEAD)]


def schemes_for(weights: ModelWeights, scheme: Scheme) -> dict[str, Scheme]:
    return dict.fromkeys(matrices(weights), scheme)


def open_trainer(backend: str, weights: ModelWeights, **options: object) -> Trainer:
    values = {"device": "cpu", "dtype": "float32", "max_len": 64, **options}
    return load_backend(backend).open_trainer(weights, TrainOptions(**values))


def one_document(seed: int = 0, rows: int = 2, tokens: int = 32) -> TrainBatch:
    ids = np.random.default_rng(seed).integers(3, 320, (rows, tokens + 1)).astype(np.int32)
    return TrainBatch(
        tokens=ids[:, :-1],
        targets=ids[:, 1:],
        learned=np.ones((rows, tokens), bool),
        documents=np.ones((rows, tokens), np.int32),
        positions=np.tile(np.arange(tokens, dtype=np.int32), (rows, 1)),
    )


def expected_nats(weights: ModelWeights, batch: TrainBatch) -> np.ndarray:
    """By the reference, of rows that are one document."""
    nats = []
    for tokens, targets, learned in zip(batch.tokens, batch.targets, batch.learned, strict=True):
        logits = reference.forward(weights, tokens.tolist()).astype(np.float64)
        high = logits.max(axis=-1)
        total = high + np.log(np.exp(logits - high[:, None]).sum(axis=-1))
        nats.append((total - logits[np.arange(len(targets)), targets])[learned].sum())
    return np.array(nats)


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_is_that_of_the_reference(backend: str, family: str, tmp_path: Path) -> None:
    weights = tiny(tmp_path, **FAMILIES[family])
    scheme = GRIDS[-1]
    trainer = open_trainer(backend, weights, schemes=schemes_for(weights, scheme))
    batch = one_document()
    np.testing.assert_allclose(trainer.evaluate(batch, quantized=False), expected_nats(weights, batch), rtol=1e-5)
    codes = QuantizedWeights(weights, schemes_for(weights, scheme).get)
    np.testing.assert_allclose(trainer.evaluate(batch, quantized=True), expected_nats(codes, batch), rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scheme", GRIDS, ids=str)
def test_what_is_trained_is_what_is_quantized(
    backend: str, scheme: Scheme, dtype: str, weights: ModelWeights, tmp_path: Path
) -> None:
    """A model whose weights are the dequantized codes has, to the last bit, the loss of the last forward pass."""
    if (backend, dtype) == ("tpu", "bfloat16"):
        pytest.skip("JAX refuses bfloat16 on the CPU")
    schemes = schemes_for(weights, scheme)
    trainer = open_trainer(backend, weights, schemes=schemes, dtype=dtype)
    batch, before = one_document(), expected_nats(weights, one_document())
    for _ in range(3):
        trainer.step([batch], 1e-3, quantized=True)
    last = trainer.evaluate(batch, quantized=True)
    assert (last < before).all()
    finished = {name: trainer.weight(name) for name in weights.shapes}
    rounded = {
        name: dequantize(quantize(weight, schemes[name])) if name in schemes else weight
        for name, weight in finished.items()
    }
    plain = load_weights(str(write_checkpoint(tmp_path / "codes", dict(weights.reader.config), rounded)))
    np.testing.assert_array_equal(open_trainer(backend, plain, dtype=dtype).evaluate(batch, quantized=False), last)


@pytest.mark.parametrize(("family", "symmetric"), [("qwen2", True), ("mixtral", False)])
def test_rounded_inputs_are_those_of_the_reference(backend: str, symmetric: bool, family: str, tmp_path: Path) -> None:
    """In most rows, as long as they are short: an input next to a tie may fall to its other side, and others after it."""
    weights, batch = tiny(tmp_path, **FAMILIES[family]), one_document(rows=9, tokens=3)
    config = QuantizationConfig(scheme="int8_per_channel", symmetric=symmetric, activation="int8")
    codes = QuantizedWeights(weights, config)
    rounded = frozenset(name for name in weights if codes.rounds_inputs(name))
    assert {name.split(".")[-2] for name in rounded} >= {"q_proj", "o_proj"}
    trainer = open_trainer(backend, weights, schemes=codes.schemes, rounded_inputs=rounded)
    only_weights = open_trainer(backend, weights, schemes=codes.schemes).evaluate(batch, quantized=True)
    found, expected = trainer.evaluate(batch, quantized=True), expected_nats(codes, batch)
    assert np.median(np.abs(found / expected - 1)) < 1e-6 < np.abs(only_weights / expected - 1).min()
    np.testing.assert_allclose(trainer.evaluate(batch, quantized=False), expected_nats(weights, batch), rtol=1e-5)
    losses = [trainer.step([batch], 1e-3, quantized=True).loss for _ in range(3)]
    assert losses[2] < losses[1] < losses[0]


def test_the_artifact_predicts_what_training_saw(backend: str, weights: ModelWeights) -> None:
    scheme = SCHEMES["int4_blockwise"].model_copy(update={"group_size": 32})
    trainer = open_trainer(backend, weights, schemes=schemes_for(weights, scheme))
    batch = one_document(rows=1)
    model = load_backend(backend).open_model(
        QuantizedWeights(weights, schemes_for(weights, scheme).get), ModelOptions("cpu", "float32", 1, 64)
    )
    _, (scores,) = model.score(model.init_state(), 0, 0, [Run(batch.tokens[0], batch.targets[0])])
    assert scores
    np.testing.assert_allclose(-scores.logprobs.sum(), trainer.evaluate(batch, quantized=True)[0], rtol=1e-5)


def test_fake_quantization_changes_the_loss_and_the_gradient(backend: str, weights: ModelWeights) -> None:
    scheme = SCHEMES["int4_per_channel"]
    losses = {}
    for quantized in (False, True):
        trainer = open_trainer(backend, weights, schemes=schemes_for(weights, scheme))
        losses[quantized] = [trainer.step([one_document()], 1e-3, quantized=quantized) for _ in range(2)]
    assert losses[False][0].loss != losses[True][0].loss
    assert losses[False][0].grad_norm != losses[True][0].grad_norm


@pytest.mark.parametrize("family", ["qwen2", "gemma3", "mixtral"])
def test_every_tensor_learns(backend: str, family: str, tmp_path: Path) -> None:
    weights = tiny(tmp_path, **FAMILIES[family])
    trainer = open_trainer(backend, weights, schemes=schemes_for(weights, GRIDS[0]))
    trainer.step([one_document()], 1e-3, quantized=True)
    for name in weights:
        assert not np.array_equal(trainer.weight(name), weights[name]), name


def test_accumulated_batches_are_one_batch(backend: str, weights: ModelWeights) -> None:
    """Normalized by tokens, also where batches learn unequally many."""
    whole = one_document(rows=4)
    whole.learned[1:, 5:] = False
    parts = [
        TrainBatch(
            *(array[rows] for array in (whole.tokens, whole.targets, whole.learned, whole.documents, whole.positions))
        )
        for rows in (slice(0, 1), slice(1, 4))
    ]
    trained = []
    for batches in ([whole], parts):
        trainer = open_trainer(backend, weights, schemes=schemes_for(weights, GRIDS[0]))
        trained.append([trainer.step(batches, 1e-3, quantized=True) for _ in range(3)])
    for one, other in zip(*trained, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-5)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-4)


def test_documents_of_a_row_do_not_see_each_other(backend: str, tmp_path: Path) -> None:
    for number, changes in enumerate(({}, {"architectures": ["MistralForCausalLM"], "sliding_window": 5}, GEMMA3)):
        weights = tiny(tmp_path / str(number), **changes)
        trainer = open_trainer(backend, weights)
        apart = [one_document(seed, rows=1, tokens=size) for seed, size in ((1, 9), (2, 14), (3, 20))]
        padding = 64 - 9 - 14 - 20
        fields = {
            name: np.concatenate([getattr(batch, name)[0] for batch in apart] + [np.zeros(padding, np.int32)])[None]
            for name in ("tokens", "targets", "positions")
        }
        numbers = np.repeat([1, 2, 3, 0], [9, 14, 20, padding]).astype(np.int32)[None]
        together = TrainBatch(**fields, learned=numbers > 0, documents=numbers)
        expected = sum(trainer.evaluate(batch, quantized=False)[0] for batch in apart)
        assert trainer.evaluate(together, quantized=False)[0] == pytest.approx(expected, rel=1e-5)


def test_state_is_everything(backend: str, weights: ModelWeights) -> None:
    schemes, batch = schemes_for(weights, GRIDS[0]), one_document()
    trainer = open_trainer(backend, weights, schemes=schemes)
    for _ in range(3):
        trainer.step([batch], 1e-3, quantized=True)
    state = trainer.state()
    assert all(isinstance(array, np.ndarray) for array in state.values())
    other = open_trainer(backend, weights, schemes=schemes)
    other.evaluate(batch, quantized=True)
    other.load_state(3, state)
    for _ in range(2):
        assert trainer.step([batch], 1e-3, quantized=True) == other.step([batch], 1e-3, quantized=True)
    assert state.keys() == open_trainer(backend, weights, schemes=schemes).state().keys()


def test_moments_of_8_bits_are_stored_as_they_are_held(weights: ModelWeights) -> None:
    """In a quarter of the bytes; training with them comes as far, and a state is everything there is."""
    pytest.importorskip("torchao", reason="torchao is not installed: pip install llmq[qat]")
    schemes, batch = schemes_for(weights, GRIDS[0]), one_document()
    eight, wide = (open_trainer("gpu", weights, schemes=schemes, optimizer=name) for name in ("adamw8bit", "adamw"))
    for _ in range(3):
        losses = [trainer.step([batch], 1e-3, quantized=True).loss for trainer in (eight, wide)]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    state, wide_state = eight.state(), wide.state()
    sizes = [
        sum(array.nbytes for name, array in held.items() if name.startswith(("first", "second")))
        for held in (state, wide_state)
    ]
    assert sizes[0] < 0.3 * sizes[1]
    assert {name: held.shape for name, held in state.items() if "codes" in name} == {
        name.replace(" ", " codes ", 1): held.shape
        for name, held in wide_state.items()
        if held.size >= 4096 and name[0] in "fs"
    }
    other = open_trainer("gpu", weights, schemes=schemes, optimizer="adamw8bit")
    other.load_state(3, state)
    for _ in range(2):
        assert eight.step([batch], 1e-3, quantized=True) == other.step([batch], 1e-3, quantized=True)
    again = other.state()
    for name, array in eight.state().items():
        np.testing.assert_array_equal(again[name], array, name)


def test_moments_of_8_bits_are_refused_where_there_are_none(
    weights: ModelWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        BackendError, match=r"optimizer='adamw8bit': the tpu backend holds .* in float32; use adamw, or"
    ):
        open_trainer("tpu", weights, optimizer="adamw8bit")
    together = SimpleNamespace(size=2, device=torch.device("cpu"))
    with pytest.raises(BackendError, match="optimizer='adamw8bit': the 2 processes would cut its blocks"):
        AdamW8bit({"x": nn.Parameter(torch.zeros(4))}, TrainOptions(), together)
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(
        BackendError, match=r"optimizer='adamw8bit': needs torchao, .*; install llmq\[qat\], or use adamw"
    ):
        open_trainer("gpu", weights, optimizer="adamw8bit")


@pytest.mark.slow
def test_compiled_fake_quantization_changes_nothing(
    weights: ModelWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BackendError, match="compile: the tpu backend compiles everything anyway; leave --compile out"):
        open_trainer("tpu", weights, compile=True)
    if reason := compiler_refusal(torch.device("cpu")):
        pytest.skip(f"torch.compile {reason}")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    schemes = schemes_for(weights, GRIDS[0])
    steps = [
        [trainer.step([one_document()], 1e-3, quantized=quantized) for quantized in (False, True, True)]
        for trainer in (open_trainer("gpu", weights, schemes=schemes, compile=on) for on in (False, True))
    ]
    assert steps[0] == steps[1]


def test_recomputed_activations_change_nothing(backend: str, weights: ModelWeights) -> None:
    schemes = schemes_for(weights, GRIDS[0])
    steps = [
        [trainer.step([one_document()], 1e-3, quantized=True) for _ in range(2)]
        for trainer in (open_trainer(backend, weights, schemes=schemes, recompute=on) for on in (False, True))
    ]
    assert steps[0] == steps[1]


def test_adapters_are_seen_merged(backend: str, tmp_path: Path) -> None:
    weights = tiny(tmp_path, tie_word_embeddings=True)
    schemes = schemes_for(weights, GRIDS[3])
    targets = frozenset(name for name in matrices(weights) if "q_proj" in name or "down_proj" in name)
    adapters = Adapters(rank=4, alpha=8.0, targets=targets, seed=0)
    trainer = open_trainer(backend, weights, schemes=schemes, adapters=adapters)
    untouched = open_trainer(backend, weights, schemes=schemes)
    batch = one_document()
    np.testing.assert_array_equal(trainer.evaluate(batch, quantized=True), untouched.evaluate(batch, quantized=True))
    for _ in range(5):
        trainer.step([batch], 1e-2, quantized=True)
    for name in weights:
        assert np.array_equal(trainer.weight(name), weights[name]) == (name not in targets), name
    merged = {name: trainer.weight(name) for name in weights}
    plain = load_weights(str(write_checkpoint(tmp_path / "merged", dict(weights.reader.config), merged)))
    np.testing.assert_array_equal(
        open_trainer(backend, plain, schemes=schemes).evaluate(batch, quantized=True),
        trainer.evaluate(batch, quantized=True),
    )
    assert all(name.split()[-1] in targets for name in trainer.state())


def test_a_teacher_is_learned_from(backend: str, weights: ModelWeights, tmp_path: Path) -> None:
    """Its own model has nothing to learn from it, and another comes nearer to it."""
    teacher, batch = tiny(tmp_path, tie_word_embeddings=True), one_document()
    alone = open_trainer(backend, teacher, teacher=teacher, kd_weight=1.0, kd_temperature=2.0)
    found = alone.step([batch], 0.0, quantized=False)
    assert abs(found.loss) < 1e-6
    assert found.grad_norm < 1e-3
    pupil = open_trainer(backend, weights, teacher=teacher, kd_weight=1.0)
    losses = [pupil.step([batch], 1e-3, quantized=False).loss for _ in range(3)]
    assert losses[2] < losses[1] < losses[0]
    shares = [
        open_trainer(backend, weights, teacher=teacher, kd_weight=share).step([batch], 0.0, quantized=False).loss
        for share in (0.25, 1.0)
    ]
    plain = open_trainer(backend, weights).step([batch], 0.0, quantized=False).loss
    assert shares[0] == pytest.approx(0.75 * plain + 0.25 * shares[1], rel=1e-5)
    assert losses[0] == pytest.approx(expected_divergence(teacher, weights, batch), rel=1e-5)


def test_a_teacher_has_its_own_rotation_and_windows(backend: str, weights: ModelWeights, tmp_path: Path) -> None:
    """And its heads, and may compute elsewhere."""
    changes = {"rope_theta": 500.0, "head_dim": 64, "sliding_window": 8, "architectures": ["MistralForCausalLM"]}
    teacher, batch = tiny(tmp_path, **changes), one_document()
    expected = expected_divergence(teacher, weights, batch)
    for where in (None, "cpu"):
        pupil = open_trainer(backend, weights, teacher=teacher, kd_weight=1.0, teacher_device=where)
        assert pupil.step([batch], 0.0, quantized=False).loss == pytest.approx(expected, rel=1e-5)


def test_the_model_teaches_its_own_adapters(backend: str, weights: ModelWeights) -> None:
    """As another copy of it does: what it teaches is neither rounded nor adapted."""
    targets = frozenset(name for name in matrices(weights) if "q_proj" in name or "down_proj" in name)
    options = {
        "schemes": schemes_for(weights, GRIDS[-1]),
        "adapters": Adapters(rank=4, alpha=8.0, targets=targets, seed=0),
        "kd_weight": 0.5,
    }
    batches = [one_document(seed) for seed in range(2)]
    copy = load_weights(str(weights.reader.path))
    shared, apart = (open_trainer(backend, weights, teacher=teacher, **options) for teacher in (weights, copy))
    for _ in range(3):
        steps = [trainer.step(batches, 1e-2, quantized=True) for trainer in (shared, apart)]
        assert steps[0].loss == pytest.approx(steps[1].loss, rel=1e-6)
        assert steps[0].grad_norm == pytest.approx(steps[1].grad_norm, rel=1e-5)
    for name in targets:
        np.testing.assert_allclose(shared.weight(name), apart.weight(name), atol=1e-6)


def expected_divergence(teacher: ModelWeights, weights: ModelWeights, batch: TrainBatch) -> float:
    """Mean of KL(teacher || model), by the reference."""
    parts = []
    for tokens in batch.tokens:
        ours, theirs = (reference.forward(model, tokens.tolist()).astype(np.float64) for model in (weights, teacher))
        ours, theirs = (logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True) for logits in (ours, theirs))
        parts.append((np.exp(theirs) * (theirs - ours)).sum(axis=-1))
    return float(np.mean(parts))
