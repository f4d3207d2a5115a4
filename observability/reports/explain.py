"""Reads a run's directory and returns the story of one rollout, group or batch."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tidegate.errors import AuditError
from tidegate.observability.records.trace import trace_of
from tidegate.observability.records.trajectories import find_trajectory, trajectories_where
from tidegate.observability.reports.facts import read_metrics, read_record, resumed_batches
from tidegate.observability.reports.story import RunContext, Story, Subject, SubjectKind, story_of


def explain(directory: Path, subject: Subject) -> Story:
    """Return the story of one rollout, group or batch of a recorded run.

    Raises:
        AuditError: the run has no such subject, or its files can't be read.
    """
    record = read_record(directory)
    run = RunContext.of(
        record["settings"],
        bound=(record.get("statistics") or {}).get("staleness_bound"),
        is_resumed=bool(resumed_batches(directory)),
        trace=trace_of(directory),
    )
    return explain_from(directory, subject, run)


def explain_from(directory: Path, subject: Subject, run: RunContext) -> Story:
    """Return a story, with a context that was read before; raises like :func:`explain`."""
    story = story_of(
        subject,
        run,
        rollout=partial(find_trajectory, directory),
        rows_where=partial(trajectories_where, directory),
        metrics=partial(_metrics, directory),
    )
    if story is not None:
        return story
    hint = {
        SubjectKind.ROLLOUT: "rollouts are numbered from 0 in the order in which they start",
        SubjectKind.GROUP: "groups are numbered from 0; an evaluation's are negative",
        SubjectKind.BATCH: "a batch is named by the version at which it was trained, from 0",
    }[subject.kind]
    raise AuditError(
        f"{directory} has recorded no {subject}: {hint}; one that had not ended is not recorded"
    )


def _metrics(directory: Path, version: int) -> Mapping[str, Any] | None:
    rows = read_metrics(directory, stops_at_damage=True)
    return next((row for row in reversed(rows) if row.get("version") == version), None)
