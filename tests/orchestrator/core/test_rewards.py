"""Rewards that a batch can hold; others are refused by name instead of becoming infinite."""

import math

import numpy as np
import pytest

from tidegate.errors import ConfigError
from tidegate.orchestrator.episodes.generated_turn import REWARD_MAX, checked_reward


@pytest.mark.parametrize("reward", [0, True, -1.5, REWARD_MAX, -REWARD_MAX, np.float32(2.5)])
def test_a_number_that_a_float32_holds_is_a_reward(reward: float) -> None:
    assert checked_reward(reward) == reward
    assert np.isfinite(np.float32(reward))


@pytest.mark.parametrize(
    "reward", [math.nan, math.inf, -math.inf, 2 * REWARD_MAX, -1e39, 1e300, None, "1.0"]
)
def test_anything_else_is_refused_with_what_it_is(reward: object) -> None:
    with pytest.raises(ConfigError, match=r"at most 3\.403e\+38 either way") as refused:
        checked_reward(reward)
    assert str(refused.value).endswith(f"got {reward!r}")
