"""Batches handed to the trainer: which batches count in admission, and which a crash can undo.

:class:`Core` adds a batch at its hand-over. A batch counts in ``outstanding_groups`` until the
version made from it is live. Its groups are kept longer, because the trainer may report rows that
it did not train on; a run with a journal keeps them until the trainer's checkpoint contains the
batch. A row is a rollout or a branch of one, and a rollout counts as trained while one of its rows
does. Built on ``groups.py``, and on the counts of ``trained.py``, which are corrected when the
trainer reports rows that it did not train on.

A publish does not say which batches its weights were made from. A trainer that asks for the next
batch during its train step (look-ahead) holds batches that it will train on later, under a newer
version; a trainer that publishes every k batches has trained on all that it holds. A publish
therefore counts for as many batches as the policy is told (``batches_per_version``); untold, for at
least one, and for more only where the trainer's own rhythm shows it, see
:meth:`HandedBatches.publish`. Counting too few keeps the bound; too many would break it. A
trainer is assumed to train in the order of the batches, to look ahead by one number of batches, and
to publish no more often than it trains.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from tidegate.errors import ConfigError
from tidegate.orchestrator.core.group import Group, TaskKey
from tidegate.orchestrator.core.groups import GroupTracker
from tidegate.orchestrator.core.rollout import Rollout
from tidegate.orchestrator.core.trained import TrainedCounts

KEPT_BATCHES = 2
"""Fewest batches kept in a run without a journal. A trainer that consumes single rows may request
the next batch before it reports the discarded rows of the current batch."""


@dataclass(slots=True)
class HandedBatch:
    """One batch that was handed over."""

    number: int
    """Number of the batch in its run, from 1."""
    num_groups: int
    """Number of outstanding groups that the batch counts as; at least its number of groups."""
    trainer_version: int
    """Trainer version at which the batch is trained; see :attr:`HandedBatches.untrained`."""
    version: int | None = None
    """First version that was certainly made from the batch; None until then."""
    groups: list[Group] = field(default_factory=list)
    """Groups of the batch, kept while the trainer may discard rows or a resume may undo the
    batch."""
    was_undone: bool = False
    """Whether a resume had undone this batch and handed it over again unchanged."""

    @property
    def rows(self) -> list[Rollout]:
        """Rows of the batch, in the order in which they were handed over."""
        return [row for group in self.groups for row in group.kept]


class HandedBatches:
    """Batches of the trainer, kept while admission, discarded rows or a resume need them."""

    def __init__(self, *, is_kept: bool, batches_per_version: int = 1) -> None:
        """``is_kept``: whether batches may have to be handed over again after a crash.
        ``batches_per_version``: number of batches that each publish counts for; 1: inferred."""
        self.is_kept = is_kept
        self._batches_per_version = batches_per_version
        self.count = 0
        """Number of batches handed over; after a resume, it restarts at the number in the trainer's
        checkpoint."""
        self.checkpointed = 0
        """Number of batches that the trainer's checkpoint certainly contains."""
        self.checkpoint_offer = 0
        """Number of the user's iterator in use at that checkpoint."""
        self.holding: deque[HandedBatch] = deque()
        """Batches whose version isn't live yet, oldest first."""
        self.kept: deque[HandedBatch] = deque()
        """Batches that no checkpoint contains, oldest first. If not ``is_kept``, the last
        :data:`KEPT_BATCHES` batches, or more while more are in ``holding``."""
        self.undone: deque[tuple[int, ...]] = deque()
        """Group ids of the batches that a resume has undone and that are still to be handed over
        again, oldest batch first, each in its original order."""
        self.versions: deque[tuple[int, int]] = deque([(0, 0)])
        """(version, most batches it was made from), for versions that a resume could return to."""
        self.newest_version_batches = 0
        """Number of batches that the newest version is known to have been made from."""
        self.previous_taken = 0
        """Batches handed over between the last two publishes, divided by the publishes attempted
        (failed ones included unless retried). 0 if a batch request was unmet at the publish, or
        found no more tasks before it, because the trainer then catches up in the next interval."""
        self.count_at_failure = 0
        """Number of batches handed over when the last publish failed; 0 if it did not fail."""
        self.failed_publishes = 0
        """Publishes that failed since the newest one, each with a batch handed over before it."""
        self.failed_publishes_counted = 0
        """Number of ``failed_publishes`` whose batch counts as trained; see
        :meth:`assume_trained`."""
        self.is_requested_ahead = False
        """Whether a batch request was unmet at the newest publish."""
        self.has_lacked_tasks = False
        """Whether a batch request since the newest publish found no more tasks."""
        self._has_rhythm = False
        """Whether a publish has followed a batch. From then on a trainer with a fixed look-ahead
        takes a whole number of versions' batches between two publishes."""

    @property
    def num_groups(self) -> int:
        """Number of outstanding groups that all batches count as in admission."""
        groups = 0
        for batch in self.holding:  # read for every rollout, and a generator costs twice as much
            groups += batch.num_groups
        return groups

    @property
    def untrained(self) -> int:
        """Number of batches that the trainer holds and may not have trained on yet.

        The next batch is trained after these batches, and so at the trainer's version plus one for
        each of them.
        """
        return sum(batch.version is None for batch in self.holding)

    @property
    def taken(self) -> int:
        """Number of batches handed over since the newest publish."""
        return self.count - self.versions[-1][1]

    @property
    def unpublished_groups(self) -> int:
        """Number of outstanding groups of batches that no version is known to be made from."""
        groups = 0
        for batch in self.holding:  # read as often as num_groups
            if batch.version is None:
                groups += batch.num_groups
        return groups

    def __contains__(self, number: int) -> bool:
        """Whether rows of this batch can still be reported as not trained on."""
        return any(batch.number == number for batch in self.kept)

    def __getitem__(self, number: int) -> HandedBatch:
        return next(batch for batch in self.kept if batch.number == number)

    def add(self, groups: list[Group], trainer_version: int, *, num_groups: int) -> int:
        """Add a batch that is handed over now and counts as ``num_groups``; return its number."""
        self.count += 1
        was_undone = bool(self.undone)
        if was_undone:
            self.undone.popleft()
        batch = HandedBatch(
            self.count, num_groups, trainer_version, groups=groups, was_undone=was_undone
        )
        self.holding.append(batch)
        self.kept.append(batch)
        return self.count

    def refuse_early_publish(self, *, is_batch_requested: bool) -> None:
        """Refuse a publish that contradicts ``batches_per_version``: the batches that the trainer
        holds would be trained under newer versions than they were counted for.

        Raises:
            ConfigError: after part of a version's batches.
        """
        taken = self.taken + is_batch_requested - self.is_requested_ahead
        number = self._batches_per_version
        if self._has_rhythm and not self.has_lacked_tasks and taken % number:
            raise ConfigError(
                f"a publish after {taken} batches, but the policy was told "
                f"batches_per_version={number}; publish after each {number} batches (the last, "
                f"after the tasks have ended, may be of fewer), or set the number that your "
                f"trainer trains on before a publish"
            )

    def forget_rhythm(self) -> None:
        """Allow the next publish after any number of batches, because bad weights are replaced."""
        self._has_rhythm = False

    def publish(
        self,
        version: int,
        *,
        is_batch_requested: bool = False,
        is_restored: bool = False,
        replaced: int = 0,
    ) -> None:
        """Record a publish, and infer how many of the trainer's batches ``version`` is made from.

        With ``batches_per_version`` above 1, it is made from as many. Otherwise it is made from at
        least the oldest batch without a version, and from more if the trainer took more than one
        batch both in this interval and in the previous one: a trainer with a fixed look-ahead takes
        as many batches between two publishes as it trains on. An interval does not show this while
        the trainer catches up, after a publish with an unmet batch request (``is_batch_requested``)
        or one before which the tasks had ended (:meth:`on_tasks_ended`). Each earlier publish
        without a version adds a version's batches: the ``replaced`` ones, and failed ones after
        which a batch was taken. A failed publish without such a batch may be a first attempt at
        this one. Restored weights (``is_restored``) are made from all batches handed over.
        """
        taken = self.taken
        failed = self.failed_publishes - (
            self.failed_publishes > 0 and self.count_at_failure == self.count
        )
        if self._batches_per_version > 1:
            self.newest_version_batches = self._batches_per_version * (1 + failed + replaced)
        else:
            known = min(self.previous_taken, taken - failed)
            self.newest_version_batches = max(known, 1 + failed) + replaced
        uncounted = self.newest_version_batches - self.failed_publishes_counted
        self._count_trained(self.count if is_restored else uncounted, version)
        self._has_rhythm = not is_restored and (self._has_rhythm or taken > 0)
        self.previous_taken = (
            0 if is_batch_requested or self.has_lacked_tasks else taken // (1 + failed)
        )
        self.count_at_failure = self.failed_publishes = self.failed_publishes_counted = 0
        self.is_requested_ahead, self.has_lacked_tasks = is_batch_requested, False
        self.versions.append((version, self.count))
        self._forget_versions()

    def on_publish_failed(self, *, is_batch_requested: bool) -> None:
        """Record a failed publish.

        A trainer with an unmet batch request (``is_batch_requested``), or whose request found no
        more tasks, catches up afterwards, just as after a successful publish.
        """
        if is_batch_requested or self.has_lacked_tasks:
            self.previous_taken, self.has_lacked_tasks = 0, False
        if not is_batch_requested and self.count > max(self.count_at_failure, self.versions[-1][1]):
            self.count_at_failure = self.count
            self.failed_publishes += 1

    def on_tasks_ended(self) -> None:
        """Record a batch request that found no more tasks: a trainer that looks ahead then holds
        one batch fewer than usual."""
        self.has_lacked_tasks = True

    def on_batch_requested(self) -> bool:
        """Record a batch request; return whether one more batch is now known to be trained.

        If the trainer has taken several batches since the newest publish, this request included,
        and took several before it, then the newest version was made from as many (the smaller of
        the two). Each publish that failed since accounts for one batch of those taken since.
        """
        known = min(self.previous_taken, self.taken + 1 - self.failed_publishes)
        if self._batches_per_version > 1 or known <= self.newest_version_batches:
            return False
        before, more = (
            self.untrained,
            min(known - self.newest_version_batches, self.untrained - self.taken),
        )
        self.newest_version_batches = known
        self._count_trained(more, self.versions[-1][0])
        return self.untrained < before

    def assume_trained(self) -> bool:
        """Count one more batch as trained, because admission allows no batch to fill while the
        trainer holds this many.

        The batch may have been trained for a publish that failed; then it does not count for the
        next publish again. Returns False if no batch need be trained yet: the trainer took all of
        its batches since the newest publish, or it requests batches while it publishes, and so may
        request more than it may hold.
        """
        if self.is_requested_ahead or self.untrained <= self.taken:
            return False
        self.failed_publishes_counted += self.failed_publishes > self.failed_publishes_counted
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
        """Remove batches whose version is live on every engine from admission."""
        while self.holding:
            version = self.holding[0].version
            if version is None or version > live_version:
                break
            self.holding.popleft()
        while not self.is_kept and len(self.kept) > max(KEPT_BATCHES, len(self.holding)):
            self._drop_oldest()

    def mark_checkpointed(self, batches: int, offer: int) -> None:
        """Record that the trainer's checkpoint contains the first ``batches`` batches.

        ``offer`` is the number of the user's iterator in use at the checkpoint.
        """
        self.checkpoint_offer = offer
        self.checkpointed = max(self.checkpointed, min(batches, self.count))
        while self.kept and self.kept[0].number <= self.checkpointed:
            self._drop_oldest()
        self._forget_versions()

    def undo_after(self, batches: int) -> list[HandedBatch]:
        """Undo every batch after the first ``batches``; return the undone batches, newest first.

        They will be handed over again unchanged.
        """
        undone: list[HandedBatch] = []
        while self.kept and self.kept[-1].number > batches:
            batch = self.kept.pop()
            undone.append(batch)
            self.undone.appendleft(tuple(group.group_id for group in batch.groups))
        while self.holding and self.holding[-1].number > batches:
            self.holding.pop()
        self.count = batches
        return undone

    def undo_newest(self) -> HandedBatch:
        """Undo the newest batch, which never reached the trainer, and return it.

        Its groups may be selected again. If a resume had undone the batch before, the batch is
        handed over again unchanged.
        """
        (batch,) = self.undo_after(self.count - 1)
        if not batch.was_undone:
            self.undone.popleft()
        self.versions = deque((v, min(made, self.count)) for v, made in self.versions)
        return batch

    def forget_trainer_pace(self) -> None:
        """Forget how many batches the trainer takes per version; its process was restarted."""
        self.newest_version_batches = self.previous_taken = self.count_at_failure = (
            self.failed_publishes
        ) = self.failed_publishes_counted = 0
        self.is_requested_ahead = self.has_lacked_tasks = False

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
        """Keep only versions that a resume could return to: the newest one made only from
        checkpointed batches, and later ones."""
        checkpointed = self.checkpointed if self.is_kept else self.count
        while len(self.versions) > 1 and self.versions[1][1] <= checkpointed:
            self.versions.popleft()


# ---------------------------------------------------------------- rows that are not trained on


def discard_rows(
    batch: HandedBatch,
    indices: Iterable[int],
    reason: str,
    groups: GroupTracker,
    trained: TrainedCounts,
) -> None:
    """Count these of a batch's rows (indices in :attr:`HandedBatch.rows`) as not trained; rows
    discarded before stay so."""
    rows = batch.rows
    chosen = [rows[index] for index in sorted({*indices})]
    chosen = [row for row in chosen if row.discard_reason is None]
    roots = _roots(chosen)
    trained.count(roots, batch.trainer_version, -1)
    for row in chosen:
        row.discard_reason = reason
        groups.ledger.discard_trained(row.sampled_tokens - row.masked_tokens, reason)
    trained.count([root for root in roots if _is_trained(root)], batch.trainer_version, 1)
    keys = _keys(batch)
    for root in roots:
        if (why := root.discard_reason) is not None and not _is_trained(root):
            groups.discarded_rollouts[why] += 1
            groups.discards.count_untrained(root, why, keys[root.group_id])


def undo_batch(batch: HandedBatch, groups: GroupTracker, trained: TrainedCounts) -> None:
    """Undo a whole batch, its discarded rows included, so that it can be handed over again."""
    roots = [row for row in batch.rows if row.branch_of is None]
    trained.count([root for root in roots if _is_trained(root)], batch.trainer_version, -1)
    keys = _keys(batch)
    for root in roots:
        if (why := root.discard_reason) is not None and not _is_trained(root):
            groups.discarded_rollouts[why] -= 1
            groups.discards.uncount_untrained(root, why, keys[root.group_id])
    for row in batch.rows:
        if row.discard_reason is not None:
            groups.ledger.discard_trained(
                row.masked_tokens - row.sampled_tokens, row.discard_reason
            )
            row.discard_reason = None
    groups.return_to_buffer(batch.groups)


def _keys(batch: HandedBatch) -> dict[int, TaskKey | None]:
    return {group.group_id: group.key for group in batch.groups}


def _roots(rows: Iterable[Rollout]) -> list[Rollout]:
    return list({root.rollout_id: root for root in (row.root for row in rows)}.values())


def _is_trained(root: Rollout) -> bool:
    return any(row.discard_reason is None for row in root.rows)
