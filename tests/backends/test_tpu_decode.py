"""Decode steps of the JAX backend: rows that depend on nothing else, and nothing compiled late."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from llmq.backends.base import ModelOptions, SlotSampling, State, StepOut
from llmq.backends.tpu import TPUBackend
from llmq.backends.tpu.infer import JaxModel
from llmq.checkpoint.loader import ModelWeights, load_weights
from llmq.config import QuantizationConfig
from tests.backends.quantized import QuantizedWeights
from tests.backends.test_tpu import log_softmax
from tests.tiny import write_tiny

MAX_LEN, VOCAB, NUM_WORDS = 300, 330, 11
TOKENS = np.random.default_rng(1).integers(0, VOCAB, MAX_LEN).astype(np.int32)
LENGTHS = [200, 41, 3, 129, 70]
PARAMS = [
    SlotSampling(temperature=0.9, top_p=0.8),
    SlotSampling(),
    SlotSampling(repetition_penalty=1.3, logit_bias={7: 3.0}),
    SlotSampling(temperature=1.5, top_k=4),
    SlotSampling(temperature=0.7, min_p=0.1, presence_penalty=0.5, frequency_penalty=0.5),
]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> ModelWeights:
    path = write_tiny(tmp_path_factory.mktemp("decode") / "model", vocab_size=VOCAB)
    return QuantizedWeights(load_weights(str(path)), QuantizationConfig(scheme="int4_blockwise"))


@pytest.fixture(scope="module", params=["float32", "int8"])
def model(request: pytest.FixtureRequest, weights: ModelWeights) -> JaxModel:
    return open_model(weights, kv_int8=request.param == "int8")


def open_model(weights: ModelWeights, num_slots: int = 5, **options: Any) -> JaxModel:
    options = {"device": "cpu", "num_slots": num_slots, "max_len": MAX_LEN, **options}
    return TPUBackend().open_model(weights, ModelOptions(**options))


def prompt_of(length: int) -> np.ndarray:
    return np.roll(TOKENS, length)[:length]


def hand(model: JaxModel, state: State, slot: int, prompt: np.ndarray, params: SlotSampling) -> State:
    for start in range(0, len(prompt) - 1, model.caps.chunk_size):
        end = min(start + model.caps.chunk_size, len(prompt) - 1)
        state, _ = model.extend(state, slot, prompt[start:end], start)
    return model.set_slot(state, slot, prompt, params)


def active(model: JaxModel, slots: Iterable[int]) -> np.ndarray:
    return np.isin(np.arange(model.caps.num_slots), list(slots))


def step(model: JaxModel, state: State, slots: Iterable[int], **options: Any) -> tuple[State, StepOut]:
    uniform = np.full(model.caps.num_slots, 0.6, np.float32)
    state, handle = model.decode(state, active(model, slots), uniform, want_logprobs=True, **options)
    return state, model.fetch(handle)


def bits(out: StepOut, slot: int) -> np.ndarray:
    return np.concatenate([[out.tokens[slot], out.logprobs[slot]], out.top_ids[slot], out.top_logprobs[slot]])


@pytest.mark.parametrize("who", range(5))
def test_neighbours_and_the_slot_change_no_bit(model: JaxModel, who: int) -> None:
    def answer(slot: int, neighbours: Iterable[int]) -> np.ndarray:
        state = model.init_state()
        for index in neighbours:
            other = (slot - who + index) % 5  # everyone moves along
            state = hand(model, state, other, prompt_of(LENGTHS[index]), PARAMS[index])
        state = hand(model, state, slot, prompt_of(LENGTHS[who]), PARAMS[who])
        busy, rows = {slot, *((slot - who + index) % 5 for index in neighbours)}, []
        for _ in range(4):
            state, out = step(model, state, busy)
            rows.append(bits(out, slot))
        return np.stack(rows)

    alone = answer(who, ())
    assert len(np.unique(alone[:, 1])) == 4
    others = [index for index in range(5) if index != who]
    for slot in (who, (who + 1) % 5, (who + 3) % 5):
        np.testing.assert_array_equal(answer(slot, others), alone)


def test_a_mask_of_a_neighbour_changes_no_bit(model: JaxModel) -> None:
    state = hand(model, model.init_state(), 1, prompt_of(41), SlotSampling())
    state, alone = step(model, state, [1])
    allowed = np.full((5, NUM_WORDS), 0xFFFFFFFF, np.uint32)
    allowed[0] = 0
    allowed[0, 2] = 1 << 5
    state = hand(model, hand(model, state, 0, prompt_of(9), SlotSampling()), 1, prompt_of(41), SlotSampling())
    state, masked = step(model, state, [0, 1], allowed=allowed)
    assert masked.tokens[0] == 69
    np.testing.assert_array_equal(bits(masked, 1), bits(alone, 1))


def test_inactive_slots_are_untouched(model: JaxModel) -> None:
    state = model.init_state()
    for slot, length in enumerate(LENGTHS):
        state = hand(model, state, slot, prompt_of(length), PARAMS[slot])
    state, _ = step(model, state, range(5))

    def held(state: State) -> Any:
        cache = jax.tree.map(lambda stored: np.asarray(stored[:, 3]), state.cache)
        return cache, jax.tree.map(lambda of_slots: np.asarray(of_slots[3]), state.slots)

    before = held(state)
    state, _ = step(model, state, [0, 1, 2, 4])
    state, _ = step(model, state, [1])
    jax.tree.map(np.testing.assert_array_equal, held(state), before)


def test_tokens_are_fed_back(weights: ModelWeights) -> None:
    model = open_model(weights)
    state, tokens = hand(model, model.init_state(), 2, prompt_of(120), SlotSampling()), list(prompt_of(120))
    for _ in range(12):  # over the end of a block of attention
        _, logits = model.extend(model.init_state(), 0, np.asarray(tokens, np.int32), 0, want_logits=True)
        expected = log_softmax(logits[-1])
        state, out = step(model, state, [2])
        assert out.tokens[2] == expected.argmax()
        np.testing.assert_allclose(out.logprobs[2], expected.max(), rtol=0, atol=2e-5)
        np.testing.assert_allclose(out.top_logprobs[2], np.sort(expected)[::-1][:20], rtol=0, atol=2e-5)
        tokens.append(out.tokens[2])


def test_the_answer_counts_for_penalties_until_the_slot_is_handed_on(model: JaxModel) -> None:
    params, plain = SlotSampling(frequency_penalty=2.0, logit_bias={9: 50.0}), SlotSampling(logit_bias={9: 50.0})
    state = hand(model, model.init_state(), 0, TOKENS[:5], params)
    state = hand(model, state, 1, TOKENS[:5], plain)
    tokens = []
    for _ in range(40):
        state, out = step(model, state, [0, 1])
        tokens.append(out.tokens[:2])
    first, second = np.transpose(tokens)
    assert (second == 9).all()
    assert 20 < np.argmax(first != 9) < 30  # 50 is outweighed after some 25 times
    state = hand(model, state, 0, TOKENS[:5], params)
    state, out = step(model, state, [0])
    assert out.tokens[0] == 9


def test_one_step_may_be_dispatched_ahead_of_the_one_fetched(model: JaxModel) -> None:
    def run(ahead: bool) -> list[np.ndarray]:
        state, handles, outs = hand(model, model.init_state(), 0, TOKENS[:20], PARAMS[4]), [], []
        for index in range(4):
            uniform, slots = np.full(5, index / 4, np.float32), active(model, [0])
            allowed = np.full((5, NUM_WORDS), 0x7FFFFFFF, np.uint32)
            state, handle = model.decode(state, slots, uniform, allowed=allowed)
            uniform[:], slots[:], allowed[:] = 0.99, False, 0  # the caller's again
            handles.append(handle)
            if len(handles) > ahead:
                outs.append(model.fetch(handles.pop(0)).tokens[0])
        return outs + [model.fetch(handle).tokens[0] for handle in handles]

    assert run(ahead=True) == run(ahead=False)


@pytest.mark.parametrize("num_tokens", [1, 128, 150])
def test_a_copied_prefix_is_continued_as_where_it_was_written(model: JaxModel, num_tokens: int) -> None:
    prompt = prompt_of(num_tokens + 1)
    state = hand(model, model.init_state(), 2, TOKENS[::-1][:290].copy(), SlotSampling())
    state = hand(model, hand(model, state, 4, TOKENS[:50], SlotSampling()), 0, prompt, PARAMS[0])
    others = [1, 3, 4]
    before = jax.tree.map(lambda stored: np.asarray(stored[:, np.array(others)]), state.cache)
    state = model.set_slot(model.copy_slot(state, 0, 2, num_tokens), 2, prompt, PARAMS[0])
    after = jax.tree.map(lambda stored: np.asarray(stored[:, np.array(others)]), state.cache)
    jax.tree.map(np.testing.assert_array_equal, after, before)
    for _ in range(3):
        state, out = step(model, state, [0, 2])
        np.testing.assert_array_equal(bits(out, 2), bits(out, 0))


def test_nothing_is_compiled_after_warmup(tmp_path: Path) -> None:
    weights = load_weights(str(write_tiny(tmp_path / "m", vocab_size=VOCAB + 1)))
    model = open_model(weights, num_slots=3)
    state = model.init_state()
    before = model.stats().num_compiles
    state = model.warmup(state)
    warm = model.stats().num_compiles
    assert warm - before == 10
    rng = np.random.default_rng(0)
    for turn, length in enumerate([1, 2, 17, 64, 65, 129, 250]):
        slot, params = turn % 3, PARAMS[turn % 5]
        state = hand(model, state, slot, prompt_of(length), params)
        state = model.set_slot(
            model.copy_slot(state, slot, (slot + 1) % 3, length - 1), (slot + 1) % 3, TOKENS[:length], params
        )
        allowed = np.full((3, NUM_WORDS), 0xFFFFFFFF, np.uint32)
        for want_logprobs in (True, False):
            for mask in (None, allowed):
                uniform = rng.random(3).astype(np.float32)
                state, handle = model.decode(
                    state, rng.random(3) < 0.7, uniform, allowed=mask, want_logprobs=want_logprobs
                )
                model.fetch(handle)
    state, _ = model.extend(state, 0, TOKENS[:30], 0, want_logits=True)
    state = model.init_state()
    assert model.stats().num_compiles == warm


def test_bytes_are_those_of_weights_and_state(weights: ModelWeights) -> None:
    model = open_model(weights, kv_int8=True)
    state = model.init_state()
    arrays = jax.tree.leaves((model._params, state.cache, state.slots))
    assert model.stats().num_bytes == sum(array.nbytes for array in arrays)
    model.close()
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(model._params))
