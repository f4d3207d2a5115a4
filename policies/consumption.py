"""In which order are groups handed to the trainer? Three orders, and the age that each allows.

Symbols: η the staleness that admission allows for, B groups per batch, v the trainer's version,
W the window, n a group's place in the order of admission.
"""

import itertools
from dataclasses import dataclass

from tidegate.errors import ConfigError
from tidegate.policies.staleness import G, Waiting

COMPARED_MIN = 2
"""Rollouts that a group is split for at least: one alone has nothing to be compared with."""


@dataclass(frozen=True, slots=True)
class Window:
    """Groups may overtake the oldest one that has not ended, but only the next ``groups - 1``.

    With admission's bound, no sample is older than ``η + 1 + ⌊(W - 2)/B⌋``. Group n is not yet
    trained while only groups before ``n + W`` were, so its batch is at most number
    ``⌊(n + W - 1)/B⌋``; it was admitted at version ``⌈(n + 1)/B⌉ - (η + 1)`` or later.
    """

    groups: int
    """W; 1 is the order of admission."""

    def __post_init__(self) -> None:
        if self.groups < 1:
            raise ConfigError(f"a window must hold at least 1 group, got Window({self.groups})")

    def staleness_bound(self, *, max_staleness: int, groups_per_batch: int) -> int:
        """What no sample exceeds under admission for ``max_staleness``."""
        return max_staleness + 1 + (self.groups - 2) // groups_per_batch


def in_admission_order(waiting: Waiting[G], groups: int) -> list[G] | None:
    """The groups admitted first, once all of them have ended."""
    if waiting.ended_ahead < groups:
        return None  # a straggler keeps all that have ended behind it from being handed over
    return list(itertools.islice(waiting.in_order, groups))


def in_window(waiting: Waiting[G], groups: int, window: Window) -> list[G] | None:
    """The first that have ended, of those that lie within the window."""
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


def in_completion_order(waiting: Waiting[G], groups: int) -> list[G] | None:
    """Those that ended first."""
    if len(waiting.ended) < groups:
        return None
    return list(itertools.islice(waiting.ended, groups))


def by_deadline(
    waiting: Waiting[G], groups: int, *, groups_per_batch: int, due_floor: int
) -> list[G] | None:
    """Those that ended first, as long as every other can still be trained in time.

    A group whose oldest token is of version f must be trained at version ``f + η``, its deadline,
    or before; ``due_floor`` is ``v - η``: groups of that version are due in this batch. Whatever is
    chosen now, the batches left until any deadline d must hold all that are due by then: so of
    those due by d, at least ``(number of them) - (d - v)·B`` belong into this batch. Where they
    have not ended, the batch waits for them.

    Why no group ever misses its deadline: admission keeps ``(η + 1)·B`` groups outstanding at
    most, so those due by ``v + η`` fit into the batches until then when they start, and the
    condition above keeps it so from one batch to the next. Strict order of admission keeps it too,
    but lets no group overtake a straggler that has time left.
    """
    if len(waiting.ended) < groups:
        return None
    needed = _needed_by_floor(waiting, groups, groups_per_batch, due_floor)
    if not needed:
        return in_completion_order(waiting, groups)
    if any(_ended_by(waiting, floor) < count for floor, count in needed):
        return None  # before thousands that wait with it are looked through
    chosen: dict[int, G] = {}
    for floor, count in needed:
        for group in waiting.ended:
            if len(chosen) >= count:
                break
            if group.version_floor <= floor:
                chosen[group.group_id] = group
    for group in waiting.ended:
        if len(chosen) >= groups:
            break
        chosen[group.group_id] = group
    return list(chosen.values())


def split_at_deadline(waiting: Waiting[G], groups: int, *, due_floor: int) -> list[G] | None:
    """What is due, whole or at least by half, then the oldest that have ended; and rests that have.

    A group of which only stragglers go on is trained at its deadline without them: else all that
    its others have sampled would come of age while they wait to be compared. Where fewer than half
    have ended, it is left for later, and masked.
    """
    due_running = sum(
        n - waiting.ended_floors.get(f, 0) for f, n in waiting.floors.items() if f <= due_floor
    )
    if len(waiting.ended) + due_running < groups:
        return None
    due: list[G] = []
    others: list[G] = []
    rests: list[G] = []
    for group in waiting.in_order:
        is_due = group.version_floor <= due_floor
        if group.is_rest:
            rests += [] if group.running else [group]
        elif not group.running:
            (due if is_due else others).append(group)
        elif is_due and group.finished >= max(COMPARED_MIN, group.running):
            due.append(group)
    if len(due) + len(others) < groups:
        return None
    due.sort(key=lambda group: group.running > 0)
    others.sort(key=lambda group: (group.version_floor, group.group_id))
    return [*due[:groups], *others[: groups - min(groups, len(due))], *rests]


def _needed_by_floor(
    waiting: Waiting[G], groups: int, groups_per_batch: int, due_floor: int
) -> list[tuple[int, int]]:
    """(version floor, how many groups of it or older the batch must hold), where that is any."""
    needed: list[tuple[int, int]] = []
    due = 0
    for floor in sorted(waiting.floors):
        due += waiting.floors[floor]
        count = min(groups, due - max(0, floor - due_floor) * groups_per_batch)
        if count > (needed[-1][1] if needed else 0):
            needed.append((floor, count))
    return needed


def _ended_by(waiting: Waiting[G], floor: int) -> int:
    """Groups that have ended and are of this version or older."""
    return sum(groups for version, groups in waiting.ended_floors.items() if version <= floor)
