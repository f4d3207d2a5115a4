"""Counts of trained batches and rollouts, and their staleness at consumption.

:class:`Core` updates them at each hand-over; statistics read them. Reads the rollouts' weight
versions. Built on ``rollout.py``.
"""

from collections import Counter
from dataclasses import dataclass, field

from tidegate.orchestrator.core.rollout import Rollout


@dataclass(slots=True)
class TrainedCounts:
    """Totals over all batches handed to the trainer."""

    batches: int = 0
    rollouts: int = 0
    mixed_version: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    """Number of rollouts by staleness at consumption, in versions."""

    def count(self, rows: list[Rollout], trainer_version: int, times: int) -> None:
        """Add these rows (``times`` = 1), or subtract them again (-1). Branches don't count."""
        by_oldest: Counter[int] = Counter()
        rollouts = mixed = 0
        for rollout in rows:
            if rollout.branch_of is not None:
                continue
            rollouts += 1
            versions = _of_all_rows(rollout) if rollout.branches else rollout.trained_versions()
            if versions is not None:
                oldest, is_mixed = versions
                by_oldest[oldest] += 1
                if is_mixed:
                    mixed += 1
        self.rollouts += times * rollouts
        self.mixed_version += times * mixed
        for oldest, count in by_oldest.items():
            self.staleness[trainer_version - oldest] += times * count
        self.staleness = +self.staleness  # drops counts that were undone to 0


def _of_all_rows(rollout: Rollout) -> tuple[int, bool] | None:
    """Return :meth:`Rollout.trained_versions` over all rows of a rollout that forked."""
    rows = [row for row in rollout.rows if row.discard_reason is None]
    oldest = [v for row in rows if (v := row.oldest_trained_version) is not None]
    if not oldest:
        return None
    newest = max(v for row in rows if (v := row.newest_version) is not None)
    return min(oldest), min(oldest) != newest
