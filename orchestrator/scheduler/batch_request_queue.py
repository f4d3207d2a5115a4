"""Queue of the trainer's requests for batches, on the run's event loop.

The scheduler adds requests and passes on the core's hand-overs. A handed-over batch is an offer at
first: the trainer's thread takes it (see :class:`BatchRequest`), and acknowledges it once nothing
can interrupt the trainer's call any more. Until then the hand-over can be undone: a batch that the
trainer does not take returns to the core, which selects the next batch again at the version current
then. One batch is on offer at a time, so the batch that is undone is always the newest. Built on
:class:`BatchRequest` of ``fleet/pending_futures.py``.

While it is undecided which version the trainer has made, no batch is on offer, because its
staleness would be counted from the version before.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial

from tidegate.errors import TidegateError
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.fleet.pending_futures import BatchRequest, fail, resolve


class BatchRequestQueue:
    """Hands batches to the trainer's requests, one after the other."""

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
