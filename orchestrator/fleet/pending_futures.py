"""Futures of calls that wait on the run's loop, by what resolves them.

The scheduler and its parts register and resolve them; a failed run fails all of them. Built on
asyncio futures, a lock towards the trainer's thread, and the core's ``events.py``.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.rollout import Rollout, Turn
from tidegate.orchestrator.fleet.scores import Score


class BatchRequest:
    """One call for the next batch, shared by the run's loop and the caller's thread.

    An offered batch is either taken by the caller or withdrawn by the run. So no batch is lost if
    the caller stops waiting before its loop has received the offer, and no batch is taken that a
    publish has made older meanwhile.
    """

    def __init__(self) -> None:
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


@dataclass(slots=True)
class PendingFutures:
    """All pending calls of a run."""

    turns: dict[int, asyncio.Future[Turn]] = field(default_factory=dict)
    """Episodes' turns, by rollout id."""
    batches: list[deque[BatchRequest]] = field(default_factory=list)
    """Requests for batches, by trainer."""
    evaluations: dict[int, asyncio.Future[Rollout]] = field(default_factory=dict)
    """Evaluation rollouts, by rollout id."""
    scores: set[asyncio.Future[Score]] = field(default_factory=set)
    calls: dict[int, asyncio.Future[None]] = field(default_factory=dict)
    """Trainer's calls about weights, pauses and sleep, by number."""
    others: "set[asyncio.Future[Any]]" = field(default_factory=set)
    """Trainer's calls about adapters with versions of their own, and about engines that leave."""
    conditions: list[tuple[Callable[[], bool], asyncio.Future[None]]] = field(default_factory=list)
    """Conditions checked whenever an engine or its weights have changed."""

    def futures(self) -> "list[asyncio.Future[Any]]":
        """Return all futures."""
        conditions = [future for _, future in self.conditions]
        return [
            *self.turns.values(),
            *(each.future for queue in self.batches for each in queue if each.future is not None),
            *self.evaluations.values(),
            *self.scores,
            *self.calls.values(),
            *self.others,
            *conditions,
        ]

    def fail_all(self, error: BaseException) -> None:
        """Raise ``error`` in every pending call."""
        for future in self.futures():
            if not future.done():
                future.set_exception(error)
                future.exception()  # marks it as retrieved, for asyncio's log

    def notify(self) -> None:
        """Resolve the futures whose condition holds now."""
        conditions, self.conditions = self.conditions, []
        for condition, future in conditions:
            if condition():
                resolve(future, None)
            elif not future.done():
                self.conditions.append((condition, future))

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return once ``condition`` holds."""
        if not condition():
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.conditions.append((condition, future))
            await future


def resolve(future: "asyncio.Future[Any] | None", value: object) -> None:
    """Set a future's result, unless it is done."""
    if future is not None and not future.done():
        future.set_result(value)


def fail(future: "asyncio.Future[Any] | None", error: Exception) -> None:
    """Set a future's exception, unless it is done."""
    if future is not None and not future.done():
        future.set_exception(error)
