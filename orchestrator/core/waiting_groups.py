"""Ordered collection of the groups that run or wait to be trained; the base of
:class:`GroupTracker`.

Staleness policies read it, to admit, select and expire groups. All figures that they need are kept
up to date with each change, because there may be a hundred thousand groups.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterable, Mapping

from tidegate.orchestrator.core.group import Group


class OutstandingGroupIndex:
    """Groups from their admission until they are trained or given up."""

    def __init__(self) -> None:
        self._waiting: dict[int, Group] = {}
        """Running and buffered groups by id, in the order of admission."""
        self._ended: dict[int, Group] = {}
        """The buffered ones of these, in the order in which they ended."""
        self._going: OrderedDict[int, Group] = OrderedDict()
        """The running ones, in the order of admission."""
        self._line: deque[int] = deque()
        """Ids in the order of admission, from the oldest running group on; some no longer wait."""
        self._ahead: set[int] = set()
        """Ids of waiting groups that were removed from ``_line``: all admitted before its first."""
        self._floors: dict[int, int] = {}
        """Waiting groups by version floor. A Counter's items take three times as long to set."""
        self._ended_counts_by_version: dict[int, int] = {}
        """Number of buffered groups by version floor."""
        self._rests = 0
        """Number of waiting groups that are rests of split groups."""
        self.revision = 0
        """Counts changes that a policy could see: groups that come, end or go, and their floors."""

    # ------------------------------------------------------------ looking

    @property
    def newest(self) -> Group:
        """Group admitted last; there must be one."""
        return self._waiting[next(reversed(self._waiting))]

    @property
    def in_order(self) -> Collection[Group]:
        """Running and buffered groups, in the order of admission."""
        return self._waiting.values()

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
        return next(iter(self._going.values()), None)

    @property
    def ended_ahead(self) -> int:
        """Number of buffered groups admitted before the oldest running one.

        Each group is visited once: groups that end behind a straggler cost nothing until it has
        ended.
        """
        line, going = self._line, self._going
        while line and line[0] not in going:
            if (group_id := line.popleft()) in self._waiting:
                self._ahead.add(group_id)
        return len(self._ahead)

    @property
    def counts_by_version(self) -> Mapping[int, int]:
        """Number of waiting groups by version floor: none of their tokens is older."""
        return self._floors

    @property
    def ended_counts_by_version(self) -> Mapping[int, int]:
        """Number of buffered groups by version floor."""
        return self._ended_counts_by_version

    @property
    def admission_slots(self) -> int:
        """Number of groups that count in admission: all but rests."""
        return len(self._waiting) - self._rests

    @property
    def running_groups(self) -> int:
        """Number of groups with at least one running episode."""
        return len(self._going)

    def rests_of(self, group: Group) -> list[Group]:
        """Return the waiting groups that were split from a group."""
        return [g for g in self._waiting.values() if g.split_from == group.group_id]

    def __contains__(self, group: Group) -> bool:
        return group.group_id in self._waiting

    # ------------------------------------------------------------ changing

    def raise_floors(self, live_version: int) -> None:
        """Raise version floors: from now on no turn starts under weights older than
        ``live_version``.

        At each publish all running groups are visited, perhaps a hundred thousand, most of which
        wait for their first token; those are handled here without a call each.
        """
        self.revision += 1
        raised: dict[int, int] = {}
        """Number of groups without a token whose floor was raised here, by their old floor."""
        for group in self._going.values():
            before = group.oldest_possible_version
            if before >= live_version:
                continue
            for rollout in group.rollouts:
                turns = rollout.turns
                if turns and (turns[0].runs or len(turns) > 1):
                    self._raise_floor(group, live_version)
                    break
            else:
                group.oldest_possible_version = live_version
                raised[before] = raised.get(before, 0) + 1
        for before, groups in raised.items():
            _take(self._floors, before, groups)
            _put(self._floors, live_version, groups)

    def _raise_floor(self, group: Group, live_version: int) -> None:
        oldest = group.oldest_version  # future turns start under live weights or newer
        floor = live_version if oldest is None else min(oldest, live_version)
        if floor != group.oldest_possible_version:
            _move(self._floors, group.oldest_possible_version, floor)
            group.oldest_possible_version = floor

    def restore(self, groups: Iterable[Group], *, ended: Iterable[int]) -> None:
        """Replace all groups, in the order of admission; ``ended`` are ids in the order of ends."""
        self._waiting = {group.group_id: group for group in groups}
        self._ended = {group_id: self._waiting[group_id] for group_id in ended}
        self._going = OrderedDict((i, g) for i, g in self._waiting.items() if g.running)
        self._rests = sum(group.is_split_remainder for group in self._waiting.values())
        self._count_anew()

    def _add(self, group: Group) -> None:
        self._waiting[group.group_id] = self._going[group.group_id] = group
        _put(self._floors, group.oldest_possible_version)
        self._line.append(group.group_id)
        if len(self._line) > 2 * len(self._waiting) + 16:  # keeps stale ids below half of the line
            self._line = deque(i for i in self._line if i in self._waiting)
        self.revision += 1

    def _add_split(self, part: Group, *, rest: Group) -> None:
        """Replace a running group by its ended part and its running rest, the newest group."""
        self._rests += 1
        self._add(rest)
        self._waiting[part.group_id] = self._ended[part.group_id] = part
        _put(self._floors, part.oldest_possible_version)
        _put(self._ended_counts_by_version, part.oldest_possible_version)

    def _note_end(self, group: Group, oldest_possible_version: int) -> None:
        """Move a group whose last episode has ended to the buffer."""
        self.revision += 1
        if group.oldest_possible_version != oldest_possible_version:
            _move(self._floors, group.oldest_possible_version, oldest_possible_version)
            group.oldest_possible_version = oldest_possible_version
        _put(self._ended_counts_by_version, oldest_possible_version)
        del self._going[group.group_id]
        self._ended[group.group_id] = group

    def _forget(self, group: Group) -> None:
        self.revision += 1
        group_id = group.group_id
        del self._waiting[group_id]
        self._ahead.discard(group_id)
        if group.split_from is not None:
            self._rests -= 1
        _take(self._floors, group.oldest_possible_version)
        if self._ended.pop(group_id, None) is None:
            self._going.pop(group_id, None)
        else:
            _take(self._ended_counts_by_version, group.oldest_possible_version)

    def _forget_batch(self, groups: list[Group]) -> None:
        """Remove buffered groups in one call, because each may be of one rollout."""
        self.revision += 1
        waiting, ended, ahead = self._waiting, self._ended, self._ahead
        for group in groups:
            group_id = group.group_id
            del waiting[group_id], ended[group_id]
            ahead.discard(group_id)
            if group.split_from is not None:
                self._rests -= 1
        for version, count in Counter([group.oldest_possible_version for group in groups]).items():
            _take(self._floors, version, count)
            _take(self._ended_counts_by_version, version, count)

    def _put_back(self, groups: list[Group]) -> None:
        """Return groups to the buffer, as ended before all others."""
        self.revision += 1
        self._rests += sum(group.is_split_remainder for group in groups)
        by_id = {group.group_id: group for group in groups}
        self._waiting = dict(sorted({**self._waiting, **by_id}.items()))
        self._ended = {**by_id, **self._ended}
        self._count_anew()

    def _count_anew(self) -> None:
        self._line = deque(self._waiting)
        self._ahead.clear()
        self._floors = dict(Counter([g.oldest_possible_version for g in self._waiting.values()]))
        self._ended_counts_by_version = dict(
            Counter([g.oldest_possible_version for g in self._ended.values()])
        )


def _put(counts: dict[int, int], version: int, groups: int = 1) -> None:
    counts[version] = counts.get(version, 0) + groups


def _take(counts: dict[int, int], version: int, groups: int = 1) -> None:
    left = counts[version] - groups
    if left:
        counts[version] = left
    else:
        del counts[version]


def _move(counts: dict[int, int], version: int, to: int) -> None:
    _take(counts, version)
    _put(counts, to)
