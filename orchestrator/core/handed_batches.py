"""Batches that the trainer has had: which it still holds, and which a crash could still undo.

:class:`Core` adds a batch at its hand-over. A batch holds places in admission (it counts in
``outstanding_groups``) until the version made from it is live. Its groups are kept as well, because
the trainer may report rows that it did not train on; a run with a journal keeps them until the
trainer's checkpoint holds the batch.

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
"""Batches kept in a run without a journal: a trainer that takes rows one by one may be a batch
ahead of what it trains on, and has by then reported what it left out of the batch before."""


@dataclass(slots=True)
class HandedBatch:
    """One batch that was handed over."""

    number: int
    """Number of the batch in its run, from 1."""
    num_groups: int
    """Places that the batch holds in admission."""
    trainer_version: int
    """Version at which it is trained; see :attr:`HandedBatches.untrained`."""
    version: int | None = None
    """First version that was certainly made from the batch; None until then."""
    groups: list[Group] = field(default_factory=list)
    """Groups of the batch, kept while rows may be left out or a resume may undo the batch."""
    was_undone: bool = False
    """Whether a resume had undone this batch and handed it over again unchanged."""

    @property
    def rows(self) -> list[Rollout]:
        """Rows of the batch, in the order in which they were handed over."""
        return [row for group in self.groups for row in group.kept]


class HandedBatches:
    """The trainer's batches, as long as admission, left-out rows or a resume need them."""

    def __init__(self, *, is_kept: bool) -> None:
        """``is_kept``: whether batches may have to be handed over again after a crash."""
        self.is_kept = is_kept
        self.count = 0
        """Number of batches handed over; after a resume, of those in the trainer's checkpoint."""
        self.safe = 0
        """Number of batches that the trainer's checkpoint certainly holds."""
        self.safe_offer = 0
        """Number of the user's iterator in use at that checkpoint."""
        self.holding: deque[HandedBatch] = deque()
        """Batches whose version isn't live yet, oldest first."""
        self.kept: deque[HandedBatch] = deque()
        """Batches that aren't safe, oldest first; if not ``is_kept``, the last few, and those whose
        version isn't live yet."""
        self.undone: deque[tuple[int, ...]] = deque()
        """Group ids of the batches that a resume has undone and that are still to be handed over
        again, oldest batch first, each in its original order."""
        self.versions: deque[tuple[int, int]] = deque([(0, 0)])
        """(version, most batches it was made from), for versions that a resume could return to."""
        self.covered = 0
        """Number of batches that the newest version is known to have been made from."""
        self.taken_before = 0
        """Batches handed over between the last two publishes, for each that was tried; 0 if the
        trainer asked for one more that it did not get, because such a trainer catches up in the
        next interval."""
        self.tried = 0
        """Number of batches handed over when the last publish failed; 0 if it did not fail."""
        self.failed = 0
        """Publishes that failed since the newest, each with a batch taken before it."""
        self.failed_counted = 0
        """Of those, how many have their batch counted as trained; see :meth:`assume_trained`."""
        self.is_requested_ahead = False
        """Whether a batch was being asked for at the newest publish."""
        self.is_short = False
        """Whether a batch was asked for since the newest publish and the tasks had ended."""

    @property
    def num_groups(self) -> int:
        """Admission places held by all batches."""
        groups = 0
        for batch in self.holding:  # read for every rollout, and a generator costs twice as much
            groups += batch.num_groups
        return groups

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
        """Admission places of batches that no version is known to have been made from."""
        groups = 0
        for batch in self.holding:  # read as often
            if batch.version is None:
                groups += batch.num_groups
        return groups

    def __contains__(self, number: int) -> bool:
        """Whether rows of this batch can still be reported as not trained on."""
        return any(batch.number == number for batch in self.kept)

    def __getitem__(self, number: int) -> HandedBatch:
        return next(batch for batch in self.kept if batch.number == number)

    def add(self, groups: list[Group], trainer_version: int, *, places: int) -> int:
        """Add a batch that is handed over now and holds ``places`` places; return its number."""
        self.count += 1
        was_undone = bool(self.undone)
        if was_undone:
            self.undone.popleft()
        batch = HandedBatch(
            self.count, places, trainer_version, groups=groups, was_undone=was_undone
        )
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
        """Record a publish: ``version`` was made from at least the oldest batch that the trainer
        holds.

        It was made from more if the trainer took more in this interval and in the one before:
        a trainer with a fixed look-ahead takes as many between two publishes as it trains on. That
        is not so while it catches up after a publish at which it was waiting (``is_asked``), or
        before which the tasks had ended (:meth:`on_tasks_ended`). Each earlier publish that came to
        nothing adds one: those whose place this one takes (``replaced``), and failed ones after
        which a batch was taken; others may be tried again.
        Restored weights (``is_restored``) are made from everything that the trainer has had.
        """
        taken = self.taken
        failed = self.failed - (self.failed > 0 and self.tried == self.count)
        known = min(self.taken_before, taken - failed)
        self.covered = max(known, 1 + failed) + replaced
        uncounted = self.covered - self.failed_counted
        self._count_trained(self.count if is_restored else uncounted, version)
        self.taken_before = 0 if is_asked or self.is_short else taken // (1 + failed)
        self.tried = self.failed = self.failed_counted = 0
        self.is_requested_ahead, self.is_short = is_asked, False
        self.versions.append((version, self.count))
        self._forget_versions()

    def on_publish_failed(self, *, is_asked: bool) -> None:
        """A publish has failed. A trainer that waits for a batch meanwhile, or was told that tasks
        have ended, catches up after it as it does after one that succeeds."""
        if is_asked or self.is_short:
            self.taken_before, self.is_short = 0, False
        if not is_asked and self.count > max(self.tried, self.versions[-1][1]):
            self.tried = self.count
            self.failed += 1

    def on_tasks_ended(self) -> None:
        """A batch was asked for, and there are no more tasks: a trainer that looks ahead holds one
        batch fewer than it wants."""
        self.is_short = True

    def on_batch_requested(self) -> bool:
        """A batch is asked for: if the trainer has taken more than one since the newest publish,
        and took more than one before it, that publish was made from as many. A publish that failed
        since explains one of those taken.

        Returns whether a batch is now known to be trained.
        """
        known = min(self.taken_before, self.taken + 1 - self.failed)
        if known <= self.covered:
            return False
        before, more = self.untrained, min(known - self.covered, self.untrained - self.taken)
        self.covered = known
        self._count_trained(more, self.versions[-1][0])
        return self.untrained < before

    def assume_trained(self) -> bool:
        """Count one more batch as trained, because no batch can fill while the trainer holds so
        many.

        It may have been trained for a publish that failed; then the next one was not made from it.
        Returns False where that does not follow: it took all of them since that publish, or it
        asks while it publishes, and so may ask for more than it is allowed to hold.
        """
        if self.is_requested_ahead or self.untrained <= self.taken:
            return False
        self.failed_counted += self.failed > self.failed_counted
        self._count_trained(1, self.versions[-1][0])
        return True

    def _count_trained(self, batches: int, version: int) -> None:
        """Assign ``version`` to the oldest ``batches`` batches without one."""
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
            self._drop_oldest()

    def make_safe(self, batches: int, offer: int) -> None:
        """Note that the trainer's checkpoint holds the result of the first ``batches`` batches."""
        self.safe_offer = offer
        self.safe = max(self.safe, min(batches, self.count))
        while self.kept and self.kept[0].number <= self.safe:
            self._drop_oldest()
        self._forget_versions()

    def undo_after(self, batches: int) -> list[HandedBatch]:
        """Undo every batch after the first ``batches``, to be handed over again unchanged.

        Returns them, newest first.
        """
        taken: list[HandedBatch] = []
        while self.kept and self.kept[-1].number > batches:
            batch = self.kept.pop()
            taken.append(batch)
            self.undone.appendleft(tuple(group.group_id for group in batch.groups))
        while self.holding and self.holding[-1].number > batches:
            self.holding.pop()
        self.count = batches
        return taken

    def undo_newest(self) -> HandedBatch:
        """Undo the newest batch, which never reached the trainer; no version was made from it.

        Its groups are selected anew, unless a resume had undone the batch: then it stays as it was.
        """
        (batch,) = self.undo_after(self.count - 1)
        if not batch.was_undone:
            self.undone.popleft()
        self.versions = deque((v, min(made, self.count)) for v, made in self.versions)
        return batch

    def forget_trainer_pace(self) -> None:
        """Forget how many batches the trainer takes per version, because its process has
        changed."""
        self.covered = self.taken_before = self.tried = self.failed = self.failed_counted = 0
        self.is_requested_ahead = self.is_short = False

    def roll_back(self, version: int) -> None:
        """Continue the checkpoint's weights as ``version``; forget versions of later batches."""
        self.versions = deque((v, made) for v, made in self.versions if made <= self.count)
        self.versions.append((version, self.count))

    def first_lost_version(self, batches: int) -> int | None:
        """Return the oldest version made from more than the first ``batches`` batches, or None."""
        return min((version for version, made in self.versions if made > batches), default=None)

    def _drop_oldest(self) -> None:
        for group in self.kept.popleft().groups:
            group.untie()

    def _forget_versions(self) -> None:
        """Keep only versions that a resume could return to: the newest safe one, and later ones."""
        unsafe_from = self.safe if self.is_kept else self.count
        while len(self.versions) > 1 and self.versions[1][1] <= unsafe_from:
            self.versions.popleft()
