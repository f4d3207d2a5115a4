"""Bounded queue that brings a remote trainer's tasks to the run, as an async iterator.

The listener's event loop puts tasks, the run's event loop takes them.
"""

import asyncio
from collections import deque
from typing import Self

TASKS_WAITING_MAX = 4
"""Tasks prefetched to hide the network's latency: few, because the trainer's iterator may choose
tasks by what was trained so far."""


class TaskPipe:
    """Bounded async queue of tasks, across two event loops; the consumer iterates over it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._tasks: deque[object] = deque()
        self._changed = asyncio.Condition()
        self._is_over = False

    async def put(self, tasks: list[object], *, is_end: bool) -> bool:
        """Add tasks and wait until the queue accepts more; return False once it is closed."""
        async with self._changed:
            if self._is_over:
                return False
            self._tasks += tasks
            self._is_over = is_end
            self._changed.notify_all()
            await self._changed.wait_for(
                lambda: self._is_over or len(self._tasks) < TASKS_WAITING_MAX
            )
            return not self._is_over

    async def close(self) -> None:
        """Refuse further tasks; queued tasks can still be taken."""
        async with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> object:
        """Return the next task. May be called on any event loop."""
        future = asyncio.run_coroutine_threadsafe(self._take(), self._loop)
        tasks = await asyncio.wrap_future(future)
        if not tasks:
            raise StopAsyncIteration
        return tasks[0]

    async def _take(self) -> list[object]:
        async with self._changed:
            await self._changed.wait_for(lambda: self._tasks or self._is_over)
            taken = [self._tasks.popleft()] if self._tasks else []
            self._changed.notify_all()
            return taken
