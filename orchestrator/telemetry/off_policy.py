"""What does a trainer tell of its last batch that only its loss knows? How far off-policy it was.

Knows no loss, and nobody who shows it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tidegate.policies.diagnostics import LagBucket

BY_LAG = {"kl": "k1", "k3": "k3", "chi2": "chi2_token", "ess": "ess", "ppl_ratio": "ppl_ratio"}
"""What is told by lag -> what :class:`~tidegate.policies.diagnostics.Mismatch` calls it."""


@dataclass(frozen=True, slots=True)
class OffPolicy:
    """How far off-policy the trainer found its last batch; None where it didn't say."""

    effective_sample_size: float | None = None
    mismatch_kl: float | None = None
    k3: float | None = None
    """Of all tokens, as ``chi2``; known if it told them by lag."""
    chi2: float | None = None
    by_lag: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """By the smallest lag of each bucket: what :data:`BY_LAG` names, where it is finite."""

    def figures(self) -> dict[str, float]:
        """By the names that batches' figures have."""
        said = {
            "effective_sample_size": self.effective_sample_size,
            "mismatch_kl": self.mismatch_kl,
            "mismatch_k3": self.k3,
            "mismatch_chi2": self.chi2,
        }
        told = {name: value for name, value in said.items() if value is not None}
        for lag, values in self.by_lag.items():
            told |= {f"mismatch_{name}_lag_{lag}": value for name, value in values.items()}
        return told


def off_policy(
    ess: float | None, kl: float | None, by_lag: "Sequence[LagBucket]" = ()
) -> OffPolicy:
    """From what ``observe`` was given."""
    told = {
        bucket.lag_min: {
            name: value
            for name, field_name in BY_LAG.items()
            if math.isfinite(value := float(getattr(bucket.mismatch, field_name)))
        }
        for bucket in by_lag
    }
    return OffPolicy(ess, kl, _mean(by_lag, "k3"), _mean(by_lag, "chi2_token"), told)


def off_policy_of(figures: Mapping[str, float]) -> OffPolicy:
    """Back from a batch's figures."""
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
    """Over the tokens of all buckets: of both it is what all of them together would give."""
    tokens = sum(bucket.mismatch.tokens for bucket in by_lag)
    if not tokens:
        return None
    values = (bucket.mismatch.tokens * getattr(bucket.mismatch, name) for bucket in by_lag)
    mean = float(sum(values)) / tokens
    return mean if math.isfinite(mean) else None
