"""The engine's thread and its asyncio face, on a fake model that takes time."""

import asyncio
import threading
import time
from collections.abc import Coroutine
from contextlib import aclosing
from typing import Any

import pytest

from llmq.backends.base import Stats
from llmq.engine.engine import EngineLimits
from llmq.engine.mailbox import coalesce
from llmq.engine.request import Delta, PromptDone, Request
from llmq.engine.sampling import Grammar
from llmq.engine.service import EngineService
from llmq.errors import (
    CheckpointError,
    ConfigError,
    DrainingError,
    EngineDeadError,
    LlmqError,
    QueueFullError,
    QueueTimeoutError,
)
from tests.engine.drive import TOKENIZER, Outcome, ask
from tests.fake import DeviceLostError, FakeModel


class Service:
    """A started service that ends with the test, and leaves nothing behind."""

    def __init__(self, model: FakeModel, *, start: bool = True, warmup: bool = True, **limits: Any) -> None:
        self.service = EngineService(model, TOKENIZER, EngineLimits(**limits), warmup=warmup)
        self._start = start

    def __enter__(self) -> EngineService:
        self._threads = threading.active_count()
        if self._start:
            self.service.start()
        return self.service

    def __exit__(self, *_: object) -> None:
        assert self.service.stop()
        assert not self.service._mailboxes
        deadline = time.monotonic() + 2
        while threading.active_count() > self._threads and time.monotonic() < deadline:
            time.sleep(0.01)
        assert threading.active_count() == self._threads


def run(coroutine: Coroutine) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 20))


async def gather(service: EngineService, request: Request) -> Outcome:
    outcome = Outcome()
    async with aclosing(service.generate(request)) as events:
        async for event in events:
            outcome.add(event)
    return outcome


async def until(condition, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        await asyncio.sleep(0.002)


def is_idle(service: EngineService) -> bool:
    status = service.status()
    return (status.num_running, status.num_waiting, status.num_free_slots) == (0, 0, status.num_slots)


class TestAnswers:
    def test_many_at_once(self) -> None:
        async def main() -> None:
            requests = [ask(f"request {i} 🗼", n=1 + i % 3) for i in range(50)]
            outcomes = await asyncio.gather(*(gather(service, request) for request in requests))
            for i, outcome in enumerate(outcomes):
                assert len(outcome.choices) == 1 + i % 3
                assert all(choice.text == f"request {i} 🗼" for choice in outcome.choices.values())
            await until(lambda: is_idle(service))

        with Service(FakeModel(step_seconds=0.001)) as service:
            run(main())
            assert service.state == "ready"

    def test_whoever_heard_of_the_end_finds_it_in_the_status(self) -> None:
        class SlowToCount(FakeModel):
            def stats(self) -> Stats:
                time.sleep(0.02)
                return super().stats()

        async def main() -> None:
            await gather(service, ask("ab", n=2))
            assert is_idle(service)

        with Service(SlowToCount()) as service:
            run(main())

    def test_pieces_come_as_they_are_made(self) -> None:
        async def main() -> None:
            times = [time.monotonic() async for _ in service.generate(ask("abcdefghij"))]
            assert len(times) > 8
            assert times[-1] - times[0] > 0.05

        with Service(FakeModel(step_seconds=0.01)) as service:
            run(main())

    def test_to_several_event_loops(self) -> None:
        with Service(FakeModel(step_seconds=0.001)) as service:
            texts: list[str] = []

            def client(i: int) -> None:
                texts.append(run(gather(service, ask(f"loop {i}"))).choices[0].text)

            threads = [threading.Thread(target=client, args=(i,)) for i in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(10)
            assert sorted(texts) == [f"loop {i}" for i in range(6)]

    def test_a_loop_that_is_closed_frees_its_slots(self) -> None:
        with Service(FakeModel(step_seconds=0.005)) as service:
            loop = asyncio.new_event_loop()
            events = service.generate(ask("a" * 60))
            loop.run_until_complete(anext(events))
            loop.close()
            run(until(lambda: is_idle(service)))
            assert run(gather(service, ask("next"))).choices[0].text == "next"
            with pytest.raises(StopIteration):
                events.aclose().send(None)

    def test_before_it_is_ready_they_wait(self) -> None:
        async def main() -> None:
            waiting = asyncio.ensure_future(gather(service, ask("early")))
            await asyncio.sleep(0.02)
            assert service.state == "starting"
            service.start()
            assert (await waiting).choices[0].text == "early"

        with Service(FakeModel(), start=False) as service:
            run(main())
            assert service.status().num_compiles == 1  # warmed up

    def test_a_grammar_is_compiled_off_the_loop(self) -> None:
        async def main() -> None:
            grammar = Grammar(kind="regex", source="[0-9]{4}")
            assert (await gather(service, ask(grammar=grammar))).choices[0].text.isdigit()

        with Service(FakeModel()) as service:
            run(main())

    def test_one_call_to_the_loop_for_each_step(self) -> None:
        async def main() -> None:
            loop = asyncio.get_running_loop()
            calls = 0
            plain = loop.call_soon_threadsafe

            def counted(callback, *args, **kwargs):
                nonlocal calls
                calls += "_put" in getattr(callback, "__name__", "")
                return plain(callback, *args, **kwargs)

            loop.call_soon_threadsafe = counted
            await asyncio.gather(*(gather(service, ask("x" * 40)) for _ in range(8)))
            steps = model.calls["decode"] + model.calls["extend"] + 2
            assert 40 < calls <= steps < 150

        model = FakeModel(num_slots=8, step_seconds=0.001)
        with Service(model) as service:
            run(main())


class TestSlowReaders:
    def test_get_fewer_larger_pieces_and_hold_nobody_up(self) -> None:
        async def main() -> None:
            pieces = []
            async with aclosing(service.generate(ask("a" * 70))) as events:
                assert isinstance(await anext(events), PromptDone)
                await gather(service, ask("b" * 79))
                async for event in events:
                    pieces.append(event)
                    await asyncio.sleep(0.02)
            assert "".join(event.text for event in pieces) == "a" * 70
            assert sum(len(event.tokens) for event in pieces) == 70
            assert len(pieces) < 10
            assert pieces[-1].finish_reason == "stop"

        with Service(FakeModel(step_seconds=0.001)) as service:
            run(main())

    def test_joining_keeps_everything(self) -> None:
        events = [
            PromptDone(3),
            Delta(0, "a", (1,)),
            Delta(1, "x", (7,)),
            Delta(0, "", (2,)),
            Delta(0, "b", (3,), finish_reason="stop", stop="s"),
            Delta(1, "y", (8,)),
        ]
        assert coalesce(events) == [
            PromptDone(3),
            Delta(0, "ab", (1, 2, 3), finish_reason="stop", stop="s"),
            Delta(1, "xy", (7, 8)),
        ]


class TestLeaving:
    def test_frees_the_slot_within_a_step(self) -> None:
        async def main() -> None:
            async with aclosing(service.generate(ask("a" * 70, n=2))) as events:
                async for event in events:
                    if isinstance(event, Delta):
                        break
                assert service.status().num_running == 1
            start = time.monotonic()
            await until(lambda: is_idle(service))
            assert time.monotonic() - start < 0.7  # of the 1.4 that the answer would take

        with Service(FakeModel(step_seconds=0.02)) as service:
            run(main())

    def test_before_the_first_event_too(self) -> None:
        async def main() -> None:
            running = asyncio.ensure_future(gather(service, ask("a" * 30)))
            await until(lambda: service.status().num_running == 1)
            waiting = asyncio.ensure_future(gather(service, ask("b")))
            await until(lambda: service.status().num_waiting == 1)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await until(lambda: service.status().num_waiting == 0, 0.3)
            assert (await running).choices[0].text == "a" * 30

        with Service(FakeModel(num_slots=1, step_seconds=0.02)) as service:
            run(main())


class TestRefused:
    @pytest.mark.parametrize(
        ("request_", "error"),
        [
            (ask([]), ConfigError),
            (ask([5] * 1000), ConfigError),
            (ask([500]), CheckpointError),
            (ask(n=5), ConfigError),
            (ask(logit_bias={99999: 1.0}), ConfigError),
            (ask(grammar=Grammar(kind="json_schema", source="{")), ConfigError),
        ],
    )
    def test_before_it_is_queued_and_the_others_go_on(self, request_: Request, error: type[LlmqError]) -> None:
        async def main() -> None:
            running = asyncio.ensure_future(gather(service, ask("fine")))
            with pytest.raises(error):
                await gather(service, request_)
            assert (await running).choices[0].text == "fine"

        with Service(FakeModel(step_seconds=0.002)) as service:
            run(main())

    def test_an_id_in_use(self) -> None:
        async def main() -> None:
            request = ask("a" * 20)
            running = asyncio.ensure_future(gather(service, request))
            await until(lambda: service.status().num_running == 1)
            with pytest.raises(ConfigError, match="is in use"):
                await gather(service, request)
            assert (await running).choices[0].text == "a" * 20

        with Service(FakeModel(step_seconds=0.01)) as service:
            run(main())

    def test_a_full_queue_at_once(self) -> None:
        async def main() -> None:
            tasks = [asyncio.ensure_future(gather(service, ask("a" * 8))) for _ in range(16)]
            await until(lambda: sum(task.done() for task in tasks) == 16 - 2 - 3, 0.3)  # long before an answer is over
            refused = [task for task in tasks if task.done()]
            for task in refused:
                with pytest.raises(QueueFullError):
                    await task
            outcomes = await asyncio.gather(*(task for task in tasks if task not in refused))
            assert [outcome.choices[0].text for outcome in outcomes] == ["a" * 8] * 5

        with Service(FakeModel(num_slots=2, step_seconds=0.05), max_queue=3) as service:
            run(main())

    def test_after_a_timeout_in_the_queue(self) -> None:
        async def main() -> None:
            running = asyncio.ensure_future(gather(service, ask("a" * 40)))
            await until(lambda: service.status().num_running == 1)
            start = time.monotonic()
            with pytest.raises(QueueTimeoutError):
                await gather(service, ask("b"))
            assert time.monotonic() - start > 0.05
            assert not running.done()
            assert (await running).choices[0].text == "a" * 40

        with Service(FakeModel(num_slots=1, step_seconds=0.01), queue_timeout=0.05) as service:
            run(main())


class TestDeath:
    @pytest.mark.parametrize("fault", [("extend", 1), ("decode", 0), ("decode", 9), ("fetch", 9), ("copy_slot", 0)])
    def test_every_request_fails_and_stays_failed(self, fault: tuple[str, int]) -> None:
        deaths = []

        async def main() -> None:
            tasks = [asyncio.ensure_future(gather(service, ask("a" * 30, n=2)))]
            await asyncio.sleep(0)
            tasks += [asyncio.ensure_future(gather(service, ask(text * 30))) for text in "bcd"]
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(outcome) for outcome in outcomes] == [EngineDeadError] * 4
            assert "device" in str(outcomes[0]).lower()
            assert len({id(outcome) for outcome in outcomes}) == 4
            with pytest.raises(EngineDeadError):
                await gather(service, ask("too late"))
            assert await service.wait_idle(1)

        with Service(FakeModel(num_slots=2, step_seconds=0.002, fault=fault)) as service:
            service.on_death = deaths.append
            run(main())
            assert service.state == "dead"
        assert service.state == "dead"
        assert isinstance(service.failure, DeviceLostError)
        assert deaths == [service.failure]

    def test_while_warming_up(self) -> None:
        async def main() -> None:
            waiting = asyncio.ensure_future(gather(service, ask()))
            await asyncio.sleep(0.02)
            service.start()
            with pytest.raises(EngineDeadError):
                await waiting

        with Service(FakeModel(fault=("warmup", 0)), start=False) as service:
            run(main())
            assert service.state == "dead"

    def test_text_before_it_is_delivered(self) -> None:
        async def main() -> None:
            events = service.generate(ask("hello world"))
            seen = [await anext(events) for _ in range(5)]
            assert [event.text for event in seen[1:]] == ["h", "e", "l", "l"]
            with pytest.raises(EngineDeadError):
                await anext(events)

        with Service(FakeModel(step_seconds=0.005, fault=("fetch", 4))) as service:
            run(main())


class TestShutdown:
    def test_draining_refuses_and_finishes(self) -> None:
        async def main() -> None:
            running = asyncio.ensure_future(gather(service, ask("a" * 20)))
            waiting = asyncio.ensure_future(gather(service, ask("b" * 20)))
            await until(lambda: service.status().num_waiting == 1)
            service.drain()
            assert service.state == "draining"
            with pytest.raises(DrainingError):
                await gather(service, ask())
            assert not await service.wait_idle(0.02)
            assert await service.wait_idle(5)
            assert (await running).choices[0].text == "a" * 20
            assert (await waiting).choices[0].text == "b" * 20

        with Service(FakeModel(num_slots=1, step_seconds=0.005)) as service:
            run(main())
        assert service.state == "stopped"

    def test_stopping_ends_what_is_live(self) -> None:
        async def main() -> None:
            tasks = [asyncio.ensure_future(gather(service, ask("a" * 60))) for _ in range(3)]
            await until(lambda: service.status().num_running == 1)
            assert service.stop()
            assert service.state == "stopped"
            for task in tasks:
                with pytest.raises(EngineDeadError, match="was stopped"):
                    await task
            with pytest.raises(DrainingError):
                await gather(service, ask())
            with pytest.raises(DrainingError):
                await service.run_in_pool(len, "x")

        with Service(FakeModel(num_slots=1, step_seconds=0.01)) as service:
            run(main())

    def test_a_device_that_hangs_does_not_hold_up_the_end(self) -> None:
        release = threading.Event()

        class Hanging(FakeModel):
            def fetch(self, handle):
                release.wait(10)
                return super().fetch(handle)

        async def main() -> None:
            task = asyncio.ensure_future(gather(service, ask()))
            await asyncio.sleep(0.05)
            start = time.monotonic()
            assert not service.stop(timeout=0.1)
            assert time.monotonic() - start < 1
            release.set()
            with pytest.raises(EngineDeadError):
                await task

        with Service(Hanging()) as service:
            run(main())

    def test_one_that_was_never_started_stops(self) -> None:
        with Service(FakeModel(), start=False) as service:
            pass
        assert service.state == "stopped"


def test_the_pool_leaves_the_loop_free() -> None:
    async def main() -> None:
        slow = asyncio.ensure_future(service.run_in_pool(time.sleep, 0.2))
        await asyncio.sleep(0.01)
        assert not slow.done()
        await slow
        with pytest.raises(ZeroDivisionError):
            await service.run_in_pool(lambda: 1 / 0)
        assert await service.run_in_pool(max, 3, 4) == 4

    with Service(FakeModel()) as service:
        run(main())
