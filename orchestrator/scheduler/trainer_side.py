"""Tasks and batches of one trainer, which trains the run's weights or one adapter.

The scheduler has one :class:`TrainerSide` for each policy that the run trains, as it has one
:class:`EngineSide` for its engines. It reads the trainer's tasks, queues the trainer's requests for
batches and parks the trainer's episodes; the policy's :class:`Core` decides.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from tidegate.errors import PublishNeeded, TidegateError
from tidegate.orchestrator.batches.ages import PublishTimes
from tidegate.orchestrator.batches.tasks import Tasks
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.core import Core
from tidegate.orchestrator.core.rollout import Rollout
from tidegate.orchestrator.episodes.parking import Parking
from tidegate.orchestrator.episodes.runner import EpisodeFunction
from tidegate.orchestrator.fleet.pending_futures import PendingFutures
from tidegate.orchestrator.scheduler.batch_requests import BatchRequest, BatchRequests
from tidegate.orchestrator.scheduler.task_feed import TaskIterators
from tidegate.orchestrator.telemetry.recorder import Recorder

UNNAMED = (
    ". No publish named it in time: name what a version was made from, "
    "publish(…, batches=[batch]), which a partial publish must, or hold fewer batches"
)
"""Advice beside a held batch that has become stale, because a trainer that never names its batches
gets their tasks again for ever."""

log = logging.getLogger("tidegate")

Handle = Callable[[ev.Event, EpisodeFunction | None], None]
"""Feeds one event to the run's core, with the function of an episode that the event starts."""


class TrainerSide:
    """One trainer's tasks, batch requests and parked episodes."""

    def __init__(
        self,
        core: Core,
        handle: Handle,
        pending: PendingFutures,
        when_safe: Callable[[Callable[[], None]], None],
        take_failure: Callable[[], TidegateError | None],
        *,
        adapter: str = "",
        is_journalled: Callable[[], bool],
        now_s: Callable[[], float],
    ) -> None:
        """``core``: the core of what is trained. ``adapter``: the trained adapter; empty: the run's
        weights. ``take_failure``: as of :class:`BatchRequests`."""
        self.core = core
        self._adapter = adapter
        self._handle_event = handle
        self._pending = pending
        self._when_safe = when_safe
        self._is_journalled = is_journalled
        self._is_closed = False
        self.recorder: Recorder | None = None
        """Recorder of the trainer's rollouts; None if they are not recorded."""
        self.has_capacity = asyncio.Event()
        self.published = PublishTimes(core.trainer_version)
        self.batch_requests = BatchRequests(
            core.handed, self.handle, pending.batches, when_safe, take_failure
        )
        self.tasks = TaskIterators(
            core, self.handle if adapter else handle, has_capacity=self.has_capacity, now_s=now_s
        )
        self.parking = Parking(
            live_version=lambda: core.versions.live_version,
            is_starved=lambda: core.handed.wants_batch,
        )

    def handle(self, event: ev.Event, episode: EpisodeFunction | None = None) -> None:
        """Feed the core an event of this trainer, unless it was closed: the core and the journal
        do not know an adapter that is trained no longer."""
        if self._is_closed:
            return
        if self._adapter:
            event = ev.ForAdapter(self._adapter, event)
        self._handle_event(event, episode)

    def wake_tasks(self) -> None:
        """Take more tasks if the core has capacity now."""
        if not self.has_capacity.is_set() and self.core.admissible_groups:
            self.has_capacity.set()

    def close(self) -> None:
        """Stop taking tasks, and end the trainer's requests without a batch."""
        self._is_closed = True
        self.tasks.close()
        self.batch_requests.end_all()

    # ------------------------------------------------------------ the trainer's requests

    def offer(
        self,
        tasks: Tasks,
        episode: EpisodeFunction,
        group: asyncio.TaskGroup,
        agents: Sequence[str] = (),
    ) -> None:
        """Take tasks from this iterator from now on, each run by ``episode``, in a task of
        ``group``. ``agents``: trained adapters that episodes sample beside their own."""
        is_journalled = self._is_journalled()
        self.tasks.begin(tasks, episode, group, is_journalled=is_journalled, agents=agents)

    async def next_batch(self) -> ev.HandOver | None:
        """Return the next batch, or None when the tasks are used up; for callers on this loop."""
        request = BatchRequest()
        while await self.batch_requests.wait(request):
            batch = request.batch
            if batch is not None and request.take(batch):
                self.batch_requests.acknowledge(request)
                return batch
        return None

    def batches_of_publish(self, batches: Sequence[int] | None) -> Sequence[int]:
        """Return the batches that a publish was made from; None: those that the trainer holds.

        Raises:
            PublishUnclear: as :func:`batches_of_publish`.
            BatchNotHeld: as :meth:`HandOvers.refuse_untrainable`.
        """
        core = self.core
        if batches is None:
            batches = core.handed.batches_of_publish(core.policy.batches_per_version)
        core.handed.refuse_untrainable(batches)
        return batches

    def name_batches(self, batches: Sequence[int]) -> None:
        """Record that the weights about to be published were made from these batches.

        Raises:
            BatchNotHeld: as :meth:`HandOvers.refuse_untrainable`; nothing is recorded.
        """
        self.core.handed.refuse_untrainable(batches)
        if batches:
            self.handle(ev.BatchesTrained(tuple(batches)))

    async def mark_checkpointed(self, batches: int, offer: int) -> None:
        """Record that the trainer's checkpoint holds the result of ``batches`` batches; return once
        no crash can undo that."""
        self.handle(ev.BatchesCheckpointed(batches, offer))
        await self.wait_until_safe()

    async def wait_until_safe(self) -> None:
        """Return once no crash can undo the events handled so far."""
        safe: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._when_safe(lambda: None if safe.done() else safe.set_result(None))
        await safe

    def start_evaluation(
        self, tasks: list[Any], episode: EpisodeFunction, version: int | None
    ) -> list[asyncio.Future[Rollout]]:
        """Start one episode per task outside training; return futures of the rollouts.

        ``version``: the only one that may sample; None: any."""
        loop = asyncio.get_running_loop()
        futures = []
        for index, task in enumerate(tasks):
            future: asyncio.Future[Rollout] = loop.create_future()
            futures.append(future)
            self._pending.evaluations[self.core.groups.next_rollout_id] = future
            self.handle(ev.EvaluationRequested(task, index, version), episode)
        return futures

    # ------------------------------------------------------------ the core's commands

    def carry_out(
        self,
        command: ev.HandOver | ev.EndBatches | ev.RefuseBatch | ev.LoseBatch | ev.RequeueTask,
    ) -> None:
        """Carry out a command that is about this trainer."""
        match command:
            case ev.HandOver():
                self.batch_requests.hand_over(command)
            case ev.EndBatches(request=request):
                self.batch_requests.end(request)
            case ev.RequeueTask(task=task, key=key):
                self.tasks.put_back(task, key)
            case ev.LoseBatch(number=number, reason=reason):
                log.warning(
                    "batch=%d reason=%s: the trainer holds it and must not train on it any more; "
                    "its tasks are started again%s",
                    number,
                    reason,
                    UNNAMED if reason == "stale" else "",
                )
            case ev.RefuseBatch(request=request, unpublished_groups=groups, held=held):
                error = PublishNeeded(
                    unpublished_groups=groups,
                    outstanding_groups_max=self.core.policy.outstanding_groups_max,
                    held=held,
                )
                self.batch_requests.refuse(request, error)
