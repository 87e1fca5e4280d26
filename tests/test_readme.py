"""The README stays true: its commands run, its tables and lists are those of the code."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from llmq.config import SCHEMES, SYNONYMS
from tests.conftest import ROOT

README = (ROOT / "README.md").read_text()
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL) for line in block.splitlines()]


@pytest.mark.slow
def test_commands_run_in_the_order_they_stand(smollm2_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / smollm2_gguf.name).symlink_to(smollm2_gguf)
    (tmp_path / "README.md").write_text(README)
    assert len(COMMANDS) == 11
    outputs = {}
    for command in COMMANDS:
        program, *args = shlex.split(command)
        assert program == "llmq"
        done = subprocess.run(
            [sys.executable, "-m", "llmq", *args], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        outputs[command] = done
    answer = next(done.stdout for command, done in outputs.items() if "capital of France" in command)
    assert answer == "The capital of France is Paris.\n"
    assert "`The capital of France is Paris.`" in README


def test_schemes_are_those_of_the_code() -> None:
    for name, scheme in SCHEMES.items():
        short = next((f" (`{short}`)" for short, target in SYNONYMS.items() if target == name), "")
        scale = "group" if "blockwise" in name else "row"
        symmetry = "symmetric" if scheme.symmetric else "asymmetric"
        assert f"| `{name}`{short} | {scheme.num_bits} bits | {scale} | {symmetry} |" in README


def test_commands_that_work_are_listed() -> None:
    import typer

    from llmq.cli import app

    for name in typer.main.get_command(app).commands:
        assert f"`llmq {name}`" in README


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for document in ("README.md", "CONTRIBUTING.md"):
        for target in re.findall(r"(?:^    |`)make (\w+)", (ROOT / document).read_text(), re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{document}: make {target}"


def test_the_public_documents_are_there() -> None:
    for name in ("LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", ".pre-commit-config.yaml", ".ci/run"):
        assert (ROOT / name).is_file()
    assert "Apache License" in (ROOT / "LICENSE").read_text()
