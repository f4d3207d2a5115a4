"""Who takes the user's tasks takes as many as there are places for, and tells their end once."""

import asyncio
import contextlib

from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.core import Core
from tidegate.orchestrator.core.rules import Rules
from tidegate.orchestrator.episodes.runner import EpisodeFunction
from tidegate.orchestrator.feed.task_feed import TaskFeed
from tidegate.orchestrator.feed.tasks import Tasks, TaskSource
from tidegate.policies.asynchrony import BoundedStaleness


async def fed(tasks: Tasks) -> list[ev.Event]:
    """What a core with four places hears, until the feed waits."""
    core = Core(Rules(policy=BoundedStaleness(groups_per_batch=2, max_staleness=1), group_size=1))
    events: list[ev.Event] = [ev.TasksOffered()]
    core.handle(events[0])

    def handle(event: ev.Event, episode: EpisodeFunction | None) -> None:
        events.append(event)
        core.handle(event)

    wants_tasks = asyncio.Event()
    feed = TaskFeed(
        core,
        TaskSource(tasks),
        handle,
        lambda key: None,
        wants_tasks=wants_tasks,
        is_journalled=False,
    )
    with contextlib.suppress(TimeoutError):  # it never ends by itself
        async with asyncio.timeout(0.2):
            await feed.run()
    return events[1:]


async def test_the_end_of_the_tasks_is_told_once_though_places_are_left() -> None:
    expected = [ev.TaskArrived("a"), ev.TaskArrived("b"), ev.TasksExhausted()]
    assert await fed(["a", "b"]) == expected


async def test_no_more_tasks_are_taken_than_there_are_places() -> None:
    tasks = iter(range(9))
    assert await fed(tasks) == [ev.TaskArrived(task) for task in range(4)]
    assert next(tasks) == 5  # one is looked at, to know whether it is the last
