"""A trainer's requests for batches: carries out what the core's :class:`HandOvers` decides.

:class:`TrainerSide` has one :class:`BatchRequests`. A handed-over batch is an offer at first: the
trainer's thread takes it, and acknowledges it once nothing can interrupt the trainer's call any
more. Until then the hand-over can be undone: a batch that the trainer does not take returns to the
core, which selects the next batch again, for the version that is current by then.
"""

import asyncio
import itertools
import threading
from collections.abc import Callable
from functools import partial

from tidegate.errors import TidegateError
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.hand_over import HandOvers
from tidegate.orchestrator.fleet.pending_futures import fail, resolve


class BatchRequest:
    """One call for the next batch, shared by the run's loop and the caller's thread.

    An offered batch is either taken by the caller or withdrawn by the run. So no batch is lost if
    the caller stops waiting before its loop has received the offer, and no batch is taken that a
    publish has made older meanwhile.
    """

    def __init__(self) -> None:
        self.number = 0
        """Number of the request in its run, from 1; 0 until the run has it."""
        self.future: asyncio.Future[bool] | None = None
        """Future of the run's loop: True once a batch is on offer, False if there will be none."""
        self._lock = threading.Lock()
        self._batch: ev.HandOver | None = None
        self._is_taken = False
        self._is_closed = False

    @property
    def is_offered(self) -> bool:
        """Whether a batch is on offer, or was taken."""
        return self._batch is not None

    @property
    def batch(self) -> ev.HandOver | None:
        """Batch on offer; it may be withdrawn until it is taken."""
        return self._batch

    def take(self, batch: ev.HandOver) -> bool:
        """Take this batch, on the caller's thread; False if it is no longer on offer."""
        with self._lock:
            self._is_taken = self._batch is batch and not self._is_closed
            return self._is_taken

    def offer(self, batch: ev.HandOver) -> None:
        """Put a batch on offer, on the run's loop."""
        with self._lock:
            self._batch = batch

    def withdraw(self) -> bool:
        """Withdraw the offer, on the run's loop; False if the caller has taken it."""
        with self._lock:
            if not self._is_taken:
                self._batch = None
            return not self._is_taken

    def close(self) -> None:
        """End the call without a batch."""
        with self._lock:
            self._is_closed = True
        if self.future is not None:
            self.future.cancel()


class BatchRequests:
    """All requests of one trainer, on the run's event loop."""

    def __init__(
        self,
        hand_overs: HandOvers,
        handle: Callable[[ev.Event], None],
        pending: "set[asyncio.Future[bool]]",
        when_safe: Callable[[Callable[[], None]], None],
        take_failure: Callable[[], TidegateError | None],
    ) -> None:
        """``take_failure`` returns the error to raise before the trainer gets a batch, if any."""
        self._hand_overs = hand_overs
        self._handle = handle
        self._pending = pending
        self._when_safe = when_safe
        self._take_failure = take_failure
        self._numbers = itertools.count(1)
        self._open: dict[int, BatchRequest] = {}
        """Requests that wait, or whose offer is not acknowledged, by number."""
        self._newest: ev.HandOver | None = None
        """Batch that the core has offered last."""

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
        self._pending.add(request.future)
        request.future.add_done_callback(self._pending.discard)
        if request.number not in self._open:
            request.number = next(self._numbers)
            self._open[request.number] = request
            self._handle(ev.BatchRequested(request.number))
        try:
            return await request.future
        except asyncio.CancelledError:
            self.close(request)
            raise

    def acknowledge(self, request: BatchRequest) -> None:
        """Confirm that the trainer has the batch that was offered to this request."""
        if self._open.pop(request.number, None) is not None:
            self._handle(ev.BatchTaken(request.number))

    def close(self, request: BatchRequest) -> None:
        """End a request without a batch, and undo an offer to it. Harmless if repeated."""
        request.close()
        if self._open.pop(request.number, None) is None:
            return
        offer = self._hand_overs.offer
        if offer is not None and offer[0] == request.number:
            self._handle(ev.BatchReturned(offer[1]))
        else:
            self._handle(ev.BatchRequestCancelled(request.number))

    def return_batch(self, number: int) -> bool:
        """Return an acknowledged batch untrained, see :meth:`HandOvers.can_return`."""
        if not self._hand_overs.can_return(number):
            return False
        self._handle(ev.BatchReturned(number))
        return True

    def pause(self, is_paused: bool) -> None:
        """Withdraw the offer and offer nothing more; or offer batches again."""
        hand_overs = self._hand_overs
        if not is_paused and hand_overs.requests and (failure := self._take_failure()) is not None:
            request = self._open.pop(hand_overs.requests[0].number)
            self._handle(ev.BatchRequestCancelled(request.number))
            fail(request.future, failure)
        if is_paused == hand_overs.is_paused:
            return
        self._handle(ev.HandOverPaused(is_paused))
        if is_paused and (offer := self._hand_overs.offer) is not None:
            number, batch = offer
            if number in self._open and self._open[number].withdraw():
                self._handle(ev.BatchReturned(batch, number))

    def end_all(self) -> None:
        """End all requests without a batch, for good: no event of theirs follows."""
        for request in self._open.values():
            resolve(request.future, False)
        self._open.clear()
        self._newest = None

    # ------------------------------------------------------------ the core's commands

    def hand_over(self, batch: ev.HandOver) -> None:
        """Offer a batch to its request, once the journal has committed the hand-over."""
        self._newest = batch
        self._when_safe(partial(self._deliver, batch))

    def end(self, request: int) -> None:
        """End a request without a batch: there are no more tasks."""
        resolve(self._open.pop(request).future, False)

    def refuse(self, request: int, error: TidegateError) -> None:
        """Fail a request: no batch can fill."""
        fail(self._open.pop(request).future, error)

    def _deliver(self, batch: ev.HandOver) -> None:
        """Offer the batch to the trainer, unless the hand-over was undone meanwhile."""
        is_current = self._hand_overs.offer == (batch.request, batch.number)
        if self._newest is batch and is_current:
            request = self._open[batch.request]
            request.offer(batch)
            resolve(request.future, True)
