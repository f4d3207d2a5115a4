"""Tests of the mode comparison: reward over time, and time to a reward."""

from typing import Any, cast

from examples.compare_modes import reward_over_time, seconds_to_reward
from tidegate.observability.reports.comparison import ComparedRun

REWARDS = [0.0, 0.3, 0.3, 0.9, 0.9, 0.9]


def a_run(rewards: list[float]) -> ComparedRun:
    """A run that got a batch every two seconds; only its metrics are read."""
    metrics: list[dict[str, Any]] = [
        {"wall_s": 2.0 * (at + 1), "reward": reward} for at, reward in enumerate(rewards)
    ]
    return ComparedRun("a run", cast("Any", None), metrics)


def test_reward_over_time_is_the_mean_of_the_latest_three_batches_once_there_are_three() -> None:
    points = [(at_s, round(reward, 9)) for at_s, reward in reward_over_time(a_run(REWARDS))]

    assert points == [(6.0, 0.2), (8.0, 0.5), (10.0, 0.7), (12.0, 0.9)]


def test_a_reward_is_reached_when_the_mean_first_is_as_high_and_not_when_one_batch_is() -> None:
    run = a_run(REWARDS)

    assert seconds_to_reward(run, 0.19) == 6.0
    assert seconds_to_reward(run, 0.6) == 10.0
    assert seconds_to_reward(run, 0.95) is None


def test_a_run_of_fewer_batches_is_averaged_over_those_there_are() -> None:
    assert reward_over_time(a_run([0.2, 0.4])) == [(4.0, (0.2 + 0.4) / 2)]
    assert reward_over_time(a_run([])) == []
