"""Reads a run's directory and returns the story of one rollout, group or batch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tidegate.errors import AuditError
from tidegate.observability.records.trace import trace_of
from tidegate.observability.records.trajectories import (
    RecordedRollout,
    find_trajectory,
    trajectories_where,
)
from tidegate.observability.reports.facts import read_metrics, read_record, resumed_batches
from tidegate.observability.reports.story import (
    RunContext,
    Story,
    Subject,
    SubjectKind,
    batch_story,
    group_story,
    rollout_story,
)


def explain(directory: Path, subject: Subject) -> Story:
    """Return the story of one rollout, group or batch of a recorded run.

    Raises:
        AuditError: the run has no such subject, or its files can't be read.
    """
    return explain_from(directory, subject, context_of(directory))


def context_of(directory: Path) -> RunContext:
    """Return the facts of a recorded run that stories use.

    Raises:
        AuditError: the directory holds no run, or its files can't be read.
    """
    record = read_record(directory)
    statistics: dict[str, Any] = record.get("statistics") or {}
    return RunContext.of(
        record["settings"],
        bound=statistics.get("staleness_bound"),
        is_resumed=bool(resumed_batches(directory)),
        trace=trace_of(directory),
    )


def explain_from(directory: Path, subject: Subject, run: RunContext) -> Story:
    """Return a story, with a context that was read before; raises like :func:`explain`."""
    match subject.kind:
        case SubjectKind.ROLLOUT:
            rollout = find_trajectory(directory, subject.number)
            if rollout is None:
                raise _missing(directory, subject)
            group = trajectories_where(directory, "group_id", rollout.group_id)
            return rollout_story(rollout, group, run)
        case SubjectKind.GROUP:
            rows = trajectories_where(directory, "group_id", subject.number)
            if not rows:
                raise _missing(directory, subject)
            return group_story(rows, run)
        case SubjectKind.BATCH:
            rows = _trained(trajectories_where(directory, "consumed_version", subject.number))
            if not rows:
                raise _missing(directory, subject)
            return batch_story(subject.number, rows, run, _metrics(directory, subject.number))


def _trained(rows: Sequence[RecordedRollout]) -> list[RecordedRollout]:
    return [row for row in rows if row.state == "trained"]


def _metrics(directory: Path, version: int) -> dict[str, Any] | None:
    rows = read_metrics(directory, stops_at_damage=True)
    return next((row for row in reversed(rows) if row.get("version") == version), None)


def _missing(directory: Path, subject: Subject) -> AuditError:
    hint = {
        SubjectKind.ROLLOUT: "rollouts are numbered from 0 in the order in which they start",
        SubjectKind.GROUP: "groups are numbered from 0; an evaluation's are negative",
        SubjectKind.BATCH: "a batch is named by the version at which it was trained, from 0",
    }[subject.kind]
    return AuditError(
        f"{directory} has recorded no {subject}: {hint}; one that had not ended is not recorded"
    )
