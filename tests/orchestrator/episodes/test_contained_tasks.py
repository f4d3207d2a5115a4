"""Tasks of loops that run users' code."""

import asyncio

from tests.reference_cycles import cycles_found
from tidegate.orchestrator.episodes.contained_tasks import contained_task


async def test_a_task_that_awaits_a_failure_or_is_cancelled_leaves_no_reference_cycle() -> None:
    loop = asyncio.get_running_loop()

    async def play(turns: list["asyncio.Future[None]"]) -> None:
        await turns.pop()

    async def end_in_both_ways() -> None:
        failed: asyncio.Future[None] = loop.create_future()
        task = contained_task(loop, play([failed]))
        other = contained_task(loop, play([loop.create_future()]))
        await asyncio.sleep(0)
        failed.set_exception(ValueError("refused"))
        other.cancel()
        await asyncio.wait([task, other])
        assert task.exception() is not None
        assert other.cancelled()

    await end_in_both_ways()  # lets go of what tests before have left on this loop
    with cycles_found() as cycles:
        await end_in_both_ways()
    assert not cycles
