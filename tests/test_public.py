"""Public names, the examples, and a file written by the first release."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import llmq
from llmq.backends.reference import forward
from llmq.checkpoint.inspect import describe
from llmq.checkpoint.layout import FORMAT_VERSION
from llmq.checkpoint.loader import load_weights
from tests.conftest import ROOT

GOLDEN = Path(__file__).parent / "golden"


def test_public_names_are_there_and_no_others() -> None:
    assert llmq.__all__ == sorted(llmq.__all__, key=lambda name: (not name.isupper(), name[0].islower(), name))
    for name in llmq.__all__:
        assert getattr(llmq, name).__doc__ or name.isupper()
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        _ = llmq.missing


def test_importing_the_package_imports_nothing_else() -> None:
    code = "import sys, llmq; print([m for m in ('numpy', 'pydantic', 'torch', 'jax') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_the_quickstart_answers(smollm2_gguf: Path, tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "examples" / "quickstart.py", smollm2_gguf, tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "211 of 272 tensors quantized" in done.stdout
    assert "Paris" in done.stdout


@pytest.mark.parametrize("version", range(1, FORMAT_VERSION + 1))
def test_artifacts_of_every_format_version_load(version: int) -> None:
    """Logits were noted when the artifact was written: codes, grid and layout must mean the same for ever."""
    path = GOLDEN / f"artifact-v{version}"
    assert describe(str(path), verify=True)["quantization"]["scheme"] == "int4_blockwise"
    logits = np.load(GOLDEN / f"artifact-v{version}-logits.npy")
    np.testing.assert_allclose(forward(load_weights(str(path)), [1, 2, 3]), logits, rtol=1e-9)
