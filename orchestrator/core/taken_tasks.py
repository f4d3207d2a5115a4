"""Position in the user's task iterators: which tasks were taken, and which will start again.

:class:`Core` owns one :class:`TakenTasks`. A task is identified by its iterator and index. After a
crash the user gives the iterator in use at the checkpoint again, from its beginning. Tasks of
earlier iterators can only be restored from the journal, if they are plain data.
"""

from collections import Counter
from dataclasses import dataclass

from tidegate.orchestrator.core.group import TaskKey


@dataclass(frozen=True, slots=True)
class ReturnedTask:
    """A task of a discarded group, to be started again."""

    task: object
    body: bytes
    """The task as bytes, as :attr:`~tidegate.orchestrator.core.group.Group.body`."""


class TakenTasks:
    """Counts of taken tasks by iterator, and the tasks to be taken again."""

    def __init__(self) -> None:
        self.offer = -1
        """Number of the iterator in use; -1 before the first."""
        self.counts: Counter[int] = Counter()
        """Number of tasks taken, by iterator."""
        self.requeued: dict[TaskKey, ReturnedTask] = {}
        """Tasks that were put back and not taken again yet."""
        self.episodes: dict[int, str] = {}
        """Name of the episode function of each iterator that has tasks left; empty if unknown."""
        self.first_available_offer = 0
        """Iterators below this number precede the resumed checkpoint's, and are not given again."""
        self.dropped = 0
        """Number of unfinished tasks that the newest resume had to drop."""
        self.is_continued = False
        """Whether the next iterator is the one that was in use before a crash."""

    @property
    def count(self) -> int:
        """Number of tasks taken from the iterator in use."""
        return self.counts[self.offer]

    def begin(self, episode: str = "", used: "set[int] | None" = None) -> None:
        """Begin a new iterator; ``used`` are the numbers of the iterators that gave the tasks of
        current groups."""
        if not self.is_continued:
            self.offer += 1
        self.is_continued = False
        used = (used or set()) | {key.offer for key in self.requeued}
        self.episodes = {offer: name for offer, name in self.episodes.items() if offer in used}
        self.episodes[self.offer] = episode

    def take(self, key: TaskKey | None) -> TaskKey:
        """Take the next task of the iterator in use, or the returned one with this ``key``."""
        if key is not None:
            self.requeued.pop(key, None)
            # A task read ahead from an earlier iterator was not counted yet.
            self.counts[key.offer] = max(self.counts[key.offer], key.index + 1)
            return key
        count = self.counts[self.offer]
        key = TaskKey(self.offer, count)
        self.counts[self.offer] = count + 1
        return key

    def put_back(self, key: TaskKey, task: object, body: bytes) -> None:
        """Put a task back, to be started again."""
        self.requeued[key] = ReturnedTask(task, body)

    def forget(self, key: TaskKey) -> None:
        """Drop a task that was put back and can't be started again."""
        del self.requeued[key]
        self.dropped += 1

    def can_be_taken_again(self, key: TaskKey, body: bytes) -> bool:
        """Whether a task can be started again: from its iterator, or from the journal."""
        return key.offer >= self.first_available_offer or self.is_known(key, body)

    def is_known(self, key: TaskKey, body: bytes) -> bool:
        """Whether a task of an earlier iterator can be run without that iterator.

        It can if the journal holds the task and its iterator had the same episode function as the
        iterator in use, because after a resume no other function is known.
        """
        before, now = self.episodes.get(key.offer, ""), self.episodes.get(self.offer, "")
        return bool(body) and (not before or not now or before == now)

    def resume(self, offer: int) -> None:
        """Continue with iterator ``offer``; tasks taken from later ones will be taken again."""
        self.offer = offer
        self.first_available_offer = max(0, offer)
        self.dropped = 0
        self.is_continued = offer >= 0
        self.counts = Counter({o: n for o, n in self.counts.items() if o <= offer})
        self.episodes = {o: name for o, name in self.episodes.items() if o <= offer}
        requeued = {k: each for k, each in self.requeued.items() if k.offer <= offer}
        self.requeued = {k: each for k, each in requeued.items() if k.offer == offer or each.body}
        self.dropped += len(requeued) - len(self.requeued)
