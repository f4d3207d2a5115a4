"""Where do tasks come from? The user's iterator, sync or async, and what was put back."""

from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from typing import Any

Tasks = Iterable[Any] | AsyncIterable[Any]


class _NoMore:
    """The end of an iterator, told apart from a task that is None."""


NO_MORE = _NoMore()


class TaskSource:
    """The user's tasks, sync or async, with a few put back at the front."""

    def __init__(self, tasks: Tasks) -> None:
        self._returned: deque[object] = deque()
        self._async: AsyncIterator[object] | None = None
        self._sync: Iterator[object] = iter(())
        if isinstance(tasks, AsyncIterable):
            self._async = aiter(tasks)
        else:
            self._sync = iter(tasks)

    def put_back(self, task: object) -> None:
        """Give this task out again before any other."""
        self._returned.append(task)

    def has_ended(self) -> bool:
        """Whether a sync iterator has no more: looks one task ahead, and keeps it.

        Known early, the end of tasks is told apart from a batch that waits for a publish. Of an
        async one nothing is known before it is asked.
        """
        if not self._returned and self._async is None:
            task = next(self._sync, NO_MORE)
            if task is NO_MORE:
                return True
            self._returned.append(task)
        return False

    async def next(self) -> object:
        """The next task, or NO_MORE."""
        if self._returned:
            return self._returned.popleft()
        if self._async is not None:
            return await anext(self._async, NO_MORE)
        return next(self._sync, NO_MORE)
