"""Evaluations of a recorded run, read from ``evaluations.jsonl`` of all its processes.

The recorder writes one line per call of ``rollouts.evaluate()``. Readers get one point per name and
weight version.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidegate.errors import AuditError
from tidegate.observability.records.run_directories import (
    RUN_FILE,
    process_directories,
    read_json_lines,
    read_run_file,
)
from tidegate.observability.records.run_files import EVALUATIONS_FILE
from tidegate.transport.printable import printable


@dataclass(frozen=True, slots=True)
class EvaluationPoint:
    """Evaluation of one version on the tasks of one name."""

    name: str
    version: int
    batches: int
    """Number of batches that the trainer had received."""
    reward: float
    """Mean over all tasks; failed episodes count as 0."""
    tasks: int
    failures: int


def read_evaluations(directory: Path) -> list[EvaluationPoint]:
    """Return a run's evaluations in their order; empty if it has none.

    Evaluations of one name and version, such as those of several ranks, are one point. If a process
    resumed from a checkpoint, the earlier processes' evaluations after that checkpoint are omitted,
    because the resume undid them.

    Raises:
        AuditError: a file can't be read.
    """
    points: dict[tuple[str, int], EvaluationPoint] = {}
    for row in _rows(Path(directory)):
        add_point(points, _point(row, Path(directory)))
    return list(points.values())


def add_point(points: dict[tuple[str, int], EvaluationPoint], point: EvaluationPoint) -> None:
    """Add a point to points by name and version, joined with one that is there already."""
    key = point.name, point.version
    points[key] = _joined(points[key], point) if key in points else point


def held_out_name(points: Sequence[EvaluationPoint]) -> str | None:
    """Return the name of the run's main evaluation: ``held_out``, or the first."""
    names = [point.name for point in points]
    return "held_out" if "held_out" in names else next(iter(names), None)


def point_of(figures: Mapping[str, Any]) -> EvaluationPoint:
    """Convert the figures of one evaluation, a mapping that :meth:`Recorder.evaluation` receives,
    to a point.

    Raises:
        KeyError, TypeError, ValueError: a figure is missing, or is no number.
    """
    return EvaluationPoint(
        name=printable(str(figures["name"])),
        version=int(figures["version"]),
        batches=int(figures["batches"]),
        reward=float(figures["reward"]),
        tasks=int(figures["tasks"]),
        failures=int(figures["failures"]),
    )


def _point(row: Mapping[str, Any], directory: Path) -> EvaluationPoint:
    try:
        return point_of(row)
    except (KeyError, TypeError, ValueError) as error:
        raise AuditError(
            f"a line of {directory / EVALUATIONS_FILE} is not what Tidegate writes: "
            f"{type(error).__name__} {error}"
        ) from error


def _joined(first: EvaluationPoint, second: EvaluationPoint) -> EvaluationPoint:
    tasks = first.tasks + second.tasks
    total = first.reward * first.tasks + second.reward * second.tasks
    return EvaluationPoint(
        name=first.name,
        version=first.version,
        batches=first.batches,
        reward=total / max(1, tasks),
        tasks=tasks,
        failures=first.failures + second.failures,
    )


def _rows(directory: Path) -> list[Mapping[str, Any]]:
    rows: list[Mapping[str, Any]] = []
    for part in process_directories(directory):
        run = read_run_file(part) if part != directory and (part / RUN_FILE).exists() else {}
        resumed = run.get("resumed_batches")
        if isinstance(resumed, int):
            rows = [row for row in rows if row.get("batches", 0) <= resumed]
        if (part / EVALUATIONS_FILE).exists():
            rows += read_json_lines(part / EVALUATIONS_FILE)
    return rows
