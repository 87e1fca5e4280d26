"""Runs an engine to the end and gathers what each request came to."""

from dataclasses import dataclass, field
from typing import Any

from llmq.engine.engine import Engine
from llmq.engine.grammar import compile_grammar
from llmq.engine.request import Delta, Event, FinishReason, PromptDone, Request, TokenLogprobs
from llmq.engine.sampling import SamplingParams
from llmq.model.tokenizer import Tokenizer
from tests.fake import FakeModel, Say, byte_tokenizer, echo

TOKENIZER = byte_tokenizer()


@dataclass
class Choice:
    pieces: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop: str | int | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass
class Outcome:
    prompt: PromptDone | None = None
    choices: dict[int, Choice] = field(default_factory=dict)

    def add(self, event: Event) -> None:
        if isinstance(event, PromptDone):
            assert self.prompt is None
            assert not self.choices
            self.prompt = event
            return
        assert self.prompt is not None, "a delta came before the prompt was done"
        choice = self.choices.setdefault(event.choice, Choice())
        assert choice.finish_reason is None, "a delta came after the last one"
        choice.pieces.append(event.text)
        choice.tokens += event.tokens
        choice.logprobs += event.logprobs
        choice.finish_reason, choice.stop = event.finish_reason, event.stop


def ask(text: str | list[int] = "hi", salt: str = "", **params: Any) -> Request:
    """A request; a text gets a BOS."""
    prompt = TOKENIZER.encode(text) if isinstance(text, str) else text
    return Request(tuple(prompt), SamplingParams(**{"max_tokens": 80, **params}), salt)


def submit(engine: Engine, request: Request, tokenizer: Tokenizer = TOKENIZER) -> None:
    engine.check(request)
    grammar = request.params.grammar
    engine.submit(request, None if grammar is None else compile_grammar(tokenizer, grammar))


def drive(engine: Engine, outcomes: dict[str, Outcome] | None = None) -> dict[str, Outcome]:
    """Step until nothing is left; the slots are all free then."""
    outcomes = {} if outcomes is None else outcomes
    for request_id, event in finish(engine):
        outcomes.setdefault(request_id, Outcome()).add(event)
    return outcomes


def finish(engine: Engine) -> list[tuple[str, Event]]:
    """The same for requests of which events were taken before."""
    events: list[tuple[str, Event]] = []
    while engine.has_work:
        events += engine.step()
        assert len(events) < 100_000
    status = engine.status()
    assert (status.num_running, status.num_waiting, status.num_tokens_held) == (0, 0, 0)
    assert status.num_free_slots == status.num_slots
    return events


def answer(request: Request, say: Say = echo, tokenizer: Tokenizer = TOKENIZER, **model: Any) -> Outcome:
    """A request by itself, on a new model."""
    engine = Engine(FakeModel(say, **model), tokenizer)
    submit(engine, request, tokenizer)
    return drive(engine)[request.id]


def first(request: Request, say: Say = echo, tokenizer: Tokenizer = TOKENIZER, **model: Any) -> Choice:
    """Its only choice."""
    outcome = answer(request, say, tokenizer, **model)
    assert list(outcome.choices) == [0]
    return outcome.choices[0]


def ids(text: str) -> list[int]:
    """Tokens of an answer."""
    return TOKENIZER.encode(text)[1:]


def is_last(event: Event) -> bool:
    return isinstance(event, Delta) and event.finish_reason is not None
