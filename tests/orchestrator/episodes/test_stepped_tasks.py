"""Stepped tasks behave like asyncio's own, for asyncio's tools and libraries built on them."""

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

import pytest

from tidegate.orchestrator.episodes.stepped_tasks import (
    Rounds,
    SteppedFuture,
    SteppedTask,
    stepped_future,
)
from tidegate.simulation.virtual_time import run_in_virtual_time

Work = Callable[[], Coroutine[Any, Any, Any]]


class Noted(SteppedTask):
    """Task that records how it ended."""

    __slots__ = ("_work", "error", "value")

    def __init__(self, rounds: Rounds, work: Work) -> None:
        super().__init__(rounds)
        self._work = work
        self.value: Any = None
        self.error: BaseException | None = None

    def begin(self) -> Coroutine[Any, Any, Any]:
        return self._work()

    def end(self, value: Any, error: BaseException | None) -> None:
        self.value, self.error = value, error

    def get_name(self) -> str:
        return "noted"


def nobody(error: BaseException) -> None:
    pytest.fail(f"{error!r} was nobody's")


def rounds() -> Rounds:
    return Rounds(asyncio.get_running_loop(), nobody)


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def awaited() -> None:
        await main()

    run_in_virtual_time(awaited())


def test_it_is_the_current_task_of_its_code_and_among_all_tasks_until_it_has_ended() -> None:
    async def main() -> None:
        async def work() -> bool:
            await asyncio.sleep(1)
            return asyncio.current_task() is task  # type: ignore[comparison-overlap]

        task = Noted(rounds(), work)
        assert task in asyncio.all_tasks()  # type: ignore[comparison-overlap]
        await task
        assert task.value is True
        assert task not in asyncio.all_tasks()  # type: ignore[comparison-overlap]
        assert asyncio.current_task().get_name() == "main"  # type: ignore[union-attr]

    run(main)


def test_timeouts_groups_and_gathers_of_asyncio_work_inside_of_one() -> None:
    async def main() -> None:
        async def work() -> list[int]:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1):
                    await asyncio.sleep(60)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.Event().wait(), 1)
            with pytest.raises(ExceptionGroup):
                await grouped()
            await asyncio.sleep(0)
            return await asyncio.gather(*(asyncio.sleep(1, n) for n in range(3)))

        async def grouped() -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(failing())
                await asyncio.sleep(60)

        async def failing() -> None:
            raise ValueError("as planned")

        task = Noted(rounds(), work)
        await task
        assert task.value == [0, 1, 2]
        assert task.cancelling() == 0

    run(main)


def test_a_cancel_reaches_it_where_it_waits_before_it_begins_and_in_its_last_step() -> None:
    async def main() -> None:
        async def waiting(on: Awaitable[object]) -> None:
            await on

        async def last_words() -> None:
            asyncio.current_task().cancel()  # type: ignore[union-attr]

        loop = asyncio.get_running_loop()
        of = rounds()
        ours: SteppedFuture[None] = stepped_future(loop)
        tasks = [
            Noted(of, lambda: waiting(loop.create_future())),
            Noted(of, lambda: waiting(ours)),
            Noted(of, last_words),
        ]
        await asyncio.sleep(0.1)
        tasks.append(Noted(of, lambda: waiting(asyncio.sleep(1))))
        for task in tasks[:2] + tasks[3:]:
            assert task.cancel()
        await asyncio.wait(tasks)
        assert [type(task.error) for task in tasks] == [asyncio.CancelledError] * 4
        assert not any(task.cancel() for task in tasks)

    run(main)


def test_a_cancel_that_is_taken_back_leaves_it_going() -> None:
    async def main() -> None:
        async def work() -> str:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                asyncio.current_task().uncancel()  # type: ignore[union-attr]
            return "went on"

        task = Noted(rounds(), work)
        await asyncio.sleep(1)
        task.cancel()
        await task
        assert (task.value, task.cancelling()) == ("went on", 0)

    run(main)


def test_what_it_sets_in_its_context_nobody_else_sees() -> None:
    async def main() -> None:
        number: contextvars.ContextVar[int] = contextvars.ContextVar("number", default=0)

        async def work() -> int:
            before = number.get()
            number.set(1)
            await asyncio.sleep(1)
            return 10 * before + number.get()

        tasks = [Noted(of, work) for of in [rounds()] for _ in range(3)]
        await asyncio.wait(tasks)
        assert [task.value for task in tasks] == [1, 1, 1]
        assert number.get() == 0

    run(main)


def test_a_future_of_ours_wakes_ours_and_any_other_task_that_waits_for_it() -> None:
    async def main() -> None:
        future: SteppedFuture[str] = stepped_future(asyncio.get_running_loop())

        async def work() -> str:
            return await future

        of = rounds()
        tasks = [Noted(of, work), Noted(of, work)]
        other = asyncio.ensure_future(work())
        await asyncio.sleep(1)
        future.set_result("there")
        await asyncio.wait(tasks)
        await other
        assert [task.value for task in tasks] == ["there", "there"]
        assert other.result() == "there"

    run(main)


def test_it_is_told_what_is_no_future_or_one_of_another_loop() -> None:
    class Odd:
        def __await__(self) -> Any:
            yield "something odd"

    async def main() -> None:
        stranger = asyncio.new_event_loop()

        async def work(odd: Awaitable[object]) -> str:
            with pytest.raises(RuntimeError) as told:
                await odd
            return str(told.value)

        of = rounds()
        odd: list[Awaitable[object]] = [Odd(), stranger.create_future(), stepped_future(stranger)]
        tasks = [Noted(of, partial(work, each)) for each in odd]
        await asyncio.wait(tasks)
        stranger.close()
        assert "bad yield: 'something odd'" in tasks[0].value
        assert "different loop" in tasks[1].value
        assert "different loop" in tasks[2].value

    run(main)


def test_what_its_end_raises_is_heard_of_and_others_go_on() -> None:
    class Broken(Noted):
        def end(self, value: Any, error: BaseException | None) -> None:
            raise ValueError("at the end")

    async def main() -> None:
        async def work() -> str:
            return "done"

        heard: list[BaseException] = []
        of = Rounds(asyncio.get_running_loop(), heard.append)
        broken, whole = Broken(of, work), Noted(of, work)
        await asyncio.wait([broken, whole])
        assert [str(error) for error in heard] == ["at the end"]
        assert whole.value == "done"

    run(main)
