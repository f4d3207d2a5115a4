"""Which groups run or wait to be trained, and in which order? What a policy may look at.

It knows their ids and the floors of their versions; not how rollouts end, nor what they cost.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterable, Mapping

from tidegate.orchestrator.core.group import Group


class WaitingGroups:
    """Groups from their admission until they are trained or given up."""

    def __init__(self) -> None:
        self._waiting: dict[int, Group] = {}
        """Running and buffered ones by id, in the order of admission."""
        self._ended: dict[int, Group] = {}
        """Of those, the buffered ones, in the order in which they ended."""
        self._going: OrderedDict[int, Group] = OrderedDict()
        """And the running ones, in the order of admission."""
        self._line: deque[int] = deque()
        """Ids in the order of admission, from the oldest running one on; some are gone."""
        self._ahead: set[int] = set()
        """Ids of those waiting that have left the line: all that were admitted before it."""
        self._floors: dict[int, int] = {}
        """How many of those waiting no token of which is older than this version. No Counter, whose
        items take thrice as long to set."""
        self._ended_floors: dict[int, int] = {}
        """And of the buffered ones."""
        self._rests = 0
        """Of those waiting, the rests of groups that were split."""
        self.revision = 0
        """Counts what a policy could see change: groups that come, end and go, and their floors."""

    # ------------------------------------------------------------ looking

    @property
    def newest(self) -> Group:
        """The group admitted last; there must be one."""
        return self._waiting[next(reversed(self._waiting))]

    @property
    def in_order(self) -> Collection[Group]:
        """Running and buffered groups, in the order of admission."""
        return self._waiting.values()

    @property
    def ended(self) -> Collection[Group]:
        """Buffered ones, in the order in which they ended."""
        return self._ended.values()

    def ended_group(self, group_id: int) -> Group | None:
        """Return a buffered group by its id; None if no group of this id is buffered."""
        return self._ended.get(group_id)

    @property
    def oldest_running(self) -> Group | None:
        """Of the running ones, the one admitted first."""
        return next(iter(self._going.values()), None)

    @property
    def ended_ahead(self) -> int:
        """Of those that have ended, the ones admitted before the oldest running one.

        Each is looked at once: what ends behind a straggler costs nothing until that has ended.
        """
        line, going = self._line, self._going
        while line and line[0] not in going:
            if (group_id := line.popleft()) in self._waiting:
                self._ahead.add(group_id)
        return len(self._ahead)

    @property
    def floors(self) -> Mapping[int, int]:
        """Versions, and of how many groups each is the floor."""
        return self._floors

    @property
    def ended_floors(self) -> Mapping[int, int]:
        """The same of those that have ended."""
        return self._ended_floors

    @property
    def places(self) -> int:
        """Groups that admission counts: all but rests."""
        return len(self._waiting) - self._rests

    @property
    def running_groups(self) -> int:
        """Groups with at least one episode going on."""
        return len(self._going)

    def rests_of(self, group: Group) -> list[Group]:
        """What was parted from a group and still waits."""
        return [g for g in self._waiting.values() if g.split_from == group.group_id]

    def __contains__(self, group: Group) -> bool:
        return group.group_id in self._waiting

    # ------------------------------------------------------------ changing

    def raise_floors(self, live_version: int) -> None:
        """From now on no turn starts under weights older than these.

        At each publish all that run are looked at, a hundred thousand maybe, most of which wait for
        their first token: so these are seen to here, without a call for each.
        """
        self.revision += 1
        raised: dict[int, int] = {}
        """How many of those there are, by what their floor was."""
        for group in self._going.values():
            before = group.version_floor
            if before >= live_version:
                continue
            for rollout in group.rollouts:
                turns = rollout.turns
                if turns and (turns[0].runs or len(turns) > 1):
                    self._raise_floor(group, live_version)
                    break
            else:
                group.version_floor = live_version
                raised[before] = raised.get(before, 0) + 1
        for before, groups in raised.items():
            _take(self._floors, before, groups)
            _put(self._floors, live_version, groups)

    def _raise_floor(self, group: Group, live_version: int) -> None:
        oldest = group.oldest_version  # its turns start under live weights or newer
        floor = live_version if oldest is None else min(oldest, live_version)
        if floor != group.version_floor:
            _move(self._floors, group.version_floor, floor)
            group.version_floor = floor

    def restore(self, groups: Iterable[Group], *, ended: Iterable[int]) -> None:
        """These are all there are, in the order of admission; and some have ended, in an order."""
        self._waiting = {group.group_id: group for group in groups}
        self._ended = {group_id: self._waiting[group_id] for group_id in ended}
        self._going = OrderedDict((i, g) for i, g in self._waiting.items() if g.running)
        self._rests = sum(group.is_rest for group in self._waiting.values())
        self._count_anew()

    def _add(self, group: Group) -> None:
        """It runs from now on, as the newest."""
        self._waiting[group.group_id] = self._going[group.group_id] = group
        _put(self._floors, group.version_floor)
        self._line.append(group.group_id)
        if len(self._line) > 2 * len(self._waiting) + 16:  # fewer ids are gone than are not
            self._line = deque(i for i in self._line if i in self._waiting)
        self.revision += 1

    def _add_split(self, part: Group, *, rest: Group) -> None:
        """A running group was parted: one has ended, the other runs, as the newest."""
        self._rests += 1
        self._add(rest)
        self._waiting[part.group_id] = self._ended[part.group_id] = part
        _put(self._floors, part.version_floor)
        _put(self._ended_floors, part.version_floor)

    def _note_end(self, group: Group, version_floor: int) -> None:
        """Its last episode has ended, and this is its oldest version."""
        self.revision += 1
        if group.version_floor != version_floor:
            _move(self._floors, group.version_floor, version_floor)
            group.version_floor = version_floor
        _put(self._ended_floors, version_floor)
        del self._going[group.group_id]
        self._ended[group.group_id] = group

    def _forget(self, group: Group) -> None:
        """It waits no more."""
        self.revision += 1
        group_id = group.group_id
        del self._waiting[group_id]
        self._ahead.discard(group_id)
        if group.split_from is not None:
            self._rests -= 1
        _take(self._floors, group.version_floor)
        if self._ended.pop(group_id, None) is None:
            self._going.pop(group_id, None)
        else:
            _take(self._ended_floors, group.version_floor)

    def _forget_batch(self, groups: list[Group]) -> None:
        """These have ended, and wait no more: at once, for each may be of one rollout."""
        self.revision += 1
        waiting, ended, ahead = self._waiting, self._ended, self._ahead
        for group in groups:
            group_id = group.group_id
            del waiting[group_id], ended[group_id]
            ahead.discard(group_id)
            if group.split_from is not None:
                self._rests -= 1
        for version, count in Counter([group.version_floor for group in groups]).items():
            _take(self._floors, version, count)
            _take(self._ended_floors, version, count)

    def _put_back(self, groups: list[Group]) -> None:
        """These wait again, as ended before all others that have."""
        self.revision += 1
        self._rests += sum(group.is_rest for group in groups)
        by_id = {group.group_id: group for group in groups}
        self._waiting = dict(sorted({**self._waiting, **by_id}.items()))
        self._ended = {**by_id, **self._ended}
        self._count_anew()

    def _count_anew(self) -> None:
        """Derive from what waits all that is counted as it changes."""
        self._line = deque(self._waiting)
        self._ahead.clear()
        self._floors = dict(Counter([g.version_floor for g in self._waiting.values()]))
        self._ended_floors = dict(Counter([g.version_floor for g in self._ended.values()]))


def _put(counts: dict[int, int], version: int, groups: int = 1) -> None:
    """More are of this version."""
    counts[version] = counts.get(version, 0) + groups


def _take(counts: dict[int, int], version: int, groups: int = 1) -> None:
    """Fewer are of this version; one that none has is forgotten."""
    left = counts[version] - groups
    if left:
        counts[version] = left
    else:
        del counts[version]


def _move(counts: dict[int, int], version: int, to: int) -> None:
    """One is of another version."""
    _take(counts, version)
    _put(counts, to)
