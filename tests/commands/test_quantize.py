"""``llmq quantize`` in processes of its own: errors, a plan that stops, a kill, a checkpoint that was trained."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmq.checkpoint import layout
from llmq.config import QuantizationConfig
from tests.commands.test_cli import llmq, refused
from tests.quantize.test_run import random_words
from tests.tiny import byte_tokenizer_files, random_tensors, tiny_config, write_checkpoint


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("quantize") / "source", num_hidden_layers=3)


def write_source(path: Path, **changes: object) -> Path:
    config = tiny_config(**changes)
    write_checkpoint(path, config, random_tensors(config))
    for name, contents in byte_tokenizer_files().items():
        (path / name).write_bytes(contents)
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quantize") / "text.txt"
    path.write_text(random_words(seed=0))
    return path


def test_errors_are_one_sentence_before_any_work(source: Path, text: Path, tmp_path: Path) -> None:
    out = ("-o", tmp_path / "out")
    assert refused("quantize", source, *out) == (
        "dataset: is missing; gptq calibrates on text, so name some, or choose one of rtn, mse, hqq."
    )
    few = refused("quantize", source, *out, "--dataset", text, "--num-samples", 100, "--seq-len", 500)
    assert few.startswith(f"dataset={text}: has 11,999 tokens")
    assert "100 samples of 500 take 49,900" in few
    assert "must be one of rtn, mse, hqq, awq, gptq, awq+gptq" in refused("quantize", source, "--algorithm", "best")
    assert "has none; add --asym or choose mse" in refused("quantize", source, *out, "--algorithm", "hqq", "--sym")
    assert "has none; add --asym" in refused("quantize", source, *out, "--algorithm", "hqq", "--scheme", "w8a16")
    both = refused("quantize", source, "--dataset", text, "--target-bits", 4.5, "--target-size", "1MB")
    assert both == "target: must be one of --target-bits, --target-size and --max-kl."
    assert "target_size='much'" in refused("quantize", source, "--dataset", text, "--target-size", "much")
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_prints_the_plan_and_writes_no_artifact(source: Path, text: Path, tmp_path: Path) -> None:
    done = llmq(
        *("quantize", source, "-o", tmp_path / "out", "--dataset", text, "--num-samples", 4, "--seq-len", 32),
        *("--backend", "cpu", "--target-bits", 5.2, "--dry-run", "--json"),
    )
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    linears = [row for row in plan["coverage"] if row["kind"] == "linear"]
    bits = 8 * sum(row["stored_bytes"] for row in linears) / sum(row["shape"][0] * row["shape"][1] for row in linears)
    assert 5.0 < bits <= 5.2
    assert "expected divergence" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.sensitivity.html", "out.sensitivity.json"]


def test_a_trained_checkpoint_needs_no_options_and_allows_no_others(text: Path, tmp_path: Path) -> None:
    trained = QuantizationConfig(scheme="int4_blockwise", group_size=32, symmetric=True, embedding="none")
    path = write_source(tmp_path / "trained", **{layout.TRAINED: layout.quantization_dict(trained)})
    assert llmq("quantize", path, "-o", tmp_path / "out").returncode == 0
    options = ("--groupsize", 32, "--sym", "--embedding", "none")
    assert llmq("convert", path, "-o", tmp_path / "plain", *options).returncode == 0
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "plain/model.safetensors").read_bytes()
    assert llmq("quantize", path, "-o", tmp_path / "same", *options, "--algorithm", "rtn").returncode == 0
    assert refused("quantize", path, "--groupsize", 64) == (
        "group_size=64: the checkpoint was trained for 32; leave it out to quantize on the grid it was trained for."
    )
    assert "symmetric=False: the checkpoint was trained for True" in refused("quantize", path, "--asym")
    found = refused("quantize", path, "--algorithm", "gptq", "--dataset", text)
    assert found.startswith("algorithm='gptq': the checkpoint was trained for the nearest codes")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cpu", "tpu"])
def test_one_core_and_all_of_them_write_the_same_bytes(source: Path, text: Path, tmp_path: Path, backend: str) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2 or shutil.which("taskset") is None:
        pytest.skip("takes two cores, and taskset to leave one of them out")
    options = ("--dataset", text, "--num-samples", 12, "--seq-len", 200, "--backend", backend, "--device", "cpu")
    written = []
    for prefix in (["taskset", "-c", cores[0]], [], []):
        out = tmp_path / str(len(written))
        command = [*prefix, sys.executable, "-m", "llmq", "quantize", source, "-o", out, *options]
        subprocess.run([*map(str, command)], stderr=subprocess.PIPE, check=True)
        written.append((out / "model.safetensors").read_bytes())
    assert written[0] == written[1] == written[2]


@pytest.mark.slow
def test_a_run_that_is_killed_is_resumed_to_the_same_bytes(text: Path, tmp_path: Path) -> None:
    source = write_source(tmp_path / "source", num_hidden_layers=20)
    options = ("--dataset", text, "--num-samples", 16, "--seq-len", 128, "--backend", "cpu")
    clean = llmq("quantize", source, "-o", tmp_path / "clean", *options)
    assert clean.returncode == 0, clean.stderr
    command = [sys.executable, "-m", "llmq", "quantize", source, "-o", tmp_path / "out", *options]
    process = subprocess.Popen([*map(str, command)], stderr=subprocess.DEVNULL)
    journal = tmp_path / ".out.llmq-quantize"
    deadline = time.monotonic() + 120
    while not (journal / "block-00016.safetensors").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "out").exists()
    assert "resume: the interrupted run had seed=" in refused(
        "quantize", source, "-o", tmp_path / "out", *options, "--seed", 1, "--resume"
    )
    resumed = llmq("quantize", source, "-o", tmp_path / "out", *options, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "clean/model.safetensors").read_bytes()
    assert not journal.exists()
