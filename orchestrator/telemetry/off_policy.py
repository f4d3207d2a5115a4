"""Off-policyness of the last batch as the trainer's loss measured it: ESS and mismatch divergences.

``Rollouts.report_off_policyness`` makes an :class:`OffPolicy` from values that the trainer computed
with ``policies/diagnostics.py``; metrics, dashboard and recordings show it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from tidegate.policies.diagnostics import LagBucket

BY_LAG = {"kl": "k1", "k3": "k3", "chi2": "chi2_token", "ess": "ess", "ppl_ratio": "ppl_ratio"}
"""Name of each figure by lag -> field of :class:`~tidegate.policies.diagnostics.Mismatch`."""


@dataclass(frozen=True, slots=True)
class OffPolicy:
    """Off-policyness that the trainer reported for its last batch; None for a figure that the
    trainer did not report."""

    effective_sample_size: float | None = None
    """Effective sample size of the batch's importance weights, as a share in (0, 1]."""
    mismatch_kl: float | None = None
    """KL divergence of trainer and engine, in nats per token."""
    k3: float | None = None
    """k3 estimator over all tokens, as ``chi2``; known if the trainer reported it by lag."""
    chi2: float | None = None
    by_lag: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """Finite figures of :data:`BY_LAG`, by the smallest lag of each bucket."""

    def figures(self) -> dict[str, float]:
        """Return the values by their names in batch metrics."""
        values = {
            "effective_sample_size": self.effective_sample_size,
            "mismatch_kl": self.mismatch_kl,
            "mismatch_k3": self.k3,
            "mismatch_chi2": self.chi2,
        }
        figures = {name: value for name, value in values.items() if value is not None}
        for lag, of_lag in self.by_lag.items():
            figures |= {f"mismatch_{name}_lag_{lag}": value for name, value in of_lag.items()}
        return figures


def off_policy(
    ess: float | None, kl: float | None, by_lag: "Sequence[LagBucket]" = ()
) -> OffPolicy:
    """Make an :class:`OffPolicy` from the arguments of ``report_off_policyness``.

    Raises:
        ConfigError: a value is out of range, or not a number.
    """
    if ess is not None and not 0 < ess <= 1:
        raise ConfigError(f"effective_sample_size is a share, in (0, 1]; got {ess}")
    if kl is not None and not kl >= 0:
        raise ConfigError(f"mismatch_kl is in nats per token, >= 0; got {kl}")
    figures = {
        bucket.lag_min: {
            name: value
            for name, field_name in BY_LAG.items()
            if math.isfinite(value := float(getattr(bucket.mismatch, field_name)))
        }
        for bucket in by_lag
    }
    return OffPolicy(ess, kl, _mean(by_lag, "k3"), _mean(by_lag, "chi2_token"), figures)


def off_policy_of(figures: Mapping[str, float]) -> OffPolicy:
    """Make an :class:`OffPolicy` from batch metrics; the inverse of :meth:`OffPolicy.figures`."""
    by_lag: dict[int, dict[str, float]] = {}
    for key, value in figures.items():
        name, is_by_lag, lag = key.removeprefix("mismatch_").partition("_lag_")
        if is_by_lag and name in BY_LAG and lag.isdecimal():
            by_lag.setdefault(int(lag), {})[name] = value
    return OffPolicy(
        figures.get("effective_sample_size"),
        figures.get("mismatch_kl"),
        figures.get("mismatch_k3"),
        figures.get("mismatch_chi2"),
        by_lag,
    )


def _mean(by_lag: "Sequence[LagBucket]", name: str) -> float | None:
    """Return the mean over the tokens of all buckets, which is exact for both figures."""
    tokens = sum(bucket.mismatch.tokens for bucket in by_lag)
    if not tokens:
        return None
    values = (bucket.mismatch.tokens * getattr(bucket.mismatch, name) for bucket in by_lag)
    mean = float(sum(values)) / tokens
    return mean if math.isfinite(mean) else None
