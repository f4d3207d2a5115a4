import pytest

from tidegate.errors import ConfigError
from tidegate.policies.filters import DynamicSampling, GroupFilter, PromptHistory


def test_groups_of_equal_rewards_are_rejected_once_all_have_ended() -> None:
    chosen = DynamicSampling()
    assert chosen.reject([1.0, 1.0], running=1) is None
    assert chosen.reject([1.0, 1.0, 1.0], running=0) == "zero_variance"
    assert chosen.reject([1.0, 0.0, 1.0], running=0) is None
    assert chosen.reject([], running=2) is None


def test_a_group_may_be_rejected_before_its_stragglers_have_ended() -> None:
    chosen = DynamicSampling(decide_after=3)
    assert chosen.reject([0.0, 0.0], running=6) is None
    assert chosen.reject([0.0, 0.0, 0.0], running=5) == "zero_variance"
    assert chosen.reject([0.0, 0.0, 1.0], running=5) is None


def test_prompts_are_passed_over_once_they_are_solved() -> None:
    chosen = DynamicSampling(solved_at=0.9, rollouts_min=4)
    history = PromptHistory()
    assert not chosen.skip(history)
    history = history.after([1.0, 1.0])
    assert not chosen.skip(history)  # fewer than rollouts_min
    history = history.after([1.0, 1.0])
    assert chosen.skip(history)
    assert not chosen.skip(history.after([0.0]))
    assert not DynamicSampling().skip(history)


def test_one_reward_can_decide_nothing() -> None:
    with pytest.raises(ConfigError, match="decide_after must be >= 2, got 1"):
        DynamicSampling(decide_after=1)


def test_a_filter_that_overrides_nothing_keeps_everything() -> None:
    assert GroupFilter().reject([0.0, 0.0], running=0) is None
    assert not GroupFilter().skip(PromptHistory(100, 100.0))
