"""What does a simulated trainer do? Trains on batches, publishes, and now and then the unusual.

It knows the scheduler as :mod:`serve` does, and nothing else of a run. It may be run again, on
another scheduler, and goes on with its versions.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from enum import Enum, auto

from tidegate.errors import (
    EngineLagging,
    PublishDropped,
    PublishNeeded,
    SleepFailed,
    WeightsRefused,
)
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.episodes.episode import Episode
from tidegate.orchestrator.feed.left_out_rows import left_out_rows
from tidegate.orchestrator.feed.tasks import Tasks
from tidegate.orchestrator.scheduler import Scheduler
from tidegate.orchestrator.simulation.hardships import Hardship
from tidegate.orchestrator.simulation.scenario import Scenario
from tidegate.orchestrator.simulation.world import World
from tidegate.transport.messages import PauseMode
from tidegate.transport.sleep_messages import MEMORY_TAGS

PATIENCE_MAX_S = 0.3
"""A publish that is cancelled gets so long at most."""

REASONS = ("too_long", "too_stale")
"""For rows that it leaves out."""

SLEEP_SHARE = 0.5
"""Of pauses, engines sleep in."""

PARTIAL_WAKE_SHARE = 0.5
"""Of sleeps, the weights are woken for a publish, and the rest after it."""


class _Next(Enum):
    """What came of asking for a batch."""

    BATCH = auto()
    PUBLISH_FIRST = auto()
    NO_MORE = auto()


class SimulatedTrainer:
    """One trainer, as the scenario wants it."""

    def __init__(
        self,
        scenario: Scenario,
        world: World,
        episode: Callable[[Episode, int], Awaitable[float]],
    ) -> None:
        self._scenario = scenario
        self._world = world
        self._episode = episode
        self._chance = scenario.chance("trainer")
        self._chance_of_rows = scenario.chance("left out")
        self.doing = "starts"
        """What it waits for, in words."""
        self.taken_tasks: set[int] = set()
        """Those that the run has taken from it."""
        self.received_groups: list[int] = []
        """In the order in which they came."""
        self._batches = 0
        """Since tasks were offered."""
        self._unpublished = 0
        self._at_once = iter(self._left())
        self._sleeps = False
        """Whether engines were put to sleep, and not all of it was woken."""
        self._slow: list[AsyncIterator[int]] = []
        """Kept until the end: the garbage collector has no place in virtual time."""

    async def run(self, scheduler: Scheduler) -> None:
        """Train until there are no more tasks."""
        scenario = self._scenario
        self.doing = "waits for engines"
        await scheduler.wait_for_engines(1)
        async with asyncio.TaskGroup() as beside:
            scheduler.offer(self._tasks(), self._episode)
            while (came := await self._next_batch(scheduler)) is not _Next.NO_MORE:
                if came is _Next.BATCH:
                    self.doing = "trains"
                    self._batches += 1
                    self._unpublished += 1
                    await self._pause_and_train(scheduler)
                if came is _Next.PUBLISH_FIRST or self._unpublished >= scenario.batches_per_publish:
                    self._unpublished = 0
                    await self._publish_and_evaluate(scheduler, beside)
                if self._batches == scenario.batches_per_offer:
                    self._world.hardships.note(Hardship.OFFERED_AGAIN)
                    self._batches = 0
                    scheduler.offer(self._tasks(), self._episode)

    async def _pause_and_train(self, scheduler: Scheduler) -> None:
        """As trainers do that share their devices with engines, or not."""
        pauses = self._chance.random() < self._scenario.pausing
        if pauses:
            mode: PauseMode = self._chance.choice(("abort", "keep", "wait"))
            self._sleeps = self._chance.random() < SLEEP_SHARE
            self.doing = "pauses engines, or puts them to sleep"
            if self._sleeps:
                self._world.hardships.note(Hardship.SLEPT)
                tags = self._chance.choice((MEMORY_TAGS, MEMORY_TAGS, MEMORY_TAGS[:1]))
                await scheduler.control.sleep(self._chance.choice((1, 2)), tags, mode)
            else:
                self._world.hardships.note(Hardship.PAUSED)
                await scheduler.control.pause(mode)
        self.doing = "trains"
        await asyncio.sleep(self._scenario.train_s)
        if self._sleeps:
            await self._wake_or_publish_first(scheduler)
        elif pauses:
            self.doing = "resumes engines"
            await scheduler.control.pause(None)

    async def _wake_or_publish_first(self, scheduler: Scheduler) -> None:
        """All at once; or the weights, and the rest when they are published."""
        if self._chance.random() < PARTIAL_WAKE_SHARE:
            self.doing = "wakes engines' weights"
            await scheduler.control.wake(["weights"])
            self._unpublished = self._scenario.batches_per_publish
        else:
            await self._wake(scheduler)

    async def _wake(self, scheduler: Scheduler) -> None:
        """Those that forgot their weights may get them by a publish only."""
        while self._sleeps:
            self.doing = "wakes engines"
            try:
                await scheduler.control.wake(None)
                self._sleeps = False
            except SleepFailed:
                await self._publish(scheduler)

    async def _next_batch(self, scheduler: Scheduler) -> _Next:
        self.doing = "waits for a batch"
        while True:
            try:
                async with asyncio.timeout(self._scenario.patience_s):
                    batch = await scheduler.next_batch()
            except PublishNeeded:
                self._world.hardships.note(Hardship.PUBLISH_NEEDED)
                return _Next.PUBLISH_FIRST
            except TimeoutError:
                self._world.hardships.note(Hardship.STOPPED_WAITING)
                continue
            except (EngineLagging, WeightsRefused, PublishDropped):
                self._world.hardships.note(Hardship.TOLD_LATER)
                continue
            if batch is None:
                return _Next.NO_MORE
            self.received_groups += [group.group_id for group in batch.groups]
            await self._leave_rows_out(scheduler, batch)
            return _Next.BATCH

    async def _leave_rows_out(self, scheduler: Scheduler, batch: ev.HandOver) -> None:
        """As a trainer does that has limits of its own."""
        rows = range(sum(len(group.kept) for group in batch.groups))
        chance, share = self._chance_of_rows, self._scenario.leaving_out
        if share and (left_out := [row for row in rows if chance.random() < share]):
            self._world.hardships.note(Hardship.LEFT_OUT)
            reason = chance.choice(REASONS)
            await left_out_rows(batch.number, left_out, reason).tell(scheduler)

    # ------------------------------------------------------------ weights

    async def _publish_and_evaluate(self, scheduler: Scheduler, beside: asyncio.TaskGroup) -> None:
        await self._publish(scheduler)
        if self._chance.random() < self._scenario.publishing_twice:
            self._world.hardships.note(Hardship.PUBLISHED_TWICE)
            await self._publish(scheduler)
        await self._wake(scheduler)
        if not self._scenario.evaluation_tasks:
            return
        if self._scenario.evaluates_beside:
            self._world.hardships.note(Hardship.EVALUATED_BESIDE)
            beside.create_task(self._evaluate(scheduler), name="evaluation")
        else:
            self.doing = "evaluates"
            await self._evaluate(scheduler)

    async def _publish(self, scheduler: Scheduler) -> None:
        """Publish, as :meth:`Rollouts.publish` does; a failure is noted, and life goes on."""
        is_cancelled = self._chance.random() < self._scenario.cancelled_publishes
        patience_s = PATIENCE_MAX_S * self._chance.random() ** 2 if is_cancelled else None
        hardships = self._world.hardships
        try:
            async with asyncio.timeout(patience_s):
                await self._bring_weights(scheduler)
        except EngineLagging:
            hardships.note(Hardship.LAGGED)
        except WeightsRefused:
            hardships.note(Hardship.REFUSED)
        except PublishDropped:
            hardships.note(Hardship.TOLD_LATER)
        except TimeoutError:
            hardships.note(Hardship.CANCELLED_PUBLISH)

    async def _bring_weights(self, scheduler: Scheduler) -> None:
        self.doing = "waits until weights can be written"
        version = await scheduler.control.publisher.reserve()
        update = self._world.buffer.begin(version, keep=scheduler.control.weights.kept_buffers)
        try:
            await asyncio.sleep(self._scenario.write_s)
        except BaseException:
            scheduler.control.publisher.release()
            raise
        self._world.buffer.end(update)
        self.doing = f"publishes v{version}"
        await scheduler.control.publisher.publish(version, [update], self._scenario.publish_wait)

    async def _evaluate(self, scheduler: Scheduler) -> None:
        tasks = [-1 - task for task in range(self._scenario.evaluation_tasks)]
        for rollout in await scheduler.evaluate(tasks, self._episode):
            self._world.tape.note_fact((rollout.reward, rollout.token_ids.tobytes()))

    # ------------------------------------------------------------ tasks

    def _tasks(self) -> Tasks:
        """Those left. A sync iterator is gone on with; an async one doesn't survive it."""
        if not self._scenario.are_tasks_async:
            return self._at_once
        self._slow.append(self._left_slowly())
        return self._slow[-1]

    def _left(self) -> Iterator[int]:
        while len(self.taken_tasks) < self._scenario.tasks:
            task = len(self.taken_tasks)
            self.taken_tasks.add(task)
            yield task

    async def _left_slowly(self) -> AsyncIterator[int]:
        while len(self.taken_tasks) < self._scenario.tasks:
            await asyncio.sleep(0.01)
            for task in itertools.islice(self._left(), 1):
                yield task
