"""Futures and events that are waited for on the run's loop, by what resolves them.

The scheduler and its parts register and resolve them; a failed run fails all of them.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tidegate.orchestrator.core.rollout import Rollout, Turn
from tidegate.orchestrator.fleet.scores import Score


@dataclass(slots=True)
class PendingFutures:
    """All pending calls of a run."""

    turns: dict[int, asyncio.Future[Turn]] = field(default_factory=dict)
    """Episodes' turns, by rollout id."""
    batches: set[asyncio.Future[bool]] = field(default_factory=set)
    """Trainers' requests for batches."""
    evaluations: dict[int, asyncio.Future[Rollout]] = field(default_factory=dict)
    """Evaluation rollouts, by rollout id."""
    scores: set[asyncio.Future[Score]] = field(default_factory=set)
    calls: dict[int, asyncio.Future[None]] = field(default_factory=dict)
    """Trainer's calls about weights, pauses and sleep, by number."""
    others: "set[asyncio.Future[Any]]" = field(default_factory=set)
    """Trainer's calls about adapters with versions of their own, and about engines that leave."""
    conditions: list[tuple[Callable[[], bool], asyncio.Future[None]]] = field(default_factory=list)
    """Conditions checked whenever an engine or its weights have changed."""
    new_tokens: dict[int, asyncio.Event] = field(default_factory=dict)
    """Events of streams, by rollout id: set at each step with tokens of the rollout. The tokens are
    in the rollout, so nothing is queued for a stream that is slow."""

    def futures(self) -> "list[asyncio.Future[Any]]":
        """Return all futures."""
        conditions = [future for _, future in self.conditions]
        return [
            *self.turns.values(),
            *self.batches,
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

    def subscribe(self, rollout_id: int, event: asyncio.Event, turn: "asyncio.Future[Any]") -> None:
        """Set ``event`` at each step with tokens of this rollout, until its ``turn`` is done."""
        self.new_tokens[rollout_id] = event

        def unsubscribe(_: object) -> None:
            if self.new_tokens.get(rollout_id) is event:  # else the row's next turn is subscribed
                del self.new_tokens[rollout_id]

        turn.add_done_callback(unsubscribe)

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
