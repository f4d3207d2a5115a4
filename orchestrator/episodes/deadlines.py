"""Which tasks take too long? Cancels those that do, with one timer for all of them.

All have the same time, so they are due in the order in which they began, and only the first needs a
timer. One of its own for each (``asyncio.timeout``) costs as much as a short episode does.
"""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from tidegate.orchestrator.episodes.stepped_tasks import SteppedTask

GRACE_S = 5.0
"""A task that was cancelled may clean up for so long. One that goes on all the same swallows
``CancelledError``, and nothing can stop it."""

LOOK_AGAIN_S = 1.0
"""While nobody's time runs, there is nothing to be on time for."""

Task = asyncio.Task[object] | SteppedTask
About = TypeVar("About")


class Deadlines(Generic[About]):
    """The tasks that are to end within ``timeout_s`` of their beginning."""

    def __init__(self, timeout_s: float, give_up: Callable[[About], None]) -> None:
        """``give_up`` is called for a task that can't be ended, with what it is about."""
        self._timeout_s = timeout_s
        self._give_up = give_up
        self._due_s: dict[Task, tuple[float, About]] = {}
        """When each is to have ended, on the loop's clock, earliest first."""
        self._cancelled: dict[Task, tuple[float, About]] = {}
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
        self._due_s = {
            task: (due_s + late_s, about) for task, (due_s, about) in self._due_s.items()
        }

    def begin(self, task: Task, about: About) -> None:
        """From now on, this task's time runs."""
        loop = task.get_loop()
        began_s = self._stood_still_at_s
        due_s = (loop.time() if began_s is None else began_s) + self._timeout_s
        self._due_s[task] = (due_s, about)
        if self._timer is None:
            self._timer = loop.call_at(due_s, self._expire, loop)

    def cut_short(self, task: Task) -> None:
        """Its time is up now. Nothing happens if it was before."""
        due = self._due_s.pop(task, None)
        if due is not None:
            loop = task.get_loop()
            self._cancelled[task] = (loop.time() + GRACE_S, due[1])
            task.cancel()
            self._set_timer(loop)

    def end(self, task: Task) -> bool:
        """Its time runs no longer; whether it was too long, and that is why it was cancelled.

        Where somebody else has cancelled the task as well, it is theirs.
        """
        if self._due_s.pop(task, None) is not None:
            return False
        self._cancelled.pop(task, None)
        return task.uncancel() == 0

    def _expire(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        now_s = loop.time()
        due_by_s = now_s if self._stood_still_at_s is None else self._stood_still_at_s
        for task, about in _take_due(self._due_s, due_by_s):
            self._cancelled[task] = (now_s + GRACE_S, about)
            task.cancel()
        for _, about in _take_due(self._cancelled, now_s):
            self._give_up(about)
        self._set_timer(loop)

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is not None:
            self._timer.cancel()
        firsts = [
            next(iter(waiting.values())) for waiting in (self._due_s, self._cancelled) if waiting
        ]
        self._timer = None
        if firsts:
            first_s = min(due_s for due_s, _ in firsts)
            if self._stood_still_at_s is not None:
                first_s = max(first_s, loop.time() + LOOK_AGAIN_S)
            self._timer = loop.call_at(first_s, self._expire, loop)


def _take_due(waiting: dict[Task, tuple[float, About]], now_s: float) -> "list[tuple[Task, About]]":
    """Those whose time is up, which are waited for no more."""
    due: list[tuple[Task, About]] = []
    while waiting:
        task, (due_s, about) = next(iter(waiting.items()))
        if due_s > now_s:
            break
        del waiting[task]
        due.append((task, about))
    return due
