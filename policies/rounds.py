"""How are rollouts generated in rounds, one per batch? For engines that rest while it trains.

Symbol: B ``groups_per_batch``.
"""

from dataclasses import dataclass

from tidegate.errors import ConfigError
from tidegate.policies.consumption import in_admission_order, in_completion_order
from tidegate.policies.staleness import G, StalenessPolicy, Waiting, WaitingGroup


@dataclass(frozen=True, kw_only=True)
class Synchronous(StalenessPolicy):
    """Every token is sampled by the weights that are trained on it: generate, then train."""

    @property
    def guaranteed_bound(self) -> int:
        """0."""
        return 0

    @property
    def allowed_groups(self) -> int:
        """One batch."""
        return self.groups_per_batch

    def select(self, waiting: Waiting[G], *, groups: int, trainer_version: int) -> list[G] | None:
        """All there are."""
        return in_admission_order(waiting, groups)


@dataclass(frozen=True, kw_only=True)
class OverSampling(StalenessPolicy):
    """More groups are started than a batch takes; those left over are carried to the next.

    Active partial rollouts (APRIL, arXiv:2509.18521): when B groups have ended, generation pauses,
    running turns are aborted, and they go on from their tokens under the next version, before any
    new group. Made for engines and trainer that share their devices. It bounds no age: a group
    that never is among the first is carried on.
    """

    factor: float = 2.0
    """Groups outstanding, in batches."""

    @property
    def pauses_generation(self) -> bool:
        """They do."""
        return True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.factor < 1:
            raise ConfigError(f"factor must be >= 1, or no batch ever fills; got {self.factor}")

    @property
    def allowed_groups(self) -> int:
        """``factor·B``."""
        return round(self.factor * self.groups_per_batch)

    def select(self, waiting: Waiting[G], *, groups: int, trainer_version: int) -> list[G] | None:
        """Those that ended first."""
        return in_completion_order(waiting, groups)


@dataclass(frozen=True, kw_only=True)
class TailPacking(StalenessPolicy):
    """Synchronous rounds without their tails: stragglers are packed into rounds of their own.

    As RollPacker's tail batching (arXiv:2509.21009): a short round starts more groups than a batch
    takes, trains on those that end first, and gives the others up; their tasks make up a long round
    as soon as there are enough, which waits for all. Every token is on-policy; what stragglers had
    sampled is wasted (``tail`` in the ledger), and no task is lost to its length.
    """

    factor: float = 1.25
    """Groups of a short round, in batches."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.factor < 1:
            raise ConfigError(f"factor must be >= 1, or no batch ever fills; got {self.factor}")

    @property
    def guaranteed_bound(self) -> int:
        """0."""
        return 0

    @property
    def allowed_groups(self) -> int:
        """Those of a short round."""
        return round(self.factor * self.groups_per_batch)

    def admit(self, waiting: Waiting[WaitingGroup], *, training_groups: int) -> int:
        """A round, once the version made from the one before is live."""
        if training_groups:
            return 0
        free = super().admit(waiting, training_groups=0)
        if self.prefers_returned(waiting):
            return max(0, min(free, self.groups_per_batch - waiting.places))
        return free

    def can_fill_batch(self, *, unpublished_groups: int) -> bool:
        """Not before the last one is published."""
        return not unpublished_groups

    def prefers_returned(self, waiting: Waiting[WaitingGroup]) -> bool:
        """In a long round, which begins where there are stragglers for a batch."""
        first = next(iter(waiting.in_order), None)
        if first is not None:
            return first.is_retaken
        return waiting.returned_tasks >= self.groups_per_batch

    def select(self, waiting: Waiting[G], *, groups: int, trainer_version: int) -> list[G] | None:
        """Those that ended first; in a long round, there are no others."""
        return in_completion_order(waiting, groups)

    def expire(self, waiting: Waiting[G], *, trainer_version: int) -> list[G]:
        """Whoever is left when a batch is handed over."""
        return list(waiting.in_order)

    @property
    def expiry_reason(self) -> str:
        """They are stragglers."""
        return "tail"
