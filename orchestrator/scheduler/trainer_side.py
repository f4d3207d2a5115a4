"""Tasks in and batches out for one trainer: of the run's weights, or of one adapter.

The scheduler has one :class:`TrainerSide` for each policy that the run trains, as it has one
:class:`EngineSide` for its engines. It reads the trainer's tasks, queues the trainer's requests for
batches and parks the trainer's episodes; the policy's :class:`Core` decides.
"""

import asyncio
from collections import deque
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
from tidegate.orchestrator.fleet.pending_futures import BatchRequest, PendingFutures, resolve
from tidegate.orchestrator.scheduler.batch_request_queue import BatchRequestQueue
from tidegate.orchestrator.scheduler.task_feed import TaskIterators
from tidegate.orchestrator.telemetry.recorder import Recorder

Handle = Callable[[ev.Event, EpisodeFunction | None], None]
"""Feeds one event to the run's core; the function is that of an episode which the event starts."""


class TrainerSide:
    """One trainer's tasks, batch requests and parked episodes."""

    def __init__(
        self,
        core: Callable[[], Core],
        handle: Handle,
        pending: PendingFutures,
        when_safe: Callable[[Callable[[], None]], None],
        take_failure: Callable[[], TidegateError | None],
        *,
        adapter: str = "",
        is_journalled: Callable[[], bool],
        now_s: Callable[[], float],
    ) -> None:
        """``adapter``: the trained adapter; empty: the run's weights. ``take_failure``: as of
        :class:`BatchRequestQueue`."""
        self._core = core
        self._adapter = adapter
        self._handle_event = handle
        self._pending = pending
        self._requests: deque[BatchRequest] = deque()
        pending.batches.append(self._requests)
        self._when_safe = when_safe
        self._is_journalled = is_journalled
        self.recorder: Recorder | None = None
        """Recorder of the trainer's rollouts; None if they are not recorded."""
        self.has_capacity = asyncio.Event()
        self.published = PublishTimes(self.core.trainer_version)
        self.batch_requests = BatchRequestQueue(
            self._requests, self.handle, when_safe, take_failure
        )
        self.tasks = TaskIterators(
            core, self.handle if adapter else handle, has_capacity=self.has_capacity, now_s=now_s
        )
        self.parking = Parking(
            live_version=lambda: self.core.versions.live_version,
            is_starved=lambda: self.core.batch_requests > 0,
        )

    @property
    def core(self) -> Core:
        """The core of what is trained."""
        return self._core()

    def handle(self, event: ev.Event, episode: EpisodeFunction | None = None) -> None:
        """Feed the core an event of this trainer."""
        if self._adapter:
            event = ev.ForAdapter(self._adapter, event)
        self._handle_event(event, episode)

    def wake_tasks(self) -> None:
        """Take more tasks if the core has capacity now."""
        if not self.has_capacity.is_set() and self._core().admissible_groups:
            self.has_capacity.set()

    def close(self) -> None:
        """Stop taking tasks, and end the trainer's requests without a batch."""
        self.tasks.close()
        self._pending.batches.remove(self._requests)
        for request in self._requests:
            resolve(request.future, False)

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

    def return_batch(self, number: int) -> bool:
        """As :meth:`BatchRequestQueue.return_batch`."""
        return self.batch_requests.return_batch(number, newest=self.core.handed.count)

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
        self, command: ev.HandOver | ev.EndBatches | ev.RefuseBatch | ev.RequeueTask
    ) -> None:
        """Carry out a command that is about this trainer."""
        match command:
            case ev.HandOver():
                self.batch_requests.hand_over(command)
            case ev.EndBatches():
                self.batch_requests.end()
            case ev.RequeueTask(task=task, key=key):
                self.tasks.put_back(task, key)
            case ev.RefuseBatch(unpublished_groups=groups):
                limit = self.core.policy.outstanding_groups_max
                self.batch_requests.refuse(
                    PublishNeeded(unpublished_groups=groups, outstanding_groups_max=limit)
                )
