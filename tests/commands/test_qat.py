"""``llmq qat`` as a user runs it: one command to the artifact, and every way out in a sentence."""

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import yaml

from llmq.checkpoint.loader import load_weights
from tests.conformance.api import Api
from tests.conformance.servers import REAL, running
from tests.tiny import byte_tokenizer_files, write_tiny


def llmq(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "llmq", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, timeout=300)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_tiny(tmp_path_factory.mktemp("qat") / "m", num_hidden_layers=1, tie_word_embeddings=True)
    for name, contents in byte_tokenizer_files().items():
        (path / name).write_bytes(contents)
    return path


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    rows = []
    for _ in range(40):
        a, b = rng.integers(0, 9, 2)
        turns = [{"role": "user", "content": f"{a}+{b}"}, {"role": "assistant", "content": f"{a + b}"}]
        rows.append(json.dumps({"messages": turns}))
    path.write_text("\n".join(rows))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gpu", "tpu"])
def test_the_chain_needs_no_setting_twice(model: Path, chats: Path, tmp_path: Path, backend: str) -> None:
    where = ("--backend", backend, "--device", "cpu", "--dtype", "float32")
    done = llmq(
        "qat", model, "--data", chats, "-o", tmp_path / "trained", "--scheme", "int8_blockwise", "--groupsize", 32, "--asym",
        "--max-steps", 4, "--seq-len", 64, "--lr", 1e-3, "--baseline", "--quantize", "--json", *where,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["artifact"] == f"{tmp_path / 'trained'}-int8_blockwise"
    assert "the same training without fake quantization" in done.stderr
    assert "of 188,416 codes changed; held-out loss" in done.stderr
    at_once = load_weights(record["artifact"])
    for command in ("convert", "quantize"):
        done = llmq(command, tmp_path / "trained", "-o", tmp_path / command)
        assert done.returncode == 0, done.stderr
        later = load_weights(str(tmp_path / command))
        assert later.quantization == at_once.quantization
        for name in at_once:
            if at_once.is_quantized(name):
                np.testing.assert_array_equal(later[name].values, at_once[name].values)
                np.testing.assert_array_equal(later[name].scale, at_once[name].scale)
    done = llmq("convert", tmp_path / "trained", "-o", tmp_path / "other", "--scheme", "int4_blockwise")
    assert done.returncode == 2
    assert done.stderr == (
        "llmq: scheme='int4_blockwise': the checkpoint was trained for 'int8_blockwise'; leave it out to quantize on "
        "the grid it was trained for.\n"
    )
    check_chain(record["artifact"], backend, tmp_path)


def check_chain(artifact: str, backend: str, tmp_path: Path) -> None:
    """What follows reads the settings off the artifact; only where to run is said again."""
    (tmp_path / "text").write_text("1+2 is 3. " * 20)
    measured = llmq("eval", artifact, "--perplexity", tmp_path / "text", "--window", 64, "--backend", backend, "--json")
    assert measured.returncode == 0, measured.stderr
    results = json.loads(measured.stdout)
    assert results["model"]["quantization"]["scheme"] == "int8_blockwise"
    assert results["model"]["quantization"]["symmetric"] is False
    assert results["metrics"]["perplexity/token"]["value"] > 1
    generated = llmq("generate", artifact, "1+2", "--max-tokens", 4, "--backend", backend)
    assert generated.returncode == 0, generated.stderr
    with running(*REAL, artifact, "--backend", backend) as server, closing(Api(server.base_url)) as api:
        answer = api.complete("1+2", max_tokens=4, temperature=0)
        assert answer["choices"][0]["text"].strip() == generated.stdout.strip()
        assert "int8_blockwise" in server.output()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gpu", "tpu"])
def test_inputs_in_int8_are_trained_for_and_kept(model: Path, chats: Path, tmp_path: Path, backend: str) -> None:
    done = llmq(
        "qat", model, "--data", chats, "-o", tmp_path / "trained", "--scheme", "w8a16", "--activation", "int8",
        "--max-steps", 3, "--seq-len", 64, "--lr", 1e-3, "--quantize", "--json", "--backend", backend, "--device", "cpu",
        "--dtype", "float32",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    done = llmq("quantize", tmp_path / "trained", "-o", tmp_path / "later")
    assert done.returncode == 0, done.stderr
    later, at_once = (load_weights(str(path)) for path in (tmp_path / "later", record["artifact"]))
    assert later.quantization == at_once.quantization
    assert {name.split(".")[-2] for name in later if later.rounds_inputs(name)} >= {"q_proj", "down_proj"}
    done = llmq("convert", tmp_path / "trained", "-o", tmp_path / "other", "--activation", "none")
    assert done.returncode == 2
    assert "activation='none': the checkpoint was trained for 'int8'; leave it out" in done.stderr
    assert not (tmp_path / "other").exists()


def test_the_recipe_is_shown_and_read_back(tmp_path: Path) -> None:
    done = llmq("qat", "m", "--data", "d", "--groupsize", 64, "--lora-rank", 4, "--print-config")
    assert done.returncode == 0, done.stderr
    shown = yaml.safe_load(done.stdout)
    assert shown["quantization"]["group_size"] == 64
    assert shown["lora"] == {"rank": 4, "alpha": 16.0, "targets": shown["lora"]["targets"]}
    path = tmp_path / "recipe.yaml"
    path.write_text(done.stdout)
    again = llmq("qat", "--config", path, "--lr", 0.5, "--sym", "--print-config", "--json")
    both = json.loads(again.stdout)
    shown["lr"], shown["quantization"]["symmetric"] = 0.5, True
    assert both["recipe"] == shown
    assert both["schema"]["properties"]["lr"]["default"] == 2e-5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--resume"], "resume: needs the run's own --save-every, without which it keeps no checkpoint."),
        (["--lr", "-1"], "lr=-1.0: input should be greater than or equal to 0."),
        (["--scheme", "int3"], "quantization.scheme='int3': must be one of"),
        (["--lora-alpha", "3"], "lora.rank: is missing."),
        (["--mesh", "dp=2,tp=2"], "mesh='dp=2,tp=2': must name the axes dp and fsdp, as in dp=2,fsdp=4."),
        (
            ["--mesh", "dp=2"],
            "mesh='dp=2,fsdp=1': takes 2 devices, and 1 train together; make the product that number,",
        ),
        (["--data", "missing.txt"], "missing.txt: cannot be read as UTF-8 text (No such file or directory)."),
        (["--backend", "reference"], "backend='reference': does not train; use cpu, gpu or tpu."),
        (
            ["--compile", "--backend", "tpu"],
            "compile: the tpu backend compiles everything anyway; leave --compile out.",
        ),
        (["--seq-len", "9999"], "seq_len=9999: must be at most the model's context, 512."),
    ],
)
def test_what_the_user_can_get_wrong(
    model: Path, chats: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    data = [] if "--data" in arguments else ["--data", chats]
    done = llmq("qat", model, *data, "-o", "out", *arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"llmq: {message}"), done.stderr
    assert not list(tmp_path.iterdir())
