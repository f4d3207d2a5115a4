"""Batches that the trainer has had: which of them it still holds, and which it could still lose.

The core adds a batch here when it hands it over. A batch holds places in admission until the
version made from it is live. Its groups are kept as well, because the trainer may say that it left
some out; where a run must survive a crash, they are kept until the trainer's checkpoint holds the
batch.

A publish does not say which batches its weights were made from. A trainer that asks for the next
batch during its train step (look-ahead) holds batches that it will train on later, under a newer
version; a trainer that publishes every k batches has trained on all that it holds. A publish
therefore counts for at least one batch, and for more only where the trainer's own rhythm shows it,
see :meth:`HandedBatches.publish`. Counting too few keeps the bound; too many would break it. A
trainer is assumed to train in the order of the batches, to look ahead by one number of batches, and
to publish no more often than it trains.
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
    """Places that it holds in admission."""
    trainer_version: int
    """Version at which it is trained; see :attr:`HandedBatches.untrained`."""
    version: int | None = None
    """First version that was made from it for certain; None until then."""
    groups: list[Group] = field(default_factory=list)
    """Kept while the trainer may say what it left out, or a crash lose what it made of them."""
    is_again: bool = False
    """Whether a resume had undone this batch, and it was handed over again as it was."""

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
        self.again: deque[tuple[int, ...]] = deque()
        """Group ids of the batches that a resume has undone and that are yet to be handed over
        again, oldest batch first, each in the order it was handed over in."""
        self.versions: deque[tuple[int, int]] = deque([(0, 0)])
        """(version, batches it was made from at most) of each that a resume could go back to."""
        self.covered = 0
        """Batches that the newest version is known to have been made from."""
        self.taken_before = 0
        """Batches handed over between the last two publishes; 0 if a batch was being asked for at
        the later one, because such a trainer catches up in the next interval."""
        self.tried = 0
        """Batches handed over by the publish tried last, if it failed; else 0."""
        self.failed = 0
        """Publishes that failed since the newest, each with a batch taken before it."""
        self.is_asked_ahead = False
        """Whether a batch was being asked for at the newest publish."""

    @property
    def num_groups(self) -> int:
        """Groups whose places are held."""
        return sum(batch.num_groups for batch in self.holding)

    @property
    def untrained(self) -> int:
        """Batches that the trainer holds and may not have trained on yet. The next batch is trained
        after them, and so under the trainer's version plus one for each of them."""
        return sum(batch.version is None for batch in self.holding)

    @property
    def taken(self) -> int:
        """Batches handed over since the newest publish."""
        return self.count - self.versions[-1][1]

    @property
    def unpublished_groups(self) -> int:
        """Places of batches that no version is known to have been made from."""
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

    def hand(self, groups: list[Group], trainer_version: int, *, places: int) -> int:
        """Note a batch handed over now, which holds so many places; its number."""
        self.count += 1
        is_again = bool(self.again)
        if is_again:
            self.again.popleft()
        batch = HandedBatch(self.count, places, trainer_version, groups=groups, is_again=is_again)
        self.holding.append(batch)
        self.kept.append(batch)
        return self.count

    def publish(
        self,
        version: int,
        *,
        is_asked: bool = False,
        is_restored: bool = False,
        replaced: int = 0,
    ) -> None:
        """``version`` was made from one batch at least: from the oldest that the trainer holds.

        It was made from more if the trainer took more in this interval and in the one before:
        a trainer with a fixed look-ahead takes as many between two publishes as it trains on. That
        is not so while it catches up after a publish at which it was waiting (``is_asked``). Each
        earlier publish that came to nothing adds one: those whose place this one takes
        (``replaced``), and failed ones after which a batch was taken; others may be tried again.
        Restored weights (``is_restored``) are made from everything that the trainer has had.
        """
        taken = self.taken
        again = self.failed > 0 and self.tried == self.count
        self.covered = max(min(self.taken_before, taken), 1 + self.failed - again) + replaced
        self._count_trained(self.count if is_restored else self.covered, version)
        self.taken_before = 0 if is_asked else taken
        self.tried = self.failed = 0
        self.is_asked_ahead = is_asked
        self.versions.append((version, self.count))
        self._forget_versions()

    def note_failed(self, *, is_asked: bool) -> None:
        """A publish has failed; of a trainer that waits for a batch meanwhile, it shows nothing."""
        if not is_asked and self.count > max(self.tried, self.versions[-1][1]):
            self.tried = self.count
            self.failed += 1

    def note_asked(self) -> bool:
        """A batch is asked for: if the trainer has taken more than one since the newest publish,
        and took more than one before it, that publish was made from as many.

        Returns whether a batch is known to be trained by this.
        """
        known = min(self.taken_before, self.taken + 1)
        if known <= self.covered:
            return False
        before, more = self.untrained, min(known - self.covered, self.untrained - self.taken)
        self.covered = known
        self._count_trained(more, self.versions[-1][0])
        return self.untrained < before

    def assume_trained(self) -> bool:
        """No batch can fill while the trainer holds so many: the oldest one that it had at the
        newest publish must be trained by now, or it would hold more than admission allows.

        Returns False where that does not follow: it took all of them since that publish, or it
        asks while it publishes, and so may ask for more than it is allowed to hold.
        """
        if self.is_asked_ahead or self.untrained <= self.taken:
            return False
        self._count_trained(1, self.versions[-1][0])
        return True

    def _count_trained(self, batches: int, version: int) -> None:
        """``version`` was made from so many of the oldest that the trainer holds."""
        for batch in self.holding:
            if batches < 1:
                return
            if batch.version is None:
                batch.version = version
                batches -= 1

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
        """Undo every batch after the first ``batches``, to be handed over again as it was.

        Returns them, newest first.
        """
        taken: list[HandedBatch] = []
        while self.kept and self.kept[-1].number > batches:
            batch = self.kept.pop()
            taken.append(batch)
            self.again.appendleft(tuple(group.group_id for group in batch.groups))
        while self.holding and self.holding[-1].number > batches:
            self.holding.pop()
        self.count = batches
        return taken

    def give_back(self) -> HandedBatch:
        """Undo the newest batch, which never reached the trainer; no version was made from it.

        Its groups are selected anew, unless a resume had undone the batch: then it comes as it was.
        """
        (batch,) = self.take_back(self.count - 1)
        if not batch.is_again:
            self.again.popleft()
        self.versions = deque((v, min(made, self.count)) for v, made in self.versions)
        return batch

    def begin_anew(self) -> None:
        """Another process of the trainer goes on: nothing is known of its rhythm."""
        self.covered = self.taken_before = self.tried = self.failed = 0
        self.is_asked_ahead = False

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
