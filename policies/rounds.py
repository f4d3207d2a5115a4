"""Round-based staleness policies, for engines that idle while the trainer trains.

Users choose one in ``tidegate.serve``; the orchestrator's core asks it which groups to admit and
hand over.

Symbol: B ``groups_per_batch``.
"""

from dataclasses import dataclass

from tidegate.errors import ConfigError
from tidegate.policies.consumption import in_admission_order, in_completion_order
from tidegate.policies.staleness import G, OutstandingGroup, OutstandingGroups, StalenessPolicy


@dataclass(frozen=True, kw_only=True)
class Synchronous(StalenessPolicy):
    """Synchronous on-policy training: generate one batch, train on it, publish, repeat."""

    @property
    def guaranteed_bound(self) -> int:
        """Bound on staleness: 0 versions."""
        return 0

    @property
    def allowed_groups(self) -> int:
        """Number of groups that may be outstanding: one batch."""
        return self.groups_per_batch

    def select(
        self, waiting: OutstandingGroups[G], *, groups: int, trainer_version: int
    ) -> list[G] | None:
        """Return the whole batch once all of its groups have ended, or None."""
        return in_admission_order(waiting, groups)


@dataclass(frozen=True, kw_only=True)
class OverSampling(StalenessPolicy):
    """Starts more groups than a batch takes, and carries unfinished ones to the next round.

    These are active partial rollouts (APRIL, arXiv:2509.18521): when B groups have ended,
    generation pauses, running turns are aborted, and they continue from their tokens under the next
    version, before any new group. Use it if engines and trainer share devices: they are paused
    until the version is live, except while the trainer waits for an evaluation or for scores. It
    does not bound staleness: a slow group can be carried over again and again.
    """

    factor: float = 2.0
    """Outstanding groups, as a multiple of ``groups_per_batch``, >= 1."""

    @property
    def pauses_generation(self) -> bool:
        """Always true: engines pause from hand-over until the next version is live."""
        return True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.factor < 1:
            raise ConfigError(f"factor must be >= 1, or no batch ever fills; got {self.factor}")

    @property
    def allowed_groups(self) -> int:
        """Number of groups that may be outstanding, ``factor·B``."""
        return round(self.factor * self.groups_per_batch)

    def select(
        self, waiting: OutstandingGroups[G], *, groups: int, trainer_version: int
    ) -> list[G] | None:
        """Return the groups that ended first, or None if too few have ended."""
        return in_completion_order(waiting, groups)


@dataclass(frozen=True, kw_only=True)
class TailPacking(StalenessPolicy):
    """Synchronous rounds without stragglers, which are packed into rounds of their own.

    This is RollPacker's tail batching (arXiv:2509.21009). A short round starts more groups than a
    batch takes, trains on those that end first, and discards the others. As soon as the discarded
    groups' tasks fill a batch, they make up a long round, which waits for all. Every token is
    on-policy; the stragglers' first attempts are wasted (``tail`` in the ledger), but no task is
    lost to its length.
    """

    factor: float = 1.25
    """Groups of a short round, as a multiple of ``groups_per_batch``, >= 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.factor < 1:
            raise ConfigError(f"factor must be >= 1, or no batch ever fills; got {self.factor}")

    @property
    def guaranteed_bound(self) -> int:
        """Bound on staleness: 0 versions."""
        return 0

    @property
    def allowed_groups(self) -> int:
        """Number of groups in a short round, ``factor·B``."""
        return round(self.factor * self.groups_per_batch)

    def admit(self, waiting: OutstandingGroups[OutstandingGroup], *, training_groups: int) -> int:
        """Return the round's free slots; 0 until the previous batch's version is live."""
        if training_groups:
            return 0
        free = super().admit(waiting, training_groups=0)
        if self.prefers_returned(waiting):
            return max(0, min(free, self.groups_per_batch - waiting.admission_slots))
        return free

    def can_fill_batch(self, *, unpublished_groups: int) -> bool:
        """Return whether all earlier batches are published."""
        return not unpublished_groups

    def prefers_returned(self, waiting: OutstandingGroups[OutstandingGroup]) -> bool:
        """Return whether this round is a long one; it begins once returned tasks fill a batch."""
        first = next(iter(waiting.in_order), None)
        if first is not None:
            return first.is_retaken
        return waiting.returned_tasks >= self.groups_per_batch

    def select(
        self, waiting: OutstandingGroups[G], *, groups: int, trainer_version: int
    ) -> list[G] | None:
        """Return the groups that ended first; a long round holds no others."""
        return in_completion_order(waiting, groups)

    def expire(self, waiting: OutstandingGroups[G], *, trainer_version: int) -> list[G]:
        """Return all groups that remain when a batch is handed over."""
        return list(waiting.in_order)

    @property
    def expiry_reason(self) -> str:
        """Ledger reason of discarded stragglers: ``tail``."""
        return "tail"
