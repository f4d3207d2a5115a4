"""Simulated trainer: trains on batches, publishes, and now and then does the unusual.

It uses the scheduler as :mod:`serve` does, and nothing else of a run. With a look-ahead it asks for
batches during its step, in a task of its own. Its loop may be slow to look whether a batch is on
offer, and it may stop waiting meanwhile.
"""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from enum import Enum, auto

from tidegate.errors import (
    EngineLagging,
    PublishDropped,
    PublishNeeded,
    SleepFailed,
    WeightsRefused,
)
from tidegate.orchestrator.batches.tasks import Tasks
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.episodes.episode import Episode
from tidegate.orchestrator.fleet.pending_futures import BatchRequest
from tidegate.orchestrator.scheduler.scheduler import Scheduler
from tidegate.orchestrator.trainer.discarded_rows import discarded_rows
from tidegate.simulation.context import SimulationContext
from tidegate.simulation.coverage_marks import CoverageMark
from tidegate.simulation.scenario import Scenario
from tidegate.simulation.staging import check_refusal
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
    """Outcome of asking for a batch."""

    BATCH = auto()
    PUBLISH_FIRST = auto()
    NO_MORE = auto()


async def receive(
    scheduler: Scheduler, looks_after_s: float, chance: random.Random
) -> ev.HandOver | None:
    """As :meth:`Scheduler.next_batch`, on a loop that looks at offers late: so long on average."""
    if not looks_after_s:
        return await scheduler.next_batch()
    request = BatchRequest()
    try:
        while await scheduler.wait_for_batch(request):
            await asyncio.sleep(chance.expovariate(1 / looks_after_s))
            batch = request.batch
            if batch is not None and request.take(batch):
                scheduler.acknowledge_batch(request)
                return batch
    except BaseException:
        scheduler.close_batch_request(request)
        raise
    return None


class SimulatedTrainer:
    """Trainer that follows a scenario."""

    def __init__(
        self,
        scenario: Scenario,
        world: SimulationContext,
        episode: Callable[[Episode, int], Awaitable[float]],
        begins_training: Callable[[ev.HandOver], None],
    ) -> None:
        """``begins_training`` is told of each batch just before its train step."""
        self._scenario = scenario
        self._world = world
        self._episode = episode
        self._chance = scenario.chance("trainer")
        self._begins_training = begins_training
        self._chance_of_rows = scenario.chance("left out")
        self._chance_of_looks = scenario.chance("looks")
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
        self._batch: ev.HandOver | None = None
        """The batch come to last."""
        self._received: ev.HandOver | None = None
        """The batch received last."""
        self._ahead: asyncio.Queue[tuple[_Next, ev.HandOver | None]] = asyncio.Queue()
        """What came of asking ahead, and is not come to yet."""
        self._may_hold = asyncio.Semaphore(scenario.look_ahead)
        """Counts the batches that may still be asked for ahead."""
        self._may_ask = asyncio.Event()
        """Whether it makes sense to ask ahead: not before a publish, or new tasks."""
        self._offers = 0
        """Iterators given so far."""
        self._ended_offer = 0
        """The one that was the newest when there was no batch any more."""
        self._is_told_again = False
        """Whether it was told to publish first, had, and asked again."""
        self._slow: list[AsyncIterator[int]] = []
        """Kept until the end: the garbage collector has no place in virtual time."""

    async def run(self, scheduler: Scheduler) -> None:
        """Train until there are no more tasks."""
        scenario = self._scenario
        self.doing = "waits for engines"
        await scheduler.wait_for_engines(1)
        async with asyncio.TaskGroup() as beside:
            self._offer(scheduler)
            looks_ahead = None
            if scenario.look_ahead:
                self._world.hardships.note(CoverageMark.LOOKED_AHEAD)
                looks_ahead = beside.create_task(self._look_ahead(scheduler), name="look-ahead")
            while await self._goes_on(came := await self._come_to_next(scheduler), scheduler):
                if came is _Next.BATCH:
                    assert self._batch is not None
                    self._begins_training(self._batch)
                    self.doing = "trains"
                    self._batches += 1
                    self._unpublished += 1
                    await self._pause_and_train(scheduler)
                if self._must_publish(came):
                    self._unpublished = 0
                    await self._publish_and_evaluate(scheduler, beside)
                self._may_ask.set()
                if self._batches == scenario.batches_per_offer:
                    self._world.hardships.note(CoverageMark.OFFERED_AGAIN)
                    self._batches = 0
                    self._offer(scheduler)
            if looks_ahead is not None:
                looks_ahead.cancel()

    async def _goes_on(self, came: _Next, scheduler: Scheduler) -> bool:
        """Whether there is more to do: if tasks are left, another iterator gives them."""
        if came is not _Next.NO_MORE:
            return True
        if self._ended_offer < self._offers:
            return True  # asked ahead, before others were given
        if len(self.taken_tasks) == self._scenario.tasks:
            return False
        self._world.hardships.note(CoverageMark.SHORT_BATCH)
        self._at_once = iter(self._left())
        self._offer(scheduler)
        return True

    def _offer(self, scheduler: Scheduler) -> None:
        self._offers += 1
        scheduler.offer(self._tasks(), self._episode)

    def _must_publish(self, came: _Next) -> bool:
        """What was asked for ahead may have been refused before the newest publish: ask again."""
        if came is _Next.PUBLISH_FIRST and self._scenario.look_ahead and not self._unpublished:
            self._is_told_again = not self._is_told_again
            return not self._is_told_again
        if came is _Next.BATCH:
            self._is_told_again = False
        is_due = self._unpublished >= self._scenario.batches_per_publish
        return came is _Next.PUBLISH_FIRST or is_due

    async def _come_to_next(self, scheduler: Scheduler) -> _Next:
        if not self._scenario.look_ahead:
            return await self._next_batch(scheduler)
        self.doing = "waits for what it asked for ahead"
        self._may_ask.set()
        came, self._batch = await self._ahead.get()
        if came is _Next.BATCH:
            self._may_hold.release()
        return came

    async def _look_ahead(self, scheduler: Scheduler) -> None:
        """Ask for batches for ever, as long as fewer than the look-ahead wait to be trained on."""
        while True:
            await self._may_hold.acquire()
            while (came := await self._next_batch(scheduler)) is not _Next.BATCH:
                self._may_ask.clear()
                self._ahead.put_nowait((came, None))
                await self._may_ask.wait()
            self._ahead.put_nowait((came, self._received))

    async def _pause_and_train(self, scheduler: Scheduler) -> None:
        """As trainers do that share their devices with engines, or not."""
        pauses = self._chance.random() < self._scenario.pausing
        if pauses:
            mode: PauseMode = self._chance.choice(("abort", "keep", "wait"))
            self._sleeps = self._chance.random() < SLEEP_SHARE
            self.doing = "pauses engines, or puts them to sleep"
            if self._sleeps:
                self._world.hardships.note(CoverageMark.SLEPT)
                tags = self._chance.choice((MEMORY_TAGS, MEMORY_TAGS, MEMORY_TAGS[:1]))
                await scheduler.control.sleep(self._chance.choice((1, 2)), tags, mode)
            else:
                self._world.hardships.note(CoverageMark.PAUSED)
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
        if not self._scenario.look_ahead:
            self.doing = "waits for a batch"
        while True:
            try:
                async with asyncio.timeout(self._scenario.patience_s):
                    batch = await receive(
                        scheduler, self._scenario.looks_after_s, self._chance_of_looks
                    )
            except PublishNeeded:
                self._world.hardships.note(CoverageMark.PUBLISH_NEEDED)
                return _Next.PUBLISH_FIRST
            except TimeoutError:
                self._world.hardships.note(CoverageMark.STOPPED_WAITING)
                continue
            except (EngineLagging, WeightsRefused, PublishDropped) as error:
                check_refusal(str(error))
                self._world.hardships.note(CoverageMark.TOLD_LATER)
                continue
            if batch is None:
                self._ended_offer = self._offers
                return _Next.NO_MORE
            self._received = batch
            if not self._scenario.look_ahead:
                self._batch = batch
            self.received_groups += [group.group_id for group in batch.groups]
            await self._leave_rows_out(scheduler, batch)
            return _Next.BATCH

    async def _leave_rows_out(self, scheduler: Scheduler, batch: ev.HandOver) -> None:
        """As a trainer does that has limits of its own."""
        rows = range(sum(len(group.kept) for group in batch.groups))
        chance, share = self._chance_of_rows, self._scenario.leaving_out
        if share and (left_out := [row for row in rows if chance.random() < share]):
            self._world.hardships.note(CoverageMark.LEFT_OUT)
            reason = chance.choice(REASONS)
            await discarded_rows(batch.number, left_out, reason).report(scheduler)

    # ------------------------------------------------------------ weights

    async def _publish_and_evaluate(self, scheduler: Scheduler, beside: asyncio.TaskGroup) -> None:
        await self._publish(scheduler)
        is_twice = self._chance.random() < self._scenario.publishing_twice
        if is_twice and not self._scenario.look_ahead:  # which the run allows to age what it holds
            self._world.hardships.note(CoverageMark.PUBLISHED_TWICE)
            await self._publish(scheduler)
        await self._wake(scheduler)
        if not self._scenario.evaluation_tasks:
            return
        if self._scenario.evaluates_beside:
            self._world.hardships.note(CoverageMark.EVALUATED_BESIDE)
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
            hardships.note(CoverageMark.LAGGED)
        except WeightsRefused as error:
            check_refusal(str(error))
            hardships.note(CoverageMark.REFUSED)
        except PublishDropped:
            hardships.note(CoverageMark.TOLD_LATER)
        except TimeoutError:
            hardships.note(CoverageMark.CANCELLED_PUBLISH)

    async def _bring_weights(self, scheduler: Scheduler) -> None:
        self.doing = "waits until weights can be written"
        reserved = await scheduler.control.reserve()
        version = reserved.version
        update = self._world.buffer.begin(version, keep=reserved.keep)
        try:
            await asyncio.sleep(self._scenario.write_s)
        except BaseException:
            scheduler.control.release()
            raise
        self._world.buffer.end(update)
        self.doing = f"publishes v{version}"
        await scheduler.control.publish(version, [update], self._scenario.publish_wait)

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
        until = self._until()
        while len(self.taken_tasks) < until:
            task = len(self.taken_tasks)
            self.taken_tasks.add(task)
            yield task

    def _until(self) -> int:
        """How many tasks are taken when an iterator that begins now has ended."""
        each = self._scenario.tasks_per_offer
        tasks = self._scenario.tasks
        return tasks if each is None else min(tasks, len(self.taken_tasks) + each)

    async def _left_slowly(self) -> AsyncIterator[int]:
        until = self._until()
        while len(self.taken_tasks) < until:
            await asyncio.sleep(0.01)
            for task in itertools.islice(self._left(), 1):
                yield task
