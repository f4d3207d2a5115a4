"""Which of the user's tasks have been taken? Counted per iterator, so that a resume takes the rest.

A task is known by its place: the user gives the same iterators again after a crash, and the run
goes on where it was. It never sees a task itself.
"""

from collections import Counter

from tidegate.orchestrator.core.group import TaskKey


class TakenTasks:
    """Places in the user's iterators."""

    def __init__(self) -> None:
        self.offer = -1
        """The iterator in use; -1 before the first."""
        self.counts: Counter[int] = Counter()
        """Tasks taken, by iterator."""
        self.requeued: set[TaskKey] = set()
        """Given back to be taken again."""
        self.gone_before = 0
        """Tasks of older iterators can't be taken again: a crash has parted the run from them."""
        self.is_continued = False
        """Whether the next iterator is the one that was in use before a crash."""

    @property
    def count(self) -> int:
        """Taken from the iterator in use."""
        return self.counts[self.offer]

    def begin(self) -> None:
        """The user gives an iterator."""
        if not self.is_continued:
            self.offer += 1
        self.is_continued = False

    def take(self, key: TaskKey | None) -> TaskKey:
        """A task is taken: the next one of the iterator in use, or one that was given back."""
        if key is not None:
            self.requeued.discard(key)
            return key
        count = self.counts[self.offer]
        key = TaskKey(self.offer, count)
        self.counts[self.offer] = count + 1
        return key

    def put_back(self, key: TaskKey) -> None:
        """A task is to be taken again."""
        self.requeued.add(key)

    def resume(self, offer: int) -> None:
        """Go on with iterator ``offer``; what was taken from later ones will be taken anew."""
        self.offer = offer
        self.gone_before = max(0, offer)
        self.is_continued = offer >= 0
        self.counts = Counter({o: n for o, n in self.counts.items() if o <= offer})
        self.requeued = {key for key in self.requeued if key.offer == offer}
