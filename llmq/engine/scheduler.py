"""Who gets which slot, and which run of a prompt is written next: lists and counts, no arrays.

Requests are served in the order in which they came. One at a time writes its prompt, in runs cut
at multiples of the chunk size; the last token of the prompt is left to the first decoding step.

A slot remembers the prompt whose full chunks it holds. Only those are reused, because only they
have the same bits whatever follows them (see `llmq.backends.base`): a request is answered alike
whether it finds its prefix or not.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from llmq.engine.request import Request
from llmq.errors import QueueFullError


@dataclass(eq=False, slots=True)
class Job:
    """A request on its way.

    Attributes:
        request: What is asked.
        arrived: When, in seconds.
        admitted: When it got its slots.
        slots: One for each of its answers; the first one's cache takes the prompt.
        num_cached: Tokens of the prompt that were in the cache before.
        num_written: Tokens of the prompt that are in the cache.
    """

    request: Request
    arrived: float
    admitted: float = 0.0
    slots: list[int] = field(default_factory=list)
    num_cached: int = 0
    num_written: int = 0

    @property
    def num_slots(self) -> int:
        """How many it needs: without a token to generate, the prompt is all there is."""
        return self.request.params.n if self.request.params.max_tokens else 1

    @property
    def num_to_write(self) -> int:
        """Tokens of the prompt that go into the cache before the first decoding step."""
        return len(self.request.prompt) - 1


@dataclass(slots=True)
class _Slot:
    """What a slot holds: the first `num_held` tokens of `prompt`, the last of them by a run that may be shorter than a chunk."""

    prompt: Sequence[int] = ()
    num_held: int = 0
    salt: str = ""


class Scheduler:
    """The queue and the slots.

    Args:
        num_slots: Sequences held at once.
        chunk_size: As in `llmq.backends.base.Caps`.
        max_queue: Requests that may wait while slots are taken.

    Attributes:
        waiting: Requests without slots, first come first.
        prefilling: The request that writes its prompt.
    """

    def __init__(self, num_slots: int, chunk_size: int, max_queue: int) -> None:
        self._slots = [_Slot() for _ in range(num_slots)]
        self._free = list(range(num_slots))  # the least recently used first
        self._chunk_size = chunk_size
        self._max_queue = max_queue
        self.waiting: list[Job] = []
        self.prefilling: Job | None = None

    @property
    def num_free(self) -> int:
        """Slots that nobody holds."""
        return len(self._free)

    def is_full(self, num_slots: int, num_coming: int = 0) -> bool:
        """Whether another request would have to wait and may not. Safe on any thread, then a moment old.

        Args:
            num_slots: How many it needs.
            num_coming: Requests that come before it and are not here yet.

        Returns:
            False for what the free slots can take, whatever the queue.
        """
        free, num_left = self.num_free, 0
        for needed in (*(job.num_slots for job in self.waiting[:]), *(1,) * num_coming, num_slots):
            if num_left or needed > free:
                num_left += 1
            else:
                free -= needed
        return num_left > self._max_queue

    def submit(self, job: Job) -> None:
        """Queue a request.

        Args:
            job: New.

        Raises:
            QueueFullError: Too many wait already.
        """
        if self.is_full(job.num_slots):
            raise QueueFullError(f"queue: {len(self.waiting)} requests wait already; try again later.")
        self.waiting.append(job)

    def expire(self, before: float) -> list[Job]:
        """Give up on requests that have waited too long.

        Args:
            before: Those that arrived earlier than this.

        Returns:
            They; nothing is left of them.
        """
        expired = [job for job in self.waiting if job.arrived < before]
        self.waiting = [job for job in self.waiting if job.arrived >= before]
        return expired

    def admit(self) -> Job | None:
        """Give the next request its slots, if they are free and nobody else writes a prompt.

        Returns:
            The request. It is `prefilling` unless its prompt is in the cache already.
        """
        if self.prefilling or not self.waiting or self.waiting[0].num_slots > self.num_free:
            return None
        job = self.waiting.pop(0)
        first = max(self._free, key=lambda slot: self._match(slot, job.request))
        self._free.remove(first)
        job.slots = [first, *self._free[: job.num_slots - 1]]
        job.num_cached = job.num_written = self._match(first, job.request)
        del self._free[: job.num_slots - 1]
        self._hold(job)
        if job.num_written < job.num_to_write:
            self.prefilling = job
        return job

    def next_run(self, num_chunks: int = 1) -> tuple[int, int]:
        """The next run of the `prefilling` request.

        Args:
            num_chunks: How many it may hold.

        Returns:
            Where it begins and ends.
        """
        job = self.prefilling
        assert job
        start = job.num_written
        return start, min((start // self._chunk_size + num_chunks) * self._chunk_size, job.num_to_write)

    def wrote(self, end: int) -> None:
        """The run was sent.

        Args:
            end: Where it ends; with the last one the request is no longer `prefilling`.
        """
        job = self.prefilling
        assert job
        job.num_written = end
        self._hold(job)
        if end == job.num_to_write:
            self.prefilling = None

    def copied(self, job: Job) -> None:
        """All slots of a request hold what its first one holds.

        Args:
            job: Its prompt is written.
        """
        for slot in job.slots[1:]:
            self._slots[slot] = self._slots[job.slots[0]]

    def release(self, slot: int) -> None:
        """Take a slot back. What its prompt left in the cache can be reused.

        Args:
            slot: Of an answer that is over.
        """
        self._free.append(slot)

    def remove(self, job: Job) -> None:
        """Forget a request that waits or writes its prompt.

        Args:
            job: One of these.
        """
        if job is self.prefilling:
            self.prefilling = None
            for slot in job.slots:
                self.release(slot)
        else:
            self.waiting.remove(job)

    def _hold(self, job: Job) -> None:
        self._slots[job.slots[0]] = _Slot(job.request.prompt, job.num_written, job.request.salt)
        for slot in job.slots[1:]:
            self._slots[slot] = _Slot()

    def _match(self, index: int, request: Request) -> int:
        """How many tokens of a prompt a slot holds, in full chunks.

        The logits of cached tokens are gone, so a request for them takes nothing from the cache.
        """
        slot, prompt, chunk = self._slots[index], request.prompt, self._chunk_size
        if slot.salt != request.salt or request.params.prompt_logprobs is not None:
            return 0
        end = 0
        while end + chunk <= min(slot.num_held, len(prompt) - 1) and (
            slot.prompt[end : end + chunk] == prompt[end : end + chunk]
        ):
            end += chunk
        return end
