"""The same run on several processes and devices: the same losses but for the order of addition, the same codes."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from llmq.checkpoint.loader import load_weights
from llmq.checkpoint.run import PARTIAL
from llmq.qat.loop import read_metrics
from llmq.qat.output import METRICS
from llmq.qat.plan import plan_run
from llmq.qat.recipe import Mesh, write_recipe
from llmq.quant import quantize
from tests.conftest import ROOT
from tests.qat.test_run import Stop, recipe, stop_at, trained
from tests.tiny import MIXTRAL, byte_tokenizer_files, write_tiny

pytestmark = pytest.mark.slow

#: Runs a recipe; after a step the process that writes may end, copy the checkpoints, or be killed in its next save.
SCRIPT = """
import os, shutil, signal, sys
from pathlib import Path
from llmq.qat import checkpoints
from llmq.qat.recipe import read_recipe
from llmq.qat.plan import plan_run
from llmq.qat.run import run

recipe, output, step, what = sys.argv[1:]

def kill(file, array):
    file.write(array.tobytes()[:8])
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)

def watch(event):
    if "loss" not in event or event["step"] != int(step):
        return
    if what == "stop":
        sys.exit(1)
    if what == "copy":
        shutil.copytree(f"{output}.qat", f"{output}-copy.qat")
    if what == "kill":
        checkpoints.write_array = kill

run(plan_run(read_recipe(Path(recipe))), Path(output), watch=watch)
"""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    path = tmp_path_factory.mktemp("processes")
    model = written(path / "m", tie_word_embeddings=True)
    text = path / "words.txt"
    text.write_text(" ".join(np.random.default_rng(0).choice(["one", "two", "three", "four"], 1500)))
    return model, text


def written(path: Path, **family: object) -> Path:
    model = write_tiny(path, num_hidden_layers=2, **family)
    for name, contents in byte_tokenizer_files().items():
        (model / name).write_bytes(contents)
    return model


def launch(tmp_path: Path, name: str, text: str, *launcher: str, stop: int = 0, **environment: str) -> None:
    (tmp_path / "recipe.yaml").write_text(text)
    (tmp_path / "run.py").write_text(SCRIPT)
    command = [*launcher, tmp_path / "run.py", tmp_path / "recipe.yaml", tmp_path / name, stop, "stop"]
    done = execute(*command, **environment)
    assert (done.returncode == 0) == (stop == 0), done.stderr


def execute(*command: object, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run([*map(str, command)], env=variables, capture_output=True, text=True, check=False, timeout=400)


TORCHRUN = (str(Path(sys.executable).parent / "torchrun"), "--nproc-per-node", "2")


def check_alike(tmp_path: Path, one: str, several: str, schemes: dict, bound: float = 1e-5) -> None:
    losses = [
        [event["loss"] for event in read_metrics(tmp_path / name / METRICS) if "loss" in event]
        for name in (one, several)
    ]
    assert len(losses[0]) == 10
    np.testing.assert_allclose(losses[1], losses[0], rtol=bound)
    weights = [load_weights(str(tmp_path / name)) for name in (one, several)]
    pairs = [
        (quantize(np.asarray(weights[0][n]), s), quantize(np.asarray(weights[1][n]), s)) for n, s in schemes.items()
    ]
    equal = sum(int((a.values == b.values).sum()) for a, b in pairs)
    assert equal >= 0.9999 * sum(a.values.size for a, _ in pairs)


@pytest.mark.parametrize("family", [{"tie_word_embeddings": True}, MIXTRAL], ids=["llama", "mixtral"])
def test_two_processes_train_as_one(family: dict, sources: tuple[Path, Path], tmp_path: Path) -> None:
    wanted = recipe(
        written(tmp_path / "m", **family),
        sources[1],
        max_steps=10,
        save_every=4,
        batch_size=4,
        fake_quant_after_n_steps=3,
        lr=1e-4,
    )
    trained(wanted, tmp_path / "one")
    (tmp_path / "recipe.yaml").write_text(write_recipe(wanted))
    done = execute(*TORCHRUN, "-m", "llmq", "qat", "--config", tmp_path / "recipe.yaml", "-o", tmp_path / "two")
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if "held-out" in line or line.startswith("10 steps, ")]
    assert len(told) == len(set(told)) == 4, done.stderr  # one of the two processes tells what is done
    assert told[0].startswith("10 steps, ")
    check_alike(tmp_path, "one", "two", plan_run(wanted).schemes)


def test_a_checkpoint_of_two_processes_resumes_on_one(sources: tuple[Path, Path], tmp_path: Path) -> None:
    """Each holding a copy of the weights."""
    wanted = recipe(*sources, max_steps=10, save_every=4, batch_size=4, lr=1e-4, lora={"rank": 2})
    trained(wanted, tmp_path / "one")
    launch(tmp_path, "two", write_recipe(wanted.model_copy(update={"mesh": Mesh(dp=2)})), *TORCHRUN, stop=6)
    assert [path.name for path in (tmp_path / "two.qat").glob("step*")] == ["step-00000004.safetensors"]
    trained(wanted, tmp_path / "two", resume=True)
    check_alike(tmp_path, "one", "two", plan_run(wanted).schemes)


def test_four_devices_train_as_one(sources: tuple[Path, Path], tmp_path: Path) -> None:
    wanted = recipe(*sources, backend="tpu", max_steps=10, batch_size=4, fake_quant_after_n_steps=3, lr=1e-4)
    launch(tmp_path, "one", write_recipe(wanted), sys.executable)
    flags = "--xla_force_host_platform_device_count=4"
    two_copies = write_recipe(wanted.model_copy(update={"mesh": Mesh(dp=2, fsdp=2)}))
    launch(tmp_path, "four", two_copies, sys.executable, XLA_FLAGS=flags)
    assert json.loads((tmp_path / "four" / "llmq.json").read_bytes())["result"]["device"].startswith("4 x cpu")
    check_alike(tmp_path, "one", "four", plan_run(wanted).schemes)


def test_two_processes_of_two_devices_train_as_one(sources: tuple[Path, Path], tmp_path: Path) -> None:
    wanted = recipe(*sources, backend="tpu", max_steps=10, batch_size=4, save_every=4, lr=1e-4)
    launch(tmp_path, "one", write_recipe(wanted), sys.executable)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    (tmp_path / "run.py").write_text(SCRIPT)
    command = [sys.executable, tmp_path / "run.py", tmp_path / "recipe.yaml", tmp_path / "four", "6", "copy"]
    shared = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": "2",
    }
    processes = [subprocess.Popen(command, env={**shared, "JAX_PROCESS_ID": str(rank)}) for rank in range(2)]
    try:
        assert [process.wait(400) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()  # one waits for the other
            process.wait()
    assert json.loads((tmp_path / "four" / "llmq.json").read_bytes())["result"]["device"].startswith("4 x cpu")
    check_alike(tmp_path, "one", "four", plan_run(wanted).schemes)
    assert [path.name for path in (tmp_path / "four-copy.qat").glob("step*")] == ["step-00000004.safetensors"]
    alone = trained(wanted, tmp_path / "four-copy", resume=True).record
    assert alone
    assert alone["result"]["device"].startswith("1 x cpu")
    check_alike(tmp_path, "one", "four-copy", plan_run(wanted).schemes)


def test_torch_and_jax_train_alike(sources: tuple[Path, Path], tmp_path: Path) -> None:
    """Sums of another order end in another code now and then, and the losses part a little."""
    wanted = recipe(*sources, max_steps=10, fake_quant_after_n_steps=3, lr=1e-4, save_every=4, weight_decay=0.1)
    trained(wanted, tmp_path / "torch")
    trained(wanted.model_copy(update={"backend": "tpu"}), tmp_path / "jax")
    check_alike(tmp_path, "torch", "jax", plan_run(wanted).schemes, bound=1e-3)


def test_a_killed_process_loses_only_steps(sources: tuple[Path, Path], tmp_path: Path) -> None:
    """Killed between any two instructions, once while it is saving again and again."""
    wanted = recipe(*sources, max_steps=40, save_every=1, keep=2, lr=1e-4)
    whole = trained(wanted, tmp_path / "whole").record
    assert whole
    (tmp_path / "recipe.yaml").write_text(write_recipe(wanted))
    (tmp_path / "run.py").write_text(SCRIPT)
    command = [sys.executable, tmp_path / "run.py", tmp_path / "recipe.yaml", tmp_path / "parts", "0", "stop"]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    directory = tmp_path / "parts.qat"
    while not list(directory.glob("step-0000000[5-9]*")):
        assert process.poll() is None
    process.kill()
    process.wait()
    assert not (tmp_path / "parts").exists()
    parts = trained(wanted, tmp_path / "parts", resume=True).record
    assert parts
    assert parts["weights_sha256"] == whole["weights_sha256"]
    with pytest.raises(Stop):
        trained(wanted, tmp_path / "parts", force=True, watch=stop_at(3))


@pytest.mark.parametrize("backend", ["gpu", "tpu"])
def test_a_process_killed_in_a_save_loses_only_that(sources: tuple[Path, Path], tmp_path: Path, backend: str) -> None:
    wanted = recipe(*sources, backend=backend, max_steps=6, save_every=2, lr=1e-4)
    whole = trained(wanted, tmp_path / "whole").record
    (tmp_path / "recipe.yaml").write_text(write_recipe(wanted))
    (tmp_path / "run.py").write_text(SCRIPT)
    command = [sys.executable, tmp_path / "run.py", tmp_path / "recipe.yaml", tmp_path / "parts", "4", "kill"]
    assert execute(*command).returncode == -signal.SIGKILL
    found = {path.name: path.stat().st_size for path in (tmp_path / "parts.qat").iterdir()}
    assert 0 < found[PARTIAL] < found["step-00000002.safetensors"]
    assert "step-00000004.safetensors" not in found
    parts = trained(wanted, tmp_path / "parts", resume=True).record
    assert whole
    assert parts
    assert parts["weights_sha256"] == whole["weights_sha256"]
    assert not (tmp_path / "parts.qat").exists()
