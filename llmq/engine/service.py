"""The engine on a thread of its own, and its asyncio face.

The thread is the only caller of the engine, and so of the backend. Commands reach it through a
queue, between two iterations. Events go back in one call per iteration and event loop, into
mailboxes that nobody has to empty in time. What a backend raises is fatal: every request fails,
the ones that wait as well, and the service stays dead.
"""

import asyncio
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, ParamSpec, TypeVar

from llmq.backends.base import InferenceModel
from llmq.engine.engine import Engine, EngineLimits
from llmq.engine.grammar import Matcher, compile_grammar
from llmq.engine.mailbox import Mailbox
from llmq.engine.observe import EngineStatus, Observer, silent
from llmq.engine.request import Delta, Event, Request
from llmq.errors import ConfigError, DrainingError, EngineDeadError, QueueFullError, QueueTimeoutError
from llmq.model.tokenizer import Tokenizer

ServiceState = Literal["starting", "ready", "draining", "dead", "stopped"]

P = ParamSpec("P")
R = TypeVar("R")

#: Threads that tokenize, render templates and compile grammars.
_POOL_THREADS = 4

#: Seconds between two looks at the backend's memory while there is work.
_STATUS_EVERY = 0.1

#: Seconds between two looks at whether all requests are over.
_IDLE_EVERY = 0.01


@dataclass(frozen=True, slots=True)
class _Submit:
    request: Request
    matcher: Matcher | None


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


class _Stop:
    pass


class EngineService:
    """Answers requests from any number of event loops.

    Args:
        model: Nobody else may use it meanwhile.
        tokenizer: Of the same model.
        limits: Of the queue.
        observer: Is told what happens, on the engine's thread.
        warmup: Compile before the first request.

    Attributes:
        on_death: Called once, on the engine's thread, when the backend failed.
    """

    def __init__(
        self,
        model: InferenceModel,
        tokenizer: Tokenizer,
        limits: EngineLimits,
        observer: Observer = silent,
        warmup: bool = True,
    ) -> None:
        self.on_death: Callable[[BaseException], None] | None = None
        self._tokenizer = tokenizer
        self._engine = Engine(model, tokenizer, limits, observer)
        self._warmup = warmup
        self._state: ServiceState = "starting"
        self._failure: BaseException | None = None
        self._status = self._engine.status()
        self._status_time = 0.0
        self._commands: queue.SimpleQueue[_Submit | _Abort | _Stop] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of the state and the mailboxes; never held while a step runs
        self._mailboxes: dict[str, Mailbox] = {}
        self._num_coming = 0  # requests that the thread has not seen yet
        self._pool = ThreadPoolExecutor(_POOL_THREADS, thread_name_prefix="llmq-pool")
        self._thread = threading.Thread(target=self._run, name="llmq-engine", daemon=True)

    def start(self) -> None:
        """Start the thread: it warms up, then serves. Requests may come before it is ready."""
        self._thread.start()

    @property
    def state(self) -> ServiceState:
        """Where the service is in its life."""
        return self._state

    @property
    def failure(self) -> BaseException | None:
        """Why it is dead."""
        return self._failure

    def status(self) -> EngineStatus:
        """A snapshot, at most a step or a tenth of a second old. Safe on any thread; never waits."""
        return self._status

    async def run_in_pool(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a function on one of a few threads, so that the event loop goes on.

        Args:
            function: What to call.
            *args: For it.
            **kwargs: For it.

        Returns:
            What it returned.

        Raises:
            DrainingError: The service was stopped.
        """
        try:
            future = self._pool.submit(function, *args, **kwargs)
        except RuntimeError as err:
            raise DrainingError("engine: was stopped; start the server again.") from err
        return await asyncio.wrap_future(future)

    async def generate(self, request: Request) -> AsyncGenerator[Event]:
        """Answer a request. Closing the generator aborts it.

        Args:
            request: What is asked.

        Yields:
            One `PromptDone`, then deltas; those of a choice are joined when the reader was slow.

        Raises:
            ConfigError: The request cannot be answered.
            CheckpointError: The prompt holds ids that the model does not have.
            QueueFullError: Too many wait already.
            QueueTimeoutError: It has waited too long.
            DrainingError: The service takes no more requests.
            EngineDeadError: The backend failed, or the service was stopped; also between events.
        """
        self._refuse_unless_open()
        matcher = await self.run_in_pool(self._prepare, request)
        mailbox = Mailbox(asyncio.get_running_loop())
        self._submit(request, matcher, mailbox)
        num_open = request.params.n
        try:
            while num_open:
                for event in await mailbox.take():
                    num_open -= _is_end(event)
                    yield event
        finally:
            with self._lock:
                self._mailboxes.pop(request.id, None)
            if num_open:
                self._commands.put(_Abort(request.id))

    def drain(self) -> None:
        """Take no more requests and let those that are here finish."""
        with self._lock:
            if self._state in ("starting", "ready"):
                self._state = "draining"

    async def wait_idle(self, timeout: float) -> bool:
        """Wait until every request is over and read.

        Args:
            timeout: Seconds.

        Returns:
            False if some are not.
        """
        deadline = time.monotonic() + timeout
        while self._mailboxes and time.monotonic() < deadline:
            await asyncio.sleep(_IDLE_EVERY)
        return not self._mailboxes

    def stop(self, timeout: float = 5.0) -> bool:
        """Abort every request and end the thread.

        Args:
            timeout: Seconds to wait for the step that is running.

        Returns:
            False if the thread did not end in time.
        """
        self.drain()
        self._commands.put(_Stop())
        if self._thread.ident is None:
            self._end("stopped", None)
        else:
            self._thread.join(timeout)
        self._pool.shutdown(wait=False)
        return not self._thread.is_alive()

    def _prepare(self, request: Request) -> Matcher | None:
        self._engine.check(request)
        grammar = request.params.grammar
        return None if grammar is None else compile_grammar(self._tokenizer, grammar)

    def _refuse_unless_open(self) -> None:
        if self._state in ("draining", "stopped"):
            raise DrainingError("engine: is shutting down and takes no more requests; send them elsewhere.")
        if self._state == "dead":
            raise self._death()

    def _death(self) -> EngineDeadError:
        return EngineDeadError(f"engine: the backend failed ({self._failure!r}); restart the server.")

    def _submit(self, request: Request, matcher: Matcher | None, mailbox: Mailbox) -> None:
        with self._lock:
            self._refuse_unless_open()
            if request.id in self._mailboxes:
                raise ConfigError(f"request id={request.id!r}: is in use; send another.")
            if self._engine.is_full(request, self._num_coming):
                raise QueueFullError("queue: too many requests wait already; try again later.")
            self._mailboxes[request.id] = mailbox
            self._num_coming += 1
            self._commands.put(_Submit(request, matcher))

    # Below, the engine's thread.

    def _run(self) -> None:
        try:
            if self._warmup:
                self._engine.warmup()
            with self._lock:
                if self._state == "starting":
                    self._state = "ready"
            while self._obey():
                failed = [(i, QueueTimeoutError(_TIMEOUT)) for i in self._engine.expire()]
                news = [*failed, *self._engine.step()]
                # Before its reader hears of an end, so that he finds it in the status.
                self._note_status(force=any(_is_end(item) for _, item in news) or not self._engine.has_work)
                self._deliver(news)
        except BaseException as err:
            self._end("dead", err)
            if self.on_death is not None:
                self.on_death(err)
        else:
            self._end("stopped", None)

    def _obey(self) -> bool:
        """Carry out commands, waiting for one while there is nothing else to do; False to stop."""
        while True:
            try:
                command = self._commands.get(block=not self._engine.has_work)
            except queue.Empty:
                return True
            match command:
                case _Submit(request, matcher):
                    with self._lock:
                        self._num_coming -= 1
                    try:
                        self._engine.submit(request, matcher)
                    except QueueFullError as err:
                        self._deliver([(request.id, err)])
                case _Abort(request_id):
                    self._engine.abort(request_id)
                    self._note_status(force=True)
                case _Stop():
                    return False

    def _note_status(self, force: bool) -> None:
        now = time.monotonic()
        if force or now - self._status_time > _STATUS_EVERY:
            self._status, self._status_time = self._engine.status(), now

    def _deliver(self, news: Sequence[tuple[str, Event | Exception]]) -> None:
        """Hand events and errors over, in one call for each event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Mailbox, Event | Exception]]] = {}
        for request_id, item in news:
            mailbox = self._mailboxes.get(request_id)
            if mailbox is not None:
                by_loop.setdefault(mailbox.loop, []).append((mailbox, item))
        for loop, items in by_loop.items():
            try:
                loop.call_soon_threadsafe(_put, items)
            except RuntimeError:  # the loop was closed under its requests
                self._forget(loop)

    def _forget(self, loop: asyncio.AbstractEventLoop) -> None:
        """Abort requests whose readers can do it no more."""
        with self._lock:
            for request_id in [i for i, mailbox in self._mailboxes.items() if mailbox.loop is loop]:
                del self._mailboxes[request_id]
                self._commands.put(_Abort(request_id))

    def _end(self, state: ServiceState, failure: BaseException | None) -> None:
        with self._lock:
            self._state, self._failure = state, failure
            left = list(self._mailboxes)
        stopped = "engine: was stopped before the answer ended; send the request again."
        self._deliver([(i, self._death() if failure else EngineDeadError(stopped)) for i in left])


_TIMEOUT = "queue: the request has waited too long for a slot; try again later."


def _is_end(item: Event | Exception) -> bool:
    return isinstance(item, Exception) or (isinstance(item, Delta) and item.finish_reason is not None)


def _put(items: list[tuple[Mailbox, Event | Exception]]) -> None:
    for mailbox, item in items:
        if isinstance(item, Exception):
            mailbox.fail(item)
        else:
            mailbox.put(item)
