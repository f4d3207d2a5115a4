"""Who waits for what on the run's loop? Futures by what will resolve them; it decides nothing."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.rollout import Rollout, Turn
from tidegate.orchestrator.fleet.scores import Score


@dataclass(slots=True)
class Waiting:
    """Who waits for what, on this loop."""

    turns: dict[int, asyncio.Future[Turn]] = field(default_factory=dict)
    """By rollout."""
    batches: deque[asyncio.Future[ev.HandOver | None]] = field(default_factory=deque)
    evaluations: dict[int, asyncio.Future[Rollout]] = field(default_factory=dict)
    """By rollout."""
    scores: set[asyncio.Future[Score]] = field(default_factory=set)
    conditions: list[tuple[Callable[[], bool], asyncio.Future[None]]] = field(default_factory=list)
    """Looked at whenever an engine or its weights have changed."""

    def futures(self) -> "list[asyncio.Future[Any]]":
        """All of them."""
        conditions = [future for _, future in self.conditions]
        return [
            *self.turns.values(),
            *self.batches,
            *self.evaluations.values(),
            *self.scores,
            *conditions,
        ]

    def fail_all(self, error: BaseException) -> None:
        """Tell everybody that nothing will come."""
        for future in self.futures():
            if not future.done():
                future.set_exception(error)
                future.exception()  # retrieved: a waiter that is gone is no news

    def notify(self) -> None:
        """Wake whose condition has come true."""
        waiting, self.conditions = self.conditions, []
        for condition, future in waiting:
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
    """Give a waiter what it waits for, if it still does."""
    if future is not None and not future.done():
        future.set_result(value)


def fail(future: "asyncio.Future[Any] | None", error: Exception) -> None:
    """Tell a waiter, if it still is one, that it waits in vain."""
    if future is not None and not future.done():
        future.set_exception(error)
