"""Which iterators of tasks has the user given, and whose episode does a task run?

One is taken from at a time. A task that was taken from an older one, and is to be taken again,
keeps the episode that it was given with.
"""

import asyncio
from collections.abc import Callable

from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.core import Core
from tidegate.orchestrator.core.group import TaskKey
from tidegate.orchestrator.episodes.runner import EpisodeFunction
from tidegate.orchestrator.feed.task_feed import TaskFeed
from tidegate.orchestrator.feed.tasks import Tasks, TaskSource


class Offers:
    """The user's iterators, and the feed that takes from the newest."""

    def __init__(
        self,
        core: Callable[[], Core],
        handle: Callable[[ev.Event, EpisodeFunction | None], None],
        *,
        wants_tasks: asyncio.Event,
        now_s: Callable[[], float],
    ) -> None:
        """``core``: the run's; ``handle`` feeds it; ``wants_tasks`` is set when it has places;
        ``now_s`` times iterators."""
        self._core = core
        self._handle = handle
        self._wants_tasks = wants_tasks
        self._now_s = now_s
        self._source: TaskSource | None = None
        self._feeding: asyncio.Task[None] | None = None
        self._episodes: dict[int, EpisodeFunction] = {}
        """By iterator, of those from which a task may still begin."""

    def begin(
        self,
        tasks: Tasks,
        episode: EpisodeFunction,
        group: asyncio.TaskGroup,
        *,
        is_journalled: bool,
    ) -> None:
        """Take tasks from this iterator from now on, each run by ``episode``."""
        core = self._core()
        if self._feeding is not None:
            self._feeding.cancel()  # it may wait for an iterator that nobody wants any more
        if self._source is None or not self._source.goes_on_with(tasks):
            before, self._source = self._source, TaskSource(tasks)
            if before is not None:
                self._source.inherit(before, TaskKey(core.tasks.offer, core.tasks.count))
        feed = TaskFeed(
            core,
            self._source,
            self._handle,
            self.episode_of,
            wants_tasks=self._wants_tasks,
            is_journalled=is_journalled,
            now_s=self._now_s,
        )
        self._feeding = group.create_task(feed.run(), name="tasks")
        self._handle(ev.TasksOffered(), None)
        used = {g.key.offer for g in core.groups.in_order if g.key is not None}
        used |= {key.offer for key in core.tasks.requeued} | self._source.offers
        self._episodes = {o: each for o, each in self._episodes.items() if o in used}
        self._episodes[core.tasks.offer] = episode

    def episode_of(self, key: TaskKey | None) -> EpisodeFunction | None:
        """What a task runs; None is a new one, of the newest iterator."""
        newest = self._episodes.get(self._core().tasks.offer)
        return newest if key is None else self._episodes.get(key.offer, newest)

    def put_back(self, task: object, key: TaskKey) -> None:
        """A task is to be taken again."""
        assert self._source is not None
        self._source.put_back(task, key)

    def close(self) -> None:
        """Nothing more is taken."""
        if self._source is not None:
            self._source.close()
