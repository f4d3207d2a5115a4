"""A task that takes too long is cancelled at its deadline, and no other task is."""

import asyncio
import sys
from collections.abc import Awaitable, Callable

import pytest

from tidegate.orchestrator.episodes.runner import CANCEL_GRACE_S, Deadlines
from tidegate.simulation.run.virtual_time import run_in_virtual_time

TIMEOUT_S = 10.0

Task = asyncio.Task[object]

Ended = dict[str, tuple[float, str]]
"""Records when and how each task ended."""


async def watched(
    deadlines: Deadlines[Task], name: str, ended: Ended, work: Callable[[], Awaitable[object]]
) -> None:
    """Run work under a deadline, as an episode does."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    deadlines.begin(task)
    try:
        await work()
        how = "late" if deadlines.end(task) else "in time"
    except asyncio.CancelledError:
        how = "too long" if deadlines.end(task) else "cancelled"
    ended[name] = (loop.time(), how)


def ignore_task(task: Task) -> None:
    pytest.fail(f"{task} was given up")


def test_each_task_is_cancelled_at_its_own_time_and_those_in_time_are_not() -> None:
    async def main() -> Ended:
        deadlines, ended = Deadlines[Task](TIMEOUT_S, ignore_task), Ended()
        async with asyncio.TaskGroup() as group:
            for start_s in (0.0, 1.0, 4.0):
                for lasts_s in (3.0, 9.9, 60.0):
                    name = f"{start_s} for {lasts_s}"
                    work = lambda lasts_s=lasts_s: asyncio.sleep(lasts_s)  # noqa: E731
                    group.create_task(watched(deadlines, name, ended, work))
                await asyncio.sleep(1.0 if start_s == 0.0 else 3.0)
        return ended

    ended = run_in_virtual_time(main())
    assert ended == {
        f"{start_s} for {lasts_s}": (
            start_s + min(lasts_s, TIMEOUT_S),
            "too long" if lasts_s > TIMEOUT_S else "in time",
        )
        for start_s in (0.0, 1.0, 4.0)
        for lasts_s in (3.0, 9.9, 60.0)
    }


def test_no_timeout_runs_while_deadlines_are_suspended() -> None:
    async def main() -> Ended:
        deadlines, ended = Deadlines[Task](TIMEOUT_S, ignore_task), Ended()
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            group.create_task(watched(deadlines, "before", ended, loop.create_future))
            await asyncio.sleep(4.0)
            deadlines.suspend(loop.time())
            await asyncio.sleep(50.0)
            group.create_task(watched(deadlines, "meanwhile", ended, loop.create_future))
            await asyncio.sleep(50.0)
            deadlines.resume(loop.time())
        return ended

    ended = run_in_virtual_time(main())
    assert {how for _, how in ended.values()} == {"too long"}
    assert 110.0 <= ended["before"][0] <= 111.0  # 6 s were left of its 10
    assert 114.0 <= ended["meanwhile"][0] <= 115.0


def test_a_task_that_is_held_has_as_much_time_left_after_it() -> None:
    async def main() -> Ended:
        deadlines, ended = Deadlines[Task](TIMEOUT_S, ignore_task), Ended()
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            held, other, ends = (
                group.create_task(watched(deadlines, name, ended, work))
                for name, work in (
                    ("held", loop.create_future),
                    ("other", loop.create_future),
                    ("ends", lambda: asyncio.sleep(8.0)),
                )
            )
            await asyncio.sleep(6.0)
            deadlines.hold(held)
            deadlines.hold(ends)
            assert (deadlines.left_s(held), deadlines.left_s(other)) == (4.0, 4.0)
            await asyncio.sleep(94.0)
            late = group.create_task(watched(deadlines, "late", ended, loop.create_future))
            await asyncio.sleep(3.0)
            deadlines.release(held)
            deadlines.release(ends)
            deadlines.release(held)
            assert (deadlines.left_s(held), deadlines.left_s(late)) == (4.0, 7.0)
        return ended

    assert run_in_virtual_time(main()) == {
        "ends": (8.0, "in time"),
        "other": (10.0, "too long"),
        "held": (107.0, "too long"),
        "late": (110.0, "too long"),
    }


def test_many_that_are_let_go_together_are_put_in_order_once() -> None:
    sorts = 0

    def count(frame: object, what: str, called: object) -> None:
        nonlocal sorts
        sorts += what == "c_call" and called is sorted

    async def main() -> Ended:
        deadlines, ended = Deadlines[Task](TIMEOUT_S, ignore_task), Ended()
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(watched(deadlines, str(n), ended, loop.create_future))
                for n in range(9)
            ]
            for task in tasks:  # who was held later has less left
                await asyncio.sleep(1.0)
                deadlines.hold(task)
            await asyncio.sleep(91.0)
            sys.setprofile(count)
            for task in tasks:
                deadlines.release(task)
            sys.setprofile(None)
        return ended

    assert run_in_virtual_time(main()) == {str(n): (109.0 - n, "too long") for n in range(9)}
    assert sorts == 0  # that is for when the first is due


def test_a_task_that_is_held_can_be_cut_short() -> None:
    async def main() -> Ended:
        deadlines, ended = Deadlines[Task](TIMEOUT_S, ignore_task), Ended()
        loop = asyncio.get_running_loop()
        task = asyncio.create_task(watched(deadlines, "a", ended, loop.create_future))
        await asyncio.sleep(1.0)
        deadlines.hold(task)
        deadlines.cancel_now(task)
        deadlines.release(task)
        await task
        return ended

    assert run_in_virtual_time(main()) == {"a": (1.0, "too long")}


def test_a_cancellation_by_other_code_is_no_timeout() -> None:
    async def main() -> Ended:
        deadlines, ended = Deadlines[Task](TIMEOUT_S, ignore_task), Ended()
        task = asyncio.create_task(
            watched(deadlines, "a", ended, asyncio.get_running_loop().create_future)
        )
        await asyncio.sleep(1.0)
        task.cancel()
        await task
        return ended

    assert run_in_virtual_time(main()) == {"a": (1.0, "cancelled")}


def test_a_cancellation_for_both_reasons_counts_as_other_codes() -> None:
    async def main() -> Ended:
        deadlines, ended = Deadlines[Task](TIMEOUT_S, ignore_task), Ended()
        loop = asyncio.get_running_loop()
        task = asyncio.create_task(watched(deadlines, "a", ended, loop.create_future))
        await asyncio.sleep(0.0)
        loop.call_at(TIMEOUT_S, task.cancel)
        await task
        return ended

    assert run_in_virtual_time(main()) == {"a": (TIMEOUT_S, "cancelled")}


def test_a_task_deaf_to_its_cancellation_is_given_up_after_its_grace() -> None:
    async def main() -> list[tuple[float, bool]]:
        loop = asyncio.get_running_loop()
        given_up: list[tuple[float, Task]] = []
        ended = Ended()
        deadlines = Deadlines[Task](TIMEOUT_S, lambda task: given_up.append((loop.time(), task)))

        async def deaf() -> None:
            try:
                await asyncio.sleep(60.0)
            except asyncio.CancelledError:
                await asyncio.sleep(60.0)

        await watched(deadlines, "a", ended, deaf)
        assert ended == {"a": (TIMEOUT_S + 60.0, "late")}
        return [(when_s, task is asyncio.current_task()) for when_s, task in given_up]

    assert run_in_virtual_time(main()) == [(TIMEOUT_S + CANCEL_GRACE_S, True)]
