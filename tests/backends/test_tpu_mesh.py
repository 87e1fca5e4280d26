"""One model on several devices: the same tokens, and logits that differ by the order of additions alone."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmq.backends.base import ModelOptions
from llmq.backends.registry import load_backend
from llmq.checkpoint.loader import load_weights
from llmq.config import QuantizationConfig
from llmq.convert import convert, plan_conversion
from llmq.errors import BackendError, ConfigError
from tests.conftest import ROOT
from tests.tiny import GEMMA3, MIXTRAL, byte_tokenizer_files, write_tiny

pytestmark = pytest.mark.slow

#: Prompts of different lengths in four slots, two of them of several chunks and blocks of positions; then greedy steps.
SCRIPT = """
import json, math, sys
import numpy as np
from llmq.backends.base import ModelOptions, SlotSampling
from llmq.backends.registry import load_backend
from llmq.checkpoint.loader import load_weights

model, output, meshes = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
weights = load_weights(model)
rng = np.random.default_rng(0)
prompts = [rng.integers(3, weights.config.vocab_size, size).astype(np.int32) for size in (5, 300, 150, 1)]
found = {}
for name, options in meshes.items():
    model = load_backend("tpu").open_model(weights, ModelOptions("cpu", "float32", 4, 320, **options))
    state = model.init_state()
    tp, num_heads = options.get("tp", 1), weights.config.num_kv_heads
    split = math.gcd(tp // options.get("sp", 1), num_heads)
    num_blocks = -(-320 // (128 * tp // split))
    held = state.cache.k_LSTKh.addressable_shards[0].data.shape[1:4]
    assert held == (4 // options.get("dp", 1), num_blocks * 128, num_heads // split), held
    logits, tokens = [], []
    for slot, prompt in enumerate(prompts):
        state, parts = model.extend(state, slot, prompt[:-1], 0, want_logits=True) if len(prompt) > 1 else (state, None)
        logits += [] if parts is None else [parts]
        state = model.set_slot(state, slot, prompt, SlotSampling())
    state = model.copy_slot(state, 1, 3, 256)
    state = model.set_slot(state, 3, prompts[1][:257], SlotSampling())
    active = np.ones(4, bool)
    for _ in range(6):
        state, handle = model.decode(state, active, np.zeros(4, np.float32), want_logprobs=True)
        step = model.fetch(handle)
        tokens.append(step.tokens)
        logits.append(step.logprobs[:, None])
    found[f"{name} tokens"] = np.stack(tokens)
    for index, part in enumerate(logits):
        found[f"{name} logits {index}"] = part
    assert model.caps.device.startswith("" if name == "one" else f"{options.get('dp', 1) * options['tp']} x ")
    model.close()
np.savez(output, **found)
"""

GRIDS = {
    "asym": QuantizationConfig(scheme="int4_blockwise", group_size=32),
    "sym": QuantizationConfig(scheme="int4_blockwise", group_size=32, symmetric=True),
    "int8": QuantizationConfig(scheme="int8_per_channel"),
    "none": None,
}

MESHES: dict[str, dict[str, Any]] = {
    "one": {},
    **{f"tp={tp}": {"tp": tp} for tp in (2, 4, 8)},
    "dp=2,tp=4": {"dp": 2, "tp": 4},
    "tp=2,sp=2": {"tp": 2, "sp": 2},
    "dp=2,tp=4,sp=4": {"dp": 2, "tp": 4, "sp": 4},
}


def write(path: Path, grid: QuantizationConfig | None, **changes: Any) -> Path:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2}
    model = write_tiny(path / "model", **{**sizes, "num_hidden_layers": 2, **changes})
    if grid is None:
        return model
    convert(plan_conversion(str(model), grid), path / "artifact")
    return path / "artifact"


def start(model: Path, output: Path, meshes: dict, num_devices: int, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT, str(model), str(output), json.dumps(meshes)]
    flags = f"--xla_force_host_platform_device_count={num_devices}"
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": flags, **environment}
    return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        said, _ = process.communicate(timeout=500)
        assert process.returncode == 0, said


def check_alike(found: Any, expected: Any, name: str, kv_int8: bool = False) -> None:
    """An int8 code of a key or value may round the other way where sums differ in their last bit."""
    np.testing.assert_array_equal(found[f"{name} tokens"], expected["one tokens"])
    numbers = [key.removeprefix("one ") for key in expected if key.startswith("one logits")]
    assert len(numbers) == 3 + 6
    for number in numbers:
        np.testing.assert_allclose(found[f"{name} {number}"], expected[f"one {number}"], atol=1e-3 if kv_int8 else 1e-4)


@pytest.mark.parametrize("grid", GRIDS)
def test_the_same_on_any_mesh(grid: str, tmp_path: Path) -> None:
    changes = {"asym": {}, "sym": {"attention_bias": True}, "int8": {}, "none": GEMMA3}
    more = {**changes[grid], "num_hidden_layers": 3} if grid == "none" else changes[grid]
    model = write(tmp_path, GRIDS[grid], **more)
    meshes = MESHES if grid == "asym" else {name: MESHES[name] for name in ("one", "tp=4", "dp=2,tp=4,sp=4")}
    finish(start(model, tmp_path / "found.npz", meshes, 8))
    with np.load(tmp_path / "found.npz") as found:
        for name in meshes:
            check_alike(found, found, name)


def test_experts_are_split_on_any_mesh(tmp_path: Path) -> None:
    model = write(tmp_path, GRIDS["asym"], **MIXTRAL)
    meshes = {"one": {}, "tp=2": {"tp": 2}, "dp=2,tp=2": {"dp": 2, "tp": 2}}
    finish(start(model, tmp_path / "found.npz", meshes, 4))
    with np.load(tmp_path / "found.npz") as found:
        for name in meshes:
            check_alike(found, found, name)


@pytest.mark.parametrize("kv_int8", [False, True])
def test_two_processes_of_four_devices(kv_int8: bool, tmp_path: Path) -> None:
    model = write(tmp_path, GRIDS["asym"])
    one = {"one": {"kv_int8": kv_int8}}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    ranks = [{"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(i)} for i in (0, 1)]
    both = {name: {**MESHES[name], "kv_int8": kv_int8} for name in ("tp=8", "dp=2,tp=4,sp=4")}
    finish(
        start(model, tmp_path / "one.npz", one, 1),
        *(start(model, tmp_path / f"{index}.npz", both, 4, **rank) for index, rank in enumerate(ranks)),
    )
    with np.load(tmp_path / "one.npz") as expected:
        for index in (0, 1):
            with np.load(tmp_path / f"{index}.npz") as found:
                for name in both:
                    check_alike(found, expected, name, kv_int8)


def test_generate_on_four_devices(tmp_path: Path) -> None:
    model = write(tmp_path, GRIDS["asym"])
    for name, contents in byte_tokenizer_files().items():
        (model / name).write_bytes(contents)
    variables = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    said = []
    for mesh in ("tp=1", "tp=4"):
        options = ["--max-tokens", "12", "--backend", "tpu", "--device", "cpu", "--mesh", mesh]
        command = [sys.executable, "-m", "llmq", "generate", str(model), "abc", *options]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
        said.append((done.stdout, "on 4 x cpu" in done.stderr))
    answer = said[0][0]
    assert answer
    assert said == [(answer, False), (answer, True)]


class TestRefused:
    def open(self, model: Path, **options: int) -> None:
        load_backend("tpu").open_model(load_weights(str(model)), ModelOptions("cpu", num_slots=4, **options))

    def test_more_devices_than_there_are(self, tmp_path: Path) -> None:
        with pytest.raises(BackendError, match=r"mesh='dp=2,tp=4': takes 8 devices, and there are \d+ here"):
            self.open(write(tmp_path, None), dp=2, tp=4)

    def test_positions_that_devices_cannot_share(self, tmp_path: Path) -> None:
        with pytest.raises(BackendError, match="mesh='tp=2,sp=4': sp must divide tp"):
            self.open(write(tmp_path, None), tp=2, sp=4)

    def test_slots_that_groups_cannot_share(self, tmp_path: Path) -> None:
        with pytest.raises(BackendError, match="dp=3: does not divide the 4 slots"):
            self.open(write(tmp_path, None), dp=3)

    def test_groups_that_devices_cannot_share(self, tmp_path: Path) -> None:
        model = write(tmp_path, QuantizationConfig(scheme="int4_blockwise", group_size=64), intermediate_size=576)
        with pytest.raises(ConfigError, match="576 input features in 9 groups of 64, which 2 devices cannot share"):
            self.open(model, tp=2)
