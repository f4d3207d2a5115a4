"""How stale may samples be before they teach too little? η, moved by what the trainer measures."""

from dataclasses import dataclass, replace
from typing import Self

from tidegate.errors import ConfigError
from tidegate.policies.asynchrony import BoundedStaleness
from tidegate.policies.staleness import OffPolicyness


@dataclass(frozen=True, kw_only=True)
class AdaptiveStaleness(BoundedStaleness):
    """Moves η between two limits, so that samples are no further off-policy than they should be.

    The trainer reports what it measures; a report that misses the target lowers η by one, and one
    that leaves ``slack`` raises it by one. What it guarantees is the upper limit.
    """

    max_staleness: int = 1
    """η, to begin with."""
    lowest: int = 0
    highest: int = 8
    effective_sample_size_min: float | None = None
    """The target, a share in (0, 1)."""
    mismatch_kl_max: float | None = None
    """The target, in nats per token."""
    slack: float = 0.1
    """η is raised only while what was measured is better than the target by this share of the
    target's distance from on-policy, so that it doesn't swing."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.lowest <= self.max_staleness <= self.highest:
            raise ConfigError(
                f"lowest <= max_staleness <= highest must hold, got {self.lowest}, "
                f"{self.max_staleness} and {self.highest}"
            )
        ess, kl = self.effective_sample_size_min, self.mismatch_kl_max
        if (ess is None) == (kl is None):
            raise ConfigError(
                "AdaptiveStaleness holds one target: give effective_sample_size_min or "
                "mismatch_kl_max"
            )
        if ess is not None and not 0 < ess < 1:
            raise ConfigError(f"effective_sample_size_min is a share in (0, 1), got {ess}")
        if kl is not None and kl <= 0:
            raise ConfigError(f"mismatch_kl_max must be > 0 nats per token, got {kl}")

    @property
    def guaranteed_bound(self) -> int:
        """That of the highest η."""
        highest = replace(self, max_staleness=self.highest)
        return super(AdaptiveStaleness, highest).guaranteed_bound

    @property
    def outstanding_groups_ceiling(self) -> int:
        """Under the highest η: lowering η takes back no group that has started."""
        return replace(self, max_staleness=self.highest).outstanding_groups_max

    @property
    def adaptation(self) -> int:
        """η."""
        return self.max_staleness

    def adapted(self, adaptation: int) -> Self:
        """With this η, or the nearest within the limits."""
        eta = min(self.highest, max(self.lowest, adaptation))
        return self if eta == self.max_staleness else replace(self, max_staleness=eta)

    def observed(self, measured: OffPolicyness) -> Self:
        """One step towards the target."""
        return self.adapted(self.max_staleness + self._step(measured))

    def _step(self, measured: OffPolicyness) -> int:
        if self.effective_sample_size_min is not None:
            if measured.effective_sample_size is None:
                return 0
            used = (1 - measured.effective_sample_size) / (1 - self.effective_sample_size_min)
        else:
            assert self.mismatch_kl_max is not None
            if measured.mismatch_kl is None:
                return 0
            used = measured.mismatch_kl / self.mismatch_kl_max
        if used > 1:
            return -1
        return 1 if used < 1 - self.slack else 0
