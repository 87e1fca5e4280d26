"""Slots and context from free memory."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmq.backends.base import Memory
from llmq.checkpoint.loader import ModelWeights, load_weights
from llmq.errors import ConfigError
from llmq.serve.capacity import RESERVE, bytes_per_token, plan_capacity, weight_bytes
from tests.tiny import write_tiny

#: 3 layers, 2 key/value heads of 32, keys and values.
FLOAT32, BFLOAT16, INT8 = 3 * 2 * 32 * 2 * 4, 3 * 2 * 32 * 2 * 2, 3 * 2 * (32 + 4) * 2
LOGITS = 320 * 32


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> ModelWeights:
    return load_weights(str(write_tiny(tmp_path_factory.mktemp("tiny") / "model", max_position_embeddings=4096)))


def plan(weights: ModelWeights, room: int, **asked: int | None):
    """With `room` bytes left for the cache."""
    free = int((room + weight_bytes(weights, "float32")) / (1 - RESERVE)) + 1
    wanted = {"num_slots": None, "max_len": None, **asked}
    return plan_capacity(weights, Memory(free, free), dtype="float32", kv_int8=False, default_slots=4, **wanted)


def test_bytes(weights: ModelWeights) -> None:
    assert [bytes_per_token(weights.config, kind) for kind in ("float32", "bfloat16", "int8")] == [
        FLOAT32,
        BFLOAT16,
        INT8,
    ]
    assert weight_bytes(weights, "bfloat16") == weights.num_bytes
    assert weight_bytes(weights, "float32") == 2 * weights.num_bytes


def test_default_takes_the_context_and_the_slots_that_fit(weights: ModelWeights) -> None:
    slot = 4096 * FLOAT32 + LOGITS
    for room, slots, length in ((9 * slot, 4, 4096), (4 * slot, 4, 4096), (2 * slot, 2, 4096), (slot, 1, 4096)):
        found = plan(weights, room)
        assert (found.num_slots, found.max_len) == (slots, length)


def test_what_is_asked_for_is_given(weights: ModelWeights) -> None:
    found = plan(weights, 7 * (512 * FLOAT32 + LOGITS), num_slots=7, max_len=512)
    assert (found.num_slots, found.max_len) == (7, 512)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"num_slots": 8, "max_len": 512}, r"max_num_seqs=8 and max_model_len=512: .* --max-num-seqs 7 or --max-model-len 384"),
        ({"num_slots": 0}, "max_num_seqs=0: must be at least 1"),
        ({"max_len": 4097}, "max_model_len=4097: must be positive and at most the model's context, 4096"),
        ({"max_len": 0}, "max_model_len=0"),
        ({"max_len": 4096}, r"max_model_len=4096: .* --max-model-len \d+"),
        ({"num_slots": 1000}, r"max_num_seqs=1000: .* --max-num-seqs 13"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_what_would(weights: ModelWeights, asked: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(weights, 7 * (512 * FLOAT32 + LOGITS), **asked)


def test_weights_that_do_not_fit(weights: ModelWeights) -> None:
    with pytest.raises(ConfigError, match=r"memory: .* are free, but the weights take"):
        plan(weights, 0)


@settings(max_examples=200)
@given(
    room=st.integers(256 * FLOAT32 + LOGITS, 10**9),
    num_slots=st.none() | st.integers(1, 64),
    max_len=st.none() | st.integers(1, 4096),
)
def test_a_plan_fits_and_a_refusal_names_one_that_does(
    weights: ModelWeights, room: int, num_slots: int | None, max_len: int | None
) -> None:
    try:
        found = plan(weights, room, num_slots=num_slots, max_len=max_len)
    except ConfigError as err:
        found = {name: int(number) for name, number in re.findall(r"--max-(num-seqs|model-len) (\d+)", str(err))}
        if "num-seqs" in found:
            assert plan(weights, room, num_slots=found["num-seqs"], max_len=max_len)
        if "model-len" in found:
            assert plan(weights, room, num_slots=num_slots, max_len=found["model-len"])
        assert found or (num_slots and max_len)
        return
    assert found.num_slots * (found.max_len * FLOAT32 + LOGITS) <= room + 2
    assert num_slots in (None, found.num_slots)
    assert max_len in (None, found.max_len)


def test_devices_share_weights_heads_and_slots(weights: ModelWeights) -> None:
    """Two groups of two: each device holds half of the weights and one of the two heads for half of the slots."""
    asked = {"dtype": "float32", "kv_int8": False, "default_slots": 10**9, "num_slots": None, "max_len": 512}
    half = weight_bytes(weights, "float32") / 2
    free = int((half + 3 * (512 * FLOAT32 / 2 + LOGITS)) / (1 - RESERVE)) + 2
    found = plan_capacity(weights, Memory(free, free), **asked, dp=2, tp=2, cache_parts=2)
    assert (found.num_slots, found.weight_bytes) == (6, half)
