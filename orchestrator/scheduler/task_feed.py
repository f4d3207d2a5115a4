"""Feeds tasks of the user's iterators to the core, in order, as admission permits.

The scheduler owns a :class:`TaskIterators`, which reads one iterator at a time. A task that is
started again keeps its iterator's episode function. After a resume, tasks that were taken before
are skipped.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from functools import partial

from tidegate.errors import ResumeMismatch
from tidegate.orchestrator.batches.curriculum import Curriculum
from tidegate.orchestrator.batches.tasks import NO_MORE, Tasks, TaskSource, task_digest
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.core import Core
from tidegate.orchestrator.core.event_log import task_body
from tidegate.orchestrator.core.group import TaskKey
from tidegate.orchestrator.episodes.failures import place_of
from tidegate.orchestrator.episodes.runner import EpisodeFunction

log = logging.getLogger("tidegate")


class TaskIterators:
    """The user's iterators of tasks; runs a :class:`TaskFeed` for the newest."""

    def __init__(
        self,
        core: Core,
        handle: Callable[[ev.Event, EpisodeFunction | None], None],
        *,
        has_capacity: asyncio.Event,
        now_s: Callable[[], float],
    ) -> None:
        """``handle`` feeds the core; ``has_capacity`` is set when the core may have capacity."""
        self._core = core
        self._handle = handle
        self._has_capacity = has_capacity
        self._now_s = now_s
        self._logged_dropped = 0
        self._source: TaskSource | None = None
        self._feeding: asyncio.Task[None] | None = None
        self._episodes: dict[int, EpisodeFunction] = {}
        """Episode functions by iterator number, while a task of the iterator may still begin."""

    def begin(
        self,
        tasks: Tasks,
        episode: EpisodeFunction,
        group: asyncio.TaskGroup,
        *,
        is_journalled: bool,
        agents: Sequence[str] = (),
    ) -> None:
        """Take tasks from this iterator from now on, each run by ``episode``; ``agents`` are
        trained adapters that it samples beside its own."""
        core = self._core
        name = tasks.name if isinstance(tasks, Curriculum) else ""
        _check_is_continued(core, name)
        if self._feeding is not None:
            self._feeding.cancel()  # the task may wait for the replaced iterator
        if self._source is None or not self._source.reads_from(tasks):
            before, self._source = self._source, TaskSource(tasks)
            if before is not None:
                self._source.inherit(before, TaskKey(core.tasks.offer, core.tasks.count))
        feed = TaskFeed(
            core,
            self._source,
            self._handle,
            self.episode_of,
            has_capacity=self._has_capacity,
            is_journalled=is_journalled,
            now_s=self._now_s,
        )
        self._feeding = group.create_task(feed.run(), name="tasks")
        self._handle(ev.TasksOffered(_name_of(episode), name, tuple(agents)), episode)
        if isinstance(tasks, Curriculum):
            self._attach(tasks)
        if core.tasks.dropped > self._logged_dropped:
            log.warning(
                "tasks=gone count=%d: unfinished tasks of earlier iterators than the checkpoint's. "
                "A resume continues them if they are plain data and the current iterator has the "
                "same episode function",
                core.tasks.dropped,
            )
            self._logged_dropped = core.tasks.dropped
        used = {g.key.offer for g in core.groups.in_order if g.key is not None}
        used |= {key.offer for key in core.tasks.requeued} | self._source.offers
        self._episodes = {offer: e for offer, e in self._episodes.items() if offer in used}
        self._episodes[core.tasks.offer] = episode

    def _attach(self, curriculum: Curriculum) -> None:
        """Give a curriculum the record of its tasks, and forward weights that the user sets in it
        to the core."""
        loop, name = asyncio.get_running_loop(), curriculum.name

        def set_weights(weights: tuple[tuple[int, float], ...]) -> None:
            self._handle(ev.TaskWeightsSet(name, weights), None)

        def submit(weights: tuple[tuple[int, float], ...]) -> None:
            with contextlib.suppress(RuntimeError):  # the run has ended, and its loop is closed
                loop.call_soon_threadsafe(set_weights, weights)

        first = curriculum.attach(self._core.task_records.curricula[name], submit)
        if first:
            set_weights(first)

    def episode_of(self, key: TaskKey | None) -> EpisodeFunction | None:
        """Return the episode function of a task; None is a new task of the newest iterator."""
        newest = self._episodes.get(self._core.tasks.offer)
        return newest if key is None else self._episodes.get(key.offer, newest)

    def describe_episode(self) -> str:
        """Return the name of the newest iterator's episode function, and the line it begins at."""
        function = self.episode_of(None)
        return "the episode" if function is None else f"the episode {place_of(function)}"

    def put_back(self, task: object, key: TaskKey) -> None:
        """Start a task again before new ones."""
        assert self._source is not None
        self._source.put_back(task, key)

    def close(self) -> None:
        """Stop taking tasks."""
        if self._feeding is not None:
            self._feeding.cancel()
        if self._source is not None:
            self._source.close()


def _check_is_continued(core: Core, name: str) -> None:
    """Check that the first tasks after a resume are of the curriculum in use before, if any.

    Raises:
        ResumeMismatch: they are not.
    """
    before = core.task_records.name_of(core.tasks.offer)
    if core.tasks.is_continued and core.tasks.count and before != name:
        raise ResumeMismatch(
            f"before the run was resumed its tasks were {_described(before)}, and now are "
            f"{_described(name)}; give the same tasks"
        )


def _described(name: str) -> str:
    return f"the curriculum {name!r}" if name else "an iterator's"


def _name_of(episode: object) -> str:
    """Return a name by which another process recognises an episode function."""
    while isinstance(episode, partial):
        episode = episode.func
    named = episode if hasattr(episode, "__qualname__") else type(episode)
    return f"{getattr(named, '__module__', '')}:{getattr(named, '__qualname__', '')}"


EPISODES_PER_SLICE = 256
"""Episodes that begin before the loop serves its sockets again. Episodes that begin together
request their turns together; with fewer, messages and steps would have fewer turns."""

SLICE_S = 0.01
"""Time after which the loop serves its sockets in any case: the user's iterator may be slow."""


class TaskFeed:
    """Feeds one of the user's iterators to the core; the scheduler runs it as a task."""

    def __init__(
        self,
        core: Core,
        source: TaskSource,
        handle: Callable[[ev.Event, EpisodeFunction | None], None],
        episode_of: Callable[[TaskKey | None], EpisodeFunction | None],
        *,
        has_capacity: asyncio.Event,
        is_journalled: bool,
        now_s: Callable[[], float],
    ) -> None:
        """``handle`` feeds the core, and starts a task's episode; ``has_capacity`` is set whenever
        the core may have capacity again; ``now_s`` is a clock."""
        self._core = core
        self.source = source
        self._handle = handle
        self._episode_of = episode_of
        self._has_capacity = has_capacity
        self._is_journalled = is_journalled
        self._needs_digests = is_journalled or core.prompts.filter.uses_history
        self._now_s = now_s
        self._begun = 0
        """Episodes begun in this slice."""
        self._until_s = 0.0
        """Time at which the slice ends."""

    async def run(self) -> None:
        """Take tasks until cancelled.

        Raises:
            ResumeMismatch: the tasks differ from those before the run was resumed.
        """
        await self._skip_taken_tasks()
        while True:
            self._has_capacity.clear()  # first, because events during _take may put a task back
            await self._take()
            await self._has_capacity.wait()

    async def _take(self) -> None:
        self._begin_slice()
        slots = 0
        core, source = self._core, self.source
        is_async, newest = source.is_async, self._episode_of(None)
        while slots or (slots := core.admissible_groups):
            prefers_returned = core.policy.prefers_returned(core.groups)
            if is_async:
                task = await source.next(prefers_returned=prefers_returned)
                if task is not None and not core.admissible_groups:  # used up during the wait
                    source.return_unused(task)
                    return
            else:
                task = source.next_nowait(prefers_returned=prefers_returned)
            if task is None:
                self._handle(ev.TasksExhausted(), None)
                return
            slots = 0 if is_async else slots - 1  # after a wait, compute it again
            digest = task_digest(task.task) if self._needs_digests else b""
            body = task_body(task.task) if self._is_journalled else b""
            arrived = ev.TaskArrived(task.task, task.key, digest, body, task.item, task.is_replay)
            self._handle(arrived, newest if task.key is None else self._episode_of(task.key))
            if source.has_ended():
                slots = 0
                self._handle(ev.TasksExhausted(), None)
            elif self._has_used_slice():
                slots = 0
                await asyncio.sleep(0)
                self._begin_slice()

    async def _skip_taken_tasks(self) -> None:
        """After a resume: skip the tasks taken before; the core restarts unfinished ones."""
        self._begin_slice()
        if self.source.curriculum is not None:
            self._find_drawn_tasks(self.source.curriculum)
            return
        count = self._core.tasks.count
        for index in range(count):
            task = await self.source.next_new()
            key = TaskKey(self._core.tasks.offer, index)
            self._check(task, key, count)
            self._handle(ev.TaskFoundAgain(task, key), self._episode_of(key))
            if self._has_used_slice():
                await asyncio.sleep(0)
                self._begin_slice()

    def _find_drawn_tasks(self, curriculum: Curriculum) -> None:
        """After a resume: give the core the unfinished tasks that the curriculum had drawn."""
        core = self._core
        offer = core.tasks.offer
        keys = {*core.pending_after_resume, *core.tasks.requeued}
        for key in sorted(key for key in keys if key.offer == offer):
            task = curriculum.tasks[core.task_records.item_of(key)]
            self._check(task, key, core.tasks.count)
            self._handle(ev.TaskFoundAgain(task, key), self._episode_of(key))

    def _begin_slice(self) -> None:
        self._begun, self._until_s = 0, self._now_s() + SLICE_S

    def _has_used_slice(self) -> bool:
        """Whether the loop should serve its sockets, after one more task."""
        self._begun += self._core.groups.group_size
        return self._begun >= EPISODES_PER_SLICE or self._now_s() >= self._until_s

    def _check(self, task: object, key: TaskKey, count: int) -> None:
        if task is NO_MORE:
            raise ResumeMismatch(
                f"{count} tasks had been taken from this iterator before the run was resumed, but "
                f"now it ends after {key.index}; give the same tasks in the same order"
            )
        pending = self._core.pending_after_resume.get(key)
        if pending and pending[0].digest != task_digest(task):
            raise ResumeMismatch(
                f"task {key.index} is {task!r:.200}, and was another one before the run was "
                f"resumed; give the same tasks in the same order"
            )
