"""Slots and queue without a model: laws that hold whatever comes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmq.engine.request import Request
from llmq.engine.sampling import SamplingParams
from llmq.engine.scheduler import Job, Scheduler
from llmq.errors import QueueFullError

CHUNK = 4


def job(prompt: list[int], arrived: float = 0.0, **params: int) -> Job:
    return Job(Request(tuple(prompt), SamplingParams(**params)), arrived)


def prefill(scheduler: Scheduler, admitted: Job, num_chunks: int = 1) -> list[tuple[int, int]]:
    runs = []
    while scheduler.prefilling is admitted:
        runs.append(scheduler.next_run(num_chunks))
        scheduler.wrote(runs[-1][1])
    scheduler.copied(admitted)
    return runs


JOBS = st.lists(
    st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=20), st.integers(1, 3), st.integers(0, 1)), max_size=12
)


@settings(max_examples=300)
@given(JOBS, st.data())
def test_slots_are_never_shared_and_runs_cover_the_prompt(jobs: list, data: st.DataObject) -> None:
    scheduler = Scheduler(num_slots=3, chunk_size=CHUNK, max_queue=100)
    submitted = [job(prompt, n=n, max_tokens=tokens) for prompt, n, tokens in jobs]
    for each in submitted:
        scheduler.submit(each)
    live: list[Job] = []
    admitted = []
    while scheduler.waiting or live:
        while new := scheduler.admit():
            admitted.append(new)
            live.append(new)
            assert len(new.slots) == new.num_slots
            assert new.num_cached % CHUNK == 0
            assert new.num_cached <= new.num_to_write
            num_chunks = data.draw(st.integers(1, 3))
            runs = prefill(scheduler, new, num_chunks)
            starts, ends = [start for start, _ in runs], [end for _, end in runs]
            assert [new.num_cached, *ends] == [*starts, new.num_to_write] or new.num_cached == new.num_to_write
            assert all(start % CHUNK == 0 and 0 < end - start <= CHUNK * num_chunks for start, end in runs)
            held = [slot for each in live for slot in each.slots]
            assert len(held) == len(set(held)) == 3 - scheduler.num_free
        over = live.pop(data.draw(st.integers(0, len(live) - 1)))
        for slot in over.slots:
            scheduler.release(slot)
    assert admitted == submitted
    assert scheduler.num_free == 3


def test_a_request_that_needs_several_slots_is_not_overtaken() -> None:
    scheduler = Scheduler(num_slots=2, chunk_size=CHUNK, max_queue=10)
    one, two, three = job([1]), job([1], n=2), job([1])
    for each in (one, two, three):
        scheduler.submit(each)
    assert scheduler.admit() is one
    assert scheduler.admit() is None
    scheduler.release(one.slots[0])
    assert scheduler.admit() is two


def test_one_prompt_is_written_at_a_time() -> None:
    scheduler = Scheduler(num_slots=2, chunk_size=CHUNK, max_queue=10)
    first, second = job([1] * 9), job([2] * 9)
    scheduler.submit(first)
    scheduler.submit(second)
    assert scheduler.admit() is first
    assert scheduler.admit() is None
    assert prefill(scheduler, first) == [(0, 4), (4, 8)]
    assert scheduler.admit() is second


def test_the_queue_counts_what_the_free_slots_cannot_take() -> None:
    scheduler = Scheduler(num_slots=3, chunk_size=CHUNK, max_queue=1)
    scheduler.submit(job([1], n=2))
    assert not scheduler.is_full(1)
    scheduler.submit(job([1], n=2))  # waits
    assert scheduler.is_full(1)  # would fit, but must not overtake
    with pytest.raises(QueueFullError):
        scheduler.submit(job([1]))
    assert Scheduler(num_slots=3, chunk_size=CHUNK, max_queue=0).is_full(1, num_coming=3)
    assert not Scheduler(num_slots=3, chunk_size=CHUNK, max_queue=0).is_full(1, num_coming=2)


def test_only_who_waits_too_long_expires() -> None:
    scheduler = Scheduler(num_slots=1, chunk_size=CHUNK, max_queue=10)
    jobs = [job([1], arrived) for arrived in (1.0, 2.0, 3.0)]
    for each in jobs:
        scheduler.submit(each)
    assert scheduler.expire(before=2.5) == jobs[:2]
    assert scheduler.waiting == jobs[2:]
