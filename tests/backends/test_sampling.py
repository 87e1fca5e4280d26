"""The sampler against a slow one in float64, in NumPy, torch and jitted JAX."""

from typing import Any

import jax
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmq.backends.base import MAX_TOP_LOGPROBS, SlotSampling
from llmq.backends.sampling import (
    Rules,
    Seen,
    SlotRules,
    _first_over,
    bias_row,
    greedy,
    log_probabilities,
    prompt_row,
    sample,
)

#: Sums of probabilities err by this much, relative to all: two sums of at most 256 terms, the odds
#: of each within a few units in the last place, once in the threshold and once in the choice.
SLACK = 2048 * 2.0**-24


def adjusted(logits, rules: SlotSampling, prompt, answer, allowed) -> np.ndarray:
    """Bias, mask and penalties, token by token."""
    out = []
    for token, logit in enumerate(np.asarray(logits, np.float64)):
        value = logit + rules.logit_bias.get(token, 0.0)
        if not (int(allowed[token // 32]) >> (token % 32)) & 1:
            value = -np.inf
        if token in prompt or token in answer:
            value = value / rules.repetition_penalty if value > 0 else value * rules.repetition_penalty
        if token in answer:
            value -= rules.presence_penalty
        out.append(value - rules.frequency_penalty * answer.count(token))
    return np.array(out)


def distribution(values: np.ndarray, rules: SlotSampling, slack: float = 0.0) -> np.ndarray:
    """Probabilities in float64, by a full sort; `slack` moves the thresholds of top_p and min_p."""
    with np.errstate(over="ignore"):
        odds = np.exp((values - values.max()) / rules.temperature)
    order = np.argsort(-values, kind="stable")
    if 0 < rules.top_k < len(values):
        odds[values < values[order[rules.top_k - 1]]] = 0
    if rules.top_p < 1:
        reached = np.cumsum(odds[order]) >= (rules.top_p + slack) * odds.sum()
        last = order[reached.argmax() if reached.any() else -1]
        odds[values < values[last]] = 0
    odds[odds < rules.min_p * (1 + slack)] = 0
    return odds / odds.sum()


def expected_token(logits, rules: SlotSampling, prompt, answer, allowed, uniform: float) -> int:
    """The token that the definition gives."""
    values = adjusted(logits, rules, set(np.asarray(prompt).tolist()), list(answer), allowed)
    if rules.temperature == 0:
        return int(values.argmax())
    return int(np.argmax(np.cumsum(distribution(values, rules)) > float(uniform)))


NUM_SLOTS = 4


def in_numpy(logits, uniform, rules, seen, allowed):
    return sample(logits, uniform, rules, seen, allowed)


def in_torch(*arguments):
    return sample(*(to_torch(argument) for argument in arguments)).numpy()


def to_torch(value: Any) -> Any:
    if isinstance(value, tuple):
        return type(value)(*map(to_torch, value))
    return None if value is None else torch.from_numpy(np.array(value))


in_jax = jax.jit(sample)

FRAMEWORKS = {"numpy": in_numpy, "torch": in_torch, "jax": in_jax}


def batch(slots: list[SlotSampling], prompts, answers, vocab_size: int) -> tuple[Rules, Seen]:
    """Every rule of every slot, neutral or not."""
    columns = {
        "temperature_S": "temperature", "top_p_S": "top_p", "min_p_S": "min_p", "repetition_S": "repetition_penalty",
        "presence_S": "presence_penalty", "frequency_S": "frequency_penalty",
    }  # fmt: skip
    rules = Rules(
        **{key: np.array([getattr(slot, name) for slot in slots], np.float32) for key, name in columns.items()},
        top_k_S=np.array([slot.top_k for slot in slots], np.int32),
        bias_SV=np.stack([bias_row(slot, vocab_size) for slot in slots]),
    )
    counts = np.stack([np.bincount(answer, minlength=vocab_size) for answer in answers]).astype(np.int32)
    return rules, Seen(np.stack([prompt_row(np.array(p, np.int32), vocab_size) for p in prompts]), counts)


def acceptable(token: int, values: np.ndarray, rules: SlotSampling, uniform: float) -> bool:
    """The token of the definition, or one across a boundary that lies within rounding of `uniform`."""
    if not np.isfinite(values.max()):
        return token == -1
    if rules.temperature == 0:
        return token == values.argmax()
    for slack in (0.0, -SLACK, SLACK):
        probabilities = distribution(values, rules, slack)
        ends = np.cumsum(probabilities)
        inside = ends[token] - probabilities[token] - SLACK <= uniform <= ends[token] + SLACK
        if token >= 0 and probabilities[token] > 0 and inside:
            return True
    return False


# Exact in float32: what is added and multiplied rounds nowhere, so ties and thresholds are what they seem.
steps_of_an_eighth = st.integers(-64, 64).map(lambda i: i / 8)


@st.composite
def slot_rules(draw: st.DrawFn, vocab_size: int) -> SlotSampling:
    token = st.integers(0, vocab_size - 1)
    return SlotSampling(
        logit_bias=draw(st.dictionaries(token, steps_of_an_eighth, max_size=3)),
        repetition_penalty=draw(st.sampled_from([1.0, 0.5, 2.0, 4.0])),
        presence_penalty=draw(st.sampled_from([0.0, -2.0, 0.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.25, -1.0])),
        temperature=draw(st.sampled_from([0.0, 1e-6, 0.3, 1.0, 2.0, 1e6])),
        top_k=draw(st.sampled_from([0, 1, 2, 7, vocab_size, 10 * vocab_size])),
        top_p=draw(st.sampled_from([1.0, 1e-6, 0.3, 0.5, 0.95])),
        min_p=draw(st.sampled_from([0.0, 0.05, 0.5, 1.0])),
    )


@pytest.mark.parametrize("framework", FRAMEWORKS)
@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_every_rule_against_the_definition(framework: str, data: st.DataObject) -> None:
    vocab_size = data.draw(st.sampled_from([37, 600]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    spread = data.draw(st.sampled_from([2, 24, 800]))  # few values: many ties
    logits = (rng.integers(-spread, spread + 1, (NUM_SLOTS, vocab_size)) / 8).astype(np.float32)
    logits[rng.random(logits.shape) < data.draw(st.sampled_from([0.0, 0.3]))] = -np.inf
    slots = data.draw(st.lists(slot_rules(vocab_size), min_size=NUM_SLOTS, max_size=NUM_SLOTS))
    few = st.integers(0, 5)  # often more than once
    tokens = st.lists(few | st.integers(0, vocab_size - 1), max_size=12)
    prompts, answers = ([data.draw(tokens) for _ in range(NUM_SLOTS)] for _ in range(2))
    num_words = -(-vocab_size // 32)
    allowed = rng.integers(0, 2**32, (NUM_SLOTS, num_words), np.uint32) | np.uint32(data.draw(st.sampled_from([0, 1])))
    allowed[rng.random(NUM_SLOTS) < 0.5] = 0xFFFFFFFF
    uniform = np.array(data.draw(st.lists(st.integers(0, 2**24 - 1), min_size=4, max_size=4))).astype(np.float32)
    uniform *= np.float32(2.0**-24)

    rules, seen = batch(slots, prompts, answers, vocab_size)
    chosen = FRAMEWORKS[framework](logits, uniform, rules, seen, allowed.view(np.int32))
    assert chosen.dtype == np.int32
    for slot, token in enumerate(np.asarray(chosen).tolist()):
        values = adjusted(logits[slot], slots[slot], prompts[slot], answers[slot], allowed[slot])
        assert acceptable(token, values, slots[slot], float(uniform[slot])), (slot, token)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e30, 3e38])
def test_logits_of_any_size(framework: str, scale: float) -> None:
    rng = np.random.default_rng(0)
    logits = (rng.uniform(-1, 1, (64, 1000)) * scale).astype(np.float32)
    uniform = rng.random(64).astype(np.float32)
    for temperature in (1e-6, 1.0, 1e6):
        slots = [SlotSampling(temperature=temperature, top_p=0.9, top_k=200)] * 64
        rules, seen = batch(slots, [[]] * 64, [[]] * 64, 1000)
        with np.errstate(over="ignore"):
            chosen = np.asarray(FRAMEWORKS[framework](logits, uniform, rules, seen, None))
        for row, token in enumerate(chosen.tolist()):
            assert acceptable(token, logits[row].astype(np.float64), slots[0], float(uniform[row]))


def test_a_large_vocabulary_in_every_framework() -> None:
    rng = np.random.default_rng(0)
    logits = (3 * rng.standard_normal((32, 49_157))).astype(np.float32)
    uniform = rng.random(32).astype(np.float32)
    slots = [
        SlotSampling(temperature=0.5 + i / 16, top_p=[1.0, 0.95, 0.5][i % 3], top_k=[0, 50][i % 2]) for i in range(32)
    ]
    rules, _ = batch(slots, [[]] * 32, [[]] * 32, 49_157)
    rules = rules._replace(repetition_S=None, presence_S=None, frequency_S=None, bias_SV=None)
    chosen = {name: np.asarray(f(logits, uniform, rules, None, None)).tolist() for name, f in FRAMEWORKS.items()}
    for row, slot in enumerate(slots):
        values = logits[row].astype(np.float64)
        assert all(acceptable(tokens[row], values, slot, float(uniform[row])) for tokens in chosen.values())
    assert sum(len({tokens[row] for tokens in chosen.values()}) == 1 for row in range(32)) >= 31, chosen


def test_frequencies_are_the_probabilities() -> None:
    """Chi-square over uniform numbers that are random themselves."""
    rng, num_draws, rule = np.random.default_rng(0), 20_000, SlotSampling(temperature=0.7, top_p=0.98)
    logits = rng.standard_normal(30).astype(np.float32) * 1.5
    rules = Rules(np.full(num_draws, 0.7, np.float32), top_p_S=np.full(num_draws, 0.98, np.float32))
    chosen = sample(np.tile(logits, (num_draws, 1)), rng.random(num_draws).astype(np.float32), rules)
    expected = num_draws * distribution(logits.astype(np.float64), rule)
    counts, kept = np.bincount(chosen, minlength=30), expected > 0
    assert counts[~kept].sum() == 0
    freedom = kept.sum() - 1
    statistic = np.sum((counts[kept] - expected[kept]) ** 2 / expected[kept])
    assert abs(statistic - freedom) < 4 * np.sqrt(2 * freedom), "either the frequencies are off, or 1 in 10,000"


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_neighbours_and_neutral_rules_change_nothing(framework: str) -> None:
    rng = np.random.default_rng(0)
    logits, uniform = rng.standard_normal((6, 999)).astype(np.float32), rng.random(6).astype(np.float32)
    mixed = [SlotSampling(temperature=1.0, top_k=9, presence_penalty=1.0), SlotSampling(min_p=0.1, top_p=0.5)] * 3
    for slot in (SlotSampling(temperature=0.9), SlotSampling(), SlotSampling(temperature=1.3, top_p=0.8)):
        tracker = SlotRules(1)
        tracker.set(0, slot)
        lean = tracker.rules(np.ones(1, np.bool_))
        run = FRAMEWORKS[framework]
        for row in range(6):
            (alone,) = np.asarray(run(logits[row : row + 1], uniform[row : row + 1], lean, None, None))
            slots = [*mixed[:row], slot, *mixed[row + 1 :]]
            everyone = np.full((6, 32), -1, np.int32)
            assert np.asarray(run(logits, uniform, *batch(slots, [[5]] * 6, [[7]] * 6, 999), everyone))[row] == alone


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_what_is_forbidden_is_never_chosen(framework: str) -> None:
    """At both ends of the uniform numbers, where sums round the most."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((64, 5000)).astype(np.float32) * 4
    allowed = rng.integers(0, 2**32, (64, 157), np.uint32) & rng.integers(0, 2**32, (64, 157), np.uint32)
    rules = Rules(np.full(64, 2.0, np.float32))
    bits = np.unpackbits(allowed.view(np.uint8), axis=-1, bitorder="little")[:, :5000]
    for uniform, end in ((0.0, bits.argmax(axis=-1)), (1 - 2.0**-24, 4999 - bits[:, ::-1].argmax(axis=-1))):
        chosen = np.asarray(
            FRAMEWORKS[framework](logits, np.full(64, uniform, np.float32), rules, None, allowed.view(np.int32))
        )
        assert bits[np.arange(64), chosen].all()
        assert (chosen == end).mean() > 0.8, "the first or the last allowed one, unless it is too unlikely"


def test_sums_that_round_choose_nothing_impossible() -> None:
    """A parallel sum may pass the goal at a token without odds, or never."""
    odds, ends = np.array([[0.5, 0.0, 0.1, 0.0]]), np.array([[0.5, 0.6, 0.6, 0.6]])
    assert [int(_first_over(np, ends, odds, np.array([goal]))[0]) for goal in (0.4, 0.55, 0.7)] == [0, 2, 2]


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_not_finite(framework: str, value: float) -> None:
    logits = np.random.default_rng(0).standard_normal((5, 300)).astype(np.float32)
    logits[1, 17], logits[2, 299] = value, value
    logits[3], logits[4, 3:] = -np.inf, -np.inf
    for temperature in (0.0, 1.0):
        slots = [SlotSampling(temperature=temperature, top_k=5, top_p=0.9, repetition_penalty=2.0)] * 5
        rules, seen = batch(slots, [[17]] * 5, [[]] * 5, 300)
        nothing_for_0 = np.where(np.arange(5)[:, None] == 0, 0, np.full((5, 10), -1)).astype(np.int32)
        run = FRAMEWORKS[framework]
        for allowed, first in ((None, True), (nothing_for_0, False)):
            chosen = np.asarray(run(logits, np.full(5, 0.5, np.float32), rules, seen, allowed))
            assert (chosen >= 0).tolist() == [first, False, False, False, True]
    assert (greedy(logits) >= 0).tolist() == [True, False, False, False, True]


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("vocab_size", [20, 256, 1000, 20_001])
def test_log_probabilities_are_of_the_raw_logits(framework: str, vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    logits = np.round(rng.standard_normal((6, vocab_size)) * 4, 1).astype(np.float32)  # many ties
    logits[0] = 1.0
    logits[1, 5:] = -np.inf
    logits[2] += 1e4
    token = rng.integers(0, vocab_size, 6).astype(np.int32)
    token[1] = 2
    function = {"numpy": log_probabilities, "torch": log_probabilities, "jax": jax.jit(log_probabilities)}[framework]
    arguments = [to_torch(a) if framework == "torch" else a for a in (logits, token)]
    chosen, ids, best = (np.asarray(part) for part in function(*arguments))
    exact = logits.astype(np.float64)
    highest = exact.max(axis=-1, keepdims=True)
    exact = exact - highest - np.log(np.exp(exact - highest).sum(axis=-1, keepdims=True))
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :MAX_TOP_LOGPROBS]
    np.testing.assert_array_equal(ids, order)
    # The sum's relative error, and one rounding of the result.
    for got, want in ((chosen, exact[np.arange(6), token]), (best, np.take_along_axis(exact, order, -1))):
        finite = np.isfinite(want)
        assert (got[~finite] == -np.inf).all()
        assert (np.abs(got[finite] - want[finite]) <= SLACK / 16 + 2.0**-22 * np.abs(want[finite])).all()
    assert (chosen.dtype, ids.dtype, best.dtype) == (np.float32, np.int32, np.float32)


def test_rules_that_nobody_asks_for_are_left_out() -> None:
    slots = SlotRules(3)
    slots.set(1, SlotSampling(temperature=0.5, top_k=4))
    slots.set(2, SlotSampling(logit_bias={1: 1.0}, frequency_penalty=1.0, top_p=0.5))

    def used(*active: int) -> tuple[list[str], bool, bool]:
        chosen = np.isin(np.arange(3), active)
        rules = slots.rules(chosen)
        return (
            [key for key, value in rules._asdict().items() if value is not None],
            slots.all_greedy(chosen),
            slots.has_bias(chosen),
        )

    assert used(0) == (["temperature_S"], True, False)
    assert used(0, 1) == (["temperature_S", "top_k_S"], False, False)
    assert used(2) == (["temperature_S", "top_p_S", "repetition_S", "presence_S", "frequency_S"], False, True)
    np.testing.assert_array_equal(slots.rules(np.ones(3, np.bool_)).top_k_S, [0, 4, 0])
