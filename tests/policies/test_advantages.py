"""Tests of the advantage estimators, per rollout and per token."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.policies.ragged import Array, Ragged, assert_laid_out, ragged
from tidegate.policies.advantages import (
    batch_normalised_advantages,
    generalised_advantages,
    group_relative_advantages,
    leave_one_out_advantages,
    relative_to_group,
    relative_to_trained_first,
)

rollouts_in_groups = st.lists(
    st.tuples(st.floats(-10, 10, width=32), st.integers(-3, 4)), min_size=1, max_size=30
)


def advantages_one_by_one(rewards: list[float], group_ids: list[int]) -> np.ndarray:
    """Reference in numpy, one rollout after the other."""
    advantages = []
    for reward, group_id in zip(rewards, group_ids, strict=True):
        group = np.array([r for r, g in zip(rewards, group_ids, strict=True) if g == group_id])
        std = group.std(ddof=1) if len(group) > 1 else 0.0
        advantages.append((reward - group.mean()) / (std + 1e-4))
    return np.array(advantages)


@settings(deadline=None)
@given(rollouts_in_groups)
def test_it_agrees_with_the_formula_worked_out_one_rollout_at_a_time(
    rollouts: list[tuple[float, int]],
) -> None:
    rewards, group_ids = [r for r, _ in rollouts], [g for _, g in rollouts]

    ours = group_relative_advantages(
        torch.tensor(rewards, dtype=torch.float64), torch.tensor(group_ids)
    )

    np.testing.assert_allclose(ours, advantages_one_by_one(rewards, group_ids), atol=1e-9)


@given(st.lists(st.floats(-1e3, 1e3), max_size=9))
def test_a_group_as_a_list_has_the_same_advantages(rewards: list[float]) -> None:
    in_torch = group_relative_advantages(
        torch.tensor(rewards, dtype=torch.float64), torch.zeros(len(rewards))
    )

    np.testing.assert_allclose(relative_to_group(rewards), in_torch, atol=1e-6)
    assert relative_to_group([0.1] * 7) == [0.0] * 7


def test_the_rollouts_of_a_group_need_not_stand_together() -> None:
    rewards = torch.tensor([1.0, 5.0, 0.0, 7.0])
    group_ids = torch.tensor([3, 9, 3, 9])

    advantages = group_relative_advantages(rewards, group_ids, scale_by_std=False)

    assert advantages.tolist() == [0.5, -1.0, -0.5, 1.0]


def test_a_group_with_one_reward_for_all_has_exactly_none() -> None:
    """The mean of 0.1 seven times is not 0.1; the result must still be exactly zero."""
    rewards = torch.full((7,), 0.1)

    advantages = group_relative_advantages(rewards, torch.zeros(7))

    assert advantages.tolist() == [0.0] * 7


def test_no_rollouts_have_no_advantages() -> None:
    nothing = torch.zeros(0)

    assert group_relative_advantages(nothing, nothing).shape == (0,)
    assert leave_one_out_advantages(nothing, nothing).shape == (0,)
    assert batch_normalised_advantages(nothing).shape == (0,)
    assert batch_normalised_advantages(nothing, nothing).shape == (0,)


@settings(deadline=None)
@given(rollouts_in_groups)
def test_leave_one_out_agrees_with_leaving_out_each_in_turn(
    rollouts: list[tuple[float, int]],
) -> None:
    expected = []
    for i, (reward, group) in enumerate(rollouts):
        others = [r for j, (r, g) in enumerate(rollouts) if g == group and j != i]
        expected.append(reward - sum(others) / len(others) if others else 0.0)
    rewards = torch.tensor([r for r, _ in rollouts], dtype=torch.float64)

    ours = leave_one_out_advantages(rewards, torch.tensor([g for _, g in rollouts]))

    np.testing.assert_allclose(ours, np.array(expected), atol=1e-12)


@settings(deadline=None)
@given(rollouts_in_groups)
def test_batch_normalised_advantages_agree_with_numpy(rollouts: list[tuple[float, int]]) -> None:
    rewards = np.array([r for r, _ in rollouts])
    groups = np.array([g for _, g in rollouts])
    centred = rewards - np.array([rewards[groups == g].mean() for g in groups])
    std = [x.std(ddof=1) if len(x) > 1 else 0.0 for x in (rewards, centred)]

    plain = batch_normalised_advantages(torch.tensor(rewards))
    with_baseline = batch_normalised_advantages(torch.tensor(rewards), torch.tensor(groups))

    np.testing.assert_allclose(plain, (rewards - rewards.mean()) / (std[0] + 1e-4), atol=1e-9)
    np.testing.assert_allclose(with_baseline, centred / (std[1] + 1e-4), atol=1e-9)


def test_a_uniform_group_stays_exactly_zero_under_batch_normalisation() -> None:
    rewards = torch.tensor([0.1] * 7 + [0.0, 1.0])
    group_ids = torch.tensor([0] * 7 + [1, 1])

    advantages = batch_normalised_advantages(rewards, group_ids)

    assert advantages[:7].tolist() == [0.0] * 7
    assert advantages[8] == -advantages[7] > 0


def test_two_rollouts_are_enough_to_normalise_by() -> None:
    advantages = batch_normalised_advantages(torch.tensor([0.0, 1.0]), epsilon=0.0)

    assert advantages.tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])


def gae_backwards(rewards: Array, values: Array, discount: float, decay: float) -> Array:
    """Reference: the recursion from the last token to the first."""
    advantages, following, next_value = np.zeros(len(values)), 0.0, 0.0
    for t in reversed(range(len(values))):
        error = rewards[t] + discount * next_value - values[t]
        following = error + discount * decay * following
        advantages[t], next_value = following, values[t]
    return advantages


@settings(deadline=None)
@given(ragged, st.sampled_from([0.0, 0.9, 1.0]), st.sampled_from([0.0, 0.95, 1.0]))
def test_gae_agrees_with_the_recursion_over_the_tokens_of_each_row(
    batch: Ragged, discount: float, decay: float
) -> None:
    rewards, values = batch.like(0), batch.like(1)
    expected = [np.zeros(len(m)) for m in batch.masks]
    for row, r, v, m in zip(expected, rewards, values, batch.masks, strict=True):
        row[m] = gae_backwards(r[m], v[m], discount, decay)

    for layout in batch.layouts():
        ours = generalised_advantages(
            layout.lay(rewards),
            layout.lay(values),
            layout.mask,
            row_ids=layout.row_ids,
            discount=discount,
            trace_decay=decay,
        )

        assert_laid_out(ours, expected, layout)


def test_undecayed_gae_of_a_thousand_tokens_is_return_minus_value() -> None:
    torch.manual_seed(0)
    rewards, values = torch.randn(2, 1, 1000, dtype=torch.float64)

    advantages = generalised_advantages(rewards, values, torch.ones(1, 1000), trace_decay=1.0)

    returns = rewards.flip(1).cumsum(1).flip(1)
    torch.testing.assert_close(advantages + values, returns)


@pytest.mark.parametrize("shape", [(0, 0), (2, 0), (0, 3), (2, 3)])
def test_where_there_are_no_tokens_gae_gives_zeros(shape: tuple[int, int]) -> None:
    nothing = torch.full(shape, float("nan"))

    assert generalised_advantages(nothing, nothing, torch.zeros(shape)).tolist() == (
        torch.zeros(shape).tolist()
    )


@pytest.mark.parametrize("name", ["discount", "trace_decay"])
def test_gae_refuses_settings_outside_of_0_to_1_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be in"):
        generalised_advantages(*[torch.zeros(1, 1)] * 3, **{name: 1.1})  # type: ignore[arg-type]


def test_later_rollouts_are_compared_with_those_trained_first_and_with_no_other() -> None:
    first = [1.0, 0.0, 1.0, 0.0]
    assert relative_to_trained_first([1.0, 0.0], first, scale_by_std=False) == [0.5, -0.5]
    alone = [*relative_to_trained_first([1.0], first), *relative_to_trained_first([0.0], first)]
    assert relative_to_trained_first([1.0, 0.0], first) == alone
    assert alone[0] == pytest.approx(0.5 / np.std([*first, 1.0], ddof=1), rel=1e-3)
    assert relative_to_trained_first([1.0, 0.0], [1.0, 1.0])[0] == 0.0


def split_gradient(chance: np.random.Generator) -> tuple[float, float]:
    """Return the mean gradient estimate of split groups, and its standard error.

    A policy writes a long answer with probability 0.5. Long answers end late in 7 of 10 cases and
    are right in half of them; short ones always end in time and are right in 9 of 10 cases.
    """
    size, groups = 8, 20_000
    estimates = []
    for _ in range(groups):
        is_long = chance.random(size) < 0.5
        is_late = is_long & (chance.random(size) < 0.7)
        reward = (chance.random(size) < np.where(is_long, 0.5, 0.9)).astype(float)
        score = is_long - 0.5  # d log p(answer) / d logit
        n = size - int(is_late.sum())
        if n < 2:
            continue
        first, late = reward[~is_late].tolist(), reward[is_late].tolist()
        of_first = np.array(relative_to_group(first, scale_by_std=False)) * n / (n - 1)
        of_late = np.array(relative_to_trained_first(late, first, scale_by_std=False))
        estimates.append((score[~is_late] @ of_first + score[is_late] @ of_late) / size)
    return float(np.mean(estimates)), float(np.std(estimates) / len(estimates) ** 0.5)


def test_a_split_at_the_deadline_leaves_the_gradient_estimate_unbiased() -> None:
    exact = 0.5 * 0.5 * (0.5 - 0.9)  # p (1 - p) (mean reward of long answers - of short ones)
    mean, error = split_gradient(np.random.default_rng(0))
    assert abs(mean - exact) < 4 * error < 0.005


def test_rewards_of_other_shapes_or_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"got \[2\], \[2, 3\] and \[2, 3\]"):
        generalised_advantages(torch.zeros(2), torch.zeros(2, 3), torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"got \[3\] and \[2\]"):
        group_relative_advantages(torch.zeros(3), torch.zeros(2))
    with pytest.raises(ValueError, match="got nan at index 1"):
        group_relative_advantages(torch.tensor([0.0, float("nan")]), torch.zeros(2))
