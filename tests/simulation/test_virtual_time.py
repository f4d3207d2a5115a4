"""Virtual time: it costs nothing, and a program that waits forever gets an error."""

import asyncio
import contextlib
import gc
import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import tidegate
from tidegate.errors import NothingLeftToHappen, VirtualTimeUp
from tidegate.simulation.run.virtual_time import (
    VirtualLoop,
    VirtualTime,
    run_in_virtual_time,
)


def test_virtual_time_skips_waits_and_fires_timers_in_order() -> None:
    fired: list[tuple[float, str]] = []

    async def sleeper(name: str, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        fired.append((asyncio.get_running_loop().time(), name))

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for name, delay_s in (("day", 86400.0), ("first", 1.0), ("second", 1.0)):
                group.create_task(sleeper(name, delay_s))

    run_in_virtual_time(main())
    assert fired == [(1.0, "first"), (1.0, "second"), (86400.0, "day")]


def test_tasks_that_wait_for_ever_are_named_with_their_location() -> None:
    async def wait_for_godot() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        await asyncio.create_task(wait_for_godot(), name="estragon")

    with pytest.raises(NothingLeftToHappen, match=r"2 tasks wait for ever: estragon in .*Event"):
        run_in_virtual_time(main())


def test_to_thread_runs_at_once_in_no_virtual_time() -> None:
    async def main() -> float:
        assert await asyncio.to_thread(sum, (1, 2)) == 3
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(divmod, 1, 0)
        return asyncio.get_running_loop().time()

    assert run_in_virtual_time(main()) == 0.0


@pytest.mark.wire  # the gateway finds a free port
async def test_a_gateway_leaves_no_failed_task_though_nobody_can_connect_in_virtual_time(
    tidegate_serve: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def agent(endpoint: tidegate.Endpoint, task: str) -> float:
        return 1.0

    with contextlib.closing(tidegate.Gateway()) as gateway:
        async with tidegate_serve() as rollouts:
            await rollouts.evaluate(["t"], episode=gateway.episode(agent))
    del gateway
    gc.collect()  # asyncio logs a task's exception when the task is freed
    assert [each.getMessage() for each in caplog.records if each.name == "asyncio"] == []


def test_calls_from_other_threads_are_refused() -> None:
    with (
        contextlib.closing(VirtualLoop()) as loop,
        ThreadPoolExecutor(1) as pool,
        pytest.raises(RuntimeError, match="another thread called the event loop"),
    ):
        pool.submit(loop.call_soon_threadsafe, print).result()


def test_virtual_time_stops_between_runs_and_passes_in_sleep() -> None:
    async def tick(times: list[float]) -> None:
        while True:
            await asyncio.sleep(1.0)
            times.append(asyncio.get_running_loop().time())

    time, times = VirtualTime(), list[float]()
    with contextlib.closing(time):
        time.loop.create_task(tick(times))
        assert times == []
        time.sleep(2.5)
        assert (times, time.now_s) == ([1.0, 2.0], 2.5)


def test_a_program_beyond_the_time_limit_is_ended_and_its_waiting_tasks_named() -> None:
    async def beat_for_ever() -> None:
        for seconds in itertools.repeat(1.0):
            await asyncio.sleep(seconds)

    time = VirtualTime(limit_s=60.0)
    with contextlib.closing(time), pytest.raises(VirtualTimeUp) as ended:
        time.run(beat_for_ever())
    assert "60 virtual seconds have passed without an end, and 1 tasks wait: main" in str(
        ended.value
    )


def test_ticks_round_timers_that_are_almost_due_to_the_same_time() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        await asyncio.gather(asyncio.sleep(0.001), asyncio.sleep(0.124))
        assert loop.time() == 0.125

    time = VirtualTime(tick_s=0.125)
    with contextlib.closing(time):
        time.run(main())


def test_a_cancelled_timer_does_not_move_the_clock() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        loop.call_later(5.0, print).cancel()
        await asyncio.sleep(1.0)
        return loop.time()

    assert run_in_virtual_time(main()) == 1.0
