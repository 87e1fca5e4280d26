"""Mixtures of experts: Mixtral and Qwen3-MoE from a checkpoint to text, and what is refused."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from llmq.backends.base import ComputeType, InferenceModel, ModelOptions
from llmq.backends.reference import forward, route
from llmq.backends.registry import load_backend
from llmq.checkpoint.coverage import Action
from llmq.checkpoint.loader import ModelWeights, load_weights
from llmq.config import Override, QuantizationConfig
from llmq.convert import convert, plan_conversion
from llmq.errors import BackendError, ConfigError, UnsupportedModelError
from llmq.evaluate.perplexity import measure_perplexity
from llmq.model.config import Experts
from llmq.model.names import Kind, expected_tensors, expert_names, layer_prefix
from llmq.model.tokenizer import Tokenizer
from llmq.quant import QTensor
from llmq.quant import quantize as quantize_weight
from llmq.quantize.options import QuantizeOptions
from llmq.quantize.run import quantize
from tests.backends.test_contract import assert_rows_stand_alone
from tests.commands.test_cli import llmq
from tests.qat.test_run import recipe as training_recipe
from tests.qat.test_run import trained
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

INT4 = QuantizationConfig(scheme="int4_blockwise", group_size=32)

TOKENS = np.random.default_rng(1).integers(0, 320, 40).astype(np.int32)


def experts_of(config: Any) -> list[str]:
    """Every matrix of every expert."""
    mixture = expert_names(config)
    assert mixture is not None
    prefixes = [layer_prefix(layer) for layer in range(config.num_layers)]
    return [f"{at}{name}.weight" for at in prefixes for expert in mixture.experts for name in expert]


def artifact(path: Path, config: QuantizationConfig = INT4, **changes: Any) -> Path:
    source = write_tiny(path / "source", num_hidden_layers=2, **changes)
    for name, contents in byte_tokenizer_files().items():
        (source / name).write_bytes(contents)
    convert(plan_conversion(str(source), config), path / "artifact")
    return path / "artifact"


def opened(backend: str, weights: ModelWeights, num_slots: int = 1, dtype: ComputeType = "float32") -> InferenceModel:
    options = ModelOptions(device="cpu", dtype=dtype, num_slots=num_slots, max_len=300)
    return load_backend(backend).open_model(weights, options)


class TestRouting:
    SCORES = np.log(np.array([[1.0, 5.0, 4.0, 10.0], [2.0, 2.0, 2.0, 2.0]]))

    @pytest.mark.parametrize("normalized", [False, True])
    def test_the_likeliest_count_and_of_equal_ones_the_first(self, normalized: bool) -> None:
        experts = Experts(num_experts=4, num_chosen=2, normalized=normalized)
        expected = (
            [[0.0, 1 / 3, 0.0, 2 / 3], [0.5, 0.5, 0.0, 0.0]] if normalized else [[0, 0.25, 0, 0.5], [0.25, 0.25, 0, 0]]
        )
        np.testing.assert_allclose(route(self.SCORES, experts), expected)

    @pytest.mark.parametrize("normalized", [False, True])
    def test_frameworks_choose_alike(self, normalized: bool) -> None:
        import jax.numpy as jnp
        import torch

        from llmq.backends.gpu.mixture import route as torch_route
        from llmq.backends.tpu.mlp import route as jax_route

        rng = np.random.default_rng(0)
        x, router = (rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in ((50, 64), (16, 64)))
        x[7:9] = 0  # every expert as likely as any other
        experts = Experts(num_experts=16, num_chosen=4, normalized=normalized)
        expected = route(x.astype(np.float64) @ router.astype(np.float64).T, experts)
        widened = [array.astype(np.float32) for array in (x, router)]
        for found in (
            torch_route(*map(torch.from_numpy, widened), experts).numpy(),
            np.asarray(jax_route(jnp.asarray(x), jnp.asarray(router), experts)),
        ):
            assert found.dtype == np.float32
            np.testing.assert_array_equal(found > 0, expected > 0)
            np.testing.assert_allclose(found, expected, atol=1e-6)
        assert (np.flatnonzero(expected[7]) == range(4)).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_expert_is_quantized_and_counted_and_routers_are_kept(family: str, tmp_path: Path) -> None:
    source = str(write_tiny(tmp_path / "m", **FAMILIES[family]))
    plan, again = (plan_conversion(source, INT4, strict=True) for _ in range(2))
    rows = {row.name: row for row in plan.coverage}
    assert plan.coverage == again.coverage
    config = load_weights(source).config
    assert config.experts is not None
    names = experts_of(config)
    assert len(names) == 3 * config.num_layers * config.experts.num_experts
    assert all(str(rows[name].scheme) == "int4_blockwise g32 asym" for name in names)
    routers = [row for row in rows.values() if row.kind is Kind.ROUTER]
    assert len(routers) == config.num_layers
    for row in routers:
        assert (row.action, row.reason, row.deviates) == (Action.KEEP, "routers are never quantized", False)
        assert row.shape == (config.experts.num_experts, config.hidden_size)

    convert(plan, tmp_path / "artifact")
    written = load_weights(str(tmp_path / "artifact"))
    assert {name for name in written if written.is_quantized(name)} == {row.name for row in rows.values() if row.scheme}
    kept, stored = load_weights(source), written[names[-1]]
    assert isinstance(stored, QTensor)
    np.testing.assert_array_equal(written[routers[0].name], kept[routers[0].name])


def test_patterns_reach_single_experts(tmp_path: Path) -> None:
    config = INT4.model_copy(
        update={
            "ignore": ("*.0.mlp.experts.*.down_proj",),
            "overrides": (Override(pattern="*.experts.3.*", scheme="int8_per_channel"),),
        }
    )
    plan = plan_conversion(str(write_tiny(tmp_path / "m", **QWEN3_MOE)), config)
    rows = {row.name.removeprefix("model.layers."): row.scheme for row in plan.coverage}
    assert rows["0.mlp.experts.3.down_proj.weight"] is None
    assert str(rows["0.mlp.experts.3.up_proj.weight"]) == "int8_per_channel sym"
    assert str(rows["1.mlp.experts.2.down_proj.weight"]) == "int4_blockwise g32 asym"
    with pytest.raises(ConfigError, match=r"ignore='\*.mlp.gate': matches no linear"):
        plan_conversion(str(tmp_path / "m"), INT4.model_copy(update={"ignore": ("*.mlp.gate",)}))


@pytest.mark.parametrize("scheme", ["int4_blockwise", "int8_per_channel"])
@pytest.mark.parametrize("family", FAMILIES)
def test_backends_compute_an_artifact_as_the_reference_does(family: str, scheme: str, tmp_path: Path) -> None:
    config = QuantizationConfig(scheme=scheme)
    weights = load_weights(str(artifact(tmp_path, config, **FAMILIES[family])))
    expected = forward(weights, TOKENS.tolist())
    for backend in ("gpu", "tpu"):
        model = opened(backend, weights)
        _, logits = model.extend(model.init_state(), 0, TOKENS, 0, want_logits=True)
        np.testing.assert_allclose(logits, expected, atol=5e-5)
        assert any("int" in kernel for kernel in model.caps.kernels)
        model.close()
    plain = forward(load_weights(str(tmp_path / "source")), TOKENS.tolist())
    assert np.abs(plain - expected).max() > 1e-3, "the codes made no difference"


@pytest.mark.parametrize(
    ("backend", "dtype", "scheme"),
    [
        ("gpu", "float32", None),
        ("gpu", "float32", "int4_blockwise"),
        ("gpu", "bfloat16", "int4_blockwise"),
        ("tpu", "float32", "int4_blockwise"),
    ],
)
def test_a_row_depends_on_itself_alone(backend: str, dtype: ComputeType, scheme: str | None, tmp_path: Path) -> None:
    """To the last bit, whichever experts the others choose; one expert is stored unlike the rest."""
    if scheme is None:
        weights = load_weights(str(write_tiny(tmp_path / "m", num_hidden_layers=2, **QWEN3_MOE)))
    else:
        other = (Override(pattern="*.experts.1.*", scheme="int8_per_channel"),) if backend == "gpu" else ()
        weights = load_weights(str(artifact(tmp_path, QuantizationConfig(scheme=scheme, overrides=other), **QWEN3_MOE)))
    assert_rows_stand_alone(opened(backend, weights, 5, dtype), [3, 70])


def test_bfloat16_chooses_by_float32_scores(tmp_path: Path) -> None:
    """A step of the torch backend in bfloat16 is near the reference, and its router is not rounded."""
    weights = load_weights(str(write_tiny(tmp_path / "m", num_hidden_layers=2, **MIXTRAL)))
    model = opened("gpu", weights, dtype="bfloat16")
    _, logits = model.extend(model.init_state(), 0, TOKENS, 0, want_logits=True)
    expected = forward(weights, TOKENS.tolist())
    near = np.abs(logits - expected).max(axis=-1) < 0.05 * np.abs(expected).max()
    assert near.mean() > 0.9  # tokens between two experts may go either way


@pytest.mark.parametrize("family", FAMILIES)
def test_layer_by_layer_as_transformers_does(family: str, tmp_path: Path) -> None:
    """The stream behind every layer, normed and multiplied by the head."""
    import torch
    from transformers import AutoModelForCausalLM

    path = write_tiny(tmp_path / "m", **FAMILIES[family])
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    oracle = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **eager).eval()
    with torch.no_grad():
        expected = oracle.model(torch.from_numpy(TOKENS)[None].long(), output_hidden_states=True).hidden_states
    weights = load_weights(str(path))
    for num_layers in range(1, 4):
        reference = forward(weights, TOKENS.tolist(), num_layers=num_layers)
        with torch.no_grad():
            stream = expected[num_layers] if num_layers == 3 else oracle.model.norm(expected[num_layers])
            logits = oracle.lm_head(stream)[0].numpy()
        np.testing.assert_allclose(reference, logits, atol=5e-5)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A checkpoint and an artifact of it."""
    place = tmp_path_factory.mktemp("mixture")
    made = artifact(place, **MIXTRAL)
    return [place / "source", made]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("The experts of a layer are asked one after the other. " * 40)
    return path


def test_perplexity_is_that_of_either_backend(models: list[Path], text: Path) -> None:
    measured = {}
    for model in models:
        weights = load_weights(str(model))
        tokenizer = Tokenizer.from_files(weights.reader.side_files(), weights.config)
        for backend in ("gpu", "tpu"):
            found = measure_perplexity(opened(backend, weights), tokenizer, text.read_text(), window=64, max_tokens=256)
            measured[model.name, backend] = found.metrics["perplexity/token"].value
    for model in ("source", "artifact"):
        assert measured[model, "gpu"] == pytest.approx(measured[model, "tpu"], rel=1e-5)
    assert measured["source", "gpu"] != pytest.approx(measured["artifact", "gpu"], rel=1e-4)


def test_commands(models: list[Path], text: Path) -> None:
    common = ("--device", "cpu", "--dtype", "float32")
    done = llmq("generate", models[1], "Hello", "--max-tokens", 8, "--backend", "tpu", *common)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    done = llmq("eval", models[1], "--perplexity", text, "--window", 64, "--backend", "gpu", *common)
    assert done.returncode == 0, done.stderr


def test_a_step_that_chooses_is_not_compiled(models: list[Path]) -> None:
    options = ModelOptions(device="cpu", dtype="float32", num_slots=1, max_len=64, compile=True)
    with pytest.raises(BackendError, match="compile: the experts of a MixtralForCausalLM are chosen as each step runs"):
        load_backend("gpu").open_model(load_weights(str(models[1])), options)


def test_processes_do_not_share_experts(models: list[Path]) -> None:
    from types import SimpleNamespace

    from llmq.backends.gpu.parallel import ShardedWeights

    with pytest.raises(ConfigError, match="tp=2: processes of the gpu backend do not share experts"):
        ShardedWeights(load_weights(str(models[1])), SimpleNamespace(size=2, rank=0))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_trained_for_the_codes_they_get(family: str, tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "m", num_hidden_layers=2, dtype=np.float32, **FAMILIES[family])
    for name, contents in byte_tokenizer_files().items():
        (source / name).write_bytes(contents)
    text = tmp_path / "text.txt"
    text.write_text("one two three four " * 200)
    trained(training_recipe(source, text, max_steps=4), tmp_path / "trained")
    plan = plan_conversion(str(tmp_path / "trained"), INT4)
    convert(plan, tmp_path / "artifact")
    schemes = {row.name: row.scheme for row in plan.coverage if row.scheme}
    before, after, codes = (load_weights(str(tmp_path / name)) for name in ("m", "trained", "artifact"))
    for name in experts_of(after.config):
        stored = codes[name]
        assert isinstance(stored, QTensor)
        np.testing.assert_array_equal(
            stored.values, quantize_weight(np.asarray(after[name], np.float32), schemes[name]).values
        )
        assert not np.array_equal(np.asarray(before[name]), np.asarray(after[name])), name


def test_searched_grids_reach_experts(tmp_path: Path) -> None:
    """Algorithms without data quantize experts as any linear, and lose less than rounding does."""
    source = str(write_tiny(tmp_path / "m", num_hidden_layers=1, **MIXTRAL))
    plan = plan_conversion(source, INT4)
    errors = {}
    for algorithm in ("rtn", "mse"):
        record = quantize(plan, QuantizeOptions(algorithm=algorithm), tmp_path / algorithm)
        rows = {row.name: row for row in record.coverage}
        errors[algorithm] = sum(rows[name].relative_error or 0.0 for name in experts_of(load_weights(source).config))
    assert errors["mse"] < errors["rtn"]


def test_experts_of_a_layer_that_differ_are_refused_where_they_are_scanned(tmp_path: Path) -> None:
    config = INT4.model_copy(update={"ignore": ("*.1.block_sparse_moe.experts.2.*",)})
    weights = load_weights(str(artifact(tmp_path, config, **MIXTRAL)))
    with pytest.raises(
        BackendError, match=r"model.layers.1.block_sparse_moe.gate: the experts of this layer are not all"
    ):
        opened("tpu", weights)
    model = opened("gpu", weights)
    _, logits = model.extend(model.init_state(), 0, TOKENS, 0, want_logits=True)
    np.testing.assert_allclose(logits, forward(weights, TOKENS.tolist()), atol=5e-5)


def fuse(tensors: dict[str, np.ndarray], config: Any) -> dict[str, np.ndarray]:
    """All experts of a layer in two tensors."""
    mixture, fused = expert_names(config), dict(tensors)
    assert mixture is not None
    for layer in range(config.num_layers):
        at = layer_prefix(layer)
        gates, ups, downs = (
            [fused.pop(f"{at}{name}.weight") for name in names] for names in zip(*mixture.experts, strict=True)
        )
        pairs = [np.concatenate(pair) for pair in zip(gates, ups, strict=True)]
        fused[f"{at}mlp.experts.gate_up_proj"], fused[f"{at}mlp.experts.down_proj"] = (
            np.stack(pairs),
            np.stack(downs),
        )
        fused[f"{at}mlp.gate.weight"] = fused.pop(f"{at}{mixture.router}.weight")
    return fused


class TestFused:
    """Experts in one tensor of three axes, as transformers 5 holds them."""

    @pytest.mark.parametrize("family", FAMILIES)
    def test_every_expert_comes_back(self, family: str, tmp_path: Path) -> None:
        raw = tiny_config(**FAMILIES[family])
        tensors = random_tensors(raw)
        plain = load_weights(str(write_checkpoint(tmp_path / "plain", raw, tensors)))
        fused = fuse(tensors, plain.config)
        assert len(fused) < len(tensors)
        path = write_checkpoint(tmp_path / "fused", raw, fused, num_shards=2)
        split = load_weights(str(path))
        assert set(split) == set(plain) == set(expected_tensors(plain.config))
        for name, expected in tensors.items():
            np.testing.assert_array_equal(split[name], expected)
        assert split.num_bytes == plain.num_bytes
        plan = plan_conversion(str(path), INT4, strict=True)
        assert {row.name for row in plan.coverage if row.scheme} >= set(experts_of(plain.config))

    def test_as_transformers_saves_them(self, tmp_path: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        path = write_tiny(tmp_path / "m", **MIXTRAL)
        oracle = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        oracle.save_pretrained(tmp_path / "fused", save_original_format=False)
        split, plain = load_weights(str(tmp_path / "fused")), load_weights(str(path))
        for name in plain:
            np.testing.assert_array_equal(split[name], plain[name])

    def test_in_a_pickle_they_are_refused(self, tmp_path: Path) -> None:
        import torch

        raw = tiny_config(**QWEN3_MOE)
        plain = load_weights(str(write_checkpoint(tmp_path / "plain", raw, random_tensors(raw))))
        fused = fuse(random_tensors(raw, dtype=np.float32), plain.config)
        (tmp_path / "m").mkdir()
        (tmp_path / "m" / "config.json").write_text(json.dumps(raw))
        torch.save(
            {name: torch.from_numpy(array) for name, array in fused.items()}, tmp_path / "m" / "pytorch_model.bin"
        )
        with pytest.raises(UnsupportedModelError, match=r"gate_up_proj, .*: all experts of a layer in one tensor"):
            load_weights(str(tmp_path / "m"))
