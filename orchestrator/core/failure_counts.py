"""Counts of failed episodes by cause, reason and outcome.

:class:`GroupTracker` increments the counts; :class:`RunStatistics`, reports and metrics show them.
Causes are those of ``policies/failures.py``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from msgspec import Struct

from tidegate.policies.failures import FailureCause


class FailureOutcome(StrEnum):
    """Outcome of a failed episode's rollout."""

    RETRIED = "retried"
    """The rollout's episode was begun again."""
    REWARDED = "rewarded"
    """The rollout got the failure policy's reward, and may be trained on."""
    DISCARDED = "discarded"
    """The rollout will never be trained on."""


class FailureKey(Struct, frozen=True, order=True, array_like=True, gc=False):
    """Failures that are counted together."""

    cause: FailureCause
    reason: str
    outcome: FailureOutcome


@dataclass(frozen=True, slots=True)
class FailureStatistics:
    """Failed episodes of one cause and reason. A retried episode may fail again, and is counted
    each time."""

    cause: FailureCause
    reason: str
    retried: int = 0
    rewarded: int = 0
    discarded: int = 0


def failure_statistics(counts: Mapping[FailureKey, int]) -> tuple[FailureStatistics, ...]:
    """Return the counts by cause and reason, sorted."""
    pairs = sorted({(key.cause, key.reason) for key in counts})
    return tuple(
        FailureStatistics(
            cause,
            reason,
            **{o.value: counts.get(FailureKey(cause, reason, o), 0) for o in FailureOutcome},
        )
        for cause, reason in pairs
    )
