"""State machine of one trainer's batches: its requests, offers, and the state of each batch.

:class:`Core` owns one :class:`HandOvers` for the run's weights and one for each trained adapter. A
trainer says which batches its weights were made from; nothing is inferred from how often it
requests or publishes. A batch that no publish has named counts as untrained: it keeps its places in
admission, and the next batches are planned to be trained after it.

What happens to a batch, by its state:

==========  ===================  ==================  ====================================
state       a publish names it   a version is        otherwise
                                 released
==========  ===================  ==================  ====================================
held        trained              held; lost if       given back, or undone: in the buffer
                                 now too old         again. Bad versions retracted: lost
trained     trained (a retry)    in a version        undone by a resume
in version  refused              in version          once live on every engine: no longer
                                                     in admission
lost        refused              lost                its groups were discarded, and their
                                                     tasks are started again
==========  ===================  ==================  ====================================

A batch's age is final when a publish names it: the trainer's version then, minus the version of the
batch's oldest trained token. No other version can be released between a publish that names the
batch and its own release, because a newer publish replaces an unreleased one.

A row is a rollout or a branch of one, and a rollout counts as trained while one of its rows does.

With ``max_uses`` a group may be trained again. When a version made from its batch is released, a
copy of it enters :attr:`HandOvers.used`, and leaves it for its next batch, or once it is too old.
It counts in admission only within that batch, and its tokens stay in the ledger as they are.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tidegate.errors import BatchNotHeld, PublishUnclear
from tidegate.orchestrator.core.group import Group, TaskKey
from tidegate.orchestrator.core.groups import GroupTracker
from tidegate.orchestrator.core.rollout import Rollout

KEPT_BATCHES = 2
"""Fewest batches kept in a run without a journal. A trainer that consumes single rows may request
the next batch before it reports the discarded rows of the current batch."""

LOST_BATCHES_MAX = 64
"""Number of lost batches whose reasons are remembered, for errors of publishes that name them."""


def batches_of_publish(
    held: Sequence[int], *, batches_per_version: int, is_ahead: bool, has_lost: bool
) -> tuple[int, ...]:
    """Return the batches that a publish without ``batches`` was made from: all that the trainer
    holds.

    A trainer that takes one batch at a time holds just the batch that it has trained on.
    ``is_ahead``: whether the trainer has requested a batch while it held all batches of a version.
    It may then hold batches that it has not trained on, and nobody but the trainer knows which.
    ``has_lost``: whether it has lost a batch since a publish named any. It may have trained on the
    lost batch all the same.

    Raises:
        PublishUnclear: the weights may not be made from what the trainer holds.
    """
    if has_lost or (held and (is_ahead or len(held) > batches_per_version)):
        raise PublishUnclear(
            held=held,
            batches_per_version=batches_per_version,
            is_ahead=is_ahead,
            has_lost=has_lost,
        )
    return tuple(held)


class WaitingRequest(NamedTuple):
    """A trainer's request that waits for a batch."""

    number: int
    is_ahead: bool
    """Whether the trainer held all batches of a version, or had requested them, at the request."""


@dataclass(slots=True, eq=False)
class HandedBatch:
    """One batch that was handed over."""

    number: int
    """Number of the batch in its run, from 1."""
    num_groups: int
    """Number of outstanding groups that the batch counts as; at least its number of groups."""
    trainer_version: int
    """Trainer version at which the batch is trained: planned at the hand-over, final once a publish
    names the batch."""
    is_trained: bool = False
    """Whether a publish has named the batch, or the trainer's checkpoint contains it."""
    version: int | None = None
    """Released version that was made from the batch; None until then."""
    groups: list[Group] = field(default_factory=list)
    """Groups of the batch, kept while the trainer may discard rows or a resume may undo the
    batch."""
    was_undone: bool = False
    """Whether a resume had undone this batch and handed it over again unchanged."""
    is_ahead: bool = False
    """Whether the batch was requested ahead, see :class:`WaitingRequest`."""

    @property
    def rows(self) -> list[Rollout]:
        """Rows of the batch, in the order in which they were handed over."""
        return [row for group in self.groups for row in group.kept]

    @property
    def oldest_trained_version(self) -> int | None:
        """Oldest version of the batch's trained tokens, without masked tokens and without rows that
        the trainer has discarded; None if no token is left."""
        rows = (row for row in self.rows if row.discard_reason is None)
        return min(
            (v for row in rows if (v := row.oldest_trained_version) is not None), default=None
        )

    @property
    def newest_version(self) -> int:
        """Newest version that sampled a token of the batch."""
        return max((group.newest_version for group in self.groups), default=0)


@dataclass(slots=True)
class TrainedCounts:
    """Totals over all batches handed to the trainer."""

    batches: int = 0
    rollouts: int = 0
    mixed_version: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    """Number of rollouts by staleness at consumption, in versions; one for each use."""
    reused_rollouts: int = 0
    """Number of further uses of rollouts, which ``rollouts`` and ``mixed_version`` do not count."""
    reused_tokens: int = 0
    """Number of tokens in these uses."""

    @property
    def mean_staleness(self) -> float:
        """Mean staleness over all uses of rollouts, in versions."""
        uses = self.rollouts + self.reused_rollouts
        return sum(s * n for s, n in self.staleness.items()) / max(1, uses)

    def count(self, rows: list[Rollout], trainer_version: int, times: int) -> None:
        """Add these rows (``times`` = 1), or subtract them again (-1). Branches don't count."""
        by_oldest: Counter[int] = Counter()
        rollouts = mixed = 0
        for rollout in rows:
            if rollout.branch_of is not None:
                continue
            is_first = rollout.use == 1
            rollouts += is_first
            if not is_first:
                self.reused_rollouts += times
                kept = (row for row in rollout.rows if row.discard_reason is None)
                self.reused_tokens += times * sum(row.sampled_tokens for row in kept)
            versions = _of_all_rows(rollout) if rollout.branches else rollout.trained_versions()
            if versions is not None:
                oldest, is_mixed = versions
                by_oldest[oldest] += 1
                if is_mixed and is_first:
                    mixed += 1
        self.rollouts += times * rollouts
        self.mixed_version += times * mixed
        for oldest, count in by_oldest.items():
            self.staleness[trainer_version - oldest] += times * count
        self.staleness = +self.staleness  # drops counts that were undone to 0


def _of_all_rows(rollout: Rollout) -> tuple[int, bool] | None:
    """Return :meth:`Rollout.trained_versions` over all rows of a rollout that forked."""
    rows = [row for row in rollout.rows if row.discard_reason is None]
    oldest = [v for row in rows if (v := row.oldest_trained_version) is not None]
    if not oldest:
        return None
    newest = max(v for row in rows if (v := row.newest_version) is not None)
    return min(oldest), min(oldest) != newest


class HandOvers:
    """Requests and batches of one trainer."""

    def __init__(self, *, is_kept: bool, max_uses: int = 1) -> None:
        """``is_kept``: whether batches may have to be handed over again after a crash.
        ``max_uses``: number of times that a group may be trained on."""
        self.is_kept = is_kept
        self._max_uses = max_uses
        self.requests: deque[WaitingRequest] = deque()
        """The trainer's requests that wait for a batch, oldest first."""
        self.offer: tuple[int, int] | None = None
        """(request, batch) whose batch the trainer has not acknowledged. The next batch is selected
        afterwards, so the batch that is undone is always the newest."""
        self.is_paused = False
        """Whether a publish is undecided. No batch is offered meanwhile, because its staleness
        would be counted from the version before."""
        self.count = 0
        """Number of batches handed over; after a resume, it restarts at the number in the trainer's
        checkpoint."""
        self.checkpointed = 0
        """Number of batches that the trainer's checkpoint certainly contains."""
        self.checkpoint_offer = 0
        """Number of the user's iterator in use at that checkpoint."""
        self.holding: deque[HandedBatch] = deque()
        """Batches that count in admission, because no version made from them is live yet."""
        self.kept: deque[HandedBatch] = deque()
        """Batches that no checkpoint contains, oldest first. If not ``is_kept``, those of
        ``holding``, and at least the last :data:`KEPT_BATCHES`."""
        self.undone: deque[tuple[int, ...]] = deque()
        """Group ids of the batches that a resume has undone and that are still to be handed over
        again, oldest batch first, each in its original order."""
        self.lost: dict[int, str] = {}
        """Reasons of the newest batches that were lost, by number."""
        self.has_lost = False
        """Whether a batch was lost since a publish named batches last."""
        self.emptied: deque[int] = deque(maxlen=LOST_BATCHES_MAX)
        """Numbers of the newest batches of which the trainer has discarded all rows. A publish may
        name them or not."""
        self.versions: deque[tuple[int, int]] = deque([(0, 0)])
        """(version, highest number of a batch that it contains), for versions that a resume could
        return to."""
        self.newest_trained = 0
        """Highest number of a batch that a publish has named."""
        self.used: dict[int, Group] = {}
        """Groups that may be trained again, by id, in the order of their last use. Each is a copy
        for its next use."""
        self.bad: set[int] = set()
        """Numbers of batches that are in no version and have tokens of versions that were rolled
        back or lost. Their groups are not used again."""

    # ------------------------------------------------------------ requests and offers

    @property
    def wants_batch(self) -> bool:
        """Whether a batch may be offered now."""
        return bool(self.requests) and self.offer is None and not self.is_paused

    def request(self, number: int, *, batches_per_version: int) -> None:
        """Add a request."""
        ahead = self.num_held + len(self.requests)
        self.requests.append(WaitingRequest(number, ahead >= batches_per_version))

    def close_request(self, number: int) -> None:
        """Forget a request that waits; harmless for another."""
        self.requests = deque(request for request in self.requests if request.number != number)

    def acknowledge(self, request: int) -> None:
        """Record that the trainer has the batch that was offered to this request."""
        if self.offer is not None and self.offer[0] == request:
            self.offer = None

    def can_return(self, number: int) -> bool:
        """Whether the trainer may give this batch back: it is the newest, no publish has named it,
        and no request waits."""
        if number != self.count or self.offer is not None or self.requests or not self.holding:
            return False
        newest = self.holding[-1]  # another one if the newest was lost
        return newest.number == number and not newest.is_trained

    # ------------------------------------------------------------ queries

    @property
    def num_groups(self) -> int:
        """Number of outstanding groups that all batches count as in admission."""
        groups = 0
        for batch in self.holding:  # read for every rollout, and a generator costs twice as much
            groups += batch.num_groups
        return groups

    @property
    def held(self) -> list[HandedBatch]:
        """Batches that no publish has named, oldest first."""
        return [batch for batch in self.holding if not batch.is_trained]

    @property
    def num_held(self) -> int:
        """Number of batches that no publish has named."""
        return sum([not batch.is_trained for batch in self.holding])

    @property
    def num_unpublished(self) -> int:
        """Number of batches that no released version was made from."""
        return sum([batch.version is None for batch in self.holding])

    @property
    def unpublished_groups(self) -> int:
        """Number of outstanding groups of batches that no released version was made from."""
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

    # ------------------------------------------------------------ batches

    def add(self, groups: list[Group], trainer_version: int, *, num_groups: int) -> HandedBatch:
        """Offer a batch to the oldest request; the batch counts as ``num_groups``."""
        request = self.requests.popleft()
        self.count += 1
        was_undone = bool(self.undone)
        if was_undone:
            self.undone.popleft()
        batch = HandedBatch(
            self.count,
            num_groups,
            trainer_version,
            groups=groups,
            was_undone=was_undone,
            is_ahead=request.is_ahead,
        )
        for group in groups:
            self.used.pop(group.group_id, None)
        self.holding.append(batch)
        self.kept.append(batch)
        self.offer = (request.number, batch.number)
        return batch

    def batches_of_publish(self, batches_per_version: int) -> tuple[int, ...]:
        """Return :func:`batches_of_publish` for what the trainer holds now."""
        held = self.held
        is_ahead = self.offer is not None or bool(self.requests)
        return batches_of_publish(
            [batch.number for batch in held],
            batches_per_version=batches_per_version,
            is_ahead=is_ahead or any(batch.is_ahead for batch in held),
            has_lost=self.has_lost,
        )

    def refuse_untrainable(self, numbers: Iterable[int]) -> None:
        """Refuse a publish that names batches which can't be counted as trained.

        A held batch is young enough: too old ones are lost with the version that ages them.

        Raises:
            BatchNotHeld: the trainer does not hold one: it was never handed over, is in a version
                already, or was lost.
        """
        known = {batch.number: batch for batch in self.holding}
        for number in numbers:
            batch = known.get(number)
            if number not in self.emptied and (batch is None or batch.version is not None):
                raise BatchNotHeld(
                    batch=number,
                    why=self._why_not_held(number, batch),
                    held=[each.number for each in self.held],
                )

    def _why_not_held(self, number: int, batch: HandedBatch | None) -> str:
        if number in self.lost:
            return f"was lost ({self.lost[number]}), and its tasks are started again"
        if not 1 <= number <= self.count:
            return "was not handed over"
        made = "" if batch is None else f" {batch.version}"
        return f"is in version{made} already, and a batch is trained once"

    def name(self, numbers: Sequence[int], trainer_version: int) -> list[HandedBatch]:
        """Record that the trainer's next version is made from these batches, which it trained on at
        ``trainer_version``; return those whose planned version was another.

        A batch keeps the version at which it was first named, even if that publish failed.
        """
        self.has_lost = False
        changed: list[HandedBatch] = []
        for batch in self.holding:
            if batch.number in numbers and not batch.is_trained:
                batch.is_trained = True
                self.newest_trained = max(self.newest_trained, batch.number)
                if batch.trainer_version != trainer_version:
                    changed.append(batch)
        return changed

    def mark_if_empty(self, batch: HandedBatch) -> None:
        """Count a batch as trained if the trainer has discarded all of its rows."""
        if all(row.discard_reason is not None for row in batch.rows):
            batch.is_trained = True
            self.newest_trained = max(self.newest_trained, batch.number)
            self.emptied.append(batch.number)

    def release_emptied(self) -> bool:
        """Remove batches without a row to train from admission; return whether there were any.

        Empty batches count until the next version, because most trainers publish after every batch.
        If a trainer requests another batch when none can fill, they are removed without a version.
        """
        left = deque(
            b for b in self.holding if b.version is not None or b.number not in self.emptied
        )
        has_emptied = len(left) < len(self.holding)
        self.holding = left
        return has_emptied

    def publish(self, version: int) -> None:
        """Record the release of a version; it contains all batches named so far."""
        for batch in self.holding:
            if batch.is_trained and batch.version is None:
                batch.version = version
                self._keep_used(batch)
        self.bad.clear()
        self.versions.append((version, self.newest_trained))
        self._forget_versions()

    def _keep_used(self, batch: HandedBatch) -> None:
        """Keep a batch's groups for their next use, except those with a row that the trainer has
        discarded."""
        if self._max_uses == 1 or batch.number in self.bad:
            return
        for group in batch.groups:
            if group.use < self._max_uses and not group.has_discarded_rows:
                self.used[group.group_id] = group.for_next_use()

    def forget_used(self, groups: Iterable[Group]) -> None:
        """Forget groups that are not trained again; harmless for groups that are not kept."""
        for group in groups:
            if (used := self.used.pop(group.group_id, None)) is not None:
                used.untie()

    def forget_sampled_by(self, version: int) -> None:
        """Forget used groups with tokens of this version or a newer one, which were rolled back or
        lost; later, too, if their batch is in no version yet."""
        self.forget_used([group for group in self.used.values() if group.newest_version >= version])
        unreleased = (batch for batch in self.holding if batch.version is None)
        self.bad |= {b.number for b in unreleased if b.newest_version >= version}

    def return_used(self, groups: Iterable[Group]) -> None:
        """Keep the groups of a batch that was undone as before it was handed over."""
        groups = list(groups)
        self.forget_used(groups)  # copies for uses after the one that was undone
        self.used = {g.group_id: g for g in groups if g.use > 1} | self.used

    def too_old(self, trainer_version: int, bound: int | None) -> list[HandedBatch]:
        """Return the held batches with a token that is too old even if they are trained next."""
        if bound is None:
            return []
        ages = ((batch, batch.oldest_trained_version) for batch in self.held)
        return [b for b, oldest in ages if oldest is not None and trainer_version - oldest > bound]

    def lose(self, batch: HandedBatch, reason: str) -> None:
        """Forget a held batch whose groups are discarded; a publish that names it is refused."""
        self.holding.remove(batch)
        self.kept.remove(batch)
        self.lost[batch.number] = reason
        self.has_lost = True
        while len(self.lost) > LOST_BATCHES_MAX:
            del self.lost[next(iter(self.lost))]

    def release(self, live_version: int) -> None:
        """Remove batches whose version is live on every engine from admission."""
        if any(b.version is not None and b.version <= live_version for b in self.holding):
            self.holding = deque(
                b for b in self.holding if b.version is None or b.version > live_version
            )
        while not self.is_kept and len(self.kept) > KEPT_BATCHES:
            if self.kept[0] in self.holding:
                break
            self._drop_oldest()

    # ------------------------------------------------------------ checkpoints, and undone batches

    def mark_checkpointed(self, batches: int, offer: int) -> None:
        """Record that the trainer's checkpoint contains the first ``batches`` batches.

        ``offer`` is the number of the user's iterator in use at the checkpoint.
        """
        self.checkpoint_offer = offer
        self.checkpointed = max(self.checkpointed, min(batches, self.count))
        while self.kept and self.kept[0].number <= self.checkpointed:
            batch = self.kept[0]
            if not batch.is_trained or (batch.version is None and self._max_uses > 1):
                break  # the groups are needed for the batch's age, and for their next use
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
        # The numbers are used again, for other batches.
        self.lost = {number: why for number, why in self.lost.items() if number <= batches}
        self.emptied = deque((n for n in self.emptied if n <= batches), maxlen=LOST_BATCHES_MAX)
        self.newest_trained = min(self.newest_trained, batches)
        return undone

    def undo_newest(self) -> HandedBatch:
        """Undo the newest batch, which never reached the trainer or was given back; return it.

        Its groups may be selected again. If a resume had undone the batch before, the batch is
        handed over again unchanged.
        """
        if self.offer is not None and self.offer[1] == self.count:
            self.offer = None
        (batch,) = self.undo_after(self.count - 1)
        if not batch.was_undone:
            self.undone.popleft()
        return batch

    def resume(self, batches: int) -> None:
        """Forget the requests of a trainer that was restarted. Its checkpoint contains the first
        ``batches`` batches, so it has trained on them."""
        self.requests.clear()
        self.offer, self.is_paused, self.has_lost = None, False, False
        for batch in self.holding:
            if batch.number <= batches and not batch.is_trained:
                batch.is_trained = True
                self.newest_trained = max(self.newest_trained, batch.number)

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
    roots = list({row.root.rollout_id: row.root for row in chosen}.values())
    trained.count(roots, batch.trainer_version, -1)
    for row in chosen:
        row.discard_reason = reason
        if row.use == 1:
            groups.ledger.discard_trained(row.sampled_tokens - row.masked_tokens, reason)
    trained.count([root for root in roots if _is_trained(root)], batch.trainer_version, 1)
    for root, why, key in _discarded(batch, roots):
        groups.discarded_rollouts[why] += 1
        groups.discards.count_untrained(root, why, key)


def undo_batch(batch: HandedBatch, groups: GroupTracker, trained: TrainedCounts) -> None:
    """Undo a whole batch, its discarded rows included, so that it can be handed over again."""
    roots = [row for row in batch.rows if row.branch_of is None]
    trained.count([root for root in roots if _is_trained(root)], batch.trainer_version, -1)
    for root, why, key in _discarded(batch, roots):
        groups.discarded_rollouts[why] -= 1
        groups.discards.uncount_untrained(root, why, key)
    for row in batch.rows:
        if row.discard_reason is not None:
            if row.use == 1:
                groups.ledger.discard_trained(
                    row.masked_tokens - row.sampled_tokens, row.discard_reason
                )
            row.discard_reason = None
    groups.return_to_buffer([group for group in batch.groups if group.use == 1])


def _discarded(
    batch: HandedBatch, roots: Iterable[Rollout]
) -> Iterator[tuple[Rollout, str, TaskKey | None]]:
    """Yield the rollouts of which no row is trained in their first use, with reason and task."""
    keys = {group.group_id: group.key for group in batch.groups}
    for root in roots:
        if root.use == 1 and root.discard_reason is not None and not _is_trained(root):
            yield root, root.discard_reason, keys[root.group_id]


def _is_trained(root: Rollout) -> bool:
    return any(row.discard_reason is None for row in root.rows)
