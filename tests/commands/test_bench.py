"""``llmq bench MODEL``; ``bench serve`` has its tests beside the server."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from llmq.cli import app
from llmq.commands.options import read_mesh
from llmq.errors import BackendError, ConfigError
from tests.tiny import byte_tokenizer_files, write_tiny


@pytest.mark.parametrize("backend", ["gpu", "tpu"])
def test_a_model_is_measured_on_both_backends(backend: str, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m", num_hidden_layers=1)
    options = "--prompt-lens 5,9 --gen-lens 3 --batch-sizes 1,2 --repeat 3 --json --device cpu"
    options += " --threads 1" if backend == "gpu" else ""
    result = CliRunner().invoke(
        app, ["bench", str(path), "--backend", backend, *options.split()], catch_exceptions=False
    )
    found = json.loads(result.stdout)
    assert [(one["batch_size"], one["prompt_len"], one["gen_len"]) for one in found["workloads"]] == [
        (1, 5, 3),
        (1, 9, 3),
        (2, 5, 3),
        (2, 9, 3),
    ]
    for one in found["workloads"]:
        for name in ("prefill", "decode", "first_token", "step"):
            assert 0 < one[name]["lowest"] <= one[name]["median"] <= one[name]["highest"]
        tokens_per_step = one["decode"]["highest"] * one["step"]["lowest"]
        assert tokens_per_step == pytest.approx(one["batch_size"])
    assert found["memory_bandwidth"] > 1e8
    assert 0 < found["weight_bytes"] <= found["device_bytes"] < found["peak_resident_bytes"]
    assert {"llmq", "numpy", {"gpu": "torch", "tpu": "jax"}[backend]} == set(found["versions"])
    assert "first token ms" in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--prompt-lens 1,x", "prompt_lens='1,x': must be whole numbers from 1 on"),
        ("--gen-lens 1", "gen_lens='1': must be whole numbers from 2 on"),
        ("--batch-sizes 0", "batch_sizes='0': must be whole numbers from 1 on"),
        ("--dtype int3", "dtype='int3': must be bfloat16, float16 or float32"),
        ("--kv-cache-dtype int3", "kv_cache_dtype='int3': must be auto or int8"),
        ("--prompt-lens 100000", "100128 tokens are more than the model's context"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(options: str, message: str, tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m", num_hidden_layers=1)
    with pytest.raises(ConfigError, match=message):
        CliRunner().invoke(app, ["bench", str(path), *options.split()], catch_exceptions=False)


def test_help_names_both() -> None:
    text = CliRunner().invoke(app, ["bench", "--help"]).output
    assert "model" in text
    assert "serve" in text


@pytest.fixture
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("command", [("bench", "model"), ("generate", "x"), ("eval",)])
@pytest.mark.usefixtures("threads_as_before")
def test_threads_are_told_or_refused(command: tuple[str, ...], tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m", num_hidden_layers=1)
    for name, contents in byte_tokenizer_files().items():
        (path / name).write_bytes(contents)
    (tmp_path / "text").write_text("a text of some length " * 3)
    more = {
        "generate": ["--max-tokens", "2", "--stats"],
        "eval": ["--perplexity", str(tmp_path / "text"), "--window", "16", "--json"],
    }
    arguments = [command[0], str(path), *command[1:], "--device", "cpu", "--threads", "2"]
    if command[0] == "bench":
        arguments = [
            *command,
            *arguments[1:2],
            *arguments[3:],
            "--repeat",
            "1",
            "--prompt-lens",
            "4",
            "--gen-lens",
            "2",
        ]
    arguments += more.get(command[0], [])
    done = CliRunner().invoke(app, [*arguments, "--backend", "gpu"], catch_exceptions=False)
    assert done.exit_code == 0
    assert "threads: 2 for a step of one row, 2 for more rows, 2 for runs" in done.output
    with pytest.raises(BackendError, match="num_threads=2: XLA takes every core"):
        CliRunner().invoke(app, [*arguments, "--backend", "tpu"], catch_exceptions=False)


@pytest.mark.parametrize(
    ("mesh", "tp", "layout"),
    [
        (None, None, {"dp": 1, "tp": 1, "sp": 1}),
        ("tp=4,dp=2,sp=2", None, {"dp": 2, "tp": 4, "sp": 2}),
        (None, 8, {"dp": 1, "tp": 8, "sp": 1}),
        ("dp=2", 4, {"dp": 2, "tp": 4, "sp": 1}),
        ("tp=4", 4, None),
        ("tp=0", None, None),
        ("pp=2", None, None),
        ("tp", None, None),
        ("tp=two", None, None),
        (None, -1, None),
    ],
)
def test_a_layout_of_devices(mesh: str | None, tp: int | None, layout: dict[str, int] | None) -> None:
    if layout is not None:
        assert read_mesh(mesh, tp) == layout
        return
    with pytest.raises(ConfigError, match="must name dp, tp and sp at most once each"):
        read_mesh(mesh, tp)


def test_the_gpu_backend_takes_a_process_a_device(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m", num_hidden_layers=1)
    for name, contents in byte_tokenizer_files().items():
        (path / name).write_bytes(contents)
    with pytest.raises(BackendError, match="tp=2: the gpu backend takes as many processes, and 1 run"):
        CliRunner().invoke(app, ["generate", str(path), "x", "--backend", "cpu", "--tp", "2"], catch_exceptions=False)
