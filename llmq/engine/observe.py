"""What an engine tells about itself: its state when asked, its milestones as they happen."""

from dataclasses import dataclass
from typing import Protocol

from llmq.engine.request import FinishReason


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """Where an engine stands.

    Attributes:
        num_slots: Sequences it can hold.
        num_running: Requests that hold slots.
        num_waiting: Requests that wait for slots.
        num_free_slots: Slots that nobody holds.
        num_steps: Decoding steps so far.
        num_tokens_held: Positions that running requests have written.
        num_tokens_capacity: Positions of all slots.
        num_compiles: As in `llmq.backends.base.Stats`.
        num_bytes: As in `llmq.backends.base.Stats`.
    """

    num_slots: int
    num_running: int
    num_waiting: int
    num_free_slots: int
    num_steps: int
    num_tokens_held: int
    num_tokens_capacity: int
    num_compiles: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class RequestDone:
    """What a request came to.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        generated_tokens: Tokens of all its answers, without those that ended them.
        finish_reason: Of its first answer.
        e2e_seconds: Since it arrived.
        decode_seconds: Since its first token; 0 without one.
    """

    prompt_tokens: int
    generated_tokens: int
    finish_reason: FinishReason
    e2e_seconds: float
    decode_seconds: float


class Observer(Protocol):
    """Is told about requests, on the engine's thread: it must be quick and must not raise."""

    def prompt_done(self, prompt_tokens: int, cached_tokens: int, queue_seconds: float, prefill_seconds: float) -> None:
        """A prompt has been evaluated.

        Args:
            prompt_tokens: Its length.
            cached_tokens: How many of them a slot held before.
            queue_seconds: From its arrival until it got its slots.
            prefill_seconds: From then until its first token; without one, until its last chunk was sent.
        """
        ...

    def first_token(self, seconds: float) -> None:
        """A request has its first token.

        Args:
            seconds: Since it arrived.
        """
        ...

    def token_interval(self, seconds: float) -> None:
        """An answer has another token.

        Args:
            seconds: Since the one before.
        """
        ...

    def finished(self, done: RequestDone) -> None:
        """A request is over.

        Args:
            done: What it came to.
        """
        ...


class _Silent:
    def prompt_done(
        self, prompt_tokens: int, cached_tokens: int, queue_seconds: float, prefill_seconds: float
    ) -> None: ...

    def first_token(self, seconds: float) -> None: ...

    def token_interval(self, seconds: float) -> None: ...

    def finished(self, done: RequestDone) -> None: ...


#: Tells nobody.
silent: Observer = _Silent()
