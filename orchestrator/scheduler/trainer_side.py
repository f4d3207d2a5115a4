"""Tasks in and batches out for one trainer: of the run's weights, or of one adapter.

The scheduler has one :class:`TrainerSide` for each policy that the run trains, as it has one
:class:`EngineSide` for its engines. It reads the trainer's tasks, queues the trainer's requests for
batches and parks the trainer's episodes; the policy's :class:`Core` decides.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tidegate.errors import PublishNeeded, TidegateError
from tidegate.orchestrator.batches.ages import PublishTimes
from tidegate.orchestrator.batches.tasks import Tasks
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.core import Core
from tidegate.orchestrator.core.rollout import Rollout
from tidegate.orchestrator.episodes.parking import Parking
from tidegate.orchestrator.episodes.runner import EpisodeFunction
from tidegate.orchestrator.fleet.pending_futures import (
    BatchRequest,
    PendingFutures,
    fail,
    resolve,
)
from tidegate.orchestrator.scheduler.task_feed import TaskIterators
from tidegate.orchestrator.telemetry.recorder import Recorder

Handle = Callable[[ev.Event, EpisodeFunction | None], None]
"""Feeds one event to the run's core; the function is that of an episode which the event starts."""


class BatchRequestQueue:
    """Hands batches to the trainer's requests, one after the other, on the run's event loop.

    A handed-over batch is an offer at first: the trainer's thread takes it (see
    :class:`BatchRequest`), and acknowledges it once nothing can interrupt the trainer's call any
    more. Until then the hand-over can be undone: a batch that the trainer does not take returns to
    the core, which selects the next batch again at the version current then. One batch is on offer
    at a time, so the batch that is undone is always the newest.

    While it is undecided which version the trainer has made, no batch is on offer, because its
    staleness would be counted from the version before.
    """

    def __init__(
        self,
        requests: deque[BatchRequest],
        handle: Callable[[ev.Event], None],
        when_safe: Callable[[Callable[[], None]], None],
        take_failure: Callable[[], TidegateError | None],
    ) -> None:
        """``requests``: an empty queue. ``take_failure`` returns the error to raise before the
        trainer gets a batch, if any."""
        self._requests = requests
        """Requests without an offer, oldest first."""
        self._handle = handle
        self._when_safe = when_safe
        self._take_failure = take_failure
        self._offer: tuple[BatchRequest, ev.HandOver] | None = None
        """Batch that the core has handed over and no trainer has acknowledged, with its request."""
        self._is_request_sent = False
        """Whether the core has been sent the oldest request."""
        self._is_held = False

    async def wait(self, request: BatchRequest) -> bool:
        """Wait until a batch is on offer to this request; False if there will be none.

        If this is cancelled, the request is closed, and an offer to it is undone.

        Raises:
            TidegateError: a publish failed after its call had returned, or no batch can come.
        """
        if request.is_offered:
            return True
        failure = self._take_failure()
        if failure is not None:
            raise failure
        request.future = asyncio.get_running_loop().create_future()
        if request not in self._requests:
            self._requests.append(request)
            self._send_request()
        try:
            return await request.future
        except asyncio.CancelledError:
            self.close(request)
            raise

    def acknowledge(self, request: BatchRequest) -> None:
        """Confirm that the trainer has the batch that was offered to this request."""
        if self._offer is not None and self._offer[0] is request:
            self._offer = None
            self._send_request()

    def close(self, request: BatchRequest) -> None:
        """End a request without a batch, and undo an offer to it. Harmless if repeated."""
        request.close()
        if request in self._requests:
            if self._requests[0] is request:
                self._cancel_request(is_held=False)
            self._requests.remove(request)
        elif self._offer is not None and self._offer[0] is request:
            self._undo_offer()
        self._send_request()

    def return_batch(self, number: int, *, newest: int) -> bool:
        """Return an acknowledged batch untrained; False if it isn't the newest or requests wait."""
        if self._offer is not None or self._requests or number != newest:
            return False
        self._handle(ev.BatchReturned(number))
        return True

    def hold(self, is_held: bool) -> None:
        """Withdraw the offer and hold all requests; or send the core the oldest request again."""
        if not is_held and self._requests and (failure := self._take_failure()) is not None:
            self._cancel_request(is_held=self._is_held)
            fail(self._requests.popleft().future, failure)
        if is_held and not self._is_held:
            self._is_held = True
            self._cancel_request(is_held=True)
            if self._offer is not None and self._offer[0].withdraw():
                self._requests.appendleft(self._offer[0])
                self._undo_offer()
        elif not is_held:
            self._is_held = False
            self._send_request()

    def hand_over(self, batch: ev.HandOver) -> None:
        """Offer a batch to the oldest request, once the journal has committed the hand-over."""
        self._is_request_sent = False
        self._offer = (self._requests.popleft(), batch)
        self._when_safe(partial(self._deliver, self._offer))

    def end(self) -> None:
        """End the oldest request without a batch: there are no more tasks."""
        self._is_request_sent = False
        resolve(self._requests.popleft().future, False)
        self._send_request()

    def refuse(self, error: TidegateError) -> None:
        """Fail the oldest request: no batch can fill."""
        self._is_request_sent = False
        fail(self._requests.popleft().future, error)
        self._send_request()

    # ------------------------------------------------------------ the core's side

    def _send_request(self) -> None:
        if self._requests and not (self._is_request_sent or self._is_held or self._offer):
            self._is_request_sent = True
            self._handle(ev.BatchRequested())

    def _cancel_request(self, *, is_held: bool) -> None:
        if self._is_request_sent:
            self._is_request_sent = False
            self._handle(ev.BatchRequestCancelled(is_held))

    def _undo_offer(self) -> None:
        assert self._offer is not None
        (_, batch), self._offer = self._offer, None
        self._handle(ev.BatchReturned(batch.number, is_held=self._is_held))

    def _deliver(self, offer: tuple[BatchRequest, ev.HandOver]) -> None:
        """Offer the batch to the trainer, unless the offer was undone; called once the journal has
        committed the hand-over."""
        if self._offer is offer:
            request, batch = offer
            request.offer(batch)
            resolve(request.future, True)


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
