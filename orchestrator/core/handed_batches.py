"""Which batches has the trainer had, what became of each, and which could it still lose?

A batch holds its groups' places in admission until the version made from it is live. Its
groups are kept as well, for the trainer may say that it left some out; where a run must survive a
crash, until the trainer's checkpoint holds what it made of them. It knows numbers and versions; not
what a group is made of.
"""

from collections import deque
from dataclasses import dataclass, field

from tidegate.orchestrator.core.group import Group
from tidegate.orchestrator.core.rollout import Rollout

KEPT_BATCHES = 2
"""Of a run that need not survive a crash: a trainer that takes rows one by one may be a batch ahead
of what it trains on, and has said by then which of the batch before it left out."""


@dataclass(slots=True)
class HandedBatch:
    """One batch that the trainer has had."""

    number: int
    """Counts a run's batches from 1."""
    num_groups: int
    """Whose places it holds: all but rests."""
    trainer_version: int
    """When it was handed over."""
    version: int | None = None
    """Made from it; None until published."""
    groups: list[Group] = field(default_factory=list)
    """Kept while the trainer may say what it left out, or a crash lose what it made of them."""

    @property
    def rows(self) -> list[Rollout]:
        """As they were handed over, in that order."""
        return [row for group in self.groups for row in group.kept]


class HandedBatches:
    """The trainer's batches, as far as they still matter."""

    def __init__(self, *, is_kept: bool) -> None:
        """``is_kept``: whether batches may have to be handed over again after a crash."""
        self.is_kept = is_kept
        self.count = 0
        """Handed over so far; after a crash, those in the trainer's checkpoint."""
        self.safe = 0
        """Of those, how many the trainer's checkpoint holds for certain."""
        self.safe_offer = 0
        """The user's iterator that was in use when they were."""
        self.holding: deque[HandedBatch] = deque()
        """Those whose version isn't live yet, oldest first."""
        self.kept: deque[HandedBatch] = deque()
        """Those that aren't safe, oldest first; if not ``is_kept``, the last few, and those whose
        version isn't live yet."""
        self.versions: deque[tuple[int, int]] = deque([(0, 0)])
        """(version, batches it was made from) of each that a resume could go back to."""

    @property
    def num_groups(self) -> int:
        """Groups whose places are held."""
        groups = 0
        for batch in self.holding:  # asked after every event: a generator takes thrice as long
            groups += batch.num_groups
        return groups

    @property
    def unpublished_groups(self) -> int:
        """Groups that no version was made from yet."""
        groups = 0
        for batch in self.holding:  # asked as often, while the trainer waits
            if batch.version is None:
                groups += batch.num_groups
        return groups

    def __contains__(self, number: int) -> bool:
        """Whether the trainer may still say what it left out of this batch."""
        return any(batch.number == number for batch in self.kept)

    def __getitem__(self, number: int) -> HandedBatch:
        return next(batch for batch in self.kept if batch.number == number)

    def hand(self, groups: list[Group], trainer_version: int) -> int:
        """Note a batch handed over now; its number."""
        self.count += 1
        num_groups = sum([group.split_from is None for group in groups])
        batch = HandedBatch(self.count, num_groups, trainer_version, groups=groups)
        self.holding.append(batch)
        self.kept.append(batch)
        return self.count

    def publish(self, version: int) -> None:
        """``version`` was made from every batch so far."""
        for batch in self.holding:
            if batch.version is None:
                batch.version = version
        self.versions.append((version, self.count))
        self._forget_versions()

    def release(self, live_version: int) -> None:
        """Free the places of batches whose version is live on every engine."""
        while self.holding:
            version = self.holding[0].version
            if version is None or version > live_version:
                break
            self.holding.popleft()
        while not self.is_kept and len(self.kept) > max(KEPT_BATCHES, len(self.holding)):
            self._let_go_of_oldest()

    def make_safe(self, batches: int, offer: int) -> None:
        """The trainer's checkpoint holds what it made of the first ``batches`` batches."""
        self.safe_offer = offer
        self.safe = max(self.safe, min(batches, self.count))
        while self.kept and self.kept[0].number <= self.safe:
            self._let_go_of_oldest()
        self._forget_versions()

    def take_back(self, batches: int) -> list[HandedBatch]:
        """Undo every batch after the first ``batches``: they are returned, newest first."""
        taken: list[HandedBatch] = []
        while self.kept and self.kept[-1].number > batches:
            taken.append(self.kept.pop())
        while self.holding and self.holding[-1].number > batches:
            self.holding.pop()
        self.count = batches
        return taken

    def roll_back(self, version: int) -> None:
        """The checkpoint's weights go on as ``version``; those made from more are no more."""
        self.versions = deque((v, made) for v, made in self.versions if made <= self.count)
        self.versions.append((version, self.count))

    def first_lost_version(self, batches: int) -> int | None:
        """The oldest version made from more than the first ``batches`` batches, if there is one."""
        return min((version for version, made in self.versions if made > batches), default=None)

    def _let_go_of_oldest(self) -> None:
        for group in self.kept.popleft().groups:
            group.untie()

    def _forget_versions(self) -> None:
        """Only what a resume could go back to: the newest that is safe, and all after it."""
        unsafe_from = self.safe if self.is_kept else self.count
        while len(self.versions) > 1 and self.versions[1][1] <= unsafe_from:
            self.versions.popleft()
