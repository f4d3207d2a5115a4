"""Index of the groups that run or wait to be trained; the base class of :class:`GroupTracker`.

Staleness policies read it to admit, select and expire groups. It updates all counts with each
change, because there may be a hundred thousand groups.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterable, Mapping

from tidegate.orchestrator.core.group import Group


class OutstandingGroupIndex:
    """Groups from their admission until they are trained or discarded."""

    def __init__(self) -> None:
        self._outstanding: dict[int, Group] = {}
        """Running and buffered groups by id, in the order of admission."""
        self._ended: dict[int, Group] = {}
        """Buffered groups, in the order in which they ended."""
        self._running: OrderedDict[int, Group] = OrderedDict()
        """Running groups, in the order of admission."""
        self._admission_order: deque[int] = deque()
        """Ids in the order of admission, from the oldest running group on; some may be of removed
        groups."""
        self._ended_before_running: set[int] = set()
        """Ids of buffered groups that were admitted before the first of ``_admission_order``."""
        self._counts_by_version: dict[int, int] = {}
        """Number of outstanding groups by oldest possible version. A dict, because setting a
        Counter's items takes three times as long."""
        self._ended_counts_by_version: dict[int, int] = {}
        """Number of buffered groups by oldest possible version."""
        self._num_remainders = 0
        """Number of outstanding groups that are remainders of split groups."""
        self.revision = 0
        """Counts changes that a policy could see: groups admitted, ended or removed, and their
        oldest possible versions."""

    # ------------------------------------------------------------ queries

    @property
    def newest(self) -> Group:
        """Group admitted last; there must be one."""
        return self._outstanding[next(reversed(self._outstanding))]

    @property
    def in_order(self) -> Collection[Group]:
        """Running and buffered groups, in the order of admission."""
        return self._outstanding.values()

    @property
    def ended(self) -> Collection[Group]:
        """Buffered groups, in the order in which they ended."""
        return self._ended.values()

    def ended_group(self, group_id: int) -> Group | None:
        """Return a buffered group by its id; None if no group of this id is buffered."""
        return self._ended.get(group_id)

    @property
    def oldest_running(self) -> Group | None:
        """Running group admitted first; None if none runs."""
        return next(iter(self._running.values()), None)

    @property
    def ended_ahead(self) -> int:
        """Number of buffered groups admitted before the oldest running one.

        Each group is visited once: groups that end behind a straggler cost nothing until it has
        ended.
        """
        order, running = self._admission_order, self._running
        while order and order[0] not in running:
            if (group_id := order.popleft()) in self._outstanding:
                self._ended_before_running.add(group_id)
        return len(self._ended_before_running)

    @property
    def counts_by_version(self) -> Mapping[int, int]:
        """Number of outstanding groups by oldest possible version: none of their tokens is
        older."""
        return self._counts_by_version

    @property
    def ended_counts_by_version(self) -> Mapping[int, int]:
        """Number of buffered groups by oldest possible version."""
        return self._ended_counts_by_version

    @property
    def admission_slots(self) -> int:
        """Number of groups that count in admission: all but split remainders."""
        return len(self._outstanding) - self._num_remainders

    @property
    def running_groups(self) -> int:
        """Number of groups with at least one running episode."""
        return len(self._running)

    def remainders_of(self, group: Group) -> list[Group]:
        """Return the outstanding groups that were split from a group."""
        return [g for g in self._outstanding.values() if g.split_from == group.group_id]

    def __contains__(self, group: Group) -> bool:
        return group.group_id in self._outstanding

    # ------------------------------------------------------------ transitions

    def raise_oldest_possible_versions(self, live_version: int) -> None:
        """Raise oldest possible versions: from now on no turn starts under weights older than
        ``live_version``.

        At each publish all running groups are visited, perhaps a hundred thousand, most of which
        wait for their first token; those are handled here without a call each.
        """
        self.revision += 1
        raised: dict[int, int] = {}
        """Number of groups without a token whose minimum was raised here, by the minimum before."""
        for group in self._running.values():
            before = group.oldest_possible_version
            if before >= live_version:
                continue
            for rollout in group.rollouts:
                turns = rollout.turns
                if turns and (turns[0].runs or len(turns) > 1):
                    self._raise_oldest_possible_version(group, live_version)
                    break
            else:
                group.oldest_possible_version = live_version
                raised[before] = raised.get(before, 0) + 1
        for before, groups in raised.items():
            _decrement(self._counts_by_version, before, groups)
            _increment(self._counts_by_version, live_version, groups)

    def _raise_oldest_possible_version(self, group: Group, live_version: int) -> None:
        oldest = group.oldest_version  # future turns start under live weights or newer
        minimum = live_version if oldest is None else min(oldest, live_version)
        if minimum != group.oldest_possible_version:
            _move(self._counts_by_version, group.oldest_possible_version, minimum)
            group.oldest_possible_version = minimum

    def restore(self, groups: Iterable[Group], *, ended: Iterable[int]) -> None:
        """Replace all groups, in the order of admission; ``ended`` are ids in the order of ends."""
        self._outstanding = {group.group_id: group for group in groups}
        self._ended = {group_id: self._outstanding[group_id] for group_id in ended}
        self._running = OrderedDict((i, g) for i, g in self._outstanding.items() if g.running)
        self._num_remainders = sum(group.is_split_remainder for group in self._outstanding.values())
        self._recount()

    def _add(self, group: Group) -> None:
        self._outstanding[group.group_id] = self._running[group.group_id] = group
        _increment(self._counts_by_version, group.oldest_possible_version)
        self._admission_order.append(group.group_id)
        if (
            len(self._admission_order) > 2 * len(self._outstanding) + 16
        ):  # keeps ids of removed groups below half
            self._admission_order = deque(
                i for i in self._admission_order if i in self._outstanding
            )
        self.revision += 1

    def _add_split(self, part: Group, *, remainder: Group) -> None:
        """Replace a running group by its ended part and its running remainder, the newest group."""
        self._num_remainders += 1
        self._add(remainder)
        self._outstanding[part.group_id] = self._ended[part.group_id] = part
        _increment(self._counts_by_version, part.oldest_possible_version)
        _increment(self._ended_counts_by_version, part.oldest_possible_version)

    def _mark_ended(self, group: Group, oldest_possible_version: int) -> None:
        """Move a group whose last episode has ended to the buffer."""
        self.revision += 1
        if group.oldest_possible_version != oldest_possible_version:
            _move(self._counts_by_version, group.oldest_possible_version, oldest_possible_version)
            group.oldest_possible_version = oldest_possible_version
        _increment(self._ended_counts_by_version, oldest_possible_version)
        del self._running[group.group_id]
        self._ended[group.group_id] = group

    def _remove(self, group: Group) -> None:
        self.revision += 1
        group_id = group.group_id
        del self._outstanding[group_id]
        self._ended_before_running.discard(group_id)
        if group.split_from is not None:
            self._num_remainders -= 1
        _decrement(self._counts_by_version, group.oldest_possible_version)
        if self._ended.pop(group_id, None) is None:
            self._running.pop(group_id, None)
        else:
            _decrement(self._ended_counts_by_version, group.oldest_possible_version)

    def _remove_batch(self, groups: list[Group]) -> None:
        """Remove buffered groups in one call, because each may be of one rollout."""
        self.revision += 1
        outstanding, ended = self._outstanding, self._ended
        for group in groups:
            group_id = group.group_id
            del outstanding[group_id], ended[group_id]
            self._ended_before_running.discard(group_id)
            if group.split_from is not None:
                self._num_remainders -= 1
        for version, count in Counter([group.oldest_possible_version for group in groups]).items():
            _decrement(self._counts_by_version, version, count)
            _decrement(self._ended_counts_by_version, version, count)

    def _restore_ended(self, groups: list[Group]) -> None:
        """Return groups to the buffer, as ended before all others."""
        self.revision += 1
        self._num_remainders += sum(group.is_split_remainder for group in groups)
        by_id = {group.group_id: group for group in groups}
        self._outstanding = dict(sorted({**self._outstanding, **by_id}.items()))
        self._ended = {**by_id, **self._ended}
        self._recount()

    def _recount(self) -> None:
        self._admission_order = deque(self._outstanding)
        self._ended_before_running.clear()
        self._counts_by_version = dict(
            Counter([g.oldest_possible_version for g in self._outstanding.values()])
        )
        self._ended_counts_by_version = dict(
            Counter([g.oldest_possible_version for g in self._ended.values()])
        )


def _increment(counts: dict[int, int], version: int, groups: int = 1) -> None:
    counts[version] = counts.get(version, 0) + groups


def _decrement(counts: dict[int, int], version: int, groups: int = 1) -> None:
    left = counts[version] - groups
    if left:
        counts[version] = left
    else:
        del counts[version]


def _move(counts: dict[int, int], version: int, to: int) -> None:
    _decrement(counts, version)
    _increment(counts, to)
