"""What has the trainer had, and how old was it?"""

from collections import Counter
from dataclasses import dataclass, field

from tidegate.orchestrator.core.rollout import Rollout


@dataclass(slots=True)
class TrainedCounts:
    """What has been handed to the trainer, in rollouts."""

    batches: int = 0
    rollouts: int = 0
    mixed_version: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    """Rollouts by staleness at consumption."""

    def count(self, rollouts: list[Rollout], trainer_version: int, times: int) -> None:
        """These were handed over (1), or that was undone (-1)."""
        self.rollouts += times * len(rollouts)
        by_oldest: dict[int, int] = {}  # to set a Counter's item takes thrice as long
        for rollout in rollouts:
            versions = rollout.trained_versions()
            if versions is not None:
                oldest, is_mixed = versions
                by_oldest[oldest] = by_oldest.get(oldest, 0) + times
                self.mixed_version += times * is_mixed
        for oldest, count in by_oldest.items():
            self.staleness[trainer_version - oldest] += count
        self.staleness = +self.staleness  # without those that were undone
