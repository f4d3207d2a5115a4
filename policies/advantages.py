"""Advantage estimators, per rollout and per token: GRPO, Dr. GRPO, RLOO, REINFORCE++ and GAE.

A run's batches use GRPO's; trainers call the others on a batch's rewards. All but GAE return one
number per rollout, which the trainer spreads over the rollout's tokens (``advantages[:, None]`` for
padded rows, ``advantages[row_ids]`` for packed tokens).

Shapes: R rollouts, over any number of groups of any size; tokens as in
:mod:`tidegate.policies.aggregation`.
"""

from collections.abc import Sequence
from math import sqrt

import torch
from torch import Tensor

from tidegate.policies.aggregation import Sequences, at_least_float32, segment_sum


def group_relative_advantages(
    rewards: Tensor, group_ids: Tensor, *, scale_by_std: bool = True, epsilon: float = 1e-4
) -> Tensor:
    """Return GRPO's ``(r - mean(r)) / (std(r) + epsilon)`` within each group. [R], [R] -> [R]

    Groups may differ in size, because rollouts can be discarded. A rollout that is alone in its
    group gets 0. The standard deviation is the unbiased one (divided by n - 1).
    ``scale_by_std=False`` omits the division, so groups that are nearly always or nearly never
    solved do not weigh more than others: Dr. GRPO (arXiv 2503.20783).

    Source: GRPO, arXiv 2402.03300, section 4.1.

    Raises:
        ValueError: the shapes differ, or a reward is not finite.
    """
    groups = _Groups(rewards, group_ids)
    deviation = groups.deviation(rewards)
    if not scale_by_std:
        return deviation
    variance = groups.sum(deviation.square()) / (groups.sizes - 1).clamp(1)
    return deviation / (variance.sqrt()[groups.of_rollout] + epsilon)


def relative_to_group(
    rewards: Sequence[float], *, epsilon: float = 1e-4, scale_by_std: bool = True
) -> list[float]:
    """Return :func:`group_relative_advantages` of one group's finite rewards, in plain Python.

    A group has few rewards, and torch costs half a millisecond a batch for them on a CPU.
    """
    if min(rewards, default=0.0) == max(rewards, default=0.0):
        return [0.0] * len(rewards)  # exactly 0, as in group_relative_advantages
    mean = sum(rewards) / len(rewards)
    scale = _deviation(rewards) + epsilon if scale_by_std else 1.0
    return [(reward - mean) / scale for reward in rewards]


def relative_to_trained_first(
    rewards: Sequence[float],
    first: Sequence[float],
    *,
    epsilon: float = 1e-4,
    scale_by_std: bool = True,
) -> list[float]:
    """Return the advantages of a split group's later rollouts: ``(r - mean(first)) / std``.

    ``first`` are the rewards of the rollouts that were trained at the group's deadline. The
    standard deviation is that of ``first`` and the rollout's own reward. Other later rewards are in
    no baseline, because the rollouts that ended in time could not be compared with them: then the
    expected baseline would depend on a rollout's length, which biases the gradient.
    :func:`group_relative_advantages` of ``first`` and these together, unscaled and times n / (n -
    1) for the first, estimate the gradient without bias: a rollout's baseline is the mean reward of
    its *siblings* that ended by the deadline, which its own tokens do not affect.
    """
    mean = sum(first) / len(first)
    advantages = []
    for reward in rewards:
        compared = [*first, reward]
        if min(compared) == max(compared):
            advantages.append(0.0)
            continue
        scale = _deviation(compared) + epsilon if scale_by_std else 1.0
        advantages.append((reward - mean) / scale)
    return advantages


def _deviation(rewards: Sequence[float]) -> float:
    """Return the standard deviation, divided by n - 1."""
    mean = sum(rewards) / len(rewards)
    return sqrt(sum([(reward - mean) ** 2 for reward in rewards]) / (len(rewards) - 1))


def leave_one_out_advantages(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Return RLOO's ``r_i - mean of the group's other rewards``. [R], [R] -> [R]

    The baseline is unbiased because it excludes the reward it is subtracted from. The result equals
    ``n / (n - 1)`` times the deviation from the group's mean; a rollout alone in its group gets 0.

    Source: RLOO, arXiv 2402.14740.

    Raises:
        ValueError: the shapes differ, or a reward is not finite.
    """
    groups = _Groups(rewards, group_ids)
    sizes = groups.sizes[groups.of_rollout]
    return groups.deviation(rewards) * sizes / (sizes - 1).clamp(1)


def batch_normalised_advantages(
    rewards: Tensor, group_ids: Tensor | None = None, *, epsilon: float = 1e-4
) -> Tensor:
    """Return REINFORCE++'s ``(r - mean(r)) / (std(r) + epsilon)`` over the whole batch. [R] -> [R]

    With ``group_ids`` it is the paper's variant with a baseline: the group's mean is subtracted
    first, then the result is divided by its standard deviation over the batch (its mean is 0
    already). Unlike GRPO, neither variant scales up the small advantages of a group whose
    rewards hardly differ. The standard deviation is the unbiased one; every rollout counts once,
    whatever its length.

    Source: REINFORCE++, arXiv 2501.03262.

    Raises:
        ValueError: the shapes differ, or a reward is not finite.
    """
    one_group = torch.zeros(len(rewards), dtype=torch.int64, device=rewards.device)
    groups = _Groups(rewards, one_group if group_ids is None else group_ids)
    deviation = groups.deviation(rewards)
    variance = deviation.square().sum() / max(len(rewards) - 1, 1)
    return deviation / (variance.sqrt() + epsilon)


@torch.no_grad()
def generalised_advantages(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    row_ids: Tensor | None = None,
    discount: float = 1.0,
    trace_decay: float = 0.95,
) -> Tensor:
    """Return generalised advantage estimates (GAE), per token.

    ``A_t = d_t + discount trace_decay A_{t+1}`` with ``d_t = r_t + discount V_{t+1} - V_t``.

    Time counts tokens with a true ``mask``: t + 1 is the sequence's next sampled token, across any
    environment output in between. A sequence is one episode, so ``V`` after its last token is 0.
    The critic's regression target is ``A + V``. The result carries no gradient.

    Args:
        rewards: one per token, [R, T] or [N]. ``Sequences(mask, row_ids).at_last_token(rewards)``
            converts one reward per rollout.
        values: the critic's V of the state in which each token was sampled; shape of ``rewards``.
        mask: true for sampled tokens; shape of ``rewards``.
        row_ids: the sequence number of each packed token.
        discount: gamma in [0, 1].
        trace_decay: lambda in [0, 1]; 1 is return minus value, 0 the one-token TD error alone.

    Returns:
        Advantages in the shape of ``rewards``; 0 where ``mask`` is false.

    Source: GAE, arXiv 1506.02438, section 3.
    """
    for name, setting in (("discount", discount), ("trace_decay", trace_decay)):
        if not 0 <= setting <= 1:
            raise ValueError(f"{name} must be in [0, 1], got {setting}")
    if not rewards.shape == values.shape == mask.shape:
        raise ValueError(
            f"rewards, values and mask hold one entry per token and must have one shape, got "
            f"{list(rewards.shape)}, {list(values.shape)} and {list(mask.shape)}"
        )
    sequences = Sequences(mask, row_ids)
    row, time = sequences.row_ids[sequences.mask], sequences.positions()[sequences.mask]
    longest = int(sequences.tokens.max()) if sequences.count else 0
    rewards, values = at_least_float32(rewards), at_least_float32(values)
    dense = values.new_zeros(2, sequences.count, longest + 1)
    dense[0, row, time], dense[1, row, time] = rewards[sequences.mask], values[sequences.mask]
    advantages = dense[0] + discount * _shifted(dense[1], 1) - dense[1]  # [R, longest + 1]
    span, decay = 1, discount * trace_decay
    while span < advantages.shape[1]:  # every entry now holds its sum's first `span` terms
        advantages = advantages + decay**span * _shifted(advantages, span)
        span *= 2
    return torch.zeros_like(values).masked_scatter(sequences.mask, advantages[row, time])


def _shifted(values: Tensor, by: int) -> Tensor:
    """Return ``values`` moved left by ``by`` columns, zero-filled. [R, L] -> [R, L]"""
    return torch.nn.functional.pad(values[:, by:], (0, by))


class _Groups:
    """The groups of a batch, numbered from 0 in ascending order of their ids."""

    __slots__ = ("of_rollout", "sizes")

    def __init__(self, rewards: Tensor, group_ids: Tensor) -> None:
        _refuse_rewards(rewards, group_ids)
        self.of_rollout = torch.unique(group_ids, return_inverse=True)[1]
        """Group number of each rollout. [R] int64"""
        self.sizes = torch.bincount(self.of_rollout)
        """Number of rollouts in each group. [groups] int64"""

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of ``values`` over each group. [R] -> [groups]"""
        return segment_sum(values, self.of_rollout, len(self.sizes))

    def deviation(self, rewards: Tensor) -> Tensor:
        """Return each reward minus its group's mean, exactly 0 if all are equal. [R] -> [R]

        The mean of equal numbers can differ from them by an ulp. Trainers find groups without a
        gradient by testing for exact zeros.
        """
        rewards = at_least_float32(rewards)
        deviation = rewards - (self.sum(rewards) / self.sizes)[self.of_rollout]
        lowest, highest = (
            rewards.new_zeros(len(self.sizes)).scatter_reduce(
                0, self.of_rollout, rewards, reduce=reduce, include_self=False
            )
            for reduce in ("amin", "amax")
        )
        return torch.where((lowest == highest)[self.of_rollout], 0.0, deviation)


def _refuse_rewards(rewards: Tensor, group_ids: Tensor) -> None:
    if rewards.ndim != 1 or rewards.shape != group_ids.shape:
        raise ValueError(
            f"rewards and group_ids hold one entry per rollout and must both be [R], "
            f"got {list(rewards.shape)} and {list(group_ids.shape)}"
        )
    if not torch.isfinite(rewards).all():
        index = int((~torch.isfinite(rewards)).nonzero()[0])
        raise ValueError(
            f"rewards must be finite, got {rewards[index].item()} at index {index}; "
            f"give such rollouts a number, or discard them"
        )
