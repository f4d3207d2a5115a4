"""How much better was a rollout than its group? The advantages of GRPO.

Knows nothing of tokens: one number per rollout, for the trainer to spread over its tokens.

Shapes: R rollouts, over any number of groups of any size.
"""

import torch
from torch import Tensor


def group_relative_advantages(
    rewards: Tensor, group_ids: Tensor, *, scale_by_std: bool = True, epsilon: float = 1e-4
) -> Tensor:
    """``(r - mean(r)) / (std(r) + epsilon)`` within each group. [R], [R] -> [R]

    A group needs no fixed size, for rollouts can be discarded; a rollout that is alone in its
    group has nothing to be compared with and gets 0. The deviation is the unbiased one (divided
    by n - 1). ``scale_by_std=False`` leaves it out, so that groups which are nearly always solved,
    or nearly never, don't weigh more than others (arXiv 2503.20783).

    Source: GRPO, arXiv 2402.03300, section 4.1.

    Raises:
        ValueError: the two differ in shape, or a reward is not a finite number.
    """
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
    group_of_rollout = torch.unique(group_ids, return_inverse=True)[1]  # [R]
    rollouts_in_group = torch.bincount(group_of_rollout)  # [groups]
    deviation = (
        rewards - (_group_sum(rewards, group_of_rollout) / rollouts_in_group)[group_of_rollout]
    )
    # The mean of equal numbers can be an ulp off them; epsilon would not hide that from a test
    # for exact zeros, which is how trainers find groups that carry no gradient.
    deviation = torch.where(_is_uniform(rewards, group_of_rollout), 0.0, deviation)
    if not scale_by_std:
        return deviation
    variance = _group_sum(deviation.square(), group_of_rollout) / (rollouts_in_group - 1).clamp(1)
    return deviation / (variance.sqrt()[group_of_rollout] + epsilon)


def _group_sum(values: Tensor, group_of_rollout: Tensor) -> Tensor:
    """[R] -> [groups]"""
    groups = int(group_of_rollout.max()) + 1 if len(group_of_rollout) else 0
    return values.new_zeros(groups).index_add(0, group_of_rollout, values)


def _is_uniform(rewards: Tensor, group_of_rollout: Tensor) -> Tensor:
    """Whether all rewards of the rollout's group are the same. [R] -> [R]"""
    groups = int(group_of_rollout.max()) + 1 if len(group_of_rollout) else 0
    lowest, highest = (
        rewards.new_zeros(groups).scatter_reduce(
            0, group_of_rollout, rewards, reduce=reduce, include_self=False
        )
        for reduce in ("amin", "amax")
    )
    return (lowest == highest)[group_of_rollout]
