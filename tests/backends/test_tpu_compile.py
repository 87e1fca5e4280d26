"""The real TPU compiler, without a TPU: what it makes of the decoder and of a decode step."""

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from llmq.backends.tpu import aot, slots
from llmq.backends.tpu.cache import Place, copy_slot, empty_cache
from llmq.backends.tpu.linear import EinsumLinear
from llmq.backends.tpu.model import Layer, Params, decode, forward, logits
from llmq.backends.tpu.table import EinsumTable
from llmq.model.config import ModelConfig
from tests.tiny import tiny_config

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("libtpu") is None, reason="needs libtpu: pip install 'llmq[tpu]'"),
]

NUM_LAYERS, HIDDEN, INNER, VOCAB, HEAD, POSITIONS = 4, 1024, 2816, 32000, 128, 1024
CONFIG = ModelConfig.from_dict(
    tiny_config(
        hidden_size=HIDDEN, intermediate_size=INNER, vocab_size=VOCAB, num_hidden_layers=NUM_LAYERS,
        num_attention_heads=HIDDEN // HEAD, num_key_value_heads=HIDDEN // HEAD,
    )
)  # fmt: skip
WEIGHT = HIDDEN * HIDDEN  # bytes of the smallest one at a byte an element; the activations of a chunk are as large


@pytest.fixture(params=["v5e", "v6e"])
def sharding(request: pytest.FixtureRequest) -> Iterator[SingleDeviceSharding]:
    """One chip that is not there."""
    with aot.no_cache():
        yield SingleDeviceSharding(aot.find_chips(f"{request.param}:1x1")[0])


def shaped(sharding: SingleDeviceSharding, *shape: int, dtype: Any = jnp.bfloat16) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def made_by(sharding: SingleDeviceSharding, function: Any, *args: Any) -> Any:
    tree = jax.eval_shape(partial(function, *args))
    return jax.tree.map(lambda leaf: shaped(sharding, *leaf.shape, dtype=leaf.dtype), tree)


def num_bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def params_of(array: Any) -> Params:
    def linear(num_outputs: int, num_features: int) -> EinsumLinear:
        grid = array(NUM_LAYERS, num_features // 128, num_outputs)
        values = array(NUM_LAYERS, num_features // 128, 128, num_outputs, dtype=jnp.int4)
        return EinsumLinear(values, grid, grid, None)

    def table() -> EinsumTable:
        return EinsumTable(array(VOCAB, HIDDEN, dtype=jnp.int8), array(VOCAB, 1), None)

    norm, square = array(NUM_LAYERS, HIDDEN), linear(HIDDEN, HIDDEN)
    layer = Layer(
        norm, square, square, square, None, None, square, norm,
        linear(INNER, HIDDEN), linear(INNER, HIDDEN), linear(HIDDEN, INNER),
    )  # fmt: skip
    angles = array(1, POSITIONS, HEAD // 2, dtype=jnp.float32)
    return Params(table(), (layer,), array(HIDDEN), table(), angles, angles)


def assert_in_place(lowered: Any, donated: Any, temporary: int) -> None:
    memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes >= num_bytes(donated), "what is donated is updated in place"
    assert memory.temp_size_in_bytes < temporary


@pytest.mark.parametrize("kv", ["bfloat16", "int8"])
@pytest.mark.parametrize("num_slots", [8, 1])
def test_a_step_writes_out_no_weight_and_copies_no_cache(
    sharding: SingleDeviceSharding, num_slots: int, kv: str
) -> None:
    array = partial(shaped, sharding)
    cache = made_by(sharding, empty_cache, CONFIG, num_slots, POSITIONS, kv)
    of_slots = array(num_slots, dtype=jnp.int32)
    lowered = decode.lower(
        CONFIG, "bfloat16", params_of(array), cache, of_slots, of_slots, array(num_slots, dtype=jnp.bool)
    )
    assert_in_place(lowered, cache, WEIGHT)


def test_prefill_writes_out_no_weight_and_copies_no_cache(sharding: SingleDeviceSharding) -> None:
    array = partial(shaped, sharding)
    cache = made_by(sharding, empty_cache, CONFIG, 8, POSITIONS, "bfloat16")
    tokens, one = array(1, 256, dtype=jnp.int32), array(dtype=jnp.int32)
    place = Place(one, tokens, tokens, tokens, tokens, one)
    assert_in_place(forward.lower(CONFIG, "bfloat16", params_of(array), cache, tokens, place), cache, 2 * WEIGHT)


def test_the_head_of_a_chunk_writes_out_no_weight(sharding: SingleDeviceSharding) -> None:
    array = partial(shaped, sharding)
    assert_in_place(logits.lower("bfloat16", params_of(array), array(1, 256, HIDDEN)), (), WEIGHT)


def test_choosing_and_handing_over_stay_in_place(sharding: SingleDeviceSharding) -> None:
    array = partial(shaped, sharding)
    every = made_by(sharding, slots.empty_slots, 8, VOCAB)
    floats, words = array(8, dtype=jnp.float32), array(8, VOCAB // 32, dtype=jnp.int32)
    logits_SV, active = array(8, VOCAB, dtype=jnp.float32), array(8, dtype=jnp.bool)
    lowered = slots.take_sampled.lower(*every, logits_SV, active, floats, words)
    assert_in_place(lowered, every.seen, 16 * num_bytes(logits_SV))
    assert_in_place(slots.take_likeliest.lower(every.following, logits_SV, active), (), num_bytes(logits_SV))
    slots.log_probabilities.lower(logits_SV, array(8, dtype=jnp.int32)).compile()
    one = jax.tree.map(lambda leaf: array(*leaf.shape[1:], dtype=leaf.dtype), every)
    assert_in_place(slots.hand_over.lower(every, array(dtype=jnp.int32), one), every, num_bytes(every))


def test_a_slot_is_copied_within_the_cache(sharding: SingleDeviceSharding) -> None:
    cache = made_by(sharding, empty_cache, CONFIG, 8, POSITIONS, "int8")
    one = shaped(sharding, dtype=jnp.int32)
    assert_in_place(copy_slot.lower(cache, one, one, one), cache, 4 * num_bytes(cache) // (8 * POSITIONS // 128))
