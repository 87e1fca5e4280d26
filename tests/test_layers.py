"""The layers are enforced: a forbidden import fails the check that `make lint` runs."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT


def lint(directory: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache", "--no-logo"]
    environment = {"PYTHONPATH": str(directory), "PATH": "", "COLUMNS": "200"}
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("file", "line", "contract"),
    [
        ("llmq/quant/affine.py", "import llmq.model.names", "imports only go down the data flow"),
        ("llmq/backends/gpu/linear.py", "import llmq.backends.tpu.linear", "backends never import each other"),
        ("llmq/convert.py", "import torch", "torch only in its backend and the pickle reader"),
        ("llmq/checkpoint/loader.py", "import jax", "jax only in its backend"),
        ("llmq/engine/generate.py", "import rich", "typer and rich only in the command line"),
        (None, None, None),
    ],
)
def test_a_forbidden_import_breaks_its_contract(file: str | None, line: str, contract: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "llmq", tmp_path / "llmq", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    if file is None:
        assert lint(tmp_path).returncode == 0
        return
    with (tmp_path / file).open("a") as source:
        source.write(f"\n{line}\n")
    done = lint(tmp_path)
    assert done.returncode != 0
    assert f"{contract} BROKEN" in done.stdout, done.stdout
