"""The core at a failed episode: retry, reward or discard, in the ledger and over a crash."""

import pytest

from tests.orchestrator.core.driver import Driver
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.failure_counts import FailureStatistics, failure_statistics
from tidegate.orchestrator.core.rollout import RolloutState
from tidegate.policies.failures import EpisodeFailure, FailureCause, FailurePolicy
from tidegate.transport.messages import STOP

POLICY, INFRA, CODE = FailureCause.POLICY, FailureCause.INFRASTRUCTURE, FailureCause.CODE


def driver_of_one(policy: FailurePolicy) -> Driver:
    return Driver(max_staleness=0, groups_per_batch=1, group_size=1, failure_policy=policy)


def test_an_episode_that_infrastructure_failed_begins_again_with_its_turns() -> None:
    driver = driver_of_one(FailurePolicy(retries_max=1, retry_delay_s=0.5))
    rollout, handle = driver.begin_turn()
    driver.sample("a", handle, 4, STOP)
    before = rollout.token_ids[:].tolist()
    rollout.extend([7, 8])  # an observation that no turn has read yet
    assert driver.fail_by(rollout, INFRA) == [ev.RetryEpisode(rollout, 0, 0.5)]
    assert rollout.state is RolloutState.RUNNING
    assert (rollout.token_ids.tolist(), rollout.retries) == (before, 1)
    driver.return_reward(rollout)
    driver.do(ev.BatchRequested())
    assert [row.sampled_tokens for row in driver.batches[0].groups[0].kept] == [4]
    assert driver.core.ledger.snapshot().discarded_total == 0


def test_a_running_turn_continues_while_its_episode_begins_again() -> None:
    driver = driver_of_one(FailurePolicy())
    rollout, handle = driver.begin_turn()
    driver.sample("a", handle, 2)
    driver.fail_by(rollout, INFRA)
    driver.sample("a", handle, 1, STOP)
    assert rollout.turns[0].finish_reason == "stop"
    assert (rollout.sampled_tokens, driver.core.ledger.in_flight) == (3, 3)


def test_after_its_last_retry_a_rollout_is_discarded_for_its_reason() -> None:
    driver = driver_of_one(FailurePolicy(retries_max=2, retry_delay_s=1.0))
    rollout, handle = driver.begin_turn()
    driver.sample("a", handle, 4, STOP)
    for _ in range(3):
        driver.fail_by(rollout, INFRA, "tool_failed")
    assert driver.retried == [(rollout.rollout_id, 1.0), (rollout.rollout_id, 2.0)]
    assert dict(driver.core.ledger.discarded) == {"tool_failed": 4}
    assert failure_statistics(driver.core.groups.failures) == (
        FailureStatistics(INFRA, "tool_failed", retried=2, discarded=1),
    )


def test_a_rollout_that_the_policy_failed_is_trained_with_the_reward_of_the_rule() -> None:
    driver = driver_of_one(FailurePolicy(reward=-1.0))
    rollout, handle = driver.begin_turn()
    driver.sample("a", handle, 3)  # its time is up in the middle of the turn
    commands = driver.fail_by(rollout, POLICY, "episode_timeout")
    assert commands == [ev.Cancel("a", handle)]
    driver.do(ev.BatchRequested())
    [row] = driver.batches[0].groups[0].kept
    assert (row.reward, row.turns[0].finish_reason, row.sampled_tokens) == (-1.0, "cancelled", 3)
    assert driver.core.ledger.trained == 3
    assert failure_statistics(driver.core.groups.failures) == (
        FailureStatistics(POLICY, "episode_timeout", rewarded=1),
    )


class TimeoutsAreWorst(FailurePolicy):
    def reward_of(self, failure: EpisodeFailure) -> float | None:
        return -2.0 if failure.reason == "episode_timeout" else -1.0


def test_a_users_policy_may_read_the_reason() -> None:
    driver = Driver(
        max_staleness=0, groups_per_batch=1, group_size=2, failure_policy=TimeoutsAreWorst()
    )
    driver.join("a")
    driver.fill()
    first, second = driver.running.values()
    for rollout in (first, second):
        driver.ask_turn(rollout)
    for handle in list(driver.engines["a"].turns):
        driver.sample("a", handle, 1, STOP)
    driver.fail_by(first, POLICY, "episode_timeout")
    driver.fail_by(second, POLICY, "gave_up")
    driver.do(ev.BatchRequested())
    assert [row.reward for row in driver.batches[0].groups[0].kept] == [-2.0, -1.0]


@pytest.mark.parametrize("policy", [FailurePolicy(), FailurePolicy(reward=0.0)])
def test_the_codes_failures_and_those_without_a_token_are_discarded(policy: FailurePolicy) -> None:
    for cause in (CODE, POLICY):
        driver = driver_of_one(policy)
        rollout, _ = driver.begin_turn()
        driver.fail_by(rollout, cause)
        assert (rollout.state, rollout.discard_reason) == (RolloutState.DISCARDED, "episode_error")
        assert driver.retried == []


def test_an_episode_that_cannot_be_ended_is_not_begun_again_beside_itself() -> None:
    driver = driver_of_one(FailurePolicy())
    rollout, _ = driver.begin_turn()
    driver.do(ev.EpisodeFailed(rollout.rollout_id, "no_engine", INFRA, can_be_retried=False))
    assert rollout.state is RolloutState.DISCARDED


@pytest.mark.parametrize("snapshot", [False, True])
def test_retries_and_counts_survive_a_crash(snapshot: bool) -> None:
    driver = driver_of_one(FailurePolicy(retries_max=2))
    rollout, handle = driver.begin_turn()
    driver.sample("a", handle, 4, STOP)
    driver.fail_by(rollout, INFRA)
    driver.die_and_resume(0, snapshot=snapshot)
    [again] = driver.running.values()
    assert (again.retries, again.sampled_tokens) == (1, 4)
    driver.fail_by(again, INFRA)
    driver.fail_by(again, INFRA)
    [counted] = failure_statistics(driver.core.groups.failures)
    assert (counted.retried, counted.discarded) == (2, 1)


def test_branches_wait_for_the_episode_that_forks_them_again() -> None:
    driver = driver_of_one(FailurePolicy())
    rollout, handle = driver.begin_turn()
    driver.sample("a", handle, 2, STOP)
    driver.do(ev.RolloutForked(rollout.rollout_id, "asked"))
    [branch] = rollout.branches
    driver.ask_turn(branch)
    [handle] = driver.engines["a"].turns
    driver.sample("a", handle, 3, STOP)
    branch.extend([1, 2])
    driver.fail_by(rollout, INFRA)
    assert rollout.branches == (branch,)
    assert (branch.sampled_tokens, len(branch.token_ids)) == (3, branch.sampled_end)


def test_a_failed_evaluation_is_retried_and_rewarded_by_the_same_rule_but_not_counted() -> None:
    driver = driver_of_one(FailurePolicy(reward=-1.0))
    driver.join("a")
    driver.do(ev.EvaluationRequested("task", 0))
    [rollout] = driver.running.values()
    driver.ask_turn(rollout)
    [handle] = driver.engines["a"].turns
    driver.fail_by(rollout, INFRA)
    driver.sample("a", handle, 2, STOP)
    commands = driver.fail_by(rollout, POLICY, "gave_up")
    assert ev.EndEvaluation(rollout) in commands
    assert rollout.reward == -1.0
    assert driver.core.groups.failures == {}
