"""The engine: requests in, events out, one iteration at a time. No thread, no HTTP; one caller.

An iteration admits requests, sends at most one run of a prompt, dispatches the next decoding step,
then waits for the one before it and turns its tokens into events: while the host works, the device
does too. A step remembers for whom it was dispatched, so that a token which comes after its answer
is over reaches nobody. While an answer with a grammar is decoded, each step is waited for before the
next one is dispatched: what may come next depends on it.
"""

import time
from dataclasses import dataclass, field, replace

import numpy as np

from llmq.backends.base import InferenceModel, State, StepHandle
from llmq.engine.answer import Answer
from llmq.engine.check import check_request
from llmq.engine.grammar import Matcher
from llmq.engine.logprobs import is_usable, step_logprobs, token_logprobs
from llmq.engine.observe import EngineStatus, Observer, RequestDone, silent
from llmq.engine.request import Delta, Event, FinishReason, PromptDone, Request, TokenLogprobs
from llmq.engine.sampling import resolve_seed
from llmq.engine.scheduler import Job, Scheduler
from llmq.engine.stops import stop_tables
from llmq.model.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """How many may wait, and how long.

    Attributes:
        max_queue: Requests that may wait while slots are taken.
        queue_timeout: Seconds; None waits without end.
    """

    max_queue: int = 256
    queue_timeout: float | None = None


#: Of an engine that nobody limits.
_LIMITS = EngineLimits()


@dataclass(eq=False, slots=True)
class _Task:
    """What has become of a request."""

    job: Job
    matcher: Matcher | None
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    is_usable: bool = True
    answers: list[Answer] = field(default_factory=list)
    first_token: float | None = None


@dataclass(frozen=True, slots=True)
class _Step:
    """A dispatched step and for whom."""

    handle: StepHandle
    answers: list[Answer]


class Engine:
    """Answers requests with a model. Whatever a step raises is the backend's failure; the engine is then lost.

    Args:
        model: Nobody else may use it meanwhile.
        tokenizer: Of the same model.
        limits: Of the queue.
        observer: Is told what happens.
    """

    def __init__(
        self,
        model: InferenceModel,
        tokenizer: Tokenizer,
        limits: EngineLimits = _LIMITS,
        observer: Observer = silent,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._limits = limits
        self._observer = observer
        self._scheduler = Scheduler(model.caps.num_slots, model.caps.chunk_size, limits.max_queue)
        self._state: State = model.init_state()
        self._tasks: dict[str, _Task] = {}
        self._active: dict[int, Answer] = {}
        self._pending: _Step | None = None
        self._num_steps = 0
        self._events: list[tuple[str, Event]] = []

    def warmup(self) -> None:
        """Compile all that serving will use. Before the first request."""
        self._state = self._model.warmup(self._state)

    def check(self, request: Request) -> None:
        """Refuse what could not be answered. Safe on any thread.

        Args:
            request: What is asked.

        Raises:
            ConfigError: A field asks for what the model does not have.
            CheckpointError: The prompt holds ids that the model does not have.
        """
        check_request(request, self._model.caps)

    def is_full(self, request: Request, num_coming: int = 0) -> bool:
        """Whether `submit` would refuse a request. Safe on any thread, then a moment old.

        Args:
            request: What is asked.
            num_coming: Requests that will be submitted before it.

        Returns:
            False while there are slots, or room in the queue.
        """
        return self._scheduler.is_full(Job(request, 0.0).num_slots, num_coming)

    def submit(self, request: Request, matcher: Matcher | None = None) -> None:
        """Queue a request.

        Args:
            request: `check` has passed it, and its id is not in use.
            matcher: Its grammar, compiled.

        Raises:
            QueueFullError: Too many wait already.
        """
        assert request.id not in self._tasks
        assert (matcher is None) == (request.params.grammar is None)
        request = replace(request, params=resolve_seed(request.params))
        job = Job(request, time.monotonic())
        self._scheduler.submit(job)
        self._tasks[request.id] = _Task(job, matcher)

    def abort(self, request_id: str) -> None:
        """Forget a request: its slots are free at once, and no event of it follows.

        Args:
            request_id: One that is over is ignored.
        """
        task = self._tasks.get(request_id)
        if task is None:
            return
        if task.answers:
            for answer in task.answers:
                if answer.finish_reason is None:
                    answer.finish_reason = "abort"
                    self._release(answer)
        else:
            self._scheduler.remove(task.job)
        self._close(task, "abort")

    def expire(self) -> list[str]:
        """Forget requests that have waited longer than the limit for their slots.

        Returns:
            Their ids.
        """
        if self._limits.queue_timeout is None:
            return []
        expired = self._scheduler.expire(time.monotonic() - self._limits.queue_timeout)
        for job in expired:
            del self._tasks[job.request.id]
        return [job.request.id for job in expired]

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return bool(self._tasks) or self._pending is not None

    def step(self) -> list[tuple[str, Event]]:
        """One iteration.

        Returns:
            What happened, each with the id of its request.
        """
        self._admit()
        self._prefill()
        if any(answer.has_grammar for answer in self._active.values()):
            self._collect()
        step = self._dispatch()
        self._collect()
        self._pending = step
        events, self._events = self._events, []
        return events

    def status(self) -> EngineStatus:
        """Where the engine stands."""
        caps, stats = self._model.caps, self._model.stats()
        prefilling = self._scheduler.prefilling
        decoding = sum(len(a.request.prompt) - 1 + a.num_dispatched for a in self._active.values())
        return EngineStatus(
            num_slots=caps.num_slots,
            num_running=len(self._tasks) - len(self._scheduler.waiting),
            num_waiting=len(self._scheduler.waiting),
            num_free_slots=self._scheduler.num_free,
            num_steps=self._num_steps,
            num_tokens_held=decoding + (prefilling.num_written if prefilling else 0),
            num_tokens_capacity=caps.num_slots * caps.max_len,
            num_compiles=stats.num_compiles,
            num_bytes=stats.num_bytes,
        )

    def _admit(self) -> None:
        while job := self._scheduler.admit():
            job.admitted = time.monotonic()
            if job is not self._scheduler.prefilling:
                self._start(self._tasks[job.request.id])

    def _prefill(self) -> None:
        """Send one run of a prompt: of one chunk while answers wait for their next tokens, or where it needs logits."""
        job = self._scheduler.prefilling
        if job is None:
            return
        task, prompt, num_top = self._tasks[job.request.id], job.request.prompt, job.request.params.prompt_logprobs
        caps = self._model.caps
        is_short = bool(self._active) or num_top is not None
        start, end = self._scheduler.next_run(1 if is_short else caps.chunks_per_run)
        self._state, logits = self._model.extend(
            self._state, job.slots[0], np.asarray(prompt[start:end], np.int32), start, want_logits=num_top is not None
        )
        if num_top is not None:
            assert logits is not None
            task.is_usable &= is_usable(logits)
            if task.is_usable:
                task.prompt_logprobs += token_logprobs(logits, prompt[start + 1 : end + 1], num_top)
        self._scheduler.wrote(end)
        if self._scheduler.prefilling is None:
            self._start(task)

    def _start(self, task: _Task) -> None:
        """The prompt is in the cache: hand its slots to its answers."""
        job, request = task.job, task.job.request
        params = request.params
        logprobs = () if params.prompt_logprobs is None or not task.is_usable else (None, *task.prompt_logprobs)
        self._events.append((request.id, PromptDone(job.num_cached, logprobs)))
        if not params.max_tokens or not task.is_usable:
            reason: FinishReason = "length" if task.is_usable else "error"
            self._events += [(request.id, Delta(i, "", finish_reason=reason)) for i in range(params.n)]
            for slot in job.slots:
                self._scheduler.release(slot)
            self._prompt_done(task, time.monotonic())
            self._close(task, reason)
            return
        prompt, stops = np.asarray(request.prompt, np.int32), stop_tables(params.stop)
        for choice, slot in enumerate(job.slots):
            if choice and job.num_to_write:
                self._state = self._model.copy_slot(self._state, job.slots[0], slot, job.num_to_write)
            self._state = self._model.set_slot(self._state, slot, prompt, params.for_slot())
            answer = Answer(
                request,
                choice,
                slot,
                stream=self._tokenizer.stream(request.prompt),
                stops=stops,
                matcher=task.matcher and task.matcher.copy(),
                eos_token_ids=self._tokenizer.eos_token_ids,
                vocab_size=self._model.caps.vocab_size,
            )
            task.answers.append(answer)
            self._active[slot] = answer
        self._scheduler.copied(job)

    def _dispatch(self) -> _Step | None:
        """Ask for the next token of every answer that goes on."""
        caps = self._model.caps
        active, uniform = np.zeros(caps.num_slots, np.bool_), np.zeros(caps.num_slots, np.float32)
        allowed: np.ndarray | None = None
        answers = [answer for answer in self._active.values() if answer.wants_token]
        for answer in answers:
            mask = answer.allowed()
            if mask is not None and not mask.any():
                self._emit(answer, answer.give_up())
                continue
            if mask is not None:
                if allowed is None:
                    allowed = np.full((caps.num_slots, len(mask)), 0xFFFFFFFF, np.uint32)
                allowed[answer.slot] = mask
            active[answer.slot] = True
            uniform[answer.slot] = answer.next_uniform()
            answer.num_dispatched += 1
        answers = [answer for answer in answers if answer.finish_reason is None]
        if not answers:
            return None
        self._state, handle = self._model.decode(
            self._state,
            active,
            uniform,
            allowed=allowed,
            want_logprobs=any(answer.request.params.logprobs is not None for answer in answers),
        )
        self._num_steps += 1
        return _Step(handle, answers)

    def _collect(self) -> None:
        """Wait for the step that was dispatched before, and deal its tokens out."""
        step, self._pending = self._pending, None
        if step is None:
            return
        out = self._model.fetch(step.handle)
        now, tokens = time.monotonic(), out.tokens.tolist()
        for answer in step.answers:
            if answer.finish_reason is None:
                token = tokens[answer.slot]
                num_top = answer.request.params.logprobs
                logprobs = None if num_top is None or token < 0 else step_logprobs(out, answer.slot, num_top)
                self._emit(answer, answer.take(token, logprobs), now)

    def _emit(self, answer: Answer, delta: Delta, now: float | None = None) -> None:
        task = self._tasks[answer.request.id]
        self._events.append((answer.request.id, delta))
        if now is not None:
            self._tell(task, answer, now)
        if delta.finish_reason is not None:
            self._release(answer)
            if all(answer.finish_reason for answer in task.answers):
                first = task.answers[0].finish_reason
                assert first
                self._close(task, first)

    def _tell(self, task: _Task, answer: Answer, now: float) -> None:
        """Time a token."""
        if task.first_token is None:
            task.first_token = now
            self._prompt_done(task, now)
            self._observer.first_token(now - task.job.arrived)
        if answer.last_seconds:
            self._observer.token_interval(now - answer.last_seconds)
        answer.last_seconds = now

    def _prompt_done(self, task: _Task, now: float) -> None:
        job = task.job
        self._observer.prompt_done(
            len(job.request.prompt), job.num_cached, job.admitted - job.arrived, now - job.admitted
        )

    def _release(self, answer: Answer) -> None:
        del self._active[answer.slot]
        self._scheduler.release(answer.slot)

    def _close(self, task: _Task, reason: FinishReason) -> None:
        request, now = task.job.request, time.monotonic()
        del self._tasks[request.id]
        self._observer.finished(
            RequestDone(
                prompt_tokens=len(request.prompt),
                generated_tokens=sum(answer.num_tokens for answer in task.answers),
                finish_reason=reason,
                e2e_seconds=now - task.job.arrived,
                decode_seconds=0.0 if task.first_token is None else now - task.first_token,
            )
        )
