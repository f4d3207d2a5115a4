"""How do a remote trainer's tasks reach the run? Through a queue that holds a few of them.

The run's own loop takes, the listener's loop puts. Whose tasks they are is for others.
"""

import asyncio
from collections import deque
from typing import Self

TASKS_WAITING_MAX = 4
"""Read ahead of need, to hide the way: few, for a trainer's iterator may follow its training."""


class TaskPipe:
    """An async iterator over tasks that come piece by piece."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[object] = deque()
        self._changed = asyncio.Condition()
        self._is_over = False

    async def put(self, tasks: list[object], *, is_end: bool) -> bool:
        """Take these in; return once there is room for more, with whether they are wanted."""
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
        """Others take their place: what waits is still taken, and nothing follows."""
        async with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> object:
        """The next one; called on any loop."""
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
