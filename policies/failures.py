"""Failure policy: whether a failed episode is begun again, its rollout rewarded, or discarded.

The orchestrator's core asks a :class:`FailurePolicy` at each failed episode, with the failure's
cause: the policy, infrastructure, or the episode's own code. Policies are immutable: the number of
retries so far is passed to them.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

from tidegate.errors import ConfigError, PolicyBroken


class FailureCause(StrEnum):
    """Cause of an episode's end without a reward: the policy, the infrastructure or the code."""

    POLICY = "policy"
    """The model: its context is full, its turn or episode took too long, it gave up."""
    INFRASTRUCTURE = "infrastructure"
    """Anything outside the model: a tool server, a sandbox, a grader, the engines."""
    CODE = "code"
    """The episode function or its settings, which fail in the same way however often they run."""


@dataclass(frozen=True, slots=True)
class EpisodeFailure:
    """One failed episode."""

    cause: FailureCause
    reason: str
    """Kind of failure, such as ``episode_timeout``; the ledger's account if it is discarded."""
    sampled_tokens: int
    """Number of tokens that the model sampled in the episode, over all branches."""
    retries: int
    """Number of times that the episode was begun again before."""


@dataclass(frozen=True, kw_only=True)
class FailurePolicy:
    """Decides whether a failed episode is retried, rewarded or discarded. Override its methods.

    * By infrastructure: the episode begins again after a delay that doubles each time, and replays
      the turns that it has. After ``retries_max`` retries its rollout is discarded.
    * By the policy: the rollout gets ``reward`` and is trained on. Discarding these rollouts, as
      with None, hides from the model that it failed: it can learn to time out where its answer
      would be wrong.
    * By the episode's code: the rollout is discarded.
    """

    reward: float | None = None
    """Reward of rollouts that failed by the policy's doing, such as that of a wrong answer; None
    discards them."""
    retries_max: int = 2
    """Number of times that an episode is begun again after failures of infrastructure."""
    retry_delay_s: float = 1.0
    """Seconds before the first retry; each further delay is twice as long."""

    def __post_init__(self) -> None:
        if self.reward is not None and not math.isfinite(self.reward):
            raise ConfigError(f"reward must be a finite number or None, got {self.reward}")
        if self.retries_max < 0:
            raise ConfigError(f"retries_max must be >= 0, got {self.retries_max}")
        if not 0 <= self.retry_delay_s < math.inf:
            raise ConfigError(f"retry_delay_s must be >= 0 seconds, got {self.retry_delay_s}")

    def reward_of(self, failure: EpisodeFailure) -> float | None:
        """Return the reward of a rollout that failed by the policy's doing; None discards it.

        Only called for rollouts that have sampled tokens.
        """
        return self.reward

    def retry_after_s(self, failure: EpisodeFailure) -> float | None:
        """Return the seconds until an episode that failed by infrastructure begins again; None
        discards its rollout."""
        if failure.retries >= self.retries_max:
            return None
        return self.retry_delay_s * 2.0**failure.retries


def decide_reward(policy: FailurePolicy, failure: EpisodeFailure) -> float | None:
    """Return the reward of a failed rollout that is to be trained on; None if it is not.

    Raises:
        PolicyBroken: the policy's ``reward_of`` returned something else.
    """
    if failure.cause is not FailureCause.POLICY or not failure.sampled_tokens:
        return None
    reward = policy.reward_of(failure)
    if reward is None:
        return None
    if not isinstance(reward, int | float) or not math.isfinite(reward):
        raise PolicyBroken(
            f"{type(policy).__name__}.reward_of() returned {reward!r} for {failure.reason}; return "
            f"a finite number, or None to discard the rollout"
        )
    return float(reward)


def decide_retry(policy: FailurePolicy, failure: EpisodeFailure) -> float | None:
    """Return the seconds until a failed episode begins again; None if it does not.

    Raises:
        PolicyBroken: the policy's ``retry_after_s`` returned something else.
    """
    if failure.cause is not FailureCause.INFRASTRUCTURE:
        return None
    delay_s = policy.retry_after_s(failure)
    if delay_s is None:
        return None
    if not isinstance(delay_s, int | float) or not 0 <= delay_s < math.inf:
        raise PolicyBroken(
            f"{type(policy).__name__}.retry_after_s() returned {delay_s!r} for {failure.reason}; "
            f"return seconds >= 0, or None to discard the rollout"
        )
    return float(delay_s)
