"""Source of tasks: the user's iterator, sync or async, and the tasks put back in front of it.

The scheduler's :class:`TaskFeed` reads a :class:`TaskSource`; recorders, audit and gateway use this
module's digests and JSON of tasks. Digests are blake2b of MessagePack.
"""

import asyncio
import hashlib
import json
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping, Sized
from typing import Any

import msgspec

from tidegate.orchestrator.batches.curriculum import Curriculum
from tidegate.orchestrator.core.group import TaskKey

Tasks = Iterable[Any] | AsyncIterable[Any] | Curriculum


class _NoMore:
    """Sentinel for the end of an iterator, because a task may be None."""


NO_MORE = _NoMore()


class Taken(msgspec.Struct, frozen=True, gc=False):
    """A task, and its key if it was taken before."""

    task: object
    key: TaskKey | None = None
    item: int | None = None
    """Index in the curriculum of a task newly drawn."""
    is_replay: bool = False


class TaskSource:
    """The user's tasks, and tasks that are to be taken again after a dropped group."""

    def __init__(self, tasks: Tasks) -> None:
        self._put_back: deque[Taken] = deque()
        self._next: Taken | None = None
        """A new task that was read ahead."""
        self._pending: asyncio.Future[object] | None = None
        """Pending ``anext`` of an async iterator."""
        self._has_put_back = asyncio.Event()
        self._async: AsyncIterator[object] | None = None
        self._sync: Iterator[object] = iter(())
        self.curriculum: Curriculum | None = None
        """The user's curriculum; None if the tasks are an iterator."""
        if isinstance(tasks, Curriculum):
            self.curriculum = tasks
        elif isinstance(tasks, AsyncIterable):
            self._async = aiter(tasks)
        else:
            self._sync = iter(tasks)

    def inherit(self, before: "TaskSource", next_key: TaskKey) -> None:
        """Take over the tasks that another source had read ahead or put back.

        ``next_key``: key of the next new task of that source's iterator.
        """
        self._put_back.extend(before._put_back)
        left = before._take_pending() or before._next
        if left is not None:
            self._put_back.append(Taken(left.task, next_key))

    @property
    def offers(self) -> set[int]:
        """Numbers of the iterators that the returned tasks came from."""
        return {taken.key.offer for taken in self._put_back if taken.key is not None}

    def close(self) -> None:
        """Stop waiting for the iterator."""
        self._take_pending()

    def _take_pending(self) -> Taken | None:
        """Return the task that has just arrived, if any, and stop waiting for one."""
        pending, self._pending = self._pending, None
        if pending is None or pending.cancel() or pending.cancelled() or pending.exception():
            return None
        task = pending.result()
        return None if task is NO_MORE else Taken(task)

    def reads_from(self, tasks: Tasks) -> bool:
        """Whether ``tasks`` is this source's iterator, so that a task read ahead stays valid."""
        return any(tasks is each for each in (self._sync, self._async, self.curriculum))

    def put_back(self, task: object, key: TaskKey) -> None:
        """Return this task to the source, unless it is there already."""
        if any(taken.key == key for taken in self._put_back):
            return
        self._put_back.append(Taken(task, key))
        self._has_put_back.set()

    def return_unused(self, taken: Taken) -> None:
        """Return a task for which admission had no capacity; it is the next one taken of its
        kind."""
        if taken.key is None:
            self._next = taken
        else:
            self._put_back.appendleft(taken)

    def has_ended(self) -> bool:
        """Whether a sync iterator has no more tasks; reads one task ahead, and keeps it.

        Reading ahead distinguishes the end of tasks from a batch that waits for a publish. Always
        False for an async iterator, which can't be read ahead without waiting.
        """
        if self._put_back or self._next is not None or self._async is not None:
            return False
        if self.curriculum is not None:
            return self.curriculum.draw() is None  # not kept: the weights may change before it
        self._next = self._new_nowait()
        return self._next is None

    @property
    def is_async(self) -> bool:
        """Whether the user's iterator is async."""
        return self._async is not None

    def next_nowait(self, *, prefers_returned: bool) -> Taken | None:
        """Return the next task, returned tasks first or last; None if no task is available now."""
        if self._put_back and prefers_returned:
            return self._put_back.popleft()
        taken, self._next = self._next, None
        if taken is not None:
            return taken
        if self._async is not None:
            return None
        taken = self._new_nowait()
        if taken is not None:
            return taken
        return self._put_back.popleft() if self._put_back else None

    def _new_nowait(self) -> Taken | None:
        """Return a new task of a curriculum or sync iterator; None if there are no more."""
        if self.curriculum is not None:
            drawn = self.curriculum.draw()
            return None if drawn is None else Taken(drawn[0], None, drawn[1], drawn[2])
        task = next(self._sync, NO_MORE)
        return None if task is NO_MORE else Taken(task)

    async def next(self, *, prefers_returned: bool) -> Taken | None:
        """Return the next task, returned tasks first or last; None if there are no more."""
        taken = self.next_nowait(prefers_returned=prefers_returned)
        if taken is not None or self._async is None:
            return taken
        taken = await self._new_or_returned(self._async)
        if taken is not None:
            return taken
        return self._put_back.popleft() if self._put_back else None

    async def _new_or_returned(self, tasks: AsyncIterator[object]) -> Taken | None:
        """Return a new task; None if there are no more, or if a task was put back first."""
        if self._pending is None:
            self._pending = asyncio.ensure_future(_next_of(tasks))
        self._has_put_back.clear()
        put_back = asyncio.ensure_future(self._has_put_back.wait())
        futures: set[asyncio.Future[Any]] = {self._pending, put_back}
        try:
            if not self._put_back:  # if cancelled here, _pending stays for the next caller
                await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        finally:
            put_back.cancel()
        if not self._pending.done():
            return None
        pending, self._pending = self._pending, None
        task = pending.result()
        return None if task is NO_MORE else Taken(task)

    async def next_new(self) -> object:
        """Return the next task of the user's iterator, or NO_MORE."""
        if self._async is not None:
            return await anext(self._async, NO_MORE)
        return next(self._sync, NO_MORE)


def num_tasks(tasks: Tasks) -> int | None:
    """Return the number of tasks that ``tasks`` gives; None if that is not known."""
    if isinstance(tasks, Curriculum):
        return tasks.num_draws_max
    return len(tasks) if isinstance(tasks, Sized) else None


async def _next_of(tasks: AsyncIterator[object]) -> object:
    return await anext(tasks, NO_MORE)


def task_digest(task: object) -> bytes:
    """Return an 8-byte digest of a task that is plain data; empty if it isn't."""
    try:
        body = msgspec.msgpack.encode(task, order="deterministic")
    except (TypeError, ValueError, OverflowError, RecursionError):
        return b""
    return hashlib.blake2b(body, digest_size=8).digest()


def to_json(value: object) -> bytes:
    """Encode a task, or any other value, as JSON; values without a JSON type become strings."""
    try:
        return msgspec.json.encode(value, enc_hook=_jsonable)
    except (TypeError, ValueError, RecursionError):
        return json.dumps(repr(value)).encode()


def _jsonable(value: object) -> object:
    return dict(value) if isinstance(value, Mapping) else str(value)
