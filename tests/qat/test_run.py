"""Runs from data to artifact: what is written, and that an interrupted run ends as it would have."""

import json
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from llmq.checkpoint import layout
from llmq.checkpoint.loader import load_weights
from llmq.config import QuantizationConfig
from llmq.convert import convert, plan_conversion
from llmq.errors import AlreadyQuantizedError, ConfigError, OutputError, TrainingError
from llmq.qat.checkpoints import Checkpoints
from llmq.qat.loop import read_metrics
from llmq.qat.output import METRICS
from llmq.qat.plan import plan_run
from llmq.qat.recipe import Recipe, read_recipe
from llmq.qat.run import Outcome, run
from llmq.quant import quantize
from tests.tiny import byte_tokenizer_files, write_tiny

SIDE = {**byte_tokenizer_files(), "chat_template.jinja": b"{{ messages }}\n", "LICENSE": b"free\n"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_tiny(tmp_path_factory.mktemp("qat") / "m", num_hidden_layers=1, tie_word_embeddings=True)
    for name, contents in SIDE.items():
        (path / name).write_bytes(contents)
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = np.random.default_rng(0).choice(["one", "two", "three", "four"], 1500)
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(" ".join(words))
    return path


def recipe(model: Path, text: Path, **changes: Any) -> Recipe:
    values: dict[str, Any] = {
        "quantization": {"scheme": "int4_blockwise", "group_size": 32},
        "backend": "gpu",
        "device": "cpu",
        "dtype": "float32",
        "max_steps": 20,
        "seq_len": 32,
        "lr": 1e-3,
        "max_eval_rows": 4,
        **changes,
    }
    return read_recipe(None, model=str(model), data=str(text), **values)


def trained(recipe: Recipe, output: Path, **options: Any) -> Outcome:
    outcome = run(plan_run(recipe), output, **options)
    assert outcome.record == json.loads((output / "llmq.json").read_bytes())
    return outcome


def weights_of(path: Path) -> dict[str, np.ndarray]:
    weights = load_weights(str(path))
    return {name: np.asarray(weights[name]) for name in weights}


class Stop(Exception):  # noqa: N818 - no error
    """Stands for whatever ends a process."""


def stop_at(step: int):
    def watch(event: Mapping[str, Any]) -> None:
        if event["step"] == step and "loss" in event:
            raise Stop

    return watch


def steps_of(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    timing = ("tokens_per_second", "peak_bytes")
    return [{key: event[key] for key in event if key not in timing} for event in metrics]


@pytest.mark.parametrize("stopped", [3, 6, 13])
def test_a_resumed_run_is_the_uninterrupted_one(model: Path, text: Path, tmp_path: Path, stopped: int) -> None:
    """The delay of 10 steps lies before, at and behind the step that is resumed from."""
    wanted = recipe(model, text, fake_quant_after_n_steps=10, save_every=5, eval_every=7)
    trained(wanted, tmp_path / "whole")
    with pytest.raises(Stop):
        trained(wanted, tmp_path / "parts", watch=stop_at(stopped))
    assert not (tmp_path / "parts").exists()
    outcome = trained(wanted, tmp_path / "parts", resume=True)
    whole, parts = (read_metrics(tmp_path / name / METRICS) for name in ("whole", "parts"))
    assert steps_of(parts) == steps_of(whole)
    assert [event["quantized"] for event in whole if "loss" in event] == [False] * 10 + [True] * 10
    assert outcome.record["weights_sha256"] == json.loads((tmp_path / "whole/llmq.json").read_bytes())["weights_sha256"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["parts", "whole"]


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_every_checkpoint_can_be_resumed_from(model: Path, text: Path, tmp_path: Path, optimizer: str) -> None:
    if optimizer == "adamw8bit":
        pytest.importorskip("torchao", reason="torchao is not installed: pip install llmq[qat]")
    wanted = recipe(model, text, max_steps=4, save_every=1, keep=4, optimizer=optimizer)
    whole = trained(wanted, tmp_path / "whole").record["weights_sha256"]
    for newest in range(1, 4):
        with pytest.raises(Stop):
            trained(wanted, tmp_path / "parts", watch=stop_at(4), force=True)
        saved = sorted((tmp_path / "parts.qat").glob("step-*"))
        assert len(saved) == 3
        for path in saved[newest:]:
            path.unlink()
        assert trained(wanted, tmp_path / "parts", resume=True, force=True).record["weights_sha256"] == whole


def test_only_the_newest_checkpoints_are_kept_and_a_torn_one_is_never_seen(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "run", {"a": 1}, resume=False, keep=2)
    state = {"x": np.arange(3, dtype=np.float32)}
    for step in range(1, 5):
        checkpoints.save(step, {"x": state["x"] + step})
    (tmp_path / "run" / ".partial").write_bytes(b"torn")
    assert sorted(path.name for path in (tmp_path / "run").glob("step*")) == [
        "step-00000003.safetensors",
        "step-00000004.safetensors",
    ]
    checkpoints.close()
    with closing(Checkpoints(tmp_path / "run", {"a": 1}, resume=True, keep=2)) as checkpoints:
        found = checkpoints.load()
    assert found
    assert found[0] == 4
    np.testing.assert_array_equal(found[1]["x"], state["x"] + 4)
    with pytest.raises(ConfigError, match="the interrupted run had a=1, now it is 2"):
        Checkpoints(tmp_path / "run", {"a": 2}, resume=True, keep=2)
    with closing(Checkpoints(tmp_path / "run", {"a": 2}, resume=False, keep=2)) as checkpoints:
        assert checkpoints.load() is None


def test_a_second_run_to_the_same_output_is_refused(model: Path, text: Path, tmp_path: Path) -> None:
    wanted = recipe(model, text, max_steps=2)
    refused = []

    def watch(event: Mapping[str, Any]) -> None:
        with pytest.raises(OutputError, match="another llmq is writing there"):
            trained(wanted, tmp_path / "out", force=True)
        refused.append(event)

    trained(wanted, tmp_path / "out", watch=watch)
    assert refused
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_output_is_ready_for_its_grid(model: Path, text: Path, tmp_path: Path) -> None:
    wanted = recipe(model, text, max_steps=3)
    outcome = trained(wanted, tmp_path / "out", command=["llmq", "qat"])
    config = json.loads((tmp_path / "out" / "config.json").read_bytes())
    assert layout.read_quantization(config["qat_config"]) == wanted.quantization
    assert config["torch_dtype"] == "float32"
    for name, contents in SIDE.items():
        assert (tmp_path / "out" / name).read_bytes() == contents
    record = json.loads((tmp_path / "out" / "llmq.json").read_bytes())
    assert record == outcome.record
    assert read_recipe(None, **record["recipe"]) == wanted
    assert 0 < record["result"]["codes_changed"] < record["result"]["codes"]
    finished, before = weights_of(tmp_path / "out"), weights_of(model)
    assert finished.keys() == before.keys()
    assert all(weight.dtype == np.float32 for weight in finished.values())

    convert(plan_conversion(str(tmp_path / "out"), wanted.quantization), tmp_path / "artifact")
    artifact = load_weights(str(tmp_path / "artifact"))
    schemes = plan_run(wanted).schemes
    for name, scheme in schemes.items():
        np.testing.assert_array_equal(artifact[name].values, quantize(finished[name], scheme).values)
    with pytest.raises(ConfigError, match="group_size=64: the checkpoint was trained for 32; leave it out"):
        plan_conversion(str(tmp_path / "out"), QuantizationConfig(scheme="int4_blockwise", group_size=64))


def test_the_baseline_tells_what_is_gained(model: Path, text: Path, tmp_path: Path) -> None:
    wanted = recipe(model, text, baseline=True, save_every=10, quantization={"scheme": "int4_per_channel"})
    with pytest.raises(Stop):  # in the second of two trainings; the first is not repeated
        trained(wanted, tmp_path / "out", watch=lambda event: None if event.get("baseline") else stop_at(12)(event))
    events: list[Mapping[str, Any]] = []
    outcome = trained(wanted, tmp_path / "out", resume=True, watch=events.append)
    assert not any(event.get("baseline") for event in events)
    assert outcome.baseline
    assert outcome.recovered
    result = outcome.record["result"]
    plain = trained(
        recipe(model, text, fake_quant_after_n_steps=20, quantization={"scheme": "int4_per_channel"}),
        tmp_path / "plain",
    )
    assert outcome.baseline.losses == plain.measured.losses
    if outcome.recovered.share is not None:
        lost = result["baseline_eval_loss_quantized"] - result["baseline_eval_loss"]
        gained = result["baseline_eval_loss_quantized"] - result["eval_loss_quantized"]
        assert outcome.recovered.share == pytest.approx(gained / lost)


def test_an_adapter_that_moves_no_code(model: Path, text: Path, tmp_path: Path) -> None:
    outcome = trained(recipe(model, text, max_steps=2, lr=1e-12, lora={"rank": 2}), tmp_path / "out")
    assert outcome.record["result"]["codes_changed"] == 0
    outcome = trained(recipe(model, text, max_steps=2, lr=1e-2, lora={"rank": 2}), tmp_path / "more")
    assert outcome.record["result"]["codes_changed"] > 0
    changed = {name for name, count in outcome.record["codes_changed"].items() if count}
    assert all("_proj" in name for name in changed)
    check_adapter(tmp_path / "more-adapter", model, tmp_path / "more")
    with pytest.raises(
        ConfigError, match=r"'query': matches no linear; names end like model\.layers\.0\.self_attn\.q_proj"
    ):
        trained(recipe(model, text, lora={"rank": 2, "targets": ("query",)}), tmp_path / "none")


def check_adapter(directory: Path, model: Path, merged: Path) -> None:
    """In peft's format and terms it is what the merged checkpoint has over the model."""
    config = json.loads((directory / "adapter_config.json").read_bytes())
    assert config["peft_type"] == "LORA"
    assert config["base_model_name_or_path"] == str(model)
    tensors = safetensors.numpy.load_file(directory / "adapter_model.safetensors")
    before, after = weights_of(model), weights_of(merged)
    targets = {name for name in before if name.rsplit(".", 2)[-2] in config["target_modules"]}
    assert len(tensors) == 2 * len(targets) > 0
    for name in targets:
        a, b = (tensors[f"base_model.model.{name.removesuffix('weight')}lora_{part}.weight"] for part in "AB")
        assert a.shape[0] == b.shape[1] == config["r"]
        added = config["lora_alpha"] / config["r"] * (b @ a)
        np.testing.assert_allclose(after[name] - before[name], added, atol=1e-6)
        assert np.abs(added).max() > 1e-3


def test_what_would_be_lost_is_refused_before_training(model: Path, text: Path, tmp_path: Path) -> None:
    (tmp_path / "out-adapter").mkdir()
    with pytest.raises(OutputError, match="out-adapter: exists already"):
        trained(recipe(model, text, max_steps=2, lora={"rank": 2}), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out-adapter"]


def test_a_diverging_run_ends_in_a_sentence(model: Path, text: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"step \d+: the loss is .*; lower --lr"):
        trained(recipe(model, text, lr=1e30, clip=None), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_trained_is_refused_before_anything_is(model: Path, text: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="seq_len=1024: must be at most the model's context, 512"):
        plan_run(recipe(model, text, seq_len=1024))
    with pytest.raises(ConfigError, match="group_size=48: does not divide"):
        plan_run(recipe(model, text, quantization={"scheme": "int4_blockwise", "group_size": 48}))
    short = tmp_path / "short.txt"
    short.write_text("one")
    with pytest.raises(ConfigError, match="makes 1 pieces of 32 tokens, too few to hold some out"):
        plan_run(recipe(model, short))
    convert(plan_conversion(str(model), QuantizationConfig(scheme="int8_per_channel")), tmp_path / "artifact")
    with pytest.raises(AlreadyQuantizedError, match="is an artifact; training needs the checkpoint"):
        plan_run(recipe(tmp_path / "artifact", text))
    with pytest.raises(OutputError, match="is the source or contains it"):
        trained(recipe(model, text), model)
