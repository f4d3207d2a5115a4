"""Who takes the user's tasks, and when? Takes as many as admission has places for, in their order.

After a resume it first passes by the tasks that were taken before. How many places there are is the
core's to say; what a task is, nobody's here.
"""

import asyncio
from collections.abc import Callable

from tidegate.errors import ResumeMismatch
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.core import Core
from tidegate.orchestrator.core.group import TaskKey
from tidegate.orchestrator.episodes.runner import EpisodeFunction
from tidegate.orchestrator.feed.tasks import NO_MORE, TaskSource, task_digest

TASKS_PER_TURN = 32
"""Tasks taken from the user's iterator before the loop sees to its sockets again."""


class TaskFeed:
    """Feeds one of the user's iterators to the core."""

    def __init__(
        self,
        core: Core,
        source: TaskSource,
        handle: Callable[[ev.Event, EpisodeFunction | None], None],
        episode_of: Callable[[TaskKey | None], EpisodeFunction | None],
        *,
        wants_tasks: asyncio.Event,
        is_journalled: bool,
    ) -> None:
        """``handle`` feeds the core, and runs a task's episode; ``wants_tasks`` is set whenever the
        core may have places again."""
        self._core = core
        self.source = source
        self._handle = handle
        self._episode_of = episode_of
        self._wants_tasks = wants_tasks
        self._wants_digests = is_journalled or core.prompts.filter.uses_history

    async def run(self) -> None:
        """Take tasks for ever.

        Raises:
            ResumeMismatch: these are other tasks than before the run was resumed.
        """
        await self._pass_by_the_taken()
        while True:
            await self._take()
            self._wants_tasks.clear()
            await self._wants_tasks.wait()

    async def _take(self) -> None:
        taken = places = 0
        core, source = self._core, self.source
        is_async, newest = source.is_async, self._episode_of(None)
        while places or (places := core.capacity_groups):
            prefers_returned = core.policy.prefers_returned(core.groups)
            if is_async:
                task = await source.next(prefers_returned=prefers_returned)
                if task is not None and not core.capacity_groups:  # there was some before the wait
                    source.give_back(task)
                    return
            else:
                task = source.next_nowait(prefers_returned=prefers_returned)
            if task is None:
                self._handle(ev.TasksExhausted(), None)
                return
            places = 0 if is_async else places - 1  # it was waited for: ask again
            digest = task_digest(task.task) if self._wants_digests else b""
            arrived = ev.TaskArrived(task.task, task.key, digest)
            self._handle(arrived, newest if task.key is None else self._episode_of(task.key))
            taken += 1
            if source.has_ended():
                places = 0
                self._handle(ev.TasksExhausted(), None)
            elif taken % TASKS_PER_TURN == 0:
                places = 0
                await asyncio.sleep(0)

    async def _pass_by_the_taken(self) -> None:
        """After a resume: what is unfinished goes on, the rest is done."""
        count = self._core.tasks.count
        for index in range(count):
            task = await self.source.next_new()
            key = TaskKey(self._core.tasks.offer, index)
            self._check(task, key, count)
            self._handle(ev.TaskFound(task, key), self._episode_of(key))
            if index % TASKS_PER_TURN == 0:
                await asyncio.sleep(0)

    def _check(self, task: object, key: TaskKey, count: int) -> None:
        if task is NO_MORE:
            raise ResumeMismatch(
                f"{count} tasks had been taken from this iterator before the run was resumed, but "
                f"now it ends after {key.index}; give the same tasks in the same order"
            )
        waiting = self._core.awaited.get(key)
        if waiting and waiting[0].digest != task_digest(task):
            raise ResumeMismatch(
                f"task {key.index} is {task!r:.200}, which is another one than before the run was "
                f"resumed; give the same tasks in the same order"
            )
