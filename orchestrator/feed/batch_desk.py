"""Who gets the next batch? Trainers wait here, in order; what one stopped waiting for is kept.

While it is undecided which version the trainer has made, the core isn't asked for a batch: what it
handed over would be counted as trained under the version before. It decides about no group.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial

from tidegate.errors import TidegateError
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.waiting import Waiting, fail, resolve

Batch = ev.HandOver | None
"""What a trainer gets; None when the tasks are used up."""


class BatchDesk:
    """Hands batches to the trainer."""

    def __init__(
        self,
        waiting: Waiting,
        handle: Callable[[ev.Event], None],
        when_safe: Callable[[Callable[[], None]], None],
        take_failure: Callable[[], TidegateError | None],
    ) -> None:
        """``take_failure``: what the trainer must be told before it gets another batch."""
        self._futures = waiting.batches
        self._handle = handle
        self._when_safe = when_safe
        self._take_failure = take_failure
        self._undelivered: deque[Batch] = deque()
        """Handed over to a trainer that had stopped waiting: what it gets next."""
        self._is_held = False

    async def next_batch(self) -> Batch:
        """The next batch, or None when the tasks are used up."""
        failure = self._take_failure()
        if failure is not None:
            raise failure
        if self._undelivered:
            return self._undelivered.popleft()
        future: asyncio.Future[Batch] = asyncio.get_running_loop().create_future()
        self._futures.append(future)
        if not self._is_held:
            self._handle(ev.BatchAsked())
        try:
            return await future
        except asyncio.CancelledError:
            if future in self._futures:
                self._futures.remove(future)
                if not self._is_held:
                    self._handle(ev.BatchNotWanted())
            elif not future.cancelled() and future.exception() is None:
                self._undelivered.append(future.result())
            raise  # if it is cancelled, and handed over by now, _deliver keeps the batch

    def hold(self, is_held: bool) -> None:
        """Ask the core for no batch for now; or ask for all that trainers wait for."""
        if not is_held and self._futures and (failure := self._take_failure()) is not None:
            if not self._is_held:
                self._handle(ev.BatchNotWanted())
            fail(self._futures.popleft(), failure)
        if is_held != self._is_held:
            self._is_held = is_held
            wish: ev.Event = ev.BatchNotWanted() if is_held else ev.BatchAsked()
            for _ in tuple(self._futures):
                self._handle(wish)

    def hand_over(self, batch: ev.HandOver) -> None:
        """There is one for whoever waits longest."""
        self._when_safe(partial(self._deliver, self._futures.popleft(), batch))

    def end(self) -> None:
        """There will be none for whoever waits longest."""
        resolve(self._futures.popleft(), None)

    def refuse(self, error: TidegateError) -> None:
        """There can be none for whoever waits longest."""
        fail(self._futures.popleft(), error)

    def _deliver(self, future: "asyncio.Future[Batch]", batch: ev.HandOver) -> None:
        """Give the trainer a batch; if it has stopped waiting for it, when it asks again."""
        if future.done():
            self._undelivered.append(batch)
        else:
            future.set_result(batch)
