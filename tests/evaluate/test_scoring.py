"""Shared work changes no answer: groups, packs, reused beginnings, cut calls, what is known already."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmq.backends.base import InferenceModel, ModelOptions
from llmq.backends.reference import forward
from llmq.backends.registry import load_backend
from llmq.checkpoint.loader import ModelWeights, load_weights
from llmq.errors import ConfigError
from llmq.evaluate.packs import (
    MAX_TOKENS_PER_CALL,
    MIN_TOKENS_PER_CALL,
    Limits,
    Request,
    fit,
    plan,
    tokens_per_call,
)
from llmq.evaluate.scoring import Answer, Scorer
from tests.evaluate.exact_model import ExactModel, exact_logprob
from tests.tiny import write_tiny

MAX_LEN = 48


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> ModelWeights:
    return load_weights(str(write_tiny(tmp_path_factory.mktemp("scoring") / "model", num_hidden_layers=1)))


def open_model(weights: ModelWeights, backend: str) -> InferenceModel:
    return load_backend(backend).open_model(weights, ModelOptions(device="cpu", dtype="float32", max_len=MAX_LEN))


def requests() -> list[Request]:
    """A primer before everything, contexts that share more or nothing, equal requests, one long continuation."""
    rng = np.random.default_rng(0)
    primer = (1, *rng.integers(3, 259, 9).tolist())
    contexts = [primer + tuple(rng.integers(3, 259, n).tolist()) for n in (1, 4, 6)]
    contexts += [(*contexts[2], 7), (5,), primer]
    made = [
        Request(context, tuple(rng.integers(3, 259, length).tolist()))
        for context in contexts
        for length in (3, 1, 5, 1)
    ]
    made += [made[5], Request((9, 8, 7), tuple(rng.integers(3, 259, 30).tolist()))]
    rng.shuffle(made)
    return [Request(tuple(map(int, context)), tuple(map(int, continuation))) for context, continuation in made]


def scored(
    model: Any, wanted: list[Request], limits: Limits, known: dict[Request, Answer] | None = None
) -> dict[Request, Answer]:
    found: dict[Request, Answer] = {}
    for answers in Scorer(model, limits).answers(wanted, known):
        found.update(answers)
    return found


def exact(request: Request) -> Answer:
    """What `ExactModel` says of one request by itself."""
    tokens, start = [*request.context, *request.continuation], len(request.context)
    logprobs = [exact_logprob(tokens[:at], tokens[at]) for at in range(start, len(tokens))]
    return Answer(sum(logprobs), all(logprob > -8 for logprob in logprobs))


def plain(weights: ModelWeights, request: Request) -> Answer:
    """One request by itself, from the definition."""
    tokens = [*request.context, *request.continuation]
    logits = forward(weights, tokens[:-1])[len(request.context) - 1 :]
    logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    targets = np.asarray(request.continuation)
    chosen = logprobs[np.arange(len(targets)), targets].sum()
    return Answer(float(chosen), bool((logits.argmax(axis=-1) == targets).all()))


# A few token ids, so that contexts often begin alike, and now and then a long primer before them.
TOKENS = st.integers(1, 3)
CONTEXTS = st.builds(
    lambda primer, rest: (*range(10, 10 + primer), *rest), st.sampled_from([0, 0, 31, 40]), st.lists(TOKENS, max_size=9)
).filter(len)
REQUESTS = st.lists(st.builds(Request, CONTEXTS, st.lists(TOKENS, min_size=1, max_size=12).map(tuple)), max_size=30)
LIMITS = st.builds(Limits, st.integers(1, 90), st.none() | st.integers(1, 9))


@given(REQUESTS, LIMITS)
@settings(deadline=None, max_examples=300)
def test_packed_answers_are_those_of_single_requests(wanted: list[Request], limits: Limits) -> None:
    """The model refuses runs behind what the slot does not hold, and calls beyond its length."""
    model = ExactModel(max_len=70)
    found = scored(model, wanted, limits)
    assert found == {request: exact(request) for request in wanted}
    for _, runs in model.calls:
        assert len(runs) == 1 or sum(length for length, _ in runs) <= limits.tokens
        num_scored = len(runs) - len({parent for _, parent in runs} - {None})
        assert num_scored <= (limits.runs or num_scored)


@given(REQUESTS, LIMITS, st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=300)
def test_what_is_known_changes_no_computation_of_the_rest(wanted: list[Request], limits: Limits, random: Any) -> None:
    """Every call that is made is one of the whole run's, behind tokens that were written by the same runs."""
    whole = ExactModel(max_len=70)
    found = scored(whole, wanted, limits)
    known = {request: answer for request, answer in found.items() if random.random() < 0.7}
    resumed = ExactModel(max_len=70)
    rest = scored(resumed, wanted, limits, known)
    assert {**known, **rest} == found
    assert rest.keys() >= found.keys() - known.keys()
    assert set(map(str, resumed.traced)) <= set(map(str, whole.traced))


def test_items_are_packed_into_calls() -> None:
    wanted = [Request((1, item, 5, 6), (20 + i,) * (i + 1)) for item in (7, 8, 9) for i in range(3)]
    model = ExactModel(max_len=99)
    scored(model, wanted, Limits(20))
    one = [(3, None), (3, 0), (2, 0), (1, 0)]
    two = [*one, (3, None), (3, 4), (2, 4), (1, 4)]
    assert model.extended == []
    assert model.calls == [(0, two), (0, one)]
    model = ExactModel(max_len=99)
    scored(model, wanted, Limits(99, runs=3))
    assert model.calls == [(0, one)] * 3


def test_a_primer_is_computed_once() -> None:
    primer = tuple(range(100, 160))
    wanted = [Request((*primer, 50 + i, 60), (70 + j,)) for i in range(5) for j in range(3)]
    model = ExactModel(max_len=99)
    scored(model, wanted, Limits(10))
    assert model.extended == [(start, 10) for start in range(0, 60, 10)]
    item = [(1, None), (1, 0), (1, 0), (1, 0)]
    two = [*item, (1, None), (1, 4), (1, 4), (1, 4)]
    assert model.calls == [(60, two), (60, two), (60, item)]


def test_a_short_beginning_is_not_worth_a_call() -> None:
    for length, extended in ((31, []), (32, [(0, 32)])):
        wanted = [Request((*range(100, 100 + length), 50 + i, 60), (70,)) for i in range(2)]
        model = ExactModel(max_len=99)
        scored(model, wanted, Limits(90))
        assert model.extended == extended
        assert len(model.calls) == 1


def test_a_group_too_large_is_cut_by_tokens_runs_and_room() -> None:
    context = tuple(range(10, 40))  # 29 held, 19 rows left
    wanted = [Request(context, (i,) * n) for i, n in ((3, 8), (4, 6), (5, 6), (6, 2), (7, 1), (8, 1))]

    def calls(limits: Limits) -> list[list[int]]:
        model = ExactModel(MAX_LEN)
        scored(model, wanted, limits)
        assert {shared for shared, _ in model.calls} <= {29, 29 + limits.tokens}
        return [[length for length, _ in runs] for _, runs in model.calls]

    assert calls(Limits(64)) == [[8, 6], [6, 2, 1, 1]]
    assert calls(Limits(64, runs=3)) == [[8, 6], [6, 2, 1], [1]]
    assert calls(Limits(6)) == [[6], [2], [6], [6], [2, 1, 1]]


def test_a_long_run_comes_in_parts() -> None:
    request = Request((1,), tuple(range(10, 50)))
    model = ExactModel(MAX_LEN)
    assert scored(model, [request], Limits(16)) == {request: exact(request)}
    assert model.calls == [(0, [(16, None)]), (16, [(16, None)]), (32, [(8, None)])]


def test_the_plan_of_many_items_is_quick() -> None:
    primer = tuple(range(2000, 3500))
    wanted = [Request((*primer, i, 1), (2, 3)) for i in range(300)]
    packs = list(plan(wanted, Limits(64), 2048))
    assert [len(groups) for _, groups in packs[:2]] == [21, 21]
    assert {prefix for prefix, _ in packs} == {primer}


@pytest.mark.parametrize("backend", ["reference", "gpu", "tpu"])
@pytest.mark.parametrize("limits", [Limits(64), Limits(16, runs=3)])
def test_backends_agree_with_the_definition(weights: ModelWeights, backend: str, limits: Limits) -> None:
    wanted = requests()
    found = scored(open_model(weights, backend), wanted, limits)
    assert set(found) == set(wanted)
    for request in wanted:
        expected = plain(weights, request)
        assert found[request].logprob == pytest.approx(expected.logprob, abs=1e-3)
        assert found[request].is_greedy == expected.is_greedy


def test_greedy_continuations_are_recognized(weights: ModelWeights) -> None:
    context = (1, 40, 41)
    best = int(forward(weights, list(context))[-1].argmax())
    second = int(forward(weights, [*context, best])[-1].argmax())
    wanted = [Request(context, (best, second)), Request(context, (best, second ^ 1))]
    found = scored(open_model(weights, "reference"), wanted, Limits(64))
    assert [found[request].is_greedy for request in wanted] == [True, False]


@pytest.mark.parametrize("limits", [Limits(64), Limits(4)])
@pytest.mark.parametrize("backend", ["gpu", "tpu"])
def test_what_is_known_changes_no_bit_of_the_rest(weights: ModelWeights, limits: Limits, backend: str) -> None:
    wanted = requests()
    model = open_model(weights, backend)
    whole = scored(model, wanted, limits)
    order = list(whole)
    for num_known in (1, len(order) // 2, len(order) - 1):
        known = {request: whole[request] for request in order[:num_known]}
        rest = scored(model, wanted, limits, known)
        assert {**known, **rest} == whole
        assert set(order[num_known:]) <= set(rest)


def test_a_prompt_is_cut_from_the_left_as_in_lm_eval() -> None:
    for num_context, num_continuation in ((3, 2), (9, 1), (9, 2), (10, 3), (4, 10), (30, 10), (1, 10)):
        request = Request(tuple(range(num_context)), tuple(range(100, 100 + num_continuation)))
        tokens = [*request.context, *request.continuation][-(10 + 1) :]  # lm_eval/models/huggingface.py
        fitted = fit(request, 10)
        assert [*fitted.context, *fitted.continuation] == tokens
        assert fitted.continuation == request.continuation


def test_what_cannot_be_scored_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_model_len=10: a continuation has 11 tokens; raise --max-model-len"):
        fit(Request((1,), (2,) * 11), 10)
    with pytest.raises(ConfigError, match="no tokens"):
        fit(Request((1,), ()), 10)


def test_tokens_per_call_follow_the_memory() -> None:
    assert tokens_per_call(49152, 24 << 30) == MAX_TOKENS_PER_CALL
    assert tokens_per_call(49152, 2 << 30) == 128
    assert tokens_per_call(256_000, 1 << 20) == MIN_TOKENS_PER_CALL
