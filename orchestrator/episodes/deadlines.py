"""Which tasks take too long? Cancels those that do, with one timer for all of them.

All have the same time, so they are due in the order in which they began, and only the first needs a
timer. One of its own for each (``asyncio.timeout``) costs as much as a short episode does.
"""

import asyncio
import math
from collections.abc import Callable
from typing import Generic, TypeVar

from tidegate.orchestrator.episodes.stepped_tasks import SteppedTask

GRACE_S = 5.0
"""A task that was cancelled may clean up for so long. One that goes on all the same swallows
``CancelledError``, and nothing can stop it."""

LOOK_AGAIN_S = 1.0
"""While nobody's time runs, there is nothing to be on time for."""

Task = TypeVar("Task", bound="asyncio.Task[object] | SteppedTask")


class Deadlines(Generic[Task]):
    """The tasks that are to end within ``timeout_s`` of their beginning."""

    def __init__(self, timeout_s: float, give_up: Callable[[Task], None]) -> None:
        """``give_up`` is called for a task that can't be ended."""
        self._timeout_s = timeout_s
        self._give_up = give_up
        self._due_s: dict[Task, float] = {}
        """When each is to have ended, on the loop's clock, earliest first."""
        self._is_in_order = True
        """Whether it is earliest first just now; some have been held for a while."""
        self._held: dict[Task, float] = {}
        """Those whose time doesn't run, with how much they have left."""
        self._cancelled: dict[Task, float] = {}
        """When those that had not are given up, earliest first."""
        self._timer: asyncio.TimerHandle | None = None
        self._stood_still_at_s: float | None = None
        """Since when nobody's time runs; None while it does."""

    def stand_still(self, now_s: float) -> None:
        """Nobody's time runs from now on. Those that were cancelled are not spared."""
        if self._stood_still_at_s is None:
            self._stood_still_at_s = now_s

    def go_on(self, now_s: float) -> None:
        """Everybody has as much time left as before. Harmless if it runs."""
        if self._stood_still_at_s is None:
            return
        late_s = now_s - self._stood_still_at_s
        self._stood_still_at_s = None
        self._due_s = {task: due_s + late_s for task, due_s in self._due_s.items()}

    def begin(self, task: Task) -> None:
        """From now on, this task's time runs."""
        loop, stood_still_at_s = task.get_loop(), self._stood_still_at_s
        # As _now_s, whose call costs as much again: each episode comes by here.
        due_s = (loop.time() if stood_still_at_s is None else stood_still_at_s) + self._timeout_s
        self._due_s[task] = due_s
        if self._timer is None or self._timer.when() > due_s:
            self._call_by(due_s, loop)

    def left_s(self, task: Task) -> float:
        """How much time it has; for ever, if its time is up or never began."""
        if task in self._held:
            return self._held[task]
        due_s = self._due_s.get(task)
        return math.inf if due_s is None else due_s - self._now_s(task.get_loop())

    def hold(self, task: Task) -> None:
        """Its own time doesn't run from now on. Nothing happens if it was up before."""
        left_s = self.left_s(task)
        if self._due_s.pop(task, None) is not None:
            self._held[task] = left_s

    def let_go(self, task: Task) -> None:
        """It has as much time left as when it was held. Harmless if it isn't."""
        left_s = self._held.pop(task, None)
        if left_s is not None:
            loop = task.get_loop()
            due_s = self._due_s[task] = self._now_s(loop) + left_s
            self._is_in_order = False  # thousands may be let go together: put in order once
            self._call_by(due_s, loop)

    def cut_short(self, task: Task) -> None:
        """Its time is up now. Nothing happens if it was before."""
        if self._due_s.pop(task, None) is not None or self._held.pop(task, None) is not None:
            loop = task.get_loop()
            self._cancelled[task] = loop.time() + GRACE_S
            task.cancel()
            self._set_timer(loop)

    def end(self, task: Task) -> bool:
        """Its time runs no longer; whether it was too long, and that is why it was cancelled.

        Where somebody else has cancelled the task as well, it is theirs.
        """
        if self._due_s.pop(task, None) is not None or self._held.pop(task, None) is not None:
            return False
        self._cancelled.pop(task, None)
        return task.uncancel() == 0

    def _expire(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        now_s = loop.time()
        self._put_in_order()
        for task in _take_due(self._due_s, self._now_s(loop)):
            self._cancelled[task] = now_s + GRACE_S
            task.cancel()
        for task in _take_due(self._cancelled, now_s):
            self._give_up(task)
        self._set_timer(loop)

    def _now_s(self, loop: asyncio.AbstractEventLoop) -> float:
        """By the clock that stands still when nobody's time runs."""
        return loop.time() if self._stood_still_at_s is None else self._stood_still_at_s

    def _call_by(self, due_s: float, loop: asyncio.AbstractEventLoop) -> None:
        """Look at who is due then, if not before."""
        if self._timer is not None:
            if self._timer.when() <= due_s:
                return
            self._timer.cancel()
        self._timer = loop.call_at(due_s, self._expire, loop)

    def _put_in_order(self) -> None:
        if not self._is_in_order:
            self._due_s = dict(sorted(self._due_s.items(), key=lambda item: item[1]))
            self._is_in_order = True

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        self._put_in_order()
        if self._timer is not None:
            self._timer.cancel()
        firsts = [
            next(iter(waiting.values())) for waiting in (self._due_s, self._cancelled) if waiting
        ]
        self._timer = None
        if firsts:
            first_s = min(firsts)
            if self._stood_still_at_s is not None:
                first_s = max(first_s, loop.time() + LOOK_AGAIN_S)
            self._timer = loop.call_at(first_s, self._expire, loop)


def _take_due(waiting: dict[Task, float], now_s: float) -> list[Task]:
    """Those whose time is up, which are waited for no more."""
    due: list[Task] = []
    while waiting:
        task, due_s = next(iter(waiting.items()))
        if due_s > now_s:
            break
        del waiting[task]
        due.append(task)
    return due
