"""Where did a batch's rollouts get old: in flight, or in the queue? And who waited for whom?

Told of batches as they are handed over, by when their episodes ended and when versions were
published. It decides nothing, and a run that goes on after a crash begins with none.
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
"""More than any group outlives."""


class PublishTimes:
    """Which version the trainer was at, by the clock of the run's loop."""

    def __init__(self, version: int) -> None:
        """``version``: at the beginning."""
        self._known: tuple[Array, Array] = (np.array([-np.inf]), np.array([version]))
        """When, and which from then on."""

    def note(self, at_s: float, version: int) -> None:
        """Published now."""
        times_s, versions = (column[-PUBLISHES_KEPT:] for column in self._known)
        self._known = (
            np.append(times_s, at_s),
            np.append(versions, version),
        )  # others read meanwhile

    def version_at(self, times_s: "Array") -> "Array":
        """For each of these instants."""
        known_s, versions = self._known
        places = np.searchsorted(known_s, times_s, side="right") - 1
        at: Array = versions[np.maximum(places, 0)]
        return at


@dataclass(slots=True)
class BatchAges:
    """All batches so far."""

    in_flight: Counter[int] = field(default_factory=Counter)
    """Trained rollouts by the versions published from their oldest trained token to the end of
    their group."""
    in_queue: Counter[int] = field(default_factory=Counter)
    """By those published from then until they were handed over."""
    groups: int = 0
    """Whose ends are known."""
    group_wait_s: float = 0.0
    """From the first end of an episode in a group to the last, added up over the groups."""

    def note(
        self, rows: Sequence[Rollout], batch: "Batch", published: PublishTimes
    ) -> dict[str, float]:
        """Take a batch's rows in; its own figures."""
        if not rows:
            return {}
        ended_s = np.array([(r if r.branch_of is None else r.root).ended_s for r in rows])
        group_ids = batch.group_ids.numpy()
        starts = np.flatnonzero(np.diff(group_ids, prepend=group_ids[0] - 1))
        last_s = np.maximum.reduceat(ended_s, starts)  # nan if one of them isn't known
        waits_s = (last_s - np.minimum.reduceat(ended_s, starts))[~np.isnan(last_s)]
        if not len(waits_s):
            return {}
        self.groups += len(waits_s)
        self.group_wait_s += float(waits_s.sum())
        figures = {
            "group_wait_s_mean": float(waits_s.mean()),
            "group_wait_s_max": float(waits_s.max()),
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
        _count(self.in_queue, queued)
        _count(self.in_flight, staleness - queued)
        mean_queued = float(queued.mean())
        return figures | {
            "staleness_in_flight_mean": float(staleness.mean()) - mean_queued,
            "staleness_in_queue_mean": mean_queued,
        }


def _count(counter: Counter[int], values: "Array") -> None:
    counter.update({value: int(n) for value, n in enumerate(np.bincount(values)) if n})
