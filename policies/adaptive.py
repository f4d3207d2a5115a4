"""Staleness policy that adapts its bound η to the off-policyness that the trainer measures.

Users pass :class:`AdaptiveStaleness` to ``tidegate.serve``; the orchestrator's core calls
:meth:`~AdaptiveStaleness.observed` with each measurement.
"""

from dataclasses import dataclass, replace
from typing import Self

from tidegate.errors import ConfigError
from tidegate.policies.asynchrony import BoundedStaleness
from tidegate.policies.staleness import OffPolicyness


@dataclass(frozen=True, kw_only=True)
class AdaptiveStaleness(BoundedStaleness):
    """Moves η within ``[lowest, highest]`` to hold the trainer's off-policyness at a target.

    A measurement worse than the target lowers η by one; a measurement better than the target by
    more than ``slack`` raises η by one. The guaranteed bound is that of ``highest``.
    """

    max_staleness: int = 1
    """Initial η, in weight versions."""
    lowest: int = 0
    highest: int = 8
    effective_sample_size_min: float | None = None
    """Target effective sample size, a share in (0, 1). Set this or ``mismatch_kl_max``."""
    mismatch_kl_max: float | None = None
    """Target KL divergence of trainer and engine, in nats per token. Set this or
    ``effective_sample_size_min``."""
    slack: float = 0.1
    """Hysteresis: η rises only if the measurement is better than the target by this share of the
    target's distance from on-policy."""

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
                "AdaptiveStaleness has one target: set either effective_sample_size_min or "
                "mismatch_kl_max"
            )
        if ess is not None and not 0 < ess < 1:
            raise ConfigError(f"effective_sample_size_min is a share in (0, 1), got {ess}")
        if kl is not None and kl <= 0:
            raise ConfigError(f"mismatch_kl_max must be > 0 nats per token, got {kl}")

    @property
    def guaranteed_bound(self) -> int:
        """Bound on staleness that holds for the highest η."""
        highest = replace(self, max_staleness=self.highest)
        return super(AdaptiveStaleness, highest).guaranteed_bound

    @property
    def outstanding_groups_ceiling(self) -> int:
        """Outstanding groups under the highest η. Lowering η does not cancel groups that have
        started."""
        return replace(self, max_staleness=self.highest).outstanding_groups_max

    @property
    def adaptation(self) -> int:
        """Current η, in weight versions."""
        return self.max_staleness

    def adapted(self, adaptation: int) -> Self:
        """Return the policy with this η, clamped to ``[lowest, highest]``."""
        eta = min(self.highest, max(self.lowest, adaptation))
        return self if eta == self.max_staleness else replace(self, max_staleness=eta)

    def observed(self, measured: OffPolicyness) -> Self:
        """Return the policy with η moved by at most one version towards the target."""
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
