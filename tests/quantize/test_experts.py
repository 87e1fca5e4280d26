"""Mixtures of experts: what each expert is shown, and whole runs on tiny Mixtrals and Qwen3-MoEs."""

import json
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmq.backends import reference
from llmq.backends.base import Calibrator, ModelOptions, Stream
from llmq.backends.gpu import calibrate
from llmq.backends.registry import load_backend
from llmq.checkpoint.loader import ModelWeights, load_weights
from llmq.checkpoint.record import read_record
from llmq.config import SCHEMES, QuantizationConfig
from llmq.convert import plan_conversion
from llmq.errors import CheckpointError
from llmq.model.config import ModelConfig
from llmq.model.names import MLP_STAGE, STAGES, Kind, as_mlp, expert_names, layer_prefix
from llmq.quant import dequantize, quantize
from llmq.quantize import run as runs
from llmq.quantize.blocks import read_block
from llmq.quantize.bounded import measure_artifact
from llmq.quantize.experts import Mixture, chosen_experts, shown_tokens
from llmq.quantize.fold import fold_expert
from llmq.quantize.mixed import plan_mixed
from llmq.quantize.options import ALGORITHMS, Target
from llmq.quantize.sensitivity import TABLE, measure_sensitivity
from llmq.quantize.setup import Run
from tests.commands.test_cli import llmq
from tests.quantize.test_run import Killed, kill_after, options, peak_bytes, random_words, weight_bytes
from tests.quantize.test_run import run as quantized
from tests.test_mixture import fuse
from tests.tiny import (
    MIXTRAL,
    QWEN3_MOE,
    byte_tokenizer_files,
    random_tensors,
    tiny_config,
    write_checkpoint,
    write_tiny,
)

FAMILIES: dict[str, dict[str, Any]] = {"mixtral": MIXTRAL, "qwen3-moe": QWEN3_MOE}

#: So few features that each expert of a few hundred tokens is chosen by more.
NARROW = {"hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 64, "head_dim": 8}

CONFIG = QuantizationConfig(scheme="int4_blockwise", group_size=32)

OPTIONS = ModelOptions(device="cpu", dtype="float32", max_len=64)

EXPERT_STAGES = (MLP_STAGE, MLP_STAGE + 1)


class Seen(ModelWeights):
    """A model, and what every linear of it reads."""

    def inputs(self, tokens: list[np.ndarray]) -> dict[str, np.ndarray]:
        found: dict[str, list[np.ndarray]] = {}
        for sequence in tokens:
            reference.forward(self, sequence.tolist(), lambda name, x, _: found.setdefault(name, []).append(x))
        return {name: np.concatenate(parts) for name, parts in found.items()}


class Shrunk(Seen):
    """A model of which every other row of some linears is half of what it was."""

    def __getitem__(self, name: str) -> np.ndarray:
        weight = super().__getitem__(name)
        if not name.endswith(("v_proj.weight", "w3.weight", "up_proj.weight")):
            return weight
        return weight * np.where(np.arange(len(weight)) % 2, 1.0, 0.5).astype(np.float32)[:, None]


def narrow(path: Path, family: str, seed: int = 0) -> Seen:
    return Seen(load_weights(str(write_tiny(path, seed, num_hidden_layers=2, **FAMILIES[family] | NARROW))).reader)


def sequences(*lengths: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, 320, n).astype(np.int32) for n in lengths]


TOKENS = sequences(60, 7, 60, 33, 60, 60, 60)


def opened(backend: str, weights: ModelWeights, num_threads: int = 1) -> Calibrator:
    return load_backend(backend).open_calibrator(weights, OPTIONS, num_threads)


def to_experts(calibrator: Calibrator, stream: Stream, weights: ModelWeights, layer: int) -> Stream:
    for stage in range(MLP_STAGE + 1):
        stream = calibrator.advance(stream, read_block(weights, layer), stage)
    return stream


def leave(calibrator: Calibrator, stream: Stream, weights: ModelWeights, layer: int) -> Stream:
    for stage in range(MLP_STAGE + 1, len(STAGES) + 1):
        stream = calibrator.advance(stream, read_block(weights, layer), stage)
    return stream


def expert_moments(calibrator: Calibrator, weights: ModelWeights, stream: Stream) -> dict[str, np.ndarray]:
    """Second moments of what every linear of every expert is shown."""
    found = {}
    for layer in range(weights.config.num_layers):
        stream = to_experts(calibrator, stream, weights, layer)
        mixture = Mixture(calibrator, stream, read_block(weights, layer), weights.config)
        for index in range(len(mixture.experts)):
            for stage in EXPERT_STAGES:
                moments = calibrator.moments(mixture.reads(stream, read_block(weights, layer), index, stage))
                found.update({layer_prefix(layer) + name: moments for name in mixture.linears(index, stage)})
        stream = leave(calibrator, stream, weights, layer)
    return found


def assert_close(found: np.ndarray, expected: np.ndarray, name: str, part: float = 2e-5) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=part * np.abs(expected).max(), err_msg=name)


class TestRule:
    def test_the_likeliest_experts_and_of_equal_ones_the_first(self) -> None:
        prob = np.array([[0.1, 0.4, 0.1, 0.4], [0.25, 0.25, 0.25, 0.25], [0.4, 0.1, 0.3, 0.2]], np.float32)
        assert chosen_experts(prob, 2).astype(int).tolist() == [[0, 1, 0, 1], [1, 1, 0, 0], [1, 0, 1, 0]]
        assert chosen_experts(prob, 1).astype(int).tolist() == [[0, 1, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]]

    @pytest.mark.parametrize(
        ("least", "expected"),
        [(0, [2, 5]), (2, [2, 5]), (3, [1, 2, 5]), (4, [1, 2, 4, 5]), (5, [0, 1, 2, 4, 5]), (9, [0, 1, 2, 3, 4, 5])],
    )
    def test_no_fewer_tokens_than_asked_for_and_its_own_before_all(self, least: int, expected: list[int]) -> None:
        """Token 2 chose the expert though it is likelier for token 1; tokens 0 and 4 are the same to it."""
        prob = np.array([0.2, 0.9, 0.3, 0.1, 0.25, 0.8], np.float32)
        chosen = np.array([False, False, True, False, False, True])
        assert shown_tokens(prob, chosen, least).tolist() == expected

    def test_an_expert_of_no_token_sees_the_likeliest(self) -> None:
        prob = np.array([0.1, 0.3, 0.2, 0.3], np.float32)
        none = np.zeros(4, bool)
        assert shown_tokens(prob, none, 1).tolist() == [1]
        assert shown_tokens(prob, none, 3).tolist() == [1, 2, 3]

    def test_an_expert_is_short_below_the_features_of_its_linears(self) -> None:
        """Gate and up have 32, down has 64."""
        counts = (31, 32, 64, 63)
        prob = np.repeat(np.eye(4, dtype=np.float32), counts, axis=0)
        config = ModelConfig.from_dict(tiny_config(**MIXTRAL | NARROW | {"num_experts_per_tok": 1}))

        class Counting:
            def probabilities(self, *_: Any) -> np.ndarray:
                return prob

            def pick(self, _: Any, tokens: np.ndarray) -> np.ndarray:
                return tokens

            def advance(self, picked: np.ndarray, *_: Any) -> np.ndarray:
                return picked

        mixture = Mixture(Counting(), None, {}, config)  # pyright: ignore[reportArgumentType]
        assert mixture.counts == list(counts)
        short = [[mixture.is_short(index, stage) for index in range(4)] for stage in EXPERT_STAGES]
        assert short == [[True, False, False, False], [True, True, False, True]]
        shown = [[len(mixture.reads(None, {}, index, stage)) for index in range(4)] for stage in EXPERT_STAGES]
        assert shown == [[32, 32, 64, 63], [64, 64, 64, 64]]


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens are computed together, so that those of an expert come from many places and go to many."""
    from llmq.backends.tpu import calibrate as tpu_calibrate

    monkeypatch.setattr(calibrate, "_CHUNK_TOKENS", 50)
    monkeypatch.setattr(tpu_calibrate, "_BATCH_TOKENS", 64)


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("backend", ["gpu", "tpu"])
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_shown_what_they_read_in_the_reference(family: str, backend: str, tmp_path: Path) -> None:
    weights = narrow(tmp_path / "m", family)
    calibrator = opened(backend, weights, 2)
    found = expert_moments(calibrator, weights, calibrator.start(TOKENS))
    expected = {name: x for name, x in weights.inputs(TOKENS).items() if ".experts." in name}
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert len(x) >= x.shape[1], "too few tokens for what is tested here"
        assert_close(found[name], x.T @ x, name)


def never_chosen(path: Path) -> tuple[Seen, np.ndarray]:
    """A Mixtral of one layer, whose last expert no token chooses: its scores are 0, as are those of the one before.

    The first two share the tokens; the nearer these are to the middle, the likelier is the last.
    """
    config = tiny_config(num_hidden_layers=1, **MIXTRAL | NARROW)
    tensors = random_tensors(config, dtype=np.float32)
    router = tensors["model.layers.0.block_sparse_moe.gate.weight"]
    router[1] = -router[0]
    router[2:] = 0
    source = write_checkpoint(path, config, tensors)
    for name, contents in byte_tokenizer_files().items():
        (source / name).write_bytes(contents)
    return Seen(load_weights(str(source)).reader), router[0]


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("backend", ["gpu", "tpu"])
def test_an_expert_that_no_token_chose_is_shown_as_many_as_it_has_features(backend: str, tmp_path: Path) -> None:
    weights, direction = never_chosen(tmp_path / "m")
    calibrator, at = opened(backend, weights), "model.layers.0.block_sparse_moe."
    found = expert_moments(calibrator, weights, calibrator.start(TOKENS))
    inputs = weights.inputs(TOKENS)
    assert f"{at}experts.3.w1" not in inputs
    x = inputs[f"{at}gate"]
    near = np.argsort(np.abs(x @ direction))
    gate_up = x[near[:32]]
    assert_close(found[f"{at}experts.3.w1"], gate_up.T @ gate_up, "gate")
    assert_close(found[f"{at}experts.3.w3"], gate_up.T @ gate_up, "up")
    gate, up = (x[near[:64]] @ np.float64(weights[f"{at}experts.3.{name}.weight"]).T for name in ("w1", "w3"))
    down = gate / (1 + np.exp(-gate)) * up
    assert_close(found[f"{at}experts.3.w2"], down.T @ down, "down")


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("backend", ["gpu", "tpu"])
@pytest.mark.parametrize("family", FAMILIES)
def test_drift_is_that_of_the_tokens_shown_now(family: str, backend: str, tmp_path: Path) -> None:
    """Whichever experts they chose before."""
    weights = narrow(tmp_path / "m", family)
    shrunk = Shrunk(weights.reader)
    calibrator = opened(backend, weights)
    was, now = (to_experts(calibrator, calibrator.start(TOKENS), each, 0) for each in (weights, shrunk))
    mixture = Mixture(calibrator, now, read_block(shrunk, 0), weights.config)
    names = expert_names(weights.config)
    assert names is not None
    before, inputs = weights.inputs(TOKENS), shrunk.inputs(TOKENS)
    router, moved = layer_prefix(0) + names.router, 0
    for index, expert in enumerate(names.experts):
        x = inputs[layer_prefix(0) + expert[0]]
        rows = np.flatnonzero((inputs[router][:, None] == x).all(axis=-1).any(axis=1))
        assert len(rows) == len(x)
        moved += len(
            set(rows)
            - set(
                np.flatnonzero(
                    (before[router][:, None] == before[layer_prefix(0) + expert[0]]).all(axis=-1).any(axis=1)
                )
            )
        )
        expected = {MLP_STAGE: (before[router][rows] - x).T @ x}
        gate, up = (
            before[router][rows] @ np.float64(weights[f"{layer_prefix(0)}{name}.weight"]).T for name in expert[:2]
        )
        down = inputs[layer_prefix(0) + expert[2]]
        expected[MLP_STAGE + 1] = (gate / (1 + np.exp(-gate)) * up - down).T @ down
        for stage in EXPERT_STAGES:
            parts = (
                mixture.reads(at, read_block(each, 0), index, stage) for at, each in ((was, weights), (now, shrunk))
            )
            assert_close(calibrator.drift(*parts), expected[stage], expert[stage - MLP_STAGE], 2e-4)
    assert moved, "every token chose as before"


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("backend", ["gpu", "tpu"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_mixture_is_left_as_the_reference_leaves_it(family: str, backend: str, tmp_path: Path) -> None:
    weights = narrow(tmp_path / "m", family)
    shrunk, calibrator = Shrunk(weights.reader), opened(backend, weights, 2)
    ends, logits = [], []
    for each in (weights, shrunk):
        stream = calibrator.start(TOKENS)
        for layer in range(2):
            stream = leave(calibrator, to_experts(calibrator, stream, each, layer), each, layer)
        ends.append(stream)
        logits.append(np.concatenate([reference.forward(each, sequence.tolist()) for sequence in TOKENS]))
    p, q = (each - np.log(np.exp(each).sum(axis=-1, keepdims=True)) for each in logits)
    expected = (np.exp(p) * (p - q)).sum(axis=-1).mean()
    assert expected > 1e-4
    assert calibrator.divergence(*ends) == pytest.approx(expected, rel=2e-4)


def test_what_stands_in_padding_reaches_no_expert(tmp_path: Path) -> None:
    """JAX pads sequences at their ends; here with large numbers."""
    from dataclasses import replace

    weights = narrow(tmp_path / "m", "qwen3-moe")
    calibrator = opened("tpu", weights)
    clean = calibrator.start(TOKENS)
    rng = np.random.default_rng(1)
    filled = [
        replace(batch, hidden_BND=np.where(np.asarray(batch.valid_BN)[..., None], batch.hidden_BND, noise))
        for batch in clean.batches
        for noise in [rng.normal(0, 100, batch.hidden_BND.shape).astype(np.float32)]
    ]
    found = [expert_moments(calibrator, weights, each) for each in (clean, clean._replace(batches=filled))]
    assert all((found[0][name] == found[1][name]).all() for name in found[0])


def test_an_expert_is_the_same_with_its_scales_folded(tmp_path: Path) -> None:
    weights = narrow(tmp_path / "m", "mixtral")
    calibrator, block = opened("gpu", weights), dict(read_block(weights, 0))
    stream = to_experts(calibrator, calibrator.start(TOKENS), weights, 0)
    mixture = Mixture(calibrator, stream, block, weights.config)
    expert = mixture.experts[1]
    down = f"{expert[2]}.weight"
    before = calibrator.moments(mixture.reads(stream, block, 1, MLP_STAGE + 1))
    schemes = {name: SCHEMES["int4_blockwise"].model_copy(update={"group_size": 16}) for name in block}
    changed = dict(block)
    with ThreadPoolExecutor(1) as pool:
        scale = fold_expert(before, "", changed, schemes, expert[1:], "nearest", pool)
    assert np.ptp(scale) > 0.1
    assert {name for name in block if changed[name] is not block[name]} == {f"{expert[1]}.weight", down}
    after = calibrator.moments(mixture.reads(stream, changed, 1, MLP_STAGE + 1))
    assert_close(after * np.outer(scale, scale), before, "down's input")
    np.testing.assert_allclose(changed[down] / scale, np.float32(block[down]), rtol=1e-6)
    assert set(as_mlp(expert, changed)) == {f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")}


def source_of(path: Path, family: str, **changes: Any) -> Path:
    source = write_tiny(path, num_hidden_layers=2, **FAMILIES[family] | changes)
    for name, contents in byte_tokenizer_files().items():
        (source / name).write_bytes(contents)
    return source


@pytest.fixture(scope="module", params=FAMILIES)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return source_of(tmp_path_factory.mktemp("experts") / request.param, request.param)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experts") / "text.txt"
    path.write_text(random_words(seed=0))
    return path


@pytest.fixture(scope="module")
def clean(source: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantized(source, tmp_path_factory.mktemp("experts") / "clean", options(text), CONFIG, num_threads=1)


def test_calibrated_codes_lose_less_of_the_predictions(source: Path, text: Path, clean: Path, tmp_path: Path) -> None:
    plan, chosen = plan_conversion(str(source), CONFIG), options(text)
    rounded = quantized(source, tmp_path / "rtn", options(None, algorithm="rtn", dataset=None), CONFIG)
    both = quantized(source, tmp_path / "both", options(text, algorithm="awq+gptq"), CONFIG)
    lost = {path.name: measure_artifact(plan, chosen, path) for path in (rounded, clean, both)}
    assert lost["clean"] < 0.25 * lost["rtn"], lost
    assert lost["both"] < 1.3 * lost["clean"], lost
    calibration = read_record(clean).calibration
    linears = {row.name.removesuffix(".weight") for row in plan.coverage if row.kind is Kind.LINEAR}
    assert {name.removesuffix(".weight") for name in calibration.output_errors} == linears
    assert calibration.few_tokens == {}


def test_experts_in_one_tensor_give_the_same_bytes(source: Path, text: Path, clean: Path, tmp_path: Path) -> None:
    plain = load_weights(str(source))
    fused = fuse({name: plain[name] for name in plain}, plain.config)
    assert len(fused) < len(plain)
    path = write_checkpoint(tmp_path / "fused", json.loads((source / "config.json").read_text()), fused)
    for name, contents in byte_tokenizer_files().items():
        (path / name).write_bytes(contents)
    assert weight_bytes(quantized(path, tmp_path / "out", options(text), CONFIG)) == weight_bytes(clean)


def test_a_killed_run_is_resumed_to_the_same_bytes(text: Path, tmp_path: Path) -> None:
    source = source_of(tmp_path / "m", "qwen3-moe")
    chosen = options(text, algorithm="awq+gptq", num_samples=2)
    clean = quantized(source, tmp_path / "clean", chosen, CONFIG)
    with pytest.raises(Killed):
        quantized(source, tmp_path / "out", chosen, CONFIG, tell=kill_after(0))
    done = quantized(source, tmp_path / "out", chosen, CONFIG, resume=True)
    assert weight_bytes(done) == weight_bytes(clean)
    assert read_record(clean).calibration.few_tokens
    assert read_record(done).calibration == read_record(clean).calibration


def test_scales_of_experts_go_from_down_into_up(source: Path, text: Path, tmp_path: Path) -> None:
    """Gate stays as it is."""
    made = {}
    for algorithm in ("mse", "awq"):
        chosen = options(text, algorithm=algorithm, num_samples=4)
        made[algorithm] = load_weights(str(quantized(source, tmp_path / algorithm, chosen, CONFIG)))
    names = expert_names(made["awq"].config)
    assert names is not None
    same = [
        tuple(np.array_equal(*(made[each][f"model.layers.1.{name}.weight"].values for each in made)) for name in expert)
        for expert in names.experts
    ]
    assert set(same) == {(True, False, False)}


def test_threads_change_no_byte(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, with everything that an algorithm does, in many chunks, and with experts of few tokens."""
    monkeypatch.setattr(calibrate, "_CHUNK_TOKENS", 16)
    source = source_of(tmp_path / "m", "qwen3-moe")
    chosen = options(text, algorithm="awq+gptq", num_samples=2, dtype="bfloat16")
    one, two = (quantized(source, tmp_path / str(n), chosen, CONFIG, num_threads=n) for n in (1, 2))
    assert weight_bytes(one) == weight_bytes(two)
    few = read_record(one).calibration.few_tokens
    assert len(few) == 2 * 6
    assert sum(few.values()) == 2 * 3 * 2 * 48
    assert few == read_record(two).calibration.few_tokens


def test_experts_of_few_tokens_are_told(text: Path, tmp_path: Path) -> None:
    never_chosen(tmp_path / "m")
    done = llmq(
        *("quantize", tmp_path / "m", "-o", tmp_path / "out", "--dataset", text, "--num-samples", 8, "--seq-len", 48),
        *("--backend", "cpu", "--dtype", "float32", "--algorithm", "awq+gptq"),
    )
    assert done.returncode == 0, done.stderr
    assert read_record(tmp_path / "out").calibration.few_tokens == {"model.layers.0.block_sparse_moe.experts.3": 0}
    assert "experts w2 " in done.stderr
    assert "; 1 experts chosen by few tokens" in done.stderr
    assert "experts: 1 were chosen by fewer tokens than their linears have input features, 1 by none" in done.stderr
    assert "experts: scales go from each down into its up" in done.stderr
    before, after = (load_weights(str(tmp_path / name)) for name in ("m", "out"))
    norm = "model.layers.0.post_attention_layernorm.weight"
    for name in (norm, "model.layers.0.block_sparse_moe.gate.weight"):
        np.testing.assert_array_equal(before[name], after[name])


@pytest.mark.parametrize("algorithm", ["gptq", "awq"])
@pytest.mark.parametrize("linear", ["w1", "w3", "w2"])
def test_damaged_weights_of_an_expert_are_refused_by_name(
    text: Path, tmp_path: Path, algorithm: str, linear: str
) -> None:
    config = tiny_config(num_hidden_layers=1, **MIXTRAL | NARROW)
    tensors = random_tensors(config)
    name = f"model.layers.0.block_sparse_moe.experts.2.{linear}.weight"
    tensors[name][3, 4] = np.nan
    source = write_checkpoint(tmp_path / "source", config, tensors)
    for file, contents in byte_tokenizer_files().items():
        (source / file).write_bytes(contents)
    with pytest.raises(CheckpointError, match=rf"^{name}: holds NaN, infinity"):
        quantized(source, tmp_path / "out", options(text, algorithm=algorithm, num_samples=2), CONFIG)
    assert not (tmp_path / "out").exists()


class OneStage(ModelWeights):
    """A model of which the linears of one stage are rounded."""

    changed: frozenset[str] = frozenset()

    def __getitem__(self, name: str) -> np.ndarray:
        weight = super().__getitem__(name)
        scheme = SCHEMES["int4_blockwise"].model_copy(update={"group_size": 64})
        return dequantize(quantize(weight, scheme)) if name in self.changed else weight


@pytest.mark.parametrize("backend", ["gpu", "tpu"])
def test_the_experts_of_a_stage_are_one_row_of_the_table(tmp_path: Path, backend: str) -> None:
    weights = load_weights(str(source_of(tmp_path / "m", "qwen3-moe")))
    heldout = sequences(30, 9)
    with ThreadPoolExecutor(2) as pool:
        table = measure_sensitivity(
            opened(backend, weights), weights, CONFIG, ALGORITHMS["rtn"], TOKENS[:3], heldout, pool
        )
    assert TABLE.validate_python(TABLE.dump_python(table, mode="json")) == table
    assert [row.name for row in table[6:]] == [
        "model.layers.1.mlp.experts.*.{gate_proj,up_proj}",
        "model.layers.1.mlp.experts.*.down_proj",
    ]
    row = table[7]
    assert row.linears == tuple(f"model.layers.1.mlp.experts.{index}.down_proj" for index in range(6))
    assert [(c.scheme, c.group_size) for c in row.candidates][:2] == [("int4_blockwise", 64), ("int4_blockwise", 32)]
    assert row.candidates[-1].num_bytes == 6 * 128 * 64 * 2
    assert list(row.candidates[0].output_error) == ["mlp.experts.*.down_proj"]
    rounded = OneStage(weights.reader)
    rounded.changed = frozenset(f"{linear}.weight" for linear in row.linears)
    kls = []
    for sequence in heldout:
        p, q = (
            logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
            for logits in (reference.forward(each, sequence.tolist()) for each in (weights, rounded))
        )
        kls.append((np.exp(p) * (p - q)).sum(axis=-1))
    assert row.candidates[0].kl == pytest.approx(np.concatenate(kls).mean(), rel=1e-3)


def test_a_mix_has_one_scheme_for_all_experts_and_runs_on_both_backends(
    source: Path, text: Path, tmp_path: Path
) -> None:
    how = {} if source.name == "mixtral" else {"backend": "tpu", "device": "cpu", "algorithm": "awq+gptq"}
    chosen = options(text, target=Target(bits=5.2), num_samples=8, **how)
    mixed = plan_mixed(plan_conversion(str(source), CONFIG), chosen, tmp_path / "out")
    linears = {row.name.removesuffix(".weight"): row for row in mixed.plan.coverage if row.kind is Kind.LINEAR}
    bits = 8 * sum(row.stored_bytes for row in linears.values()) / sum(np.prod(row.shape) for row in linears.values())
    assert 5.0 < bits <= 5.2
    assert len({str(row.scheme) for row in linears.values()}) > 1
    names = expert_names(load_weights(str(source)).config)
    assert names is not None
    for layer in range(2):
        for parts in (0, 1), (2,):
            like = [linears[layer_prefix(layer) + expert[part]] for expert in names.experts for part in parts]
            assert len({row.scheme for row in like}) == 1
    assert len(mixed.plan.config.overrides) == 2 * 7
    runs.quantize(mixed.plan, chosen, tmp_path / "out", Run(), sensitivity=mixed.sensitivity)
    weights = load_weights(str(tmp_path / "out"))
    tokens = TOKENS[0]
    expected = reference.forward(weights, tokens.tolist())
    for backend in ("gpu", "tpu"):
        model = load_backend(backend).open_model(weights, OPTIONS)
        _, logits = model.extend(model.init_state(), 0, tokens, 0, want_logits=True)
        np.testing.assert_allclose(logits, expected, atol=5e-5)
        model.close()


def test_the_second_moments_of_one_expert_at_a_time_are_held(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[weakref.ref[np.ndarray]] = []
    most = [0]

    def counting(method: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
        def counted(*args: Any) -> np.ndarray:
            found = method(*args)
            held.append(weakref.ref(found))
            most.append(sum(each() is not None for each in held))
            return found

        return counted

    for name in ("moments", "drift"):
        method = counting(getattr(calibrate.TorchCalibrator, name))
        monkeypatch.setattr(calibrate.TorchCalibrator, name, method)
    quantized(source_of(tmp_path / "m", "qwen3-moe"), tmp_path / "out", options(text, num_samples=4), CONFIG)
    assert len(held) == 2 * 2 * (2 + 6 * 2)
    assert max(most) <= 4  # of what is measured, and of what was just quantized


@pytest.mark.slow
def test_memory_does_not_grow_with_the_second_moments_of_experts(text: Path, tmp_path: Path) -> None:
    peaks = {}
    for num_experts in (2, 8):
        shape = {"hidden_size": 1024, "moe_intermediate_size": 64, "head_dim": 32}
        chosen = {"num_experts": num_experts, "num_experts_per_tok": 2}
        source = source_of(tmp_path / str(num_experts), "qwen3-moe", **shape, **chosen)
        peaks[num_experts] = peak_bytes(source, text, tmp_path / f"out-{num_experts}")
    assert peaks[8] - peaks[2] < 4 * 1024 * 1024 * 8, peaks  # those of 6 experts more: 48 MiB, without their drift
