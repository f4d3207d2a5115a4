"""Bounded queue that brings a remote trainer's tasks to the run, as an async iterator.

The listener's event loop puts tasks, the run's event loop takes them.
"""

import asyncio
from collections import deque
from typing import Self

TASKS_WAITING_MAX = 4
"""Tasks read ahead, to hide the network's latency: few, because the iterator may depend on what the
trainer has trained so far."""


class TaskPipe:
    """An async iterator over the tasks that were put, across two event loops."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[object] = deque()
        self._changed = asyncio.Condition()
        self._is_over = False

    async def put(self, tasks: list[object], *, is_end: bool) -> bool:
        """Add tasks and wait until there is room for more; return False once none are wanted."""
        async with self._changed:
            if self._is_over:
                return False
            self._waiting += tasks
            self._is_over = is_end
            self._changed.notify_all()
            await self._changed.wait_for(
                lambda: self._is_over or len(self._waiting) < TASKS_WAITING_MAX
            )
            return not self._is_over

    async def close(self) -> None:
        """End the tasks: those that wait are still taken, and none is accepted any more."""
        async with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> object:
        """Return the next task. May be called on any event loop."""
        taking = asyncio.run_coroutine_threadsafe(self._take(), self._loop)
        tasks = await asyncio.wrap_future(taking)
        if not tasks:
            raise StopAsyncIteration
        return tasks[0]

    async def _take(self) -> list[object]:
        async with self._changed:
            await self._changed.wait_for(lambda: self._waiting or self._is_over)
            taken = [self._waiting.popleft()] if self._waiting else []
            self._changed.notify_all()
            return taken
