"""Checkpoint to artifact: what is written, and that it is written whole or not at all."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from llmq.checkpoint.inspect import describe
from llmq.checkpoint.loader import load_weights
from llmq.checkpoint.safetensors import read_header, write_file
from llmq.checkpoint.writer import plan_shards, stage
from llmq.config import SCHEMES, QuantizationConfig
from llmq.convert import convert, plan_conversion
from llmq.errors import AlreadyQuantizedError, ArtifactError, CheckpointError, OutputError
from llmq.quant import QTensor, quantize
from tests.tiny import random_tensors, tiny_config, write_checkpoint, write_tiny


def run(source: Path, output: Path, *, force: bool = False, **config: Any) -> dict[str, Any]:
    fields = {"scheme": "int4_blockwise", **config}
    plan = plan_conversion(str(source), QuantizationConfig(**fields))
    return convert(plan, output, force=force, command=["llmq", "convert"]).model_dump(mode="json")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_an_artifact_holds_exactly_what_quantize_gives(
    scheme: str, symmetric: bool, dtype: type, tmp_path: Path
) -> None:
    source = write_tiny(tmp_path / "source", num_shards=2, dtype=dtype, attention_bias=True)
    record = run(source, tmp_path / "out", scheme=scheme, symmetric=symmetric)
    weights, original = load_weights(str(tmp_path / "out")), load_weights(str(source))
    assert set(weights) == set(original)
    for row in record["coverage"]:
        name, got = row["name"], weights[row["name"]]
        if row["action"] == "keep":
            np.testing.assert_array_equal(got, original[name])
            assert got.dtype == original[name].dtype
            continue
        assert isinstance(got, QTensor)
        plan = next(r for r in plan_conversion(str(source), weights.quantization).coverage if r.name == name)
        expected = quantize(original[name], plan.scheme)
        np.testing.assert_array_equal(got.values, expected.values)
        np.testing.assert_array_equal(got.scale, expected.scale)
        assert (got.zero is None) == (expected.zero is None)
        if got.zero is not None:
            np.testing.assert_array_equal(got.zero, expected.zero)
    kinds = [(row["kind"], row["action"]) for row in record["coverage"]]
    assert kinds.count(("linear", "quantize")) == 21
    assert weights.quantization.symmetric is symmetric
    describe(str(tmp_path / "out"), verify=True)


def test_size_is_planned_to_the_byte_and_the_library_reads_it(tmp_path: Path) -> None:
    plan = plan_conversion(str(write_tiny(tmp_path / "m", num_shards=2)), QuantizationConfig(scheme="int4_blockwise"))
    convert(plan, tmp_path / "out", command=["llmq"])
    actual = sum(file.stat().st_size for file in (tmp_path / "out").iterdir())
    assert actual == pytest.approx(plan.artifact_bytes, rel=0.02)
    with safe_open(tmp_path / "out" / "model.safetensors", "np") as file:
        keys = {row for r in plan.coverage for row in r.stored}
        assert set(file.keys()) == keys
        assert file.metadata()["llmq_format_version"] == "1"


def test_shards_have_an_exact_index_and_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmq.convert.plan_shards", lambda stored: plan_shards(stored, 30_000))
    source = write_tiny(tmp_path / "source")
    run(source, tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    weights = load_weights(str(tmp_path / "out"))
    assert index["metadata"]["total_size"] == weights.num_bytes
    files = sorted(tmp_path.joinpath("out").glob("model-*.safetensors"))
    assert {file.name for file in files} == set(index["weight_map"].values())
    assert len(files) > 5
    for file in files:
        names = [name for name, place in index["weight_map"].items() if place == file.name]
        assert len(names) == 1 or file.stat().st_size < 30_000 + 2_000
    describe(str(tmp_path / "out"), verify=True)


def test_side_files_and_config_travel(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "source", extra_field={"kept": [1, None, "ü"]})
    side = {
        "tokenizer.json": b'{"x": 1}\r\n',
        "chat_template.jinja": b"{{ x }}",
        "generation_config.json": b"{ }",
        "LICENSE": b"free\n",
    }
    for name, contents in side.items():
        (source / name).write_bytes(contents)
    run(source, tmp_path / "out")
    for name, contents in side.items():
        assert (tmp_path / "out" / name).read_bytes() == contents
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    quantization = config.pop("quantization_config")
    assert config == json.loads((source / "config.json").read_text())
    assert quantization["quant_method"] == "llmq"
    assert quantization["format_version"] == 1
    assert quantization["scheme"] == "int4_blockwise"


def test_the_record_tells_where_it_comes_from(tmp_path: Path) -> None:
    import hashlib

    source = write_tiny(tmp_path / "source")
    record = run(source, tmp_path / "out")
    assert record == json.loads((tmp_path / "out" / "llmq.json").read_text())
    digest = hashlib.sha256((source / "model.safetensors").read_bytes()).hexdigest()
    assert record["source"]["files"]["model.safetensors"]["sha256"] == digest
    assert record["command"] == ["llmq", "convert"]
    linear = next(row for row in record["coverage"] if row["kind"] == "linear")
    assert 18 < linear["sqnr_db"] < 22
    assert linear["source_bytes"] == 2 * 128 * 128


def test_the_same_command_writes_the_same_bytes_with_any_number_of_threads(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "source")
    contents = []
    for num_threads in (1, 2, 4):
        plan = plan_conversion(str(source), QuantizationConfig(scheme="int4_blockwise"))
        convert(plan, tmp_path / str(num_threads), num_threads=num_threads)
        contents.append((tmp_path / str(num_threads) / "model.safetensors").read_bytes())
    assert contents[0] == contents[1] == contents[2]


def test_force_replaces_an_artifact_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = write_tiny(tmp_path / "source"), tmp_path / "out"
    run(source, out)
    with pytest.raises(OutputError, match="exists already; choose another directory or add --force"):
        run(source, out)
    record = run(source, out, force=True, scheme="int8_per_channel")
    assert describe(str(out), verify=True)["record"]["weights_sha256"] == record["weights_sha256"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source"]

    (out / "adapter.safetensors").write_text("mine")  # a user's own file beside the artifact's
    home = tmp_path / "home"
    (home / "documents").mkdir(parents=True)
    (home / "documents" / "thesis").write_text("precious")
    for precious in (out, home, home / "documents"):
        with pytest.raises(OutputError, match="is not an artifact of llmq, so --force does not replace it"):
            run(source, precious, force=True)
    assert (out / "adapter.safetensors").read_text() == "mine"
    assert (home / "documents" / "thesis").read_text() == "precious"

    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    with pytest.raises(OutputError, match="is the working directory or contains it"):
        run(source, Path(), force=True)
    monkeypatch.chdir(tmp_path)
    run(source, empty, force=True)


def test_targets_that_would_cost_something(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "source")
    for target in (source, tmp_path):
        with pytest.raises(OutputError, match="is the source or contains it"):
            run(source, target, force=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="is a file"):
        run(source, tmp_path / "file", force=True)
    with pytest.raises(OutputError, match="is not a directory"):
        run(source, tmp_path / "file" / "below")


def test_a_failed_replacement_puts_the_old_artifact_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = write_tiny(tmp_path / "source"), tmp_path / "out"
    run(source, out)
    before = (out / "model.safetensors").read_bytes()
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name.endswith("llmq-partial"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OutputError, match="cannot be written"):
        run(source, out, force=True, scheme="int8_per_channel")
    assert (out / "model.safetensors").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source"]


def test_two_conversions_to_one_target_do_not_meet(tmp_path: Path) -> None:
    source, out = write_tiny(tmp_path / "source"), tmp_path / "out"
    with stage(out, {}), pytest.raises(OutputError, match="another llmq is writing there"):
        run(source, out)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "model.embed_tokens.weight"]
)
def test_a_weight_that_is_not_finite_leaves_nothing_behind(name: str, bad: float, tmp_path: Path) -> None:
    tensors = random_tensors(tiny_config())
    tensors[name].reshape(-1)[7] = bad
    source = write_checkpoint(tmp_path / "source", tiny_config(), tensors)
    with pytest.raises(CheckpointError, match=f"{name}: holds NaN, infinity"):
        run(source, tmp_path / "new" / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize("existing", [False, True])
def test_a_full_disk_leaves_nothing_behind_and_loses_nothing(
    existing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = write_tiny(tmp_path / "source"), tmp_path / "out"
    if existing:
        run(source, out)
        before = (out / "model.safetensors").read_bytes()
    calls = 0

    def full(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls > 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("llmq.checkpoint.writer.write_array", full)
    with pytest.raises(OutputError, match=r"the disk is full; [0-9,]+ bytes are needed there, nothing was left behind"):
        run(source, out, force=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == (["out", "source"] if existing else ["source"])
    if existing:
        assert (out / "model.safetensors").read_bytes() == before


def test_a_kill_leaves_no_artifact_and_the_next_run_succeeds(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "source", hidden_size=512, intermediate_size=2048, num_hidden_layers=24)
    command = [sys.executable, "-m", "llmq", "convert", str(source), "-o", str(tmp_path / "out")]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    partial = tmp_path / ".out.llmq-partial"
    deadline = time.monotonic() + 60
    while not (partial / "model.safetensors").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "out").exists()
    assert partial.exists()
    subprocess.run(command, check=True, capture_output=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source"]
    describe(str(tmp_path / "out"), verify=True)


def test_an_artifact_is_not_converted_again(tmp_path: Path) -> None:
    run(write_tiny(tmp_path / "source"), tmp_path / "out")
    with pytest.raises(AlreadyQuantizedError, match="is an artifact of llmq already"):
        plan_conversion(str(tmp_path / "out"), QuantizationConfig(scheme="int8_per_channel"))


def test_a_newer_format_is_refused_with_both_versions(tmp_path: Path) -> None:
    run(write_tiny(tmp_path / "source"), tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["format_version"] = 2
    path.write_text(json.dumps(config))
    with pytest.raises(ArtifactError, match=r"format_version=2: written by llmq [\d.]+, this llmq reads up to 1"):
        load_weights(str(tmp_path / "out"))


def flip(path: Path, offset: int) -> None:
    contents = bytearray(path.read_bytes())
    contents[offset] ^= 0x10
    path.write_bytes(contents)


def change_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


CHANGES = {
    "a byte of the weights": (lambda out: flip(out / "model.safetensors", -1), "the weights hash to"),
    "a number of the model": (
        lambda out: change_json(out / "config.json", lambda c: c.update(rms_norm_eps=1e-4)),
        r"config.json: is missing or not what llmq.json says",
    ),
    "the quantization in the config": (
        lambda out: change_json(out / "config.json", lambda c: c["quantization_config"].update(embedding="none")),
        r"config.json: is missing or not what llmq.json says",
    ),
    "no quantization in the config": (
        lambda out: change_json(out / "config.json", lambda c: c.pop("quantization_config")),
        "holds codes, but config.json says nothing of them",
    ),
    "a side file": (lambda out: (out / "tokenizer.json").write_text("{}"), r"tokenizer.json: is missing or not what"),
    "a missing side file": (lambda out: (out / "tokenizer.json").unlink(), r"tokenizer.json: is missing or not what"),
    "a missing record": (lambda out: (out / "llmq.json").unlink(), r"llmq.json: is missing, so the weights"),
    "a record that is not JSON": (lambda out: (out / "llmq.json").write_text("{"), r"llmq.json: is damaged"),
    "a scheme in the record": (
        lambda out: change_json(out / "llmq.json", lambda r: r["coverage"][2]["scheme"].update(num_bits=8)),
        r"is stored as int4_per_channel asym, llmq.json says int8",
    ),
    "a width in the record": (
        lambda out: change_json(out / "llmq.json", lambda r: r["coverage"][2]["scheme"].update(num_bits=5)),
        r"llmq.json: is damaged \(coverage.2.scheme.num_bits=5: input should be 4 or 8",
    ),
    "a size in the record": (
        lambda out: change_json(out / "llmq.json", lambda r: r["coverage"][2].update(stored_bytes=1)),
        "is stored as int4_per_channel asym",
    ),
    "a row taken out of the record": (
        lambda out: change_json(out / "llmq.json", lambda r: r["coverage"].pop()),
        "tells of another model or quantization",
    ),
    "a field taken out of the record": (
        lambda out: change_json(out / "llmq.json", lambda r: r.pop("weights_sha256")),
        r"llmq.json: is damaged \(weights_sha256: is missing",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_verify_finds_every_kind_of_change(change: str, tmp_path: Path) -> None:
    source, out = write_tiny(tmp_path / "source"), tmp_path / "out"
    (source / "tokenizer.json").write_text('{"a": 1}')
    run(source, out)
    describe(str(out), verify=True)
    tamper, message = CHANGES[change]
    tamper(out)
    with pytest.raises(ArtifactError, match=message):
        describe(str(out), verify=True)


def rewrite(path: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    tensors = {name: tensor.read() for name, tensor in read_header(path)[0].items()}
    change(tensors)
    write_file(path, tensors.items(), {})


NAME = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.update({f"{NAME}.scale": t[f"{NAME}.scale"].view(np.int16)}),
            "is int16, must be bfloat16 or float32",
        ),
        (lambda t: t.update({f"{NAME}.scale": t[f"{NAME}.scale"].astype(np.float16)}), "is float16, must be bfloat16"),
        (lambda t: t.update({f"{NAME}.values": t[f"{NAME}.values"].astype(np.int16)}), "is int16, must be uint8"),
        (lambda t: t.pop(f"{NAME}.scale"), "has values but no scale"),
        (lambda t: t.update({f"{NAME}.scale": t[f"{NAME}.scale"][:5]}), "do not fit together"),
        (lambda t: t.update({f"{NAME}.zero": t[f"{NAME}.zero"][:5]}), "do not fit together"),
        (lambda t: t.update({NAME: np.zeros((256, 128), np.float32)}), "is stored as codes and as a tensor"),
    ],
)
def test_broken_layouts_are_refused_before_anything_runs(change: Callable, message: str, tmp_path: Path) -> None:
    run(write_tiny(tmp_path / "source"), tmp_path / "out")
    rewrite(tmp_path / "out" / "model.safetensors", change)
    with pytest.raises(ArtifactError, match=message):
        load_weights(str(tmp_path / "out"))
