"""Consumption orders: how ended groups form batches, and the staleness each order allows.

The staleness policies' ``select`` methods call these functions with the waiting groups.

Symbols: η the staleness that admission allows, B groups per batch, v the trainer's version, W the
window, n a group's place in the order of admission.
"""

import itertools
from dataclasses import dataclass

from tidegate.errors import ConfigError
from tidegate.policies.staleness import G, OutstandingGroup, OutstandingGroups

COMPARED_MIN = 2
"""Minimum number of ended rollouts to split a group; a single reward has no baseline."""

RUNNING_PER_ENDED = 3
"""Maximum number of running rollouts per ended one to split a group: a quarter must have ended,
because their mean reward is the baseline of the whole group."""


@dataclass(frozen=True, slots=True)
class Window:
    """Lets groups overtake the oldest running group if they are within the next ``groups - 1``.

    With the admission bound, no sample is older than ``η + 1 + ⌊(W - 2)/B⌋``. While group n is not
    yet trained, only groups before ``n + W`` were, so its batch is at most number ``⌊(n + W -
    1)/B⌋``; it was admitted at version ``⌈(n + 1)/B⌉ - (η + 1)`` or later.
    """

    groups: int
    """Window size W, in groups, >= 1; 1 is strict admission order."""

    def __post_init__(self) -> None:
        if self.groups < 1:
            raise ConfigError(f"a window must hold at least 1 group, got Window({self.groups})")

    def staleness_bound(self, *, max_staleness: int, groups_per_batch: int) -> int:
        """Return the largest staleness of any sample if admission allows ``max_staleness``."""
        return max_staleness + 1 + (self.groups - 2) // groups_per_batch


def in_admission_order(waiting: OutstandingGroups[G], groups: int) -> list[G] | None:
    """Return the ``groups`` groups that were admitted first; None until all of them have ended."""
    if waiting.ended_ahead < groups:
        return None  # one straggler holds back all groups that ended after it
    return list(itertools.islice(waiting.in_order, groups))


def in_window(waiting: OutstandingGroups[G], groups: int, window: Window) -> list[G] | None:
    """Return the first ended groups, in admission order, that lie within the window."""
    if len(waiting.ended) < groups:
        return None
    oldest = waiting.oldest_running
    end = None if oldest is None else oldest.group_id + window.groups
    chosen: list[G] = []
    for group in waiting.in_order:
        if end is not None and group.group_id >= end:
            break
        if not group.running:
            chosen.append(group)
            if len(chosen) == groups:
                return chosen
    return None


def in_completion_order(waiting: OutstandingGroups[G], groups: int) -> list[G] | None:
    """Return the groups that ended first."""
    if len(waiting.ended) < groups:
        return None
    return list(itertools.islice(waiting.ended, groups))


def by_deadline(
    waiting: OutstandingGroups[G], groups: int, *, groups_per_version: int, due_version: int
) -> list[G] | None:
    """Return the groups that ended first, if every other group can still be trained in time.

    This is earliest-deadline-first scheduling. A group whose oldest token has version f must be
    trained at version ``f + η``, its deadline, or before. ``due_version`` is ``v - η``: groups of
    that version are due in this batch. Whatever is chosen now, the versions from ``v + 1`` to a
    deadline d must have room for the other groups due by d. So at least ``(number due by d) - (d -
    v)·V`` of the groups due by d must be in this batch, or all of its groups, where V is
    ``groups_per_version``; if they have not ended, the batch waits for them.

    No group misses its deadline: admission keeps at most ``(η + 1)·V`` groups outstanding, so the
    groups due by ``v + η`` fit into the batches until then when they start, and the condition above
    preserves this from one batch to the next. Strict admission order preserves it too, but lets no
    group overtake a straggler that has time left.
    """
    if len(waiting.ended) < groups:
        return None
    needed = _needed_by_version(waiting, groups, groups_per_version, due_version)
    if not needed:
        return in_completion_order(waiting, groups)
    if any(_ended_by(waiting, version) < count for version, count in needed):
        return None  # return before scanning thousands of ended groups
    chosen: dict[int, G] = {}
    for version, count in needed:
        for group in waiting.ended:
            if len(chosen) >= count:
                break
            if group.oldest_possible_version <= version:
                chosen[group.group_id] = group
    for group in waiting.ended:
        if len(chosen) >= groups:
            break
        chosen[group.group_id] = group
    return list(chosen.values())


def split_at_deadline(
    waiting: OutstandingGroups[G],
    groups: int,
    *,
    due_version: int,
    split_rollouts_limit: int | None = None,
) -> list[G] | None:
    """Return due groups of which enough rollouts have ended, then ended groups, and remainders.

    Enough is at least a quarter of a group, and at least two. Ended groups are the oldest.

    A due group with running stragglers is trained without them: otherwise its ended rollouts would
    reach the staleness bound while they wait for the group's advantages. A group of which fewer
    have ended is left for later, and its old tokens are masked then. Of a remainder, each rollout
    is in the first batch after its end, because a longer sibling would only age it.

    ``split_rollouts_limit``: the batch waits while more rollouts of split groups than this would
    run on. Without a limit, a fast trainer takes one batch after another with few stragglers in
    them, and then waits long for one that has many: unequal windows mask more tokens.
    """
    due_running = sum(
        n - waiting.ended_counts_by_version.get(f, 0)
        for f, n in waiting.counts_by_version.items()
        if f <= due_version
    )
    if len(waiting.ended) + due_running < groups:
        return None
    due: list[G] = []
    not_due: list[G] = []
    remainders: list[G] = []
    running_on = 0
    for group in waiting.in_order:
        is_due = group.oldest_possible_version <= due_version
        if group.is_split_remainder:
            running_on += group.running
            remainders += [group] if group.finished or not group.running else []
        elif not group.running:
            (due if is_due else not_due).append(group)
        elif is_due and _can_split(group):
            due.append(group)
    if len(due) + len(not_due) < groups:
        return None
    due.sort(key=lambda group: group.running > 0)
    running_on += sum(group.running for group in due[:groups])
    if split_rollouts_limit is not None and running_on > split_rollouts_limit:
        return None
    not_due.sort(key=lambda group: (group.oldest_possible_version, group.group_id))
    return [*due[:groups], *not_due[: groups - min(groups, len(due))], *remainders]


def _can_split(group: OutstandingGroup) -> bool:
    return group.finished >= max(COMPARED_MIN, group.running / RUNNING_PER_ENDED)


def _needed_by_version(
    waiting: OutstandingGroups[G], groups: int, groups_per_version: int, due_version: int
) -> list[tuple[int, int]]:
    """Return (version floor, minimum groups of that version or older in the batch), increasing."""
    needed: list[tuple[int, int]] = []
    due = 0
    for version in sorted(waiting.counts_by_version):
        due += waiting.counts_by_version[version]
        count = min(groups, due - max(0, version - due_version) * groups_per_version)
        if count > (needed[-1][1] if needed else 0):
            needed.append((version, count))
    return needed


def _ended_by(waiting: OutstandingGroups[G], version_max: int) -> int:
    """Return the number of ended groups whose oldest possible version is ``version_max`` or
    older."""
    counts = waiting.ended_counts_by_version.items()
    return sum(groups for version, groups in counts if version <= version_max)
