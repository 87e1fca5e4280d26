"""Shared work changes no answer: groups, reused beginnings, cut calls, skipped groups."""

from typing import Any

import numpy as np
import pytest

from llmq.backends.base import InferenceModel, ModelOptions
from llmq.backends.reference import forward
from llmq.backends.registry import load_backend
from llmq.checkpoint.loader import ModelWeights, load_weights
from llmq.errors import ConfigError
from llmq.evaluate.scoring import (
    MAX_TOKENS_PER_CALL,
    MIN_TOKENS_PER_CALL,
    Answer,
    Limits,
    Request,
    Scorer,
    fit,
    tokens_per_call,
)
from tests.tiny import write_tiny

MAX_LEN = 48


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> ModelWeights:
    return load_weights(str(write_tiny(tmp_path_factory.mktemp("scoring") / "model", num_hidden_layers=1)))


def open_model(weights: ModelWeights, backend: str = "reference") -> InferenceModel:
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


def scored(model: Any, wanted: list[Request], limits: Limits, known: dict[Request, Answer] | None = None):
    found: dict[Request, Answer] = {}
    for answers in Scorer(model, limits).answers(wanted, known):
        found.update(answers)
    return found


def plain(weights: ModelWeights, request: Request) -> Answer:
    """One request by itself, from the definition."""
    tokens = [*request.context, *request.continuation]
    logits = forward(weights, tokens[:-1])[len(request.context) - 1 :]
    logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    targets = np.asarray(request.continuation)
    chosen = logprobs[np.arange(len(targets)), targets].sum()
    return Answer(float(chosen), bool((logits.argmax(axis=-1) == targets).all()))


class Spy:
    """A model that notes its calls."""

    def __init__(self, model: InferenceModel) -> None:
        self._model = model
        self.caps = model.caps
        self.extended: list[tuple[int, int]] = []
        self.calls: list[list[int]] = []

    def init_state(self) -> Any:
        return self._model.init_state()

    def extend(self, state: Any, slot: int, tokens: np.ndarray, start: int) -> Any:
        self.extended.append((start, len(tokens)))
        return self._model.extend(state, slot, tokens, start)

    def score(self, state: Any, slot: int, shared: int, runs: Any, targets: Any) -> Any:
        self.calls.append([len(run) for run in runs])
        return self._model.score(state, slot, shared, runs, targets)


@pytest.mark.parametrize("limits", [Limits(64), Limits(64, runs=1), Limits(64, runs=3), Limits(4), Limits(1)])
def test_grouped_answers_are_those_of_single_requests(weights: ModelWeights, limits: Limits) -> None:
    wanted = requests()
    found = scored(open_model(weights), wanted, limits)
    assert set(found) == set(wanted)
    for request in wanted:
        expected = plain(weights, request)
        assert found[request].logprob == pytest.approx(expected.logprob, abs=1e-4)
        assert found[request].is_greedy == expected.is_greedy


@pytest.mark.parametrize("backend", ["gpu", "tpu"])
def test_backends_agree_with_the_definition(weights: ModelWeights, backend: str) -> None:
    wanted = requests()
    found = scored(open_model(weights, backend), wanted, Limits(16))
    for request in wanted:
        assert found[request].logprob == pytest.approx(plain(weights, request).logprob, abs=1e-3)


def test_greedy_continuations_are_recognized(weights: ModelWeights) -> None:
    context = (1, 40, 41)
    best = int(forward(weights, list(context))[-1].argmax())
    second = int(forward(weights, [*context, best])[-1].argmax())
    wanted = [Request(context, (best, second)), Request(context, (best, second ^ 1))]
    found = scored(open_model(weights), wanted, Limits(64))
    assert [found[request].is_greedy for request in wanted] == [True, False]


def test_a_primer_is_computed_once(weights: ModelWeights) -> None:
    primer = tuple(range(10, 30))
    wanted = [Request((*primer, 50 + i, 60), (70 + j,)) for i in range(5) for j in range(3)]
    spy = Spy(open_model(weights))
    scored(spy, wanted, Limits(64))
    assert spy.extended == [(0, 21), *[(20, 1)] * 4]
    assert spy.calls == [[1, 1, 1]] * 5


def test_calls_are_cut_by_tokens_runs_and_room(weights: ModelWeights) -> None:
    context = tuple(range(10, 40))  # 29 held, 19 rows left
    wanted = [Request(context, (i,) * n) for i, n in ((3, 8), (4, 6), (5, 6), (6, 2), (7, 1), (8, 1))]
    spy = Spy(open_model(weights))
    scored(spy, wanted, Limits(64))
    assert spy.calls == [[8, 6], [6, 2, 1, 1]]
    spy = Spy(open_model(weights))
    scored(spy, wanted, Limits(64, runs=4))
    assert spy.calls == [[8, 6], [6, 2, 1, 1]]
    spy = Spy(open_model(weights))
    scored(spy, wanted, Limits(6))
    assert spy.calls == [[6], [2], [6], [6], [2, 1, 1]]


@pytest.mark.parametrize("limits", [Limits(64), Limits(4)])
def test_what_is_known_changes_no_bit_of_the_rest(weights: ModelWeights, limits: Limits) -> None:
    wanted = requests()
    for backend in ("gpu", "tpu"):
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
    assert tokens_per_call(49152, 8 << 30) == 512
    assert tokens_per_call(256_000, 1 << 20) == MIN_TOKENS_PER_CALL


def test_scores_of_a_long_run_come_in_parts(weights: ModelWeights) -> None:
    request = Request((1,), tuple(range(10, 50)))
    spy = Spy(open_model(weights))
    found = scored(spy, [request], Limits(16))
    assert spy.calls == [[16], [16], [8]]
    assert found[request].logprob == pytest.approx(plain(weights, request).logprob, abs=1e-4)
