"""How much better was a rollout than it had to be? Advantages, by rollout and by token.

All but GAE give one number per rollout, for the trainer to spread over its tokens
(``advantages[:, None]`` for padded rows, ``advantages[row_ids]`` for packed tokens).

Shapes: R rollouts, over any number of groups of any size; tokens as in
:mod:`tidegate.policies.aggregation`.
"""

from collections.abc import Sequence
from math import sqrt

import torch
from torch import Tensor

from tidegate.policies.aggregation import Sequences, segment_sum


def group_relative_advantages(
    rewards: Tensor, group_ids: Tensor, *, scale_by_std: bool = True, epsilon: float = 1e-4
) -> Tensor:
    """``(r - mean(r)) / (std(r) + epsilon)`` within each group: GRPO. [R], [R] -> [R]

    A group needs no fixed size, for rollouts can be discarded; a rollout that is alone in its
    group has nothing to be compared with and gets 0. The deviation is the unbiased one (divided
    by n - 1). ``scale_by_std=False`` leaves it out, so that groups which are nearly always solved,
    or nearly never, don't weigh more than others: Dr. GRPO (arXiv 2503.20783).

    Source: GRPO, arXiv 2402.03300, section 4.1.

    Raises:
        ValueError: the two differ in shape, or a reward is not a finite number.
    """
    groups = _Groups(rewards, group_ids)
    deviation = groups.deviation(rewards)
    if not scale_by_std:
        return deviation
    variance = groups.sum(deviation.square()) / (groups.sizes - 1).clamp(1)
    return deviation / (variance.sqrt()[groups.of_rollout] + epsilon)


def relative_to_group(rewards: Sequence[float], *, epsilon: float = 1e-4) -> list[float]:
    """:func:`group_relative_advantages` of one group's rewards, which are finite.

    A group is few numbers: torch looks at them for half a millisecond a batch, on a CPU.
    """
    if min(rewards, default=0.0) == max(rewards, default=0.0):
        return [0.0] * len(rewards)  # exactly, as there
    mean = sum(rewards) / len(rewards)
    deviations = [reward - mean for reward in rewards]
    variance = sum([deviation * deviation for deviation in deviations]) / (len(rewards) - 1)
    scale = sqrt(variance) + epsilon
    return [deviation / scale for deviation in deviations]


def leave_one_out_advantages(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """``r_i - mean of the group's other rewards``: RLOO. [R], [R] -> [R]

    An unbiased baseline, for it doesn't contain the reward it is subtracted from. It equals
    ``n / (n - 1)`` times the deviation from the group's mean; alone in its group, a rollout gets 0.

    Source: RLOO, arXiv 2402.14740.

    Raises:
        ValueError: as for :func:`group_relative_advantages`.
    """
    groups = _Groups(rewards, group_ids)
    sizes = groups.sizes[groups.of_rollout]
    return groups.deviation(rewards) * sizes / (sizes - 1).clamp(1)


def batch_normalised_advantages(
    rewards: Tensor, group_ids: Tensor | None = None, *, epsilon: float = 1e-4
) -> Tensor:
    """``(r - mean(r)) / (std(r) + epsilon)`` over the whole batch: REINFORCE++. [R] -> [R]

    With ``group_ids`` it is the paper's variant with a baseline: first the group's mean is
    subtracted, then the result is scaled by its deviation over the batch (its mean is 0 already).
    Either way an easy group is not blown up to the size of others, as GRPO does. The deviation is
    the unbiased one; statistics are over rollouts, long or short.

    Source: REINFORCE++, arXiv 2501.03262.

    Raises:
        ValueError: as for :func:`group_relative_advantages`.
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
    """``A_t = d_t + discount trace_decay A_{t+1}``, ``d_t = r_t + discount V_{t+1} - V_t``: GAE.

    Time counts tokens with a true ``mask``: t + 1 is the next one of the sequence, over whatever an
    environment said in between. A sequence is an episode: nothing follows its last token, and
    ``V`` after it is 0. What the critic learns is ``A + V``. Not differentiable, on purpose.

    Args:
        rewards: one per token, [R, T] or [N]. From one per rollout,
            ``Sequences(mask, row_ids).at_last_token(rewards)`` makes them.
        values: the critic's V for the state each token was sampled in, the same shape.
        mask: the sampled tokens.
        row_ids: the sequence of each packed token.
        discount: gamma in [0, 1].
        trace_decay: lambda in [0, 1]; 1 is return minus value, 0 the one-token error alone.

    Returns:
        That shape; 0 where there is no token.

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
    dense = values.new_zeros(2, sequences.count, longest + 1)
    dense[0, row, time], dense[1, row, time] = rewards[sequences.mask], values[sequences.mask]
    advantages = dense[0] + discount * _shifted(dense[1], 1) - dense[1]  # [R, longest + 1]
    span, decay = 1, discount * trace_decay
    while span < advantages.shape[1]:  # every entry now holds the sum's first `span` terms
        advantages = advantages + decay**span * _shifted(advantages, span)
        span *= 2
    return torch.zeros_like(values).masked_scatter(sequences.mask, advantages[row, time])


def _shifted(values: Tensor, by: int) -> Tensor:
    """Entry t becomes entry t + ``by``; zeros follow the last. [R, L] -> [R, L]"""
    return torch.nn.functional.pad(values[:, by:], (0, by))


class _Groups:
    """The groups of a batch, numbered from 0 in the order of their ids."""

    __slots__ = ("of_rollout", "sizes")

    def __init__(self, rewards: Tensor, group_ids: Tensor) -> None:
        _refuse_rewards(rewards, group_ids)
        self.of_rollout = torch.unique(group_ids, return_inverse=True)[1]
        """[R]"""
        self.sizes = torch.bincount(self.of_rollout)
        """[groups]"""

    def sum(self, values: Tensor) -> Tensor:
        """[R] -> [groups]"""
        return segment_sum(values, self.of_rollout, len(self.sizes))

    def deviation(self, rewards: Tensor) -> Tensor:
        """From the group's mean, and exactly 0 where all of the group have the same. [R] -> [R]

        The mean of equal numbers can be an ulp off them; epsilon would not hide that from a test
        for exact zeros, which is how trainers find groups that carry no gradient.
        """
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
