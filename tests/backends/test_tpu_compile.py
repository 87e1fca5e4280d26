"""The real TPU compiler, without a TPU: what it makes of the decoder."""

from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from llmq.backends.tpu import device
from llmq.backends.tpu.linear import EinsumLinear
from llmq.backends.tpu.model import Cache, Layer, Params, Place, forward
from llmq.backends.tpu.table import EinsumTable
from llmq.model.config import ModelConfig
from tests.tiny import tiny_config

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("libtpu") is None, reason="needs libtpu: pip install 'llmq[tpu]'"),
]

NUM_LAYERS, HIDDEN, INNER, VOCAB, HEAD, POSITIONS = 4, 1024, 2816, 32000, 128, 1024


@pytest.fixture
def sharding(monkeypatch: pytest.MonkeyPatch) -> SingleDeviceSharding:
    """One v5e chip that is not there; the variables keep libtpu from asking the cloud about it."""
    device.configure()
    machine = {
        "SKIP_MDS_QUERY": "1",
        "ACCELERATOR_TYPE": "v5litepod-4",
        "WORKER_HOSTNAMES": "localhost",
        "WORKER_ID": "0",
    }
    for name, value in machine.items():
        monkeypatch.setenv(f"TPU_{name}", value)
    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:1x1", chips_per_host_bounds=(1, 1, 1))
    return SingleDeviceSharding(topology.devices[0])


@pytest.mark.parametrize(
    ("num_slots", "num_tokens"), [(8, 1), (1, 1), (1, 256)], ids=["decode", "decode-one", "prefill"]
)
def test_nothing_large_is_materialized(sharding: SingleDeviceSharding, num_slots: int, num_tokens: int) -> None:
    def shaped(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def linear(num_outputs: int, num_features: int) -> EinsumLinear:
        grid = shaped(NUM_LAYERS, num_features // 128, num_outputs)
        values = shaped(NUM_LAYERS, num_features // 128, 128, num_outputs, dtype=jnp.int4)
        return EinsumLinear(values, grid, grid, None)

    def table() -> EinsumTable:
        return EinsumTable(shaped(VOCAB, HIDDEN, dtype=jnp.int8), shaped(VOCAB, 1), None)

    norm, square = shaped(NUM_LAYERS, HIDDEN), linear(HIDDEN, HIDDEN)
    layer = Layer(
        norm, square, square, square, None, None, square, norm,
        linear(INNER, HIDDEN), linear(INNER, HIDDEN), linear(HIDDEN, INNER),
    )  # fmt: skip
    angles = shaped(POSITIONS, HEAD // 2, dtype=jnp.float32)
    params = Params(table(), (layer,), shaped(HIDDEN), table(), angles, angles)
    cache = shaped(NUM_LAYERS, num_slots, POSITIONS, HIDDEN // HEAD, HEAD)
    config = ModelConfig.from_dict(
        tiny_config(
            hidden_size=HIDDEN, intermediate_size=INNER, vocab_size=VOCAB, num_hidden_layers=NUM_LAYERS,
            num_attention_heads=HIDDEN // HEAD, num_key_value_heads=HIDDEN // HEAD,
        )
    )  # fmt: skip
    batch = shaped(num_slots, num_tokens, dtype=jnp.int32)
    lowered = forward.lower(
        config,
        "bfloat16",
        params,
        Cache(cache, cache),
        batch,
        Place(shaped(dtype=jnp.int32), batch, batch, shaped(dtype=jnp.int32)),
        batch,
        wanted="logits" if num_tokens == 1 else "cache",
    )
    memory = lowered.compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == 4 * NUM_LAYERS * num_slots * POSITIONS * HIDDEN, (
        "the cache is updated in place"
    )
    assert memory.temp_size_in_bytes < HIDDEN * HIDDEN, "no weight is ever written out, not even at a byte an element"
