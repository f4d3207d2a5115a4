"""Counts of forked rollouts: how many attempts forked, and rows of branches by reason.

A rollout forks when an agent's context is not a continuation of what the model read and wrote, so
many forks mean much context that is prefilled, and perhaps trained on, more than once.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tidegate.errors import AuditError
from tidegate.observability.records.trajectories import recorded_batches
from tidegate.orchestrator.core.rollout import Rollout

NO_REASON = "no reason given"
ROWS_PER_READ = 4_096
COLUMNS = ["rollout_id", "group_id", "branch_of", "fork_reason"]


@dataclass(frozen=True, slots=True)
class ForkCounts:
    """Forks of the rollouts that have ended, without evaluations."""

    rollouts: int = 0
    """Number of attempts, each with all its branches."""
    forked: int = 0
    """Number of attempts that have a branch."""
    rows_by_reason: Mapping[str, int] = field(default_factory=dict)
    """Number of branches by the reason of their fork."""

    @property
    def share(self) -> float | None:
        """Share of attempts that forked; None without any attempt."""
        return self.forked / self.rollouts if self.rollouts else None


class ForkCounter:
    """Counts the forks of a running run, row by row."""

    def __init__(self) -> None:
        self._rollouts = self._forked = 0
        self._rows: Counter[str] = Counter()

    def count(self, rollout: Rollout) -> None:
        """Count one ended row."""
        if rollout.group_id < 0:
            return
        if rollout.branch_of is None:
            self._rollouts += 1
            self._forked += bool(rollout.branches)
        else:
            self._rows[rollout.fork_reason or NO_REASON] += 1

    def counts(self) -> ForkCounts:
        """Return the counts so far."""
        return ForkCounts(self._rollouts, self._forked, dict(sorted(self._rows.items())))


def count_forks(rows: Iterable[tuple[int, int | None, str]]) -> ForkCounts:
    """Count forks of rows ``(rollout_id, branch_of, fork_reason)``."""
    parents: dict[int, int | None] = {}
    reasons: Counter[str] = Counter()
    for rollout_id, branch_of, reason in rows:
        parents[rollout_id] = branch_of
        if branch_of is not None:
            reasons[reason or NO_REASON] += 1
    roots = {rollout_id for rollout_id, branch_of in parents.items() if branch_of is None}
    forked = {
        _root(rollout_id, parents) for rollout_id, parent in parents.items() if parent is not None
    }
    return ForkCounts(len(roots), len(forked & roots), dict(sorted(reasons.items())))


def read_forks(directory: Path) -> ForkCounts:
    """Count the forks of a recorded run, as far as its rollouts can be read."""
    return count_forks(_recorded_rows(directory))


def _recorded_rows(directory: Path) -> Iterable[tuple[int, int | None, str]]:
    try:
        for batch in recorded_batches(directory, COLUMNS, rows_per_batch=ROWS_PER_READ):
            for row in batch.to_pylist():
                if row["group_id"] >= 0:
                    yield row["rollout_id"], row["branch_of"], row["fork_reason"]
    except AuditError:
        return  # damaged, or recorded by another version: the rest can't be counted


def _root(rollout_id: int, parents: Mapping[int, int | None]) -> int:
    while (parent := parents.get(rollout_id)) is not None:
        rollout_id = parent
    return rollout_id
