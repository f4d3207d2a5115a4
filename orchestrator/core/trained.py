"""What has the trainer had, and how old was it?"""

from collections import Counter
from dataclasses import dataclass, field

from tidegate.orchestrator.core.group import Group


@dataclass(slots=True)
class TrainedCounts:
    """What has been handed to the trainer, in rollouts."""

    batches: int = 0
    rollouts: int = 0
    mixed_version: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    """Rollouts by staleness at consumption."""

    def count(self, groups: list[Group], trainer_version: int, times: int) -> None:
        """These were handed over (1), or that was undone (-1)."""
        for rollout in (rollout for group in groups for rollout in group.kept):
            self.rollouts += times
            oldest = rollout.oldest_trained_version
            if oldest is not None:
                self.staleness[trainer_version - oldest] += times
                self.mixed_version += times * (oldest != rollout.newest_version)
        self.staleness = +self.staleness  # without those that were undone
