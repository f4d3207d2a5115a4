"""Does time cost nothing, and is it told when nothing will ever happen?"""

import asyncio
import contextlib

import pytest

from tidegate.errors import NothingLeftToHappen
from tidegate.orchestrator.virtual_time import VirtualLoop, run_in_virtual_time


def test_a_day_passes_at_once_and_timers_fire_in_the_order_of_their_times() -> None:
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


def test_a_timeout_ends_a_wait_at_its_virtual_time() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30.0):
                await loop.create_future()
        return loop.time()

    assert run_in_virtual_time(main()) == 30.0


def test_who_waits_for_ever_is_named_and_where() -> None:
    async def wait_for_godot() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        await asyncio.create_task(wait_for_godot(), name="estragon")

    with pytest.raises(NothingLeftToHappen, match=r"2 tasks wait for ever: .*estragon in Event"):
        run_in_virtual_time(main())


def test_threads_are_refused_for_virtual_time_does_not_wait_for_them() -> None:
    async def main() -> None:
        await asyncio.to_thread(print)

    with pytest.raises(RuntimeError, match="threads have no place in virtual time"):
        run_in_virtual_time(main())
    with (
        contextlib.closing(VirtualLoop()) as loop,
        pytest.raises(RuntimeError, match="threads have no place in virtual time"),
    ):
        loop.call_soon_threadsafe(print)


def test_a_cancelled_timer_does_not_move_the_clock() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        loop.call_later(5.0, print).cancel()
        await asyncio.sleep(1.0)
        return loop.time()

    assert run_in_virtual_time(main()) == 1.0
