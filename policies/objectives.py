"""What does the trainer minimise, when its tokens were sampled by older weights?

Decoupled PPO: the trust region is kept around the policy that the update starts from (proximal),
and a truncated importance weight accounts for the policy that sampled (behaviour). It knows
nothing of models: log-probabilities in, a loss and its diagnostics out.

Shapes: [R, T] for padded rows of R rollouts, or [N] for packed tokens. "Tokens" below are those
with a true ``loss_mask``; what the others hold, NaN included, changes nothing.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossDiagnostics:
    """How far off-policy a batch was, and what the loss did about it. Means over its tokens.

    With ``w = proximal / behaviour``, the ratio of the probabilities of one sampled token. A batch
    without tokens counts as on-policy.
    """

    ess: float
    """Effective sample size, ``(sum w)^2 / (N sum w^2)`` in (0, 1], of the weights as they are."""
    ess_clamped: float
    """The same of ``min(w, importance_weight_max)``, the weights that were used."""
    kl_k1: float
    """``-log w``, an unbiased estimate of KL(behaviour || proximal); can be negative."""
    kl_k3: float
    """``w - 1 - log w``, an unbiased estimate of the same that is never negative."""
    clip_fraction: float
    """Share of tokens whose gradient the PPO clip has cut off."""
    truncated_fraction: float
    """Share of tokens with ``w > importance_weight_max``."""


def decoupled_ppo_loss(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip: float = 0.2,
    importance_weight_max: float = 2.0,
    tokens_in_batch: int | None = None,
) -> tuple[Tensor, LossDiagnostics]:
    """``-sum_t min(w_t, C) min(u_t A_t, clip(u_t, 1 - e, 1 + e) A_t) / tokens``, and diagnostics.

    ``u = target / proximal`` carries the gradient; ``w = proximal / behaviour`` does not. All but
    the advantages are [R, T] or [N]; advantages may also be [R, 1].

    Args:
        logprobs: under the weights being optimised.
        proximal_logprobs: under the trainer's weights at the start of the update; with one
            optimizer step per batch these are ``logprobs.detach()``, and the clip is idle.
        behaviour_logprobs: under the weights that sampled, as the engine reported them.
        clip: the half-width e of the trust region.
        importance_weight_max: C, the truncation of w: bias for bounded variance.
        tokens_in_batch: the denominator. Left out, it is the number of tokens given here. For a
            batch in micro-batches pass the whole batch's, and their losses add up to its loss.

    Source: Hilton et al., arXiv 2110.00641, section 3, and AReaL, arXiv 2505.24298, for the
    decoupled objective; truncation as in IMPALA, arXiv 1802.01561.

    Raises:
        ValueError: shapes that don't belong together, or settings that can't work.
    """
    _refuse_settings(clip, importance_weight_max, tokens_in_batch)
    tensors = (logprobs, proximal_logprobs, behaviour_logprobs, loss_mask)
    _refuse_shapes(tensors, advantages)
    mask = loss_mask.bool()
    proximal = proximal_logprobs.detach()
    log_u = torch.where(mask, logprobs - proximal, 0.0)
    log_w = torch.where(mask, proximal - behaviour_logprobs.detach(), 0.0)
    advantage = torch.where(mask, advantages.detach(), 0.0)

    unclipped = log_u.exp() * advantage
    clipped = log_u.exp().clamp(1 - clip, 1 + clip) * advantage
    # Truncated before exp, which overflows above 88 in float32.
    weight = log_w.clamp(max=math.log(importance_weight_max)).exp()
    tokens = int(mask.sum()) if tokens_in_batch is None else tokens_in_batch
    loss = -(weight * torch.minimum(unclipped, clipped)).sum() / max(tokens, 1)
    is_clipped = (clipped < unclipped)[mask]
    return loss, _diagnose(log_w[mask], is_clipped, importance_weight_max)


@torch.no_grad()
def _diagnose(log_w: Tensor, is_clipped: Tensor, weight_max: float) -> LossDiagnostics:
    """Over the tokens alone. [N], [N]"""
    if not len(log_w):
        return LossDiagnostics(1.0, 1.0, 0.0, 0.0, 0.0, 0.0)
    log_w = log_w.double()  # k3 is a small difference of large numbers near w = 1
    log_weight_max = math.log(weight_max)
    return LossDiagnostics(
        ess=_effective_sample_share(log_w),
        ess_clamped=_effective_sample_share(log_w.clamp(max=log_weight_max)),
        kl_k1=float(-log_w.mean()),
        kl_k3=float((log_w.expm1() - log_w).mean()),
        clip_fraction=float(is_clipped.double().mean()),
        truncated_fraction=float((log_w > log_weight_max).double().mean()),
    )


def _effective_sample_share(log_w: Tensor) -> float:
    """``(sum w)^2 / (N sum w^2)``, in logs so that no weight overflows. [N]"""
    log_ess = 2 * torch.logsumexp(log_w, 0) - torch.logsumexp(2 * log_w, 0)
    return float(log_ess.exp()) / len(log_w)


def _refuse_settings(clip: float, weight_max: float, tokens_in_batch: int | None) -> None:
    if not 0 < clip < 1:
        raise ValueError(f"clip is the half-width of [1 - clip, 1 + clip], in (0, 1); got {clip}")
    if not weight_max > 0:
        raise ValueError(f"importance_weight_max must be > 0 (1 to 10 is usual), got {weight_max}")
    if tokens_in_batch is not None and tokens_in_batch < 1:
        raise ValueError(f"tokens_in_batch divides the loss and must be > 0, got {tokens_in_batch}")


def _refuse_shapes(tensors: tuple[Tensor, ...], advantages: Tensor) -> None:
    """An [R] of advantages would broadcast along T, in silence where R = T."""
    shape = tensors[0].shape
    names = ("logprobs", "proximal_logprobs", "behaviour_logprobs", "loss_mask")
    given = {name: list(tensor.shape) for name, tensor in zip(names, tensors, strict=True)}
    if any(tensor.shape != shape for tensor in tensors):
        raise ValueError(f"these must have one shape, [R, T] or [N]: {given}")
    per_row = torch.Size([*shape[:-1], 1]) if len(shape) == 2 else shape
    if advantages.shape not in (shape, per_row):
        raise ValueError(
            f"advantages must be {list(shape)} or {list(per_row)} to go with logprobs "
            f"{list(shape)}, got {list(advantages.shape)}; one per rollout is advantages[:, None]"
        )
