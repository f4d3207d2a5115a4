"""Does a rollout's advantage say how it compares with its own group, and nothing else?"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tidegate.policies.advantages import group_relative_advantages


def advantages_one_by_one(rewards: list[float], group_ids: list[int]) -> np.ndarray:
    """The formula, slowly: numpy, one rollout after the other."""
    advantages = []
    for reward, group_id in zip(rewards, group_ids, strict=True):
        group = np.array([r for r, g in zip(rewards, group_ids, strict=True) if g == group_id])
        std = group.std(ddof=1) if len(group) > 1 else 0.0
        advantages.append((reward - group.mean()) / (std + 1e-4))
    return np.array(advantages)


@given(
    st.lists(
        st.tuples(st.floats(-10, 10, width=32), st.integers(-3, 1000)), min_size=1, max_size=30
    )
)
def test_it_agrees_with_the_formula_worked_out_one_rollout_at_a_time(
    rollouts: list[tuple[float, int]],
) -> None:
    rewards, group_ids = [r for r, _ in rollouts], [g for _, g in rollouts]

    ours = group_relative_advantages(
        torch.tensor(rewards, dtype=torch.float64), torch.tensor(group_ids)
    )

    np.testing.assert_allclose(ours, advantages_one_by_one(rewards, group_ids), atol=1e-9)


def test_one_right_answer_among_four_gets_all_of_the_praise() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0])

    advantages = group_relative_advantages(rewards, torch.zeros(4), scale_by_std=False)

    assert advantages.tolist() == [0.75, -0.25, -0.25, -0.25]


def test_the_rollouts_of_a_group_need_not_stand_together() -> None:
    rewards = torch.tensor([1.0, 5.0, 0.0, 7.0])
    group_ids = torch.tensor([3, 9, 3, 9])

    advantages = group_relative_advantages(rewards, group_ids, scale_by_std=False)

    assert advantages.tolist() == [0.5, -1.0, -0.5, 1.0]


def test_a_rollout_alone_in_its_group_has_no_advantage() -> None:
    rewards = torch.tensor([1.0, 0.0, 5.0])

    advantages = group_relative_advantages(rewards, torch.tensor([0, 0, 1]))

    assert advantages[2] == 0


def test_a_group_with_one_reward_for_all_has_exactly_none() -> None:
    """0.1 seven times has a mean that is not 0.1; a filter for zeros must still see it."""
    rewards = torch.full((7,), 0.1)

    advantages = group_relative_advantages(rewards, torch.zeros(7))

    assert advantages.tolist() == [0.0] * 7


def test_no_rollouts_have_no_advantages() -> None:
    assert group_relative_advantages(torch.zeros(0), torch.zeros(0)).shape == (0,)


def test_rewards_without_a_group_each_are_refused() -> None:
    with pytest.raises(ValueError, match=r"got \[3\] and \[2\]"):
        group_relative_advantages(torch.zeros(3), torch.zeros(2))


def test_a_reward_that_is_not_a_number_is_refused_and_named() -> None:
    with pytest.raises(ValueError, match="got nan at index 1"):
        group_relative_advantages(torch.tensor([0.0, float("nan")]), torch.zeros(2))
