"""FailurePolicy: which failed episodes are begun again, and which rollouts are rewarded."""

import math
from typing import Any

import pytest

from tidegate.errors import ConfigError, PolicyBroken
from tidegate.policies.failures import (
    EpisodeFailure,
    FailureCause,
    FailurePolicy,
    decide_retry,
    decide_reward,
)

POLICY, INFRA, CODE = FailureCause.POLICY, FailureCause.INFRASTRUCTURE, FailureCause.CODE


def failed(cause: FailureCause, *, tokens: int = 5, retries: int = 0) -> EpisodeFailure:
    return EpisodeFailure(cause, "some_reason", tokens, retries)


def test_only_failures_of_infrastructure_are_retried_each_after_twice_the_delay() -> None:
    policy = FailurePolicy(retries_max=3, retry_delay_s=0.5)
    delays = [decide_retry(policy, failed(INFRA, retries=n)) for n in range(4)]
    assert delays == [0.5, 1.0, 2.0, None]
    assert decide_retry(policy, failed(POLICY)) is decide_retry(policy, failed(CODE)) is None


def test_only_failures_of_the_policy_are_rewarded_and_only_if_it_sampled_a_token() -> None:
    policy = FailurePolicy(reward=-0.5)
    assert decide_reward(policy, failed(POLICY)) == -0.5
    assert decide_reward(policy, failed(POLICY, tokens=0)) is None
    assert decide_reward(policy, failed(INFRA)) is decide_reward(policy, failed(CODE)) is None
    assert decide_reward(FailurePolicy(), failed(POLICY)) is None


class Broken(FailurePolicy):
    def reward_of(self, failure: EpisodeFailure) -> float | None:
        return math.nan

    def retry_after_s(self, failure: EpisodeFailure) -> float | None:
        return -1.0


def test_a_policy_that_decides_nonsense_is_named() -> None:
    with pytest.raises(PolicyBroken, match=r"Broken.reward_of\(\) returned nan for some_reason"):
        decide_reward(Broken(), failed(POLICY))
    with pytest.raises(PolicyBroken, match=r"Broken.retry_after_s\(\) returned -1.0"):
        decide_retry(Broken(), failed(INFRA))


@pytest.mark.parametrize(
    "settings", [{"reward": math.inf}, {"retries_max": -1}, {"retry_delay_s": math.nan}]
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        FailurePolicy(**settings)
