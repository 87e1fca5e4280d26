"""Runtimes beside a backend's own: what is refused where they are not installed, and what they need of the trainer."""

import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch

from llmq.backends import registry
from llmq.backends.base import TrainBatch
from llmq.backends.gpu.straight import see, see_traced, straight_through
from llmq.backends.gpu.trainable import TrainableDecoder
from llmq.backends.registry import RUNTIMES, select_backend
from llmq.config import Scheme
from llmq.errors import BackendError
from tests.backends.test_train import GRIDS, one_document, schemes_for, tiny
from tests.conftest import ROOT


def install(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Let these packages be what is installed."""

    def version(package: str) -> str:
        if package not in versions:
            raise metadata.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(registry, "version", version)


@pytest.mark.parametrize(
    ("versions", "found"),
    [
        ({"torch": "2.13.0+cpu"}, "no torch_xla and torch 2.13.0"),
        ({"torch": "2.9.0", "torch_xla": "2.9.0"}, "torch_xla 2.9.0 and torch 2.9.0"),
        ({"torch": "2.9.1", "torch_xla": "2.8.1"}, "torch_xla 2.8.1 and torch 2.9.1"),
    ],
)
def test_versions_that_do_not_fit_are_refused_unseen(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], found: str
) -> None:
    install(monkeypatch, **versions)
    with pytest.raises(BackendError) as raised:
        select_backend("tpu", None, "torch_xla")
    assert str(raised.value) == (
        f"runtime='torch_xla': needs torch_xla 2.9.0 with torch 2.9.1, and here is {found}; give it an environment of "
        "its own: pip install 'llmq[xla]'."
    )


def test_a_runtime_chooses_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, torch="2.9.1+cu128", torch_xla="2.9.0")
    for name in ("auto", "tpu"):
        backend, device = select_backend(name, "cpu", "torch_xla")
        assert (backend.name, device) == ("gpu", "cpu")
    assert select_backend("cpu", None, "torch")[1] == "cpu"
    assert select_backend("auto", None, "jax")[0].name == "tpu"
    for name, runtime, owner in (("gpu", "torch_xla", "tpu"), ("cpu", "jax", "tpu"), ("tpu", "torch", "gpu")):
        with pytest.raises(BackendError, match=f"runtime='{runtime}': belongs to --backend {owner}, not to {name};"):
            select_backend(name, None, runtime)


def test_the_versions_stand_in_one_way_everywhere() -> None:
    exact = {f"{package}=={version}" for package, version in RUNTIMES["torch_xla"].packages.items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(project["optional-dependencies"]["xla"]) == exact
    assert exact <= set((ROOT / "constraints-xla.txt").read_text().split())


@pytest.mark.skipif("torch_xla" in {d.name for d in metadata.distributions()}, reason="torch_xla is installed")
def test_the_command_says_what_is_missing(tmp_path: Path) -> None:
    """Before it looks for the model or the data."""
    command = [sys.executable, "-m", "llmq", "qat", "no-model", "--data", "none", "--runtime", "torch_xla"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=300)
    assert done.returncode == 2
    assert done.stderr == (
        f"llmq: runtime='torch_xla': needs torch_xla 2.9.0 with torch 2.9.1, and here is no torch_xla and torch "
        f"{torch.__version__.partition('+')[0]}; give it an environment of its own: pip install 'llmq[xla]'.\n"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", GRIDS, ids=str)
def test_nothing_looks_at_a_value_to_quantize(scheme: Scheme, dtype: torch.dtype) -> None:
    """The form for devices that compile gives the bits and the gradient of the other."""
    rng = np.random.default_rng(0)
    weight = (rng.standard_normal((48, 128)) * 0.05).astype(np.float32)
    weight[0], weight[1], weight[2] = 0.0, 3.0, weight[2] * 1e-30
    weight[3] *= np.float32(1e-36)
    seen = []
    for form in (see, see_traced):
        master = torch.from_numpy(weight).requires_grad_()
        out = straight_through(master, form(master.detach(), scheme, dtype))
        (out * torch.arange(1, 129)).sum().backward()
        seen.append((out.detach(), master.grad))
    assert torch.equal(seen[0][0], seen[1][0])
    assert torch.equal(seen[0][1], seen[1][1])
    if scheme.symmetric:  # whose largest weight has no code
        assert (seen[1][1] == 0).any()


def test_shapes_can_be_those_of_the_batch_alone(tmp_path: Path) -> None:
    """Computing every token's loss, and masking, changes neither losses nor gradients."""
    weights = tiny(tmp_path)
    batch = one_document(rows=2, tokens=24)
    batch.learned[0, :9] = batch.learned[1, 3:] = False
    for documents in (batch.documents, np.where(np.arange(24) < 10, 1, 2).astype(np.int32)[None].repeat(2, axis=0)):
        found = []
        for static in (False, True):
            model = TrainableDecoder(
                weights, schemes_for(weights, GRIDS[-1]), (), 64, torch.device("cpu"), torch.float32, static=static
            )
            for matrix in model.matrices():
                matrix.look(quantized=True)
            rows = model.rows(TrainBatch(batch.tokens, batch.targets, batch.learned, documents, batch.positions))
            losses = model(rows)
            losses.sum().backward()
            found.append((losses.detach(), [parameter.grad for parameter in model.parameters()]))
        (taken, gradients), (every, static_gradients) = found
        learned = torch.from_numpy(batch.learned.ravel())
        assert len(every) == batch.learned.size
        assert (every[~learned] == 0).all()
        torch.testing.assert_close(every[learned], taken, rtol=1e-5, atol=1e-6)
        for one, other in zip(gradients, static_gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
