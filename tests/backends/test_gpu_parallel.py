"""One model on several processes: shards are whole heads, features and groups, and together they answer as one."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from llmq.backends.base import ModelOptions
from llmq.backends.gpu.backend import GPUBackend
from llmq.backends.gpu.parallel import ShardedWeights
from llmq.backends.reference import reference_weight
from llmq.checkpoint.loader import ModelWeights, load_weights
from llmq.config import QuantizationConfig
from llmq.convert import convert, plan_conversion
from llmq.errors import BackendError, ConfigError
from tests.backends.quantized import QuantizedWeights
from tests.tiny import write_tiny

MODEL = {"num_hidden_layers": 2, "attention_bias": True, "tie_word_embeddings": True}


def sharded(weights: ModelWeights, size: int) -> list[ShardedWeights]:
    return [ShardedWeights(weights, SimpleNamespace(size=size, rank=rank)) for rank in range(size)]


@pytest.mark.parametrize("scheme", ["int4_blockwise", "int8_per_channel"])
def test_shards_make_up_the_whole(scheme: str, tmp_path: Path) -> None:
    plain = load_weights(str(write_tiny(tmp_path / "m", **MODEL)))
    weights = QuantizedWeights(plain, QuantizationConfig(scheme=scheme, group_size=32 if "block" in scheme else None))
    parts = sharded(weights, 2)
    config = weights.config
    assert all(part.config.num_heads == config.num_heads // 2 for part in parts)
    x = np.random.default_rng(0).standard_normal(config.intermediate_size)
    for module in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj"):
        name = f"model.layers.1.{module}.weight"
        rows = [reference_weight(part[name]) for part in parts]
        np.testing.assert_array_equal(np.concatenate(rows), reference_weight(weights[name]))
    name = "model.layers.1.mlp.down_proj.weight"
    products = [reference_weight(p[name]) @ half for p, half in zip(parts, np.split(x, 2), strict=True)]
    np.testing.assert_allclose(sum(products), reference_weight(weights[name]) @ x)
    head = np.concatenate([reference_weight(part.head()) for part in parts])
    np.testing.assert_array_equal(head, reference_weight(weights["model.embed_tokens.weight"]))


def test_processes_share_a_key_value_head(tmp_path: Path) -> None:
    weights = load_weights(str(write_tiny(tmp_path / "m", **MODEL, num_key_value_heads=2)))
    name = "model.layers.0.self_attn.v_proj.weight"
    parts = [part[name] for part in sharded(weights, 4)]
    heads = np.split(weights[name], 2)
    for part, head in zip(parts, (heads[0], heads[0], heads[1], heads[1]), strict=True):
        np.testing.assert_array_equal(part, head)


def test_what_cannot_be_shared_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = load_weights(str(write_tiny(tmp_path / "m", **MODEL)))
    with pytest.raises(ConfigError, match="tp=3: "):
        sharded(weights, 3)
    for options, sentence in (
        (ModelOptions("cpu", tp=2), "tp=2: the gpu backend takes as many processes, and 1 run; start it as torchrun"),
        (ModelOptions("cpu", dp=2), "mesh='dp=2,tp=1,sp=1': the gpu backend splits layers only; leave dp and sp out."),
    ):
        with pytest.raises(BackendError) as refused:
            GPUBackend().open_model(weights, options)
        assert str(refused.value).startswith(sentence)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(BackendError, match="not compiled; leave --compile or --tp out"):
        GPUBackend().open_model(weights, ModelOptions("cpu", tp=2, compile=True))


#: Steps of two slots, one of them copied, and scores: tokens and log-probabilities.
SCRIPT = """
import sys
import numpy as np
from llmq.backends.base import ModelOptions, Run, SlotSampling
from llmq.backends.gpu.backend import GPUBackend
from llmq.checkpoint.loader import load_weights

model, tp, output = sys.argv[1:]
options = ModelOptions("cpu", "float32", num_slots=3, max_len=64, num_threads=1, tp=int(tp))
model = GPUBackend().open_model(load_weights(model), options)
prompt, outs = np.arange(1, 30, dtype=np.int32), []
state, _ = model.extend(model.init_state(), 0, prompt[:-1], 0)
state = model.copy_slot(state, 0, 2, 28)
for slot in (0, 2):
    state = model.set_slot(state, slot, prompt + slot * (prompt == 29), SlotSampling(logit_bias={7: float(slot)}))
for _ in range(8):
    active = np.array([True, False, True])
    state, handle = model.decode(state, active, np.zeros(3, np.float32), want_logprobs=True)
    out = model.fetch(handle)
    outs.append(np.column_stack([out.tokens, out.top_logprobs])[active])
_, scores = model.score(state, 1, 0, [Run(prompt[:-1], prompt[1:])])
np.savez(output, steps=np.array(outs), scores=scores[0].logprobs)
"""


@pytest.mark.slow
def test_two_processes_compute_as_one(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "m", **MODEL)
    config = QuantizationConfig(scheme="int4_blockwise", group_size=32)
    convert(plan_conversion(str(source), config), tmp_path / "int4")
    (tmp_path / "run.py").write_text(SCRIPT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port]
    found = []
    for tp, launched in ((1, []), (2, launcher)):
        line = [*launched, tmp_path / "run.py", tmp_path / "int4", tp, tmp_path / f"{tp}.npz"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([sys.executable, *map(str, line)], capture_output=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr.decode()
        found.append(np.load(tmp_path / f"{tp}.npz"))
    one, two = found
    np.testing.assert_array_equal(one["steps"][..., 0], two["steps"][..., 0])
    for name in ("steps", "scores"):
        np.testing.assert_allclose(one[name], two[name], atol=1e-4)
