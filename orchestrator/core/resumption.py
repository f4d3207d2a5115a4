"""Where does a run go on after a crash? Where the trainer's checkpoint is, whatever came after it.

Only what is unfinished is decided about; the engines and the user's iterator are yet to return.
"""

from typing import TYPE_CHECKING

from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core import left_out
from tidegate.orchestrator.core.group import Group

if TYPE_CHECKING:
    from tidegate.orchestrator.core.core import Core


def resume(core: "Core", event: ev.Resumed) -> list[ev.Command]:
    """Go back to what the trainer's checkpoint knows of, and wait for everybody to return.

    Batches after the checkpoint are undone, to be handed over again as they were. If weights
    were published that the checkpoint has not seen, they are lost: the run goes on under a
    number that nothing was sampled with, and what those weights sampled is given up.
    """
    core.batches_asked = 0
    core.are_tasks_exhausted = False
    core.is_restoring, core.is_paused, core.awaited = True, False, {}
    commands = core.groups.end_evaluations()
    first_lost = core.handed.first_lost_version(event.batches)
    core.turns.resume()
    for batch in core.handed.take_back(event.batches):
        core.trained.batches -= 1
        left_out.take_back(batch, core.groups, core.trained)
    core.handed.make_safe(event.batches, event.offer)
    core.tasks.resume(event.offer)
    if first_lost is not None:
        core.trainer_version += 1
        core.handed.roll_back(core.trainer_version)
        core.turns.recall(core.trainer_version)
        core.handed.release(core.turns.live_version)
    for group in list(core.groups.in_order):
        if group in core.groups:  # else it was given up with the one it is a rest of
            commands += _resume_group(core, group, event.offer, first_lost)
    while core.outstanding_groups > core.policy.outstanding_groups_ceiling:
        commands += _roll_back(core, core.groups.newest)
    for group in core.groups.in_order:
        if group.key is not None and group.key.offer == event.offer:
            core.awaited.setdefault(group.key, []).append(group)
    return commands


def _resume_group(
    core: "Core", group: Group, offer: int, first_lost: int | None
) -> list[ev.Command]:
    """Give a group up if it can't go on, or must not be trained any more."""
    assert group.key is not None
    if group.key.offer > offer:
        return core.groups.give_up_group(group, "rolled_back")  # its iterator comes anew
    if group.key.offer < offer and group.running:
        return core.groups.give_up_group(group, "task_gone")
    if first_lost is not None and group.newest_version >= first_lost:
        return _roll_back(core, group)
    return []


def _roll_back(core: "Core", group: Group) -> list[ev.Command]:
    """Give a group up, and take its task anew when it is found."""
    assert group.key is not None
    commands: list[ev.Command] = []
    if not group.is_rest:  # else the others of its group were trained, or are given up too
        core.tasks.put_back(group.key)
        commands += [c for g in core.groups.rests_of(group) for c in _roll_back(core, g)]
    return commands + core.groups.give_up_group(group, "rolled_back")
