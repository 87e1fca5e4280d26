"""A model whose answers can be worked out by hand, and that watches how it is used.

It holds tokens instead of keys and values. The logits after a token come from the tokens that its
row really holds, so a mix-up of slots, positions or prefixes changes the answer; what the protocol of
`llmq.backends.base` forbids fails an assertion at once.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llmq.backends import sampling
from llmq.backends.base import Caps, Run, Scores, SlotSampling, Stats, StepOut
from llmq.backends.sampling import bias_row, prompt_row
from llmq.model.config import ModelConfig
from llmq.model.tokenizer import Tokenizer
from tests.tiny import byte_tokenizer_files, tiny_config

BOS, EOS = 1, 2

#: The prompt and the answer so far -> the most likely next token, or all logits.
Say = Callable[[Sequence[int], Sequence[int]], int | np.ndarray]

#: How much likelier a token that is said is than the others, which lie within 2.
EMPHASIS = 8.0


def byte_tokenizer() -> Tokenizer:
    """One token a byte: 259 of them, so that the 320 of the model are more than have a text."""
    return Tokenizer.from_files(byte_tokenizer_files(), ModelConfig.from_dict(tiny_config()))


def echo(prompt: Sequence[int], answer: Sequence[int]) -> int:
    """The prompt again, without its BOS, then the end."""
    said = prompt[1:] if prompt[0] == BOS else prompt
    return said[len(answer)] if len(answer) < len(said) else EOS


def script(*tokens: int) -> Say:
    """The same answer to every prompt, then the end."""
    return lambda _, answer: tokens[len(answer)] if len(answer) < len(tokens) else EOS


def logits_of(said: int | np.ndarray, digest: int, vocab_size: int) -> np.ndarray:
    """Logits `[V]`: what is said, over a pattern that depends on every token before."""
    if isinstance(said, np.ndarray):
        return said.astype(np.float32)
    logits = ((np.arange(vocab_size) * 7919 + digest) % 1009 / 1009 * 2).astype(np.float32)
    logits[said] += EMPHASIS
    return logits


class DeviceLostError(Exception):
    """What an injected fault raises."""


@dataclass
class _Row:
    """A slot: its tokens, how each was written, and a digest of all before it."""

    tokens: list[int] = field(default_factory=list)
    written_by: list[str] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    next_token: int | None = None

    def write(self, position: int, token: int, by: str) -> None:
        assert position <= len(self.tokens), f"position {position} written, {len(self.tokens)} held"
        for held in (self.tokens, self.written_by, self.digests):
            del held[position:]
        before = self.digests[-1] if self.digests else 0
        self.tokens.append(token)
        self.written_by.append(by)
        self.digests.append((before * 1103515245 + token + 12345) % (1 << 31))


@dataclass(eq=False)
class _State:
    """Each call makes a new one; only the newest may be used."""

    rows: list[_Row]


@dataclass(eq=False)
class _Handle:
    out: StepOut
    ready: float


class FakeModel:
    """An `llmq.backends.base.InferenceModel` without arithmetic.

    Args:
        say: What it answers.
        num_slots: Sequences held at once.
        max_len: Positions of each.
        chunk_size: See `Caps`.
        chunks_per_run: See `Caps`.
        vocab_size: More than the tokenizer has.
        step_seconds: How long the device takes for a decoding step, and for a run of a prompt.
        fault: A method and the number of its call, from 0, that fails.

    Attributes:
        calls: Name -> how often each method was called.
        extended: Slot, start and length of every run.
        most_active: The largest number of slots that were decoded at once.
        most_ahead: The largest number of steps that were dispatched and not fetched.
        uniforms: What chose each token of slot 0.
        busy_seconds: Spent in this class.
    """

    def __init__(
        self,
        say: Say = echo,
        *,
        num_slots: int = 4,
        max_len: int = 512,
        chunk_size: int = 16,
        chunks_per_run: int = 1,
        vocab_size: int = 320,
        step_seconds: float = 0.0,
        fault: tuple[str, int] | None = None,
    ) -> None:
        self.caps = Caps("fake", "float32", "float32", num_slots, max_len, chunk_size, vocab_size, (), chunks_per_run)
        self.calls: dict[str, int] = {}
        self.extended: list[tuple[int, int, int]] = []
        self.most_active = 0
        self.most_ahead = 0
        self.uniforms: list[float] = []
        self.busy_seconds = 0.0
        self._say = say
        self._step_seconds = step_seconds
        self._fault = fault
        self._state: _State | None = None
        self._unfetched: list[_Handle] = []
        self._free_at = 0.0
        self._closed = False
        self._rules = sampling.SlotRules(num_slots)
        self._bias = np.zeros((num_slots, vocab_size), np.float32)
        self._seen = sampling.Seen(
            np.zeros((num_slots, vocab_size), np.bool_), np.zeros((num_slots, vocab_size), np.int32)
        )

    def init_state(self) -> _State:
        self._count("init_state")
        self._unfetched.clear()
        self._state = _State([_Row() for _ in range(self.caps.num_slots)])
        return self._state

    def warmup(self, state: _State) -> _State:
        self._count("warmup")
        self._consume(state)
        return self.init_state()

    def extend(
        self, state: _State, slot: int, tokens: np.ndarray, start: int, *, want_logits: bool = False
    ) -> tuple[_State, np.ndarray | None]:
        began = self._count("extend")
        state = self._consume(state)
        assert tokens.dtype == np.int32
        assert tokens.ndim == 1
        assert len(tokens) > 0
        assert start + len(tokens) <= self.caps.max_len
        chunk = self.caps.chunk_size
        assert start % chunk == 0, "runs are cut at multiples of the chunk size"
        assert len(tokens) <= chunk * (1 if want_logits else self.caps.chunks_per_run)
        self.extended.append((slot, start, len(tokens)))
        row, whole = state.rows[slot], len(tokens) // chunk * chunk
        rows: list[np.ndarray] = []
        for i, token in enumerate(tokens.tolist()):
            row.write(start + i, token, "chunk" if i < whole else f"run from {start + whole}")
            if want_logits:
                rows.append(logits_of(self._say(row.tokens, []), row.digests[-1], self.caps.vocab_size))
        self._take_time()
        self.busy_seconds += time.perf_counter() - began
        return state, np.stack(rows) if want_logits else None

    def set_slot(self, state: _State, slot: int, prompt: np.ndarray, sampling: SlotSampling) -> _State:
        began = self._count("set_slot")
        state = self._consume(state)
        assert prompt.dtype == np.int32
        row, whole = state.rows[slot], prompt.tolist()
        last = len(whole) - 1
        full = last // self.caps.chunk_size * self.caps.chunk_size
        assert row.tokens[:last] == whole[:-1], "the prompt is not in the slot"
        assert set(row.written_by[:full]) <= {"chunk"}, "a prefix was reused that is not the same bits"
        assert set(row.written_by[full:last]) <= {f"run from {full}"}, "the rest was not written by one run"
        row.prompt, row.next_token = whole, whole[-1]
        for held in (row.tokens, row.written_by, row.digests):
            del held[last:]
        self._rules.set(slot, sampling)
        self._bias[slot] = bias_row(sampling, self.caps.vocab_size)
        self._seen.prompt_SV[slot] = prompt_row(prompt, self.caps.vocab_size)
        self._seen.answer_SV[slot] = 0
        self.busy_seconds += time.perf_counter() - began
        return state

    def copy_slot(self, state: _State, source: int, target: int, num_tokens: int) -> _State:
        self._count("copy_slot")
        state = self._consume(state)
        assert source != target
        held = state.rows[source]
        assert 0 < num_tokens <= len(held.tokens)
        state.rows[target] = _Row(held.tokens[:num_tokens], held.written_by[:num_tokens], held.digests[:num_tokens])
        return state

    def decode(
        self,
        state: _State,
        active: np.ndarray,
        uniform: np.ndarray,
        *,
        allowed: np.ndarray | None = None,
        want_logprobs: bool = False,
    ) -> tuple[_State, _Handle]:
        began = self._count("decode")
        state = self._consume(state)
        caps = self.caps
        assert (active.shape, active.dtype) == ((caps.num_slots,), np.bool_)
        assert (uniform.shape, uniform.dtype) == ((caps.num_slots,), np.float32)
        assert active.any()
        assert ((uniform >= 0) & (uniform < 1)).all()
        if allowed is not None:
            assert (allowed.shape, allowed.dtype) == ((caps.num_slots, -(-caps.vocab_size // 32)), np.uint32)
        assert len(self._unfetched) <= 1, "more than one step ahead"
        self.most_active = max(self.most_active, int(active.sum()))
        if active[0]:
            self.uniforms.append(float(uniform[0]))
        logits_SV = np.zeros((caps.num_slots, caps.vocab_size), np.float32)
        for slot in np.flatnonzero(active).tolist():
            row = state.rows[slot]
            assert row.next_token is not None, f"slot {slot} was never set"
            assert len(row.tokens) < caps.max_len
            row.write(len(row.tokens), row.next_token, "decode")
            said = self._say(row.prompt, row.tokens[len(row.prompt) :])
            logits_SV[slot] = logits_of(said, row.digests[-1], caps.vocab_size)
        tokens_S = self._sample(logits_SV, active, uniform, allowed)
        for slot in np.flatnonzero(active).tolist():
            token = int(tokens_S[slot])
            state.rows[slot].next_token = max(token, 0)
            self._seen.answer_SV[slot, token] += token >= 0
        tops = sampling.log_probabilities(logits_SV, tokens_S) if want_logprobs else ()
        handle = _Handle(StepOut(tokens_S, *tops), self._take_time())
        self._unfetched.append(handle)
        self.most_ahead = max(self.most_ahead, len(self._unfetched))
        self.busy_seconds += time.perf_counter() - began
        return state, handle

    def fetch(self, handle: _Handle) -> StepOut:
        began = self._count("fetch")
        assert self._unfetched
        assert handle is self._unfetched.pop(0), "steps are fetched once, in order"
        time.sleep(max(0.0, handle.ready - time.monotonic()))
        self.busy_seconds += time.perf_counter() - began
        return handle.out

    def score(self, state: _State, slot: int, shared: int, runs: Sequence[Run]) -> tuple[_State, list[Scores | None]]:
        self._count("score")
        state = self._consume(state)
        held = state.rows[slot].tokens[:shared]
        assert len(held) == shared
        scores: list[Scores | None] = []
        for run in runs:
            row = _Row()
            parent = [] if run.parent is None else runs[run.parent].tokens.tolist()
            before = [*held, *parent]
            for i, token in enumerate([*before, *run.tokens.tolist()]):
                row.write(i, token, "score")
            if run.targets is None:
                scores.append(None)
                continue
            logits_NV = np.stack(
                [
                    logits_of(self._say(row.tokens[: i + 1], []), row.digests[i], self.caps.vocab_size)
                    for i in range(len(before), len(row.tokens))
                ]
            )
            logprobs_N, ids_NK, _ = sampling.log_probabilities(logits_NV, run.targets)
            scores.append(Scores(logprobs_N, ids_NK[:, 0] == run.targets))
        if runs:
            for i, token in enumerate(runs[0].tokens.tolist()):
                state.rows[slot].write(shared + i, token, "score")
        return state, scores

    def stats(self) -> Stats:
        return Stats(num_compiles=self.calls.get("warmup", 0), num_bytes=0)

    def close(self) -> None:
        self._closed = True

    def held(self, slot: int) -> list[int]:
        """The tokens in a slot's row."""
        assert self._state
        return self._state.rows[slot].tokens

    def _sample(
        self, logits_SV: np.ndarray, active: np.ndarray, uniform: np.ndarray, allowed: np.ndarray | None
    ) -> np.ndarray:
        if allowed is None and self._rules.all_greedy(active):
            return np.asarray(sampling.greedy(logits_SV))
        rules = self._rules.rules(active)._replace(bias_SV=self._bias)
        words = None if allowed is None else allowed.view(np.int32)
        return np.asarray(sampling.sample(logits_SV, uniform, rules, self._seen, words))

    def _count(self, method: str) -> float:
        assert not self._closed
        number = self.calls.get(method, 0)
        self.calls[method] = number + 1
        if self._fault == (method, number):
            raise DeviceLostError(f"{method} {number}")
        return time.perf_counter()

    def _consume(self, state: Any) -> _State:
        assert state is self._state, "a state was used twice"
        self._state = _State(state.rows)
        return self._state

    def _take_time(self) -> float:
        """The device works in order; when it will be done with this."""
        self._free_at = max(self._free_at, time.monotonic()) + self._step_seconds
        return self._free_at
