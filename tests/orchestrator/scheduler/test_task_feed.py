"""The task feed takes as many tasks as there are places for, and reports their end once."""

import asyncio
import contextlib
from collections.abc import Iterator

import pytest

from tests.orchestrator.core.driver import step
from tidegate.orchestrator.batches.curriculum import Curriculum
from tidegate.orchestrator.batches.tasks import Tasks, TaskSource
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.core import Core
from tidegate.orchestrator.core.event_log import (
    TASK_BYTES_MAX,
    TASK_ELSEWHERE,
    task_body,
    task_of,
)
from tidegate.orchestrator.core.rules import Rules
from tidegate.orchestrator.episodes.runner import EpisodeFunction
from tidegate.orchestrator.fleet.pending_futures import PendingFutures
from tidegate.orchestrator.scheduler.task_feed import TaskFeed
from tidegate.orchestrator.scheduler.trainer_side import TrainerSide
from tidegate.policies.asynchrony import BoundedStaleness
from tidegate.transport.messages import STOP, SamplingParams


class Iterated:
    """Tasks that each take so long to come, on the clock that the feed reads."""

    def __init__(self, tasks: int, each_s: float) -> None:
        self._tasks = tasks
        self._each_s = each_s
        self.now_s = 0.0

    def __iter__(self) -> Iterator[int]:
        for task in range(self._tasks):
            self.now_s += self._each_s
            yield task


def feed_of(
    core: Core, tasks: Tasks, events: list[ev.Event], clock: Iterated | None = None
) -> TaskFeed:
    """Make a feed that records the core's events."""
    core.handle(ev.TasksOffered())
    source, wants_tasks = TaskSource(tasks), asyncio.Event()

    def handle(event: ev.Event, episode: EpisodeFunction | None) -> None:
        events.append(event)
        for command in core.handle(event):
            if isinstance(command, ev.RequeueTask):
                source.put_back(command.task, command.key)
                wants_tasks.set()

    return TaskFeed(
        core,
        source,
        handle,
        lambda key: None,
        has_capacity=wants_tasks,
        is_journalled=False,
        now_s=lambda: clock.now_s if clock is not None else 0.0,
    )


async def fed(tasks: Tasks) -> list[ev.Event]:
    """Return the events of a core with four places until the feed waits."""
    core = Core(Rules(policy=BoundedStaleness(groups_per_batch=2, max_staleness=1), group_size=1))
    events: list[ev.Event] = []
    with contextlib.suppress(TimeoutError):  # it never ends by itself
        async with asyncio.timeout(0.2):
            await feed_of(core, tasks, events).run()
    return events


def core_with_place_for_all(*, group_size: int) -> Core:
    policy = BoundedStaleness(groups_per_batch=1000, max_staleness=0)
    return Core(Rules(policy=policy, group_size=group_size))


async def taken_per_turn(core: Core, tasks: Iterated) -> list[int]:
    """Return the number of tasks taken or skipped in each iteration of the loop."""
    events: list[ev.Event] = []
    feeding = asyncio.create_task(feed_of(core, tasks, events, tasks).run())
    taken: list[int] = []
    while ev.TasksExhausted() not in events:
        assert not feeding.done()
        before = len(events)
        await asyncio.sleep(0)
        new = [e for e in events[before:] if isinstance(e, ev.TaskArrived | ev.TaskFoundAgain)]
        taken.append(len(new))
    feeding.cancel()
    return taken


async def test_the_end_of_the_tasks_is_reported_once_though_slots_are_free() -> None:
    expected = [ev.TaskArrived("a"), ev.TaskArrived("b"), ev.TasksExhausted()]
    assert await fed(["a", "b"]) == expected


async def test_no_more_tasks_are_taken_than_there_are_places() -> None:
    tasks = iter(range(9))
    assert await fed(tasks) == [ev.TaskArrived(task) for task in range(4)]
    assert next(tasks) == 5  # one is fetched ahead, to find out whether it is the last


async def test_a_task_that_is_put_back_as_the_tasks_end_is_taken_again() -> None:
    policy = BoundedStaleness(groups_per_batch=2, max_staleness=0)
    core = Core(Rules(policy=policy, group_size=1))
    core.handle(ev.TasksOffered())
    core.handle(ev.EngineJoined("a", 0, 4))
    [command] = core.handle(ev.TaskArrived("task"))
    assert isinstance(command, ev.StartEpisode)
    command.rollout.extend([1, 2])
    core.handle(ev.TurnRequested(0, SamplingParams(max_tokens=2)))
    core.handle(step("a", 0, [(0, [5], STOP)]))
    core.handle(ev.EpisodeReturned(0, 1.0))
    core.handle(ev.VersionPublished(1))  # by which it is too old, and half a batch
    core.handle(ev.EngineSwapped("a", 1))
    events: list[ev.Event] = []
    feed = feed_of(core, [], events)
    core.handle(ev.BatchRequested())
    feeding = asyncio.create_task(feed.run())
    for _ in range(8):
        await asyncio.sleep(0)
    feeding.cancel()
    again = [event.task for event in events if isinstance(event, ev.TaskArrived)]
    assert (events[0], again, core.running_groups) == (ev.TasksExhausted(), ["task"], 1)


async def test_the_loop_sees_to_its_sockets_whenever_so_many_episodes_have_begun() -> None:
    for tasks, group_size, taken in ((600, 1, [256, 256, 88]), (80, 8, [32, 32, 16])):
        core = core_with_place_for_all(group_size=group_size)
        assert await taken_per_turn(core, Iterated(tasks, 0.0)) == taken


async def test_weights_that_are_set_in_a_curriculum_after_its_trainer_was_closed_are_no_event() -> (
    None
):
    core = core_with_place_for_all(group_size=1)
    events: list[ev.Event] = []

    def handle(event: ev.Event, episode: EpisodeFunction | None) -> None:
        assert isinstance(event, ev.ForAdapter)
        events.append(event.event)
        core.handle(event.event)

    async def unused(episode: object, task: object) -> float:
        raise AssertionError

    trainer = TrainerSide(
        core,
        handle,
        PendingFutures(),
        lambda action: action(),
        lambda: None,
        adapter="critic",
        is_journalled=lambda: True,
        now_s=lambda: 0.0,
    )
    tasks = Curriculum(["a", "b"])
    async with asyncio.TaskGroup() as group:
        trainer.offer(tasks, unused, group)
        tasks.set_weights([1.0, 2.0])
        await asyncio.sleep(0)
        trainer.close()
        before = len(events)
        tasks.set_weights([2.0, 1.0])
        await asyncio.sleep(0)
    assert [type(event) for event in events].count(ev.TaskWeightsSet) == 1
    assert len(events) == before


async def test_tasks_that_take_long_to_come_are_taken_one_in_each_turn_of_the_loop() -> None:
    core = core_with_place_for_all(group_size=1)
    assert await taken_per_turn(core, Iterated(3, 0.5)) == [1, 1, 1]


async def test_the_loop_sees_to_its_sockets_while_a_resumed_run_passes_by_what_was_taken() -> None:
    for tasks, each_s, passed_by in ((600, 0.0, [256, 256, 88]), (3, 0.5, [1, 1, 1, 0])):
        core = core_with_place_for_all(group_size=1)
        core.handle(ev.TasksOffered())
        for task in range(tasks):
            core.handle(ev.TaskArrived(task))
        core.tasks.resume(0)
        assert await taken_per_turn(core, Iterated(tasks, each_s)) == passed_by


@pytest.mark.parametrize(
    "task",
    [
        None,
        3,
        "3+4=",
        b"\x00",
        {"question": "3+4=", "answers": ("7", [7.0, True], {"of": ()})},
        ("3+4=", "7"),
    ],
)
def test_a_task_of_plain_data_is_written_down_and_read_as_an_equal_one(task: object) -> None:
    body = task_body(task)
    again = task_of(body)
    assert body
    assert (again, type(again)) == (task, type(task))


class Question(str):
    """A str subclass, which would come back as a plain str."""


@pytest.mark.parametrize(
    "task", [object(), Question("3+4="), {1: "a"}, [{2}], 1 << 80, "x" * (TASK_BYTES_MAX + 1)]
)
def test_a_task_that_could_come_back_as_another_is_not_written_down(task: object) -> None:
    assert task_body(task) == b""
    assert task_of(b"") is TASK_ELSEWHERE


def test_a_task_without_end_is_not_written_down() -> None:
    endless: list[object] = []
    endless.append(endless)
    assert task_body(endless) == b""
