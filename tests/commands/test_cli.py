"""The command line in processes of its own: help, errors, output."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.tiny import byte_tokenizer_files, random_tensors, tiny_config, write_checkpoint, write_tiny


def llmq(*args: object, **kwargs: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "llmq", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False, **kwargs)


def refused(*args: object) -> str:
    """Run a command that must fail: one sentence, exit 2, nothing on stdout."""
    done = llmq(*args)
    assert done.returncode == 2, done
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("llmq: ")
    return lines[0].removeprefix("llmq: ")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("cli") / "source")


HEAVY = ("torch", "jax", "transformers", "numpy", "gguf", "tokenizers", "huggingface_hub", "lm_eval", "datasets")


@pytest.mark.parametrize(
    "command",
    [(), ("convert",), ("generate",), ("eval",), ("report",), ("inspect",), ("doctor",), ("quantize",), ("plan",)],
)
def test_help_imports_nothing_heavy(command: tuple[str, ...]) -> None:
    code = (
        "import sys\nfrom llmq.cli import app\n"
        f"try: app({[*command, '--help']!r})\nexcept SystemExit: pass\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    assert "Usage" in done.stdout


def test_every_option_is_documented() -> None:
    import typer

    from llmq.cli import app

    group = typer.main.get_command(app)
    for name, command in group.commands.items():
        assert command.help, name
        for parameter in command.params:
            assert getattr(parameter, "help", None), f"{name} {parameter.name}"


def test_names_of_options_may_use_underscores(source: Path) -> None:
    done = llmq("convert", source, "--group_size", "64", "--dry_run", "--json")
    assert done.returncode == 0, done.stderr
    linear = next(row for row in json.loads(done.stdout)["coverage"] if row["kind"] == "linear")
    assert linear["scheme"]["group_size"] == 64


def test_convert_and_inspect_agree_in_json(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    planned = json.loads(llmq("convert", source, "-o", out, "--dry-run", "--json").stdout)
    assert not out.exists()
    done = llmq("convert", source, "-o", out, "--scheme", "w4a16", "--sym", "--ignore", "model.layers.1.*", "--json")
    assert done.returncode == 0, done.stderr
    written = json.loads(done.stdout)
    assert "14 of 21 linears, 1 of 1 embeddings, 1 of 1 heads quantized" in done.stderr
    assert sum(row["kind"] == "linear" and row["action"] == "quantize" for row in written["coverage"]) == 14
    assert written["artifact_bytes"] == sum(file.stat().st_size for file in out.iterdir())
    assert planned["artifact_bytes"] < written["artifact_bytes"]
    shown = json.loads(llmq("inspect", out, "--verify", "--json").stdout)
    assert shown["record"]["weights_sha256"] == written["weights_sha256"]
    assert shown["quantization"]["symmetric"] is True
    stored = {row["name"]: row["stored_bytes"] for row in written["coverage"]}
    assert {row["name"]: row["stored_bytes"] for row in shown["coverage"]} == stored


def test_the_default_output_is_named_after_model_and_scheme(source: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    assert llmq("convert", source, "--scheme", "w8a16", cwd=tmp_path, env=environment).returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["source-int8_per_channel"]


def test_doctor_lists_every_backend() -> None:
    done = llmq("doctor", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert {"gpu", "tpu", "reference"} <= {row["backend"] for row in rows}
    assert all(row["usable"] or row["detail"] for row in rows)


def test_a_prompt_is_needed_where_there_is_no_terminal(source: Path) -> None:
    assert refused("generate", source).startswith("prompt: is missing")


class TestRefused:
    """Bad input: one sentence that names what is wrong, and nothing written."""

    @pytest.fixture(autouse=True)
    def _nothing_written(self, tmp_path: Path):
        self.out = tmp_path / "never" / "out"
        yield
        assert not self.out.parent.exists()

    def convert(self, model: object, *args: object) -> str:
        return refused("convert", model, "-o", self.out, *args)

    def test_missing_path(self) -> None:
        assert "./missing: no such file or directory" in self.convert("./missing")

    def test_empty_directory(self, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        assert "holds neither a config.json nor a single .gguf file" in self.convert(tmp_path / "empty")

    def test_unknown_scheme(self, source: Path) -> None:
        message = self.convert(source, "--scheme", "int5_blockwise")
        assert (
            "scheme='int5_blockwise': must be one of int8_per_channel, int4_per_channel, int8_blockwise, int4_blockwise"
            in message
        )

    @pytest.mark.parametrize("size", [0, -32, 12])
    def test_group_size(self, source: Path, size: int) -> None:
        assert f"group_size={size}: input should be" in self.convert(source, "--groupsize", size)

    def test_group_size_of_a_scheme_without_groups(self, source: Path) -> None:
        assert "has one scale per row" in self.convert(
            source, "--groupsize", 64, "--scheme", "int8_per_channel", "--lm-head", "none"
        )

    def test_output_is_the_source(self, source: Path) -> None:
        assert "is the source or contains it" in refused("convert", source, "-o", source, "--force")

    def test_existing_output(self, source: Path, tmp_path: Path) -> None:
        assert "exists already" in refused("convert", source, "-o", tmp_path)

    def test_missing_shard(self, tmp_path: Path) -> None:
        path = write_tiny(tmp_path / "m", num_shards=3)
        (path / "model-00002-of-00003.safetensors").unlink()
        assert (
            "model-00002-of-00003.safetensors: is missing, although model.safetensors.index.json lists it"
            in self.convert(path)
        )

    def test_truncated_shard(self, tmp_path: Path) -> None:
        path = write_tiny(tmp_path / "m", num_shards=3)
        shard = path / "model-00002-of-00003.safetensors"
        shard.write_bytes(shard.read_bytes()[:-10])
        assert f"{shard}: the header accounts for" in self.convert(path)

    def test_nan_weight(self, tmp_path: Path) -> None:
        tensors = random_tensors(tiny_config())
        tensors["model.layers.2.mlp.down_proj.weight"][3, 4] = float("nan")
        path = write_checkpoint(tmp_path / "m", tiny_config(), tensors)
        assert "model.layers.2.mlp.down_proj.weight: holds NaN" in self.convert(path)

    def test_unknown_architecture(self, tmp_path: Path) -> None:
        path = write_checkpoint(tmp_path / "m", tiny_config(architectures=["T5Model"]), {})
        (path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
        assert "architecture T5Model: llmq reads LlamaForCausalLM" in self.convert(path)

    @pytest.mark.parametrize("method", ["fp8", "gptq", "awq"])
    def test_already_quantized(self, tmp_path: Path, method: str) -> None:
        path = write_tiny(tmp_path / "m", quantization_config={"quant_method": method})
        assert f"is already quantized with {method}" in self.convert(path)

    def test_ignore_without_a_match(self, source: Path) -> None:
        assert "ignore='*.expert.*': matches no linear" in self.convert(source, "--ignore", "*.expert.*")

    def test_override_without_a_scheme(self, source: Path) -> None:
        assert "override 'lm_head': must read PATTERN=SCHEME" in self.convert(source, "--override", "lm_head")

    def test_strict(self, tmp_path: Path) -> None:
        path = write_tiny(tmp_path / "m", intermediate_size=4304)
        assert "strict: 3 tensors would not be quantized as asked" in self.convert(path, "--strict")

    def test_pickle(self, tmp_path: Path) -> None:
        path = tmp_path / "m"
        path.mkdir()
        (path / "config.json").write_text(json.dumps(tiny_config()))
        (path / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n.")
        assert "is not a pickle of plain tensors" in self.convert(path)

    def test_device_and_dtype(self, source: Path) -> None:
        assert "dtype='int3': must be bfloat16, float16 or float32" in refused(
            "generate", source, "x", "--dtype", "int3"
        )


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m", vocab_size=128)
    for name, contents in byte_tokenizer_files().items():
        (path / name).write_bytes(contents)
    assert "the model's vocabulary has 128; they do not belong together" in refused("generate", path, "zz\u00e9")


def test_sampling_defaults_of_the_model_are_shown_and_checked(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m")
    for name, contents in byte_tokenizer_files().items():
        (path / name).write_bytes(contents)
    advice = {"do_sample": True, "temperature": 0.5, "top_k": -1, "repetition_penalty": 1.2}
    (path / "generation_config.json").write_text(json.dumps(advice))
    done = llmq("generate", path, "x", "--max-tokens", 2, "--backend", "cpu", "--seed", 1)
    assert done.returncode == 0, done.stderr
    assert "sampling defaults of the model: temperature=0.5, top_k=0, repetition_penalty=1.2\n" in done.stderr
    (path / "generation_config.json").write_text(json.dumps({**advice, "top_p": 7}))
    lines = llmq("generate", path, "x").stderr.splitlines()
    assert lines[-1].startswith(
        "llmq: generation_config.json: top_p=7: input should be less than or equal to 1; name your own"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_files_that_may_not_be_read() -> None:
    code = (
        "import os, sys\nfrom contextlib import suppress\nfrom llmq.cli import main\n"
        "sys.argv = ['llmq', 'inspect', sys.argv[1]]\nwith suppress(SystemExit):\n    main()\n"  # import all it needs
        "os.setgid(65534)\nos.setuid(65534)\nmain()"
    )
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        path = write_tiny(Path(directory) / "m")
        (path / "model.safetensors").chmod(0o600)
        done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
        assert done.returncode == 2, done.stderr
        assert done.stderr.endswith(f"\nllmq: {path / 'model.safetensors'}: cannot be used (Permission denied).\n")


def test_a_reader_that_has_gone_is_no_error(source: Path) -> None:
    command = f"{sys.executable} -m llmq convert {source} --dry-run --json | head -1"
    done = subprocess.run(
        ["bash", "-c", f"{command}; echo ${{PIPESTATUS[0]}}"], capture_output=True, text=True, check=True
    )
    assert "Traceback" not in done.stderr
    assert done.stdout.splitlines()[0] == "{"
