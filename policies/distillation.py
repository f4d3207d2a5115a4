"""Losses of on-policy distillation: the student's own samples, scored by a teacher.

:meth:`~tidegate.Episode.attach_teacher` brings the teacher's log-probs into a batch. A mean of
``logprobs - teacher_logprobs`` is no loss: the tokens are the student's samples, so its gradient is
that of the mean log-prob, which is 0 in expectation. :func:`reverse_kl_advantages` makes
advantages of it; :func:`teacher_kl_losses` compares whole distributions, with less noise.

Letters in shapes: R rows, T tokens, V vocabulary, k likeliest tokens of the teacher.
"""

from typing import Literal

import torch
from torch import Tensor

from tidegate.policies.aggregation import at_least_float32, over_tokens, refuse_shapes

REST_MIN = 1e-7
"""Least probability of all tokens beside the teacher's k, so that its logarithm is finite."""


def reverse_kl_advantages(
    behaviour_logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor, *, discount: float = 0.0
) -> Tensor:
    """Return advantages by token whose policy gradient lowers KL(student || teacher).

    A token's is ``log teacher - log behaviour``. With a ``discount``, those of the row's later
    tokens are added, multiplied with the discount once per position. Add them to advantages of
    rewards, in the share that you want. The objective corrects for staleness, as with any others.

    Source: On-Policy Distillation, Thinking Machines Lab, 2025. ``incorporate_kl_penalty`` of
    tinker-cookbook's ``distillation/train_on_policy.py`` computes the same; that of its
    ``rl/metrics.py`` subtracts the batch's mean difference first.

    Args:
        behaviour_logprobs, teacher_logprobs, mask: [R, T].
        discount: in [0, 1]; 0 looks at each token alone.

    Returns:
        [R, T], without a gradient, 0 where the mask is false.

    Raises:
        ValueError: the shapes disagree, or ``discount`` is out of range.
    """
    refuse_shapes(mask, behaviour_logprobs=behaviour_logprobs, teacher_logprobs=teacher_logprobs)
    if not 0 <= discount <= 1:
        raise ValueError(f"discount must be in [0, 1], got {discount}")
    difference = at_least_float32(teacher_logprobs) - at_least_float32(behaviour_logprobs)
    advantages = over_tokens(difference, mask).detach()
    if discount:
        advantages = advantages.clone()
        for at in range(advantages.shape[1] - 2, -1, -1):
            advantages[:, at] += discount * advantages[:, at + 1]
    return over_tokens(advantages, mask)


def teacher_kl_losses(
    logits: Tensor,
    teacher_ids: Tensor,
    teacher_logprobs: Tensor,
    mask: Tensor,
    *,
    direction: Literal["reverse", "forward"] = "reverse",
    temperature: float = 1.0,
) -> Tensor:
    """Return, by token, the KL divergence of student and teacher over the teacher's k likeliest
    tokens, with all others lumped together as one.

    ``reverse`` is KL(student || teacher), ``forward`` KL(teacher || student). Lumping makes it a
    lower bound of the KL over the vocabulary, by the log-sum inequality; with k = V it is equal.
    With a batch's columns, for a causal model whose logits at t - 1 predict token t:

        losses = teacher_kl_losses(
            model(batch.token_ids).logits[:, :-1],
            batch.teacher_top_ids[:, 1:],
            batch.teacher_top_logprobs[:, 1:],
            batch.loss_mask[:, 1:],
        )

    Source: GKD, arXiv 2306.13649, trained on the student's own samples.

    Args:
        logits: [R, T, V] or [N, V]; alone get a gradient. Computed in float32.
        teacher_ids, teacher_logprobs: [R, T, k] or [N, k].
        mask: [R, T] or [N]; values at other tokens, NaN included, change nothing.
        temperature: divides the logits; the teacher's log-probs must be at the same one.

    Returns:
        float32, of the shape of ``mask``, 0 where it is false.

    Raises:
        ValueError: the shapes disagree.
    """
    if logits.shape[:-1] != mask.shape or teacher_ids.shape[:-1] != mask.shape:
        raise ValueError(
            f"logits {list(logits.shape)}, teacher_ids {list(teacher_ids.shape)} and mask "
            f"{list(mask.shape)} must be [R, T, V], [R, T, k] and [R, T]"
        )
    refuse_shapes(teacher_ids, teacher_logprobs=teacher_logprobs)
    chosen = mask.bool()
    losses = logits.new_zeros(mask.shape, dtype=torch.float32)
    own = at_least_float32(logits[chosen]) / temperature
    # log_softmax would keep all V log-probs of each token for the gradient.
    kept = own.gather(-1, teacher_ids[chosen].long()) - own.logsumexp(-1, keepdim=True)
    student = _with_rest(kept)
    teacher = _with_rest(at_least_float32(teacher_logprobs[chosen]).detach())
    first, second = (student, teacher) if direction == "reverse" else (teacher, student)
    kl = (first.exp() * (first - second)).sum(-1)
    return losses.masked_scatter(chosen, kl)


def _with_rest(logprobs: Tensor) -> Tensor:
    """Append the log-probability of all other tokens together. [N, k] -> [N, k + 1]"""
    rest = (1 - logprobs.exp().sum(-1, keepdim=True)).clamp_min(REST_MIN).log()
    return torch.cat([logprobs, rest], -1)
