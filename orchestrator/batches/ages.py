"""Staleness of trained batches, split by cause (generation or queue), and waits for stragglers.

The trainer's handle adds each batch to :class:`BatchAges`; batch metrics and :class:`RunStatistics`
show the figures. The figures are only reported: no decision depends on them, and a resumed run
starts at zero.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tidegate.orchestrator.core.rollout import Rollout
from tidegate.orchestrator.telemetry.rows import RowsOfRollouts

if TYPE_CHECKING:
    from tidegate.orchestrator.batches.batches import Batch

    Array = np.ndarray[tuple[int], np.dtype[Any]]

PUBLISHES_KEPT = 512
"""Number of publishes kept: more than any group outlives."""


class PublishTimes:
    """Times at which versions were published, on the run loop's clock."""

    def __init__(self, version: int) -> None:
        """``version``: version at the start of the run."""
        self._known: tuple[Array, Array] = (np.array([-np.inf]), np.array([version]))
        """(publish times in seconds, versions): the trainer was at a version from its publish time
        to the next version's."""

    def record(self, at_s: float, version: int) -> None:
        """Record that ``version`` is published at ``at_s``."""
        times_s, versions = (column[-PUBLISHES_KEPT:] for column in self._known)
        self._known = (
            np.append(times_s, at_s),
            np.append(versions, version),
        )  # replaced, not changed: other threads read it

    def version_at(self, times_s: "Array") -> "Array":
        """Return the trainer's version at each of these times."""
        known_s, versions = self._known
        indices = np.searchsorted(known_s, times_s, side="right") - 1
        versions_then: Array = versions[np.maximum(indices, 0)]
        return versions_then


@dataclass(slots=True)
class BatchAges:
    """Totals over all batches so far."""

    from_generation: Counter[int] = field(default_factory=Counter)
    """Number of trained rollouts, by the versions published between their oldest trained token and
    their group's end."""
    from_queue: Counter[int] = field(default_factory=Counter)
    """Number of trained rollouts, by the versions published between their group's end and the
    hand-over."""
    groups: int = 0
    """Number of groups for which the end of each episode is known."""
    straggler_wait_s: float = 0.0
    """Seconds from a group's first ended episode to its last, summed over ``groups``."""

    def record(
        self, rows: Sequence[Rollout], batch: "Batch", published: PublishTimes
    ) -> dict[str, float]:
        """Add a batch's rows to the totals; return the batch's own figures."""
        if not rows:
            return {}
        ended_s = np.array([(r if r.branch_of is None else r.root).ended_s for r in rows])
        group_ids = batch.group_ids.numpy()
        starts = np.flatnonzero(np.diff(group_ids, prepend=group_ids[0] - 1))
        last_s = np.maximum.reduceat(ended_s, starts)  # nan if one end is unknown
        waits_s = (last_s - np.minimum.reduceat(ended_s, starts))[~np.isnan(last_s)]
        if not len(waits_s):
            return {}
        self.groups += len(waits_s)
        self.straggler_wait_s += float(waits_s.sum())
        figures = {
            "straggler_wait_s_mean": float(waits_s.mean()),
            "straggler_wait_s_max": float(waits_s.max()),
        }
        sizes = np.diff(starts, append=len(rows))
        last_s = np.repeat(last_s, sizes)
        of_rollouts = RowsOfRollouts(batch.rollout_ids.numpy())
        last_s = of_rollouts.first(last_s)
        is_trained = of_rollouts.highest(np.asarray(batch.loss_mask.numpy().any(1)))
        counts = ~np.isnan(last_s) & is_trained
        staleness = of_rollouts.highest(batch.staleness.numpy())[counts]
        if not len(staleness):
            return figures
        queued = batch.trainer_version - published.version_at(last_s[counts])
        queued = np.clip(queued, 0, staleness)
        _count(self.from_queue, queued)
        _count(self.from_generation, staleness - queued)
        mean_queued = float(queued.mean())
        return figures | {
            "staleness_from_generation_mean": float(staleness.mean()) - mean_queued,
            "staleness_from_queue_mean": mean_queued,
        }


def _count(counter: Counter[int], values: "Array") -> None:
    counter.update({value: int(n) for value, n in enumerate(np.bincount(values)) if n})
