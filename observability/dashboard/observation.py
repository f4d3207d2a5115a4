"""What is a run seen as, at one instant? Snapshots; all that is shown is made from them.

Taken in the run's own loop, a millisecond for a thousand groups; nothing here encodes or waits.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tidegate.observability.dashboard.live import Noted
from tidegate.observability.trajectories import Snapshot, snapshot
from tidegate.orchestrator.core.core import Core
from tidegate.orchestrator.core.group import Group
from tidegate.orchestrator.core.rollout import Rollout, RolloutState
from tidegate.orchestrator.telemetry.statistics import RunStatistics

GROUPS_SHOWN_MAX = 2_000
"""The oldest ones: what waits behind them is hardly looked at."""

TASK_SHOWN_MAX = 120
"""Characters of a task in a list."""


@dataclass(frozen=True, slots=True)
class GroupLine:
    """One group that the trainer hasn't had."""

    group_id: int
    rollouts: int
    """Its rows, branches included."""
    running: int
    """Rollouts whose episode is going on; 0: it is buffered."""
    version_floor: int
    """No token of it is older, nor will be."""


@dataclass(frozen=True, slots=True)
class RolloutLine:
    """One rollout, in a list."""

    rollout_id: int
    group_id: int
    index: int
    state: str
    reason: str
    """Why it was discarded; or why its branch is there."""
    context_tokens: int
    turns: int
    reward: float | None
    staleness: int | None
    """At consumption; None before, or without a token."""
    oldest_version: int | None
    newest_version: int | None
    task: str


@dataclass(frozen=True, slots=True)
class Observation:
    """A run at one instant."""

    statistics: RunStatistics
    noted: Noted
    groups: tuple[GroupLine, ...] = ()
    about: Mapping[str, object] = field(default_factory=dict)
    """What doesn't change: its name, its model, its settings."""
    at_us: int = 0
    """By the clock of the timeline."""
    is_over: bool = False


def group_lines(core: Core) -> tuple[GroupLine, ...]:
    """Groups that run or are buffered, in the order of admission."""
    lines: list[GroupLine] = []
    for group in core.groups.in_order:
        if len(lines) == GROUPS_SHOWN_MAX:
            break
        lines.append(
            GroupLine(group.group_id, len(group.rollouts), group.running, group.version_floor)
        )
    return tuple(lines)


def rollout_lines(
    rollouts: Iterable[tuple[Rollout, object]], *, trainer_version: int | None = None
) -> list[RolloutLine]:
    """Of rollouts, each with its task. ``trainer_version``: at consumption, if that is known."""
    lines = []
    for rollout, task in rollouts:
        oldest = rollout.oldest_version
        trained = rollout.oldest_trained_version
        known = trainer_version is not None and trained is not None
        lines.append(
            RolloutLine(
                rollout_id=rollout.rollout_id,
                group_id=rollout.group_id,
                index=rollout.index,
                state=str(rollout.state),
                reason=rollout.discard_reason or rollout.fork_reason,
                context_tokens=len(rollout.token_ids),
                turns=len(rollout.turns),
                reward=rollout.reward,
                staleness=(trainer_version or 0) - (trained or 0) if known else None,
                oldest_version=oldest,
                newest_version=rollout.newest_version,
                task=short(task),
            )
        )
    return lines


def short(task: object) -> str:
    """Enough of a task to know it by."""
    try:
        text = task if isinstance(task, str) else repr(task)
    except Exception as error:  # noqa: BLE001 - a user's type may raise anything
        text = f"a {type(task).__name__} whose repr raises {type(error).__name__}"
    return text if len(text) <= TASK_SHOWN_MAX else text[: TASK_SHOWN_MAX - 1] + "…"


def going_on(core: Core, *, state: str, group_id: int | None) -> list[tuple[Rollout, Group]]:
    """Rollouts that the trainer hasn't had, in the order of admission.

    ``state``: ``running``, ``finished``, or empty for both.
    """
    if group_id is not None and group_id < 0:
        evaluated = [(r, g) for r, g in core.groups.running.values() if g.group_id == group_id]
        return evaluated
    wanted = {RolloutState(state)} if state else {RolloutState.RUNNING, RolloutState.FINISHED}
    return [
        (rollout, group)
        for group in core.groups.in_order
        if group_id is None or group.group_id == group_id
        for rollout in group.rollouts
        if rollout.state in wanted
    ]


def find_rollout(core: Core, rollout_id: int) -> Snapshot | None:
    """A copy of a rollout that the trainer hasn't had."""
    known = core.groups.running.get(rollout_id)
    if known is None:
        found = (
            (rollout, group)
            for group in core.groups.in_order
            for rollout in group.rollouts
            if rollout.rollout_id == rollout_id
        )
        known = next(found, None)
    if known is None:
        return None
    rollout, group = known
    return snapshot(rollout, task=group.task, advantage=None, consumed_version=None)
