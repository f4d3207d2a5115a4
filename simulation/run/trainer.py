"""Simulated trainer: trains on batches and publishes, with the unusual calls of its scenario.

The trainer calls the scheduler only, as the client handles do. With a look-ahead, a second asyncio
task requests batches during the train step. A real trainer has an event loop of its own; the
simulated one imitates that: it may be slow to check for an offered batch, and may stop waiting
before it checks.
"""

import asyncio
import contextlib
import itertools
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from enum import Enum, auto
from functools import partial

from tidegate.errors import (
    BatchNotHeld,
    ConfigError,
    EngineLagging,
    PublishDropped,
    PublishNeeded,
    SleepFailed,
    VersionUnavailable,
    WeightsRefused,
)
from tidegate.orchestrator.batches.tasks import Tasks
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.control_events import PublishWait
from tidegate.orchestrator.core.weight_content import (
    Change,
    patch_elements,
    replace_all,
    replace_some,
)
from tidegate.orchestrator.episodes.episode import Episode
from tidegate.orchestrator.scheduler.batch_requests import BatchRequest
from tidegate.orchestrator.scheduler.scheduler import Scheduler
from tidegate.orchestrator.trainer.discarded_rows import discarded_rows
from tidegate.simulation.checks.coverage import CoverageMark
from tidegate.simulation.engine.context import SimulationContext
from tidegate.simulation.engine.weights import check_refusal
from tidegate.simulation.faults.scenario import Scenario
from tidegate.transport.messages import PAUSE_MODES
from tidegate.transport.sleep_messages import MEMORY_TAGS, SleepLevel

PUBLISH_TIMEOUT_MAX_S = 0.3
"""Longest time after which the trainer cancels a publish, in seconds."""

QUICK_REQUESTS = 32
"""Requests for one batch after which the trainer waits twice as long before each next one. Else
nine of ten such requests would be made while nothing happens but that an episode hangs."""

OUT_OF_ORDER_WAIT_S = 0.5
"""Longest time that the trainer waits for a batch that it trains on before an older one, in
seconds."""

ROLLBACK_DELAY_MAX_S = 1.0
"""Longest time after which the trainer notices that a version is bad, in seconds."""

ROLLBACK_TRIES_MAX = 20
"""Number of failed rollbacks in a row after which the simulation reports a bug."""

DISCARD_REASONS = ("too_long", "too_stale")
"""Reasons that the trainer reports for rows that it discards."""

SLEEP_SHARE = 0.5
"""Share of pauses for which engines are put to sleep."""

PARTIAL_WAKE_SHARE = 0.5
"""Share of sleeps after which only the weights are woken before a publish, the rest after it."""


class _NoBatch(Enum):
    """Outcome of a request that brought no batch."""

    PUBLISH_FIRST = auto()
    NO_MORE = auto()


_Outcome = ev.HandOver | _NoBatch


async def receive(
    scheduler: Scheduler, batch_poll_delay_s: float, chance: random.Random
) -> ev.HandOver | None:
    """Return the next batch as :meth:`Scheduler.next_batch` does, on a loop that is slow to check.

    ``batch_poll_delay_s``: mean delay until the loop checks for an offered batch.
    """
    if not batch_poll_delay_s:
        return await scheduler.trainer.next_batch()
    request = BatchRequest()
    try:
        while await scheduler.trainer.batch_requests.wait(request):
            await asyncio.sleep(chance.expovariate(1 / batch_poll_delay_s))
            batch = request.batch
            if batch is not None and request.take(batch):
                scheduler.trainer.batch_requests.acknowledge(request)
                return batch
    except BaseException:
        scheduler.trainer.batch_requests.close(request)
        raise
    return None


class SimulatedTrainer:
    """Trainer that follows a scenario."""

    def __init__(
        self,
        scenario: Scenario,
        context: SimulationContext,
        episode: Callable[[Episode, int], Awaitable[float]],
        begin_training: Callable[[ev.HandOver], None],
    ) -> None:
        """Create the trainer; ``begin_training`` is called with each batch before its step."""
        self._scenario = scenario
        self._context = context
        self._episode = episode
        self._chance = scenario.chance("trainer")
        self._begin_training = begin_training
        self._discard_chance = scenario.chance("left out")
        self._batch_poll_chance = scenario.chance("looks")
        self.activity = "starting"
        """Current activity of the trainer, as text for reports of failures."""
        self.taken_tasks: set[int] = set()
        """Tasks that the run has taken from the trainer's iterators."""
        self.received_groups: list[int] = []
        """Ids of the received groups, in the order of arrival."""
        self._batches = 0
        """Number of batches trained since the last offer of tasks."""
        self._unpublished = 0
        """Number of batches trained since the last publish."""
        self._unnamed: list[int] = []
        """Batches that the trainer's weights were made from and that no publish has named."""
        self._sync_tasks = iter(self._remaining_tasks())
        self._is_asleep = False
        """Whether engines were put to sleep and are not completely awake again."""
        self._requested: asyncio.Queue[_Outcome] = asyncio.Queue()
        """Outcomes of requests made ahead, in order."""
        self._postponed: deque[_Outcome] = deque()
        """Outcomes that were taken from the queue early, in order."""
        self._lookahead_slots = asyncio.Semaphore(scenario.look_ahead)
        """Number of batches that may still be requested ahead."""
        self._may_request = asyncio.Event()
        """Set unless a request ahead was refused; set again by a publish or an offer of tasks."""
        self._offered_iterators = 0
        """Number of task iterators that the trainer has given the run."""
        self._exhausted_iterators = 0
        """Value of ``_offered_iterators`` when the run last answered that it has no more
        batches."""
        self._has_lost = False
        """Whether a batch was lost since the run last answered that it has no more batches. The
        batch's tasks are started again, so there may be more."""
        self._is_repeated_refusal = False
        """Whether a request was refused before a publish, and has been made once more since."""
        self._async_tasks: list[AsyncIterator[int]] = []
        """All async iterators, kept so that their garbage collection can't change the run."""

    async def run(self, scheduler: Scheduler) -> None:
        """Train until there are no more tasks."""
        scenario = self._scenario
        self.activity = "waiting for engines"
        await scheduler.wait_for_engines(1)
        async with asyncio.TaskGroup() as background:
            self._offer(scheduler)
            lookahead = None
            if scenario.look_ahead:
                self._context.coverage.add(CoverageMark.LOOKED_AHEAD)
                lookahead = background.create_task(self._look_ahead(scheduler), name="look-ahead")
            while await self._has_more(outcome := await self._next_outcome(scheduler), scheduler):
                if isinstance(outcome, ev.HandOver):
                    await self._train(scheduler, outcome)
                if self._must_publish(outcome):
                    self._unpublished = 0
                    await self._publish_and_evaluate(scheduler, background)
                self._may_request.set()
                if self._batches == scenario.batches_per_offer:
                    self._context.coverage.add(CoverageMark.OFFERED_AGAIN)
                    self._batches = 0
                    self._offer(scheduler)
            if lookahead is not None:
                lookahead.cancel()

    async def _train(self, scheduler: Scheduler, batch: ev.HandOver) -> None:
        """Train on a batch, unless it was lost or all its rows were discarded."""
        if batch.number not in [each.number for each in scheduler.core.handed.held]:
            self._has_lost = True
            return
        self._begin_training(batch)
        self.activity = "training"
        self._batches += 1
        self._unpublished += 1
        self._unnamed.append(batch.number)
        await self._pause_and_train(scheduler)

    async def _has_more(self, outcome: _Outcome, scheduler: Scheduler) -> bool:
        """Return whether batches may follow; offer another iterator if tasks are left."""
        if outcome is not _NoBatch.NO_MORE:
            return True
        if self._exhausted_iterators < self._offered_iterators:
            return True  # the request was made before the newest offer
        # A request ahead may be answered before a batch in training is lost. Then no publish may
        # follow that would name the batch and be refused.
        held = [batch.number for batch in scheduler.core.handed.held]
        if not set(held).issuperset(self._unnamed):
            self._unnamed = [number for number in self._unnamed if number in held]
            self._has_lost = True
        if self._has_lost:
            self._has_lost = False
            return True
        if len(self.taken_tasks) == self._scenario.tasks:
            return False
        self._context.coverage.add(CoverageMark.SHORT_BATCH)
        self._sync_tasks = iter(self._remaining_tasks())
        self._offer(scheduler)
        return True

    def _offer(self, scheduler: Scheduler) -> None:
        self._offered_iterators += 1
        scheduler.offer(self._task_iterator(), self._episode)

    def _must_publish(self, outcome: _Outcome) -> bool:
        """Return whether to publish now.

        With a look-ahead, a refusal (``PUBLISH_FIRST``) may be older than the newest publish. If
        nothing was trained since that publish, the first refusal causes no publish: the batch is
        requested once more. A second refusal causes a publish.
        """
        if (
            outcome is _NoBatch.PUBLISH_FIRST
            and self._scenario.look_ahead
            and not self._unpublished
        ):
            self._is_repeated_refusal = not self._is_repeated_refusal
            return not self._is_repeated_refusal
        if isinstance(outcome, ev.HandOver):
            self._is_repeated_refusal = False
        is_due = self._unpublished >= self._scenario.batches_per_publish
        return outcome is _NoBatch.PUBLISH_FIRST or is_due

    async def _next_outcome(self, scheduler: Scheduler) -> _Outcome:
        if not self._scenario.look_ahead:
            return await self._next_batch(scheduler)
        self.activity = "waiting for a batch requested ahead"
        self._may_request.set()
        outcome = await self._next_requested()
        if isinstance(outcome, ev.HandOver):
            self._lookahead_slots.release()
        return outcome

    async def _next_requested(self) -> _Outcome:
        """Return the outcome of the oldest request ahead; sometimes of the next one first."""
        if self._postponed:
            return self._postponed.popleft()
        first = await self._requested.get()
        is_chosen = self._chance.random() < self._scenario.out_of_order
        if isinstance(first, _NoBatch) or not is_chosen or self._scenario.look_ahead < 2:
            return first
        try:
            async with asyncio.timeout(OUT_OF_ORDER_WAIT_S):
                second = await self._requested.get()
        except TimeoutError:
            return first
        if isinstance(second, _NoBatch):
            self._postponed.append(second)
            return first
        self._context.coverage.add(CoverageMark.OUT_OF_ORDER)
        self._postponed.append(first)
        return second

    async def _look_ahead(self, scheduler: Scheduler) -> None:
        """Request batches until cancelled. At most ``look_ahead`` received batches wait for their
        train step."""
        while True:
            await self._lookahead_slots.acquire()
            while isinstance(outcome := await self._next_batch(scheduler), _NoBatch):
                self._may_request.clear()
                self._requested.put_nowait(outcome)
                await self._may_request.wait()
            self._requested.put_nowait(outcome)

    async def _pause_and_train(self, scheduler: Scheduler) -> None:
        """Train, with engines paused or asleep for a share of the steps."""
        pauses = self._chance.random() < self._scenario.pausing
        if pauses:
            mode = self._chance.choice(PAUSE_MODES)
            self._is_asleep = self._chance.random() < SLEEP_SHARE
            self.activity = "pausing engines or putting them to sleep"
            if self._is_asleep:
                self._context.coverage.add(CoverageMark.SLEPT)
                tags = self._chance.choice((MEMORY_TAGS, MEMORY_TAGS, MEMORY_TAGS[:1]))
                level: SleepLevel = self._chance.choice((1, 2))
                try:
                    await scheduler.control.sleep(level, tags, mode)
                except ConfigError as error:  # only parts of a set were published so far
                    if "sleep at level 1" not in str(error):
                        raise
                    await scheduler.control.sleep(1, tags, mode)
            else:
                self._context.coverage.add(CoverageMark.PAUSED)
                await scheduler.control.pause(mode)
        self.activity = "training"
        await asyncio.sleep(self._scenario.train_s)
        if self._is_asleep:
            await self._wake_or_publish_first(scheduler)
        elif pauses:
            self.activity = "resuming engines"
            await scheduler.control.pause(None)

    async def _wake_or_publish_first(self, scheduler: Scheduler) -> None:
        """Wake the engines, or only their weights before the next publish."""
        if self._chance.random() < PARTIAL_WAKE_SHARE:
            self.activity = "waking the engines' weights"
            await scheduler.control.wake(["weights"])
            self._unpublished = self._scenario.batches_per_publish
        else:
            await self._wake(scheduler)

    async def _wake(self, scheduler: Scheduler) -> None:
        """Wake the engines; publish first if an engine has discarded its weights."""
        while self._is_asleep:
            self.activity = "waking engines"
            try:
                await scheduler.control.wake(None)
                self._is_asleep = False
            except SleepFailed:
                await self._publish(scheduler)

    async def _next_batch(self, scheduler: Scheduler) -> _Outcome:
        if not self._scenario.look_ahead:
            self.activity = "waiting for a batch"
        timeout_s, timeouts = self._scenario.batch_timeout_s, 0
        while True:
            try:
                async with asyncio.timeout(timeout_s):
                    batch = await receive(
                        scheduler, self._scenario.batch_poll_delay_s, self._batch_poll_chance
                    )
            except PublishNeeded:
                self._context.coverage.add(CoverageMark.PUBLISH_NEEDED)
                return _NoBatch.PUBLISH_FIRST
            except TimeoutError:
                self._context.coverage.add(CoverageMark.STOPPED_WAITING)
                timeouts += 1
                if timeout_s is not None and timeouts > QUICK_REQUESTS:
                    timeout_s *= 2
                continue
            except (EngineLagging, WeightsRefused, PublishDropped) as error:
                check_refusal(str(error))
                self._context.coverage.add(CoverageMark.FAILED_LATER)
                continue
            if batch is None:
                self._exhausted_iterators = self._offered_iterators
                return _NoBatch.NO_MORE
            self.received_groups += [group.group_id for group in batch.groups]
            await self._discard_rows(scheduler, batch)
            return batch

    async def _discard_rows(self, scheduler: Scheduler, batch: ev.HandOver) -> None:
        """Discard some rows of a batch, as a trainer with its own limits does."""
        rows = range(sum(len(group.kept) for group in batch.groups))
        chance, share = self._discard_chance, self._scenario.discarded_rows
        if share and (discarded := [row for row in rows if chance.random() < share]):
            self._context.coverage.add(CoverageMark.ROWS_DISCARDED)
            reason = chance.choice(DISCARD_REASONS)
            await discarded_rows(batch.number, discarded, reason).report(scheduler.trainer)

    # ------------------------------------------------------------ weights

    async def _publish_and_evaluate(
        self, scheduler: Scheduler, background: asyncio.TaskGroup
    ) -> None:
        await self._publish(scheduler)
        chance, scenario, coverage = self._chance, self._scenario, self._context.coverage
        if chance.random() < scenario.publishing_twice:
            coverage.add(CoverageMark.PUBLISHED_TWICE)
            await self._publish(scheduler)
        if chance.random() < scenario.publishing_partly:
            coverage.add(CoverageMark.PUBLISHED_PARTLY)
            await self._publish(scheduler, is_part=True)
        if chance.random() < scenario.rolling_back and not self._is_asleep:
            await self._roll_back(scheduler)
        await self._wake(scheduler)
        if not self._scenario.evaluation_tasks:
            return
        if self._scenario.evaluates_beside:
            self._context.coverage.add(CoverageMark.EVALUATED_BESIDE)
            background.create_task(self._evaluate(scheduler), name="evaluation")
        else:
            self.activity = "evaluating"
            await self._evaluate(scheduler)

    async def _publish(self, scheduler: Scheduler, *, is_part: bool = False) -> None:
        """Publish as :meth:`Rollouts.publish` does; record a failure and continue."""
        is_cancelled = self._chance.random() < self._scenario.cancelled_publishes
        timeout_s = PUBLISH_TIMEOUT_MAX_S * self._chance.random() ** 2 if is_cancelled else None
        try:
            async with asyncio.timeout(timeout_s):
                while not await self._try_to_publish(scheduler, is_part=is_part):
                    pass
        except TimeoutError:
            self._context.coverage.add(CoverageMark.CANCELLED_PUBLISH)

    async def _try_to_publish(
        self, scheduler: Scheduler, *, is_part: bool = False, first_bad: int | None = None
    ) -> bool:
        """Publish once; return False if a batch was lost while the trainer trained on it, or if a
        rollback has failed. The trainer then restores its weights from before that batch."""
        names = self._scenario.must_name_batches
        batches: Sequence[int] | None = tuple(self._unnamed) if names else None
        if is_part or first_bad is not None:
            batches = ()
        coverage = self._context.coverage
        try:
            await self._write_and_publish(scheduler, batches, is_part=is_part, first_bad=first_bad)
        except BatchNotHeld as error:
            self._unnamed.remove(error.batch)
            self._has_lost = True
            return False
        except EngineLagging:
            coverage.add(CoverageMark.LAGGED)
        except WeightsRefused as error:
            check_refusal(str(error))
            coverage.add(CoverageMark.REFUSED)
        except PublishDropped:
            coverage.add(CoverageMark.FAILED_LATER)
        else:
            return True
        return first_bad is None

    async def _roll_back(self, scheduler: Scheduler) -> None:
        """Roll back from the newest version; try again until engines serve other weights, because
        they stay paused until then."""
        first_bad = scheduler.core.trainer_version
        if not first_bad:
            return
        self._context.coverage.add(CoverageMark.ROLLED_BACK)
        self.activity = "about to notice that its weights are bad"
        await asyncio.sleep(ROLLBACK_DELAY_MAX_S * self._chance.random())
        for _ in range(ROLLBACK_TRIES_MAX):
            if await self._try_to_publish(scheduler, first_bad=first_bad):
                return
        raise AssertionError(f"{ROLLBACK_TRIES_MAX} rollbacks failed in a row")

    async def _write_and_publish(
        self,
        scheduler: Scheduler,
        batches: Sequence[int] | None,
        *,
        is_part: bool,
        first_bad: int | None,
    ) -> None:
        """Name the batches, write the weights and publish them, as :meth:`WeightPublish.run`."""
        self.activity = "waiting until weights can be written"
        control, buffer = scheduler.control, self._context.buffer
        has_deltas = self._scenario.patches and not is_part
        batches = scheduler.trainer.batches_of_publish(batches)
        try:
            reserved = await control.reserve(
                is_part=is_part, has_deltas=has_deltas, first_bad=first_bad
            )
        except BaseException:
            with contextlib.suppress(BatchNotHeld):
                self._name(scheduler, batches)
            raise
        version, base_version = reserved.version, reserved.delta_base_version
        try:
            self._name(scheduler, batches)
            update = buffer.begin(version, keep=reserved.keep, patches_version=base_version)
            await asyncio.sleep(self._scenario.write_s)
        except BaseException:
            control.release()
            raise
        buffer.end(update)
        self.activity = f"publishing v{version}"
        change: Change = replace_all
        if is_part:
            buffer.forget()  # the next publish is a whole one
            change = replace_some
        elif base_version is not None and buffer.is_patch(update):
            self._context.coverage.add(CoverageMark.PATCHED)
            change = partial(patch_elements, base_version)
        wait: PublishWait = self._scenario.publish_wait if first_bad is None else "live"
        await control.publish(version, [update], wait, change)

    def _name(self, scheduler: Scheduler, batches: Sequence[int]) -> None:
        scheduler.trainer.name_batches(batches)
        self._unnamed = [number for number in self._unnamed if number not in batches]

    async def _evaluate(self, scheduler: Scheduler) -> None:
        tasks = [-1 - task for task in range(self._scenario.evaluation_tasks)]
        version = scheduler.core.trainer_version if self._scenario.pins_evaluations else None
        try:
            rollouts = await scheduler.evaluate(tasks, self._episode, version)
        except VersionUnavailable:
            return  # one engine, or a newer version was published meanwhile
        for rollout in rollouts:
            if version is not None:
                turns = [turn for row in rollout.rows for turn in row.turns]
                versions = {run.version for turn in turns for run in turn.runs}
                assert versions <= {version}, f"pinned to v{version}, sampled by {versions}"
                if versions:
                    self._context.coverage.add(CoverageMark.EVALUATED_PINNED)
            self._context.frame_log.record_fact((rollout.reward, rollout.token_ids.tobytes()))

    # ------------------------------------------------------------ tasks

    def _task_iterator(self) -> Tasks:
        """Return an iterator of remaining tasks: the same sync iterator, or a new async one."""
        if not self._scenario.are_tasks_async:
            return self._sync_tasks
        self._async_tasks.append(self._remaining_tasks_slowly())
        return self._async_tasks[-1]

    def _remaining_tasks(self) -> Iterator[int]:
        end = self._iterator_end()
        while len(self.taken_tasks) < end:
            task = len(self.taken_tasks)
            self.taken_tasks.add(task)
            yield task

    def _iterator_end(self) -> int:
        """Return the number of taken tasks at which an iterator that begins now ends."""
        tasks_max = self._scenario.tasks_per_offer
        tasks = self._scenario.tasks
        return tasks if tasks_max is None else min(tasks, len(self.taken_tasks) + tasks_max)

    async def _remaining_tasks_slowly(self) -> AsyncIterator[int]:
        end = self._iterator_end()
        while len(self.taken_tasks) < end:
            await asyncio.sleep(0.01)
            for task in itertools.islice(self._remaining_tasks(), 1):
                yield task
