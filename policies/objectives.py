"""Policy-gradient losses for off-policy tokens: PPO, GSPO, CISPO, AIPO and decoupled PPO.

Trainers call them on a batch's log-probabilities. Each ``*_losses`` function returns a loss per
token, to be multiplied with a correction (:mod:`tidegate.policies.corrections`) and reduced
(:mod:`tidegate.policies.aggregation`); :func:`decoupled_ppo_loss` is the usual combination of the
three.

``logprobs`` are under the target policy (the weights being optimised) and alone get a gradient;
``proximal_logprobs`` are under the trainer's weights at the start of the update;
``behaviour_logprobs`` are under the weights that sampled, as the engine reported them.

Shapes: [R, T] for padded rows of R rollouts, or [N] for packed tokens; advantages may also be [R,
1]. "Tokens" are positions with a true mask; the values at other positions, NaN included, change
nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tidegate.policies.aggregation import (
    Sequences,
    at_least_float32,
    mean_by_token,
    over_tokens,
    refuse_shapes,
)
from tidegate.policies.corrections import tis_token
from tidegate.policies.diagnostics import measure_mismatch, token_lags

LOG_RATIO_MAX = 80.0
"""Clamp of log ratios: exp overflows above 88 in float32, and an infinite ratio times a gradient of
0 is NaN."""


def ppo_losses(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Tensor:
    """Return PPO's ``-min(u_t A_t, clip(u_t, 1 - clip_low, 1 + clip_high) A_t)``.

    ``u = target / proximal`` is the ratio of probabilities. Multiplied with a weight for ``proximal
    / behaviour`` it is decoupled PPO; with :func:`interpolated_proximal_logprobs` as proximal
    log-probabilities it is A-3PO.

    Source: PPO, arXiv 1707.06347, section 3; two clips: DAPO, arXiv 2503.14476.
    """
    _refuse_clip(clip_low, clip_high)
    refuse_shapes(
        mask, advantages=advantages, logprobs=logprobs, proximal_logprobs=proximal_logprobs
    )
    log_u = _log_ratio(logprobs, proximal_logprobs.detach(), mask)
    return _clipped(log_u, over_tokens(advantages, mask), clip_low, clip_high)


def gspo_losses(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    row_ids: Tensor | None = None,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Tensor:
    """Return GSPO's ``-min(s_i A_t, clip(s_i, …) A_t)``, ``s_i = (prod_{t in i} u_t)^(1/tokens)``.

    Every token of a sequence holds the sequence's loss, so :func:`aggregation.mean_by_sequence`
    yields the published objective. If the experts of one token change in a mixture-of-experts
    model, the token's ratio jumps and the sequence's ratio hardly moves.

    Source: GSPO, arXiv 2507.18071.
    """
    _refuse_clip(clip_low, clip_high)
    refuse_shapes(
        mask, advantages=advantages, logprobs=logprobs, proximal_logprobs=proximal_logprobs
    )
    sequences = Sequences(mask, row_ids)
    log_s = sequences.spread(sequences.mean(_log_ratio(logprobs, proximal_logprobs.detach(), mask)))
    return _clipped(log_s, over_tokens(advantages, mask), clip_low, clip_high)


def cispo_losses(
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    weight_min: float = 0.0,
    weight_max: float = 5.0,
) -> Tensor:
    """Return CISPO's ``-sg(clip(w_t, weight_min, weight_max)) A_t log target``.

    ``w = target / behaviour`` is the ratio of probabilities. The weight is clipped and carries no
    gradient (sg is stop-gradient), so no token's gradient is cut off. ``weight_min`` and
    ``weight_max`` are the papers' 1 - e_low and 1 + e_high.

    Source: MiniMax-M1, arXiv 2506.13585; robust in its upper bound: ScaleRL, arXiv 2510.13786.
    """
    if not 0 <= weight_min < weight_max:
        raise ValueError(
            f"weights must be bounded by 0 <= weight_min < weight_max (1 is on-policy), "
            f"got weight_min={weight_min}, weight_max={weight_max}"
        )
    refuse_shapes(
        mask, advantages=advantages, logprobs=logprobs, behaviour_logprobs=behaviour_logprobs
    )
    log_w = _log_ratio(logprobs, behaviour_logprobs, mask).detach()
    weight = clamped_ratio(log_w).clamp(weight_min, weight_max)
    return -weight * over_tokens(advantages.detach(), mask) * over_tokens(logprobs, mask)


def aipo_losses(
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    weight_max: float = 2.0,
) -> Tensor:
    """Return AIPO's ``-sg(min(w_t, weight_max)) A_t log target``, ``w = target / behaviour``.

    Published ``weight_max``: 2 to 10. There is no proximal policy. Source: LlamaRL, arXiv
    2505.24034.
    """
    return cispo_losses(logprobs, behaviour_logprobs, advantages, mask, weight_max=weight_max)


@torch.no_grad()
def interpolated_proximal_logprobs(
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    weight_versions: Tensor,
    mask: Tensor,
    *,
    trainer_version: int,
) -> Tensor:
    """Return the proximal log-probabilities of A-3PO, without a forward pass.

    ``log behaviour + lag/(lag + 1) (log target - log behaviour)`` with ``lag = trainer_version -
    weight_versions``, per token. The update makes version ``trainer_version + 1`` from
    ``trainer_version``, so the proximal policy lies ``lag/(lag + 1)`` of the way from behaviour to
    target. For a token of lag 0 the proximal policy is the behaviour policy. [R, T] or [N]; 0 where
    masked.

    Source: A-3PO, arXiv 2512.06547.
    """
    refuse_shapes(mask, logprobs=logprobs, behaviour_logprobs=behaviour_logprobs)
    target, behaviour = over_tokens(logprobs, mask), over_tokens(behaviour_logprobs, mask)
    lag = token_lags(weight_versions, mask, trainer_version=trainer_version).to(target.dtype)
    return behaviour + lag / (lag + 1) * (target - behaviour)


def exact_on_policy_logprobs(
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    weight_versions: Tensor,
    *,
    trainer_version: int,
) -> Tensor:
    """Return behaviour log-probs, with the trainer's own where the trainer's version sampled.

    Those tokens are on-policy, so their ratio is 1 and their weight is 1, whatever the numerics of
    trainer and engine; other tokens keep the log-probs that the engine reported. Per token, because
    a row may have tokens of several versions. No gradient passes through the result. Any shape.

    Args:
        logprobs: under the weights ``trainer_version``, before the update starts.
        behaviour_logprobs: ``Batch.logprobs``.
        weight_versions: ``Batch.weight_versions``; -1 on tokens that were not sampled.
        trainer_version: ``Batch.trainer_version``.

    Source: prime-rl's ``exact_on_policy_ratio``, which decides by sample.
    """
    is_own = weight_versions == trainer_version
    own, behaviour = at_least_float32(logprobs.detach()), at_least_float32(behaviour_logprobs)
    return torch.where(is_own, own, behaviour)


@dataclass(frozen=True, slots=True)
class LossDiagnostics:
    """Off-policyness of a batch and the effect of clip and truncation, as means over its tokens.

    ``w = proximal / behaviour`` is the ratio of the probabilities of one sampled token. A batch
    without tokens counts as on-policy. :mod:`tidegate.policies.diagnostics` has more metrics, and
    by lag.
    """

    ess: float
    """Effective sample size, ``(sum w)^2 / (N sum w^2)`` in (0, 1], of ``w`` without truncation."""
    ess_clamped: float
    """Effective sample size of the weights used in the loss; 0 if all of them are 0."""
    kl_k1: float
    """``mean(-log w)``, an unbiased estimate of KL(behaviour || proximal); can be negative."""
    kl_k3: float
    """``mean(w - 1 - log w)``, an unbiased estimate of the same KL; never negative."""
    clip_fraction: float
    """Share of tokens whose gradient the PPO clip has cut off."""
    truncated_fraction: float
    """Share of tokens whose weight in the loss is less than ``w``."""


def decoupled_ppo_loss(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip: float = 0.2,
    importance_weight_max: float = 2.0,
    weight: Tensor | None = None,
    tokens_in_batch: int | None = None,
) -> tuple[Tensor, LossDiagnostics]:
    """Return ``-sum_t min(w_t, C) min(u_t A_t, clip(u_t, 1 - e, 1 + e) A_t) / tokens``.

    Also returns the diagnostics. ``u = target / proximal`` carries the gradient; ``w = proximal /
    behaviour`` does not.

    Args:
        logprobs: log-probabilities under the weights being optimised.
        proximal_logprobs: log-probabilities at the start of the update. With one optimizer step per
            batch these are ``logprobs.detach()``, and the clip is idle.
        behaviour_logprobs, advantages, loss_mask: of the sampled tokens; shapes as in the module.
        clip: the half-width e of the trust region.
        importance_weight_max: C, the truncation of w: bias for bounded variance.
        weight: replaces ``min(w_t, C)``: another correction, or a product of several.
        tokens_in_batch: the denominator; defaults to the number of tokens given. For micro-batches
            pass the whole batch's number; their losses then add up to the batch's loss.

    Source: Hilton et al., arXiv 2110.00641, section 3, and AReaL, arXiv 2505.24298, for the
    decoupled objective; truncation as in IMPALA, arXiv 1802.01561.

    Raises:
        ValueError: the shapes do not match, or a setting is out of range.
    """
    if not importance_weight_max > 0:
        raise ValueError(
            f"importance_weight_max must be > 0 (1 to 10 is usual), got {importance_weight_max}"
        )
    given = {"proximal_logprobs": proximal_logprobs, "behaviour_logprobs": behaviour_logprobs}
    refuse_shapes(loss_mask, advantages=advantages, **given)
    mask, proximal = loss_mask.bool(), proximal_logprobs.detach()
    log_w = _log_ratio(proximal, behaviour_logprobs.detach(), mask)
    if weight is None:
        weight = tis_token(log_w, mask, weight_max=importance_weight_max)
    refuse_shapes(loss_mask, weight=weight)
    used = over_tokens(weight.detach(), mask)
    losses = ppo_losses(logprobs, proximal, advantages, mask, clip_low=clip, clip_high=clip)
    loss = mean_by_token(used * losses, mask, tokens_in_batch=tokens_in_batch)
    unclipped = -clamped_ratio(_log_ratio(logprobs, proximal, mask).detach()) * advantages
    return loss, _diagnose(log_w[mask], used[mask], (losses > unclipped)[mask])


@torch.no_grad()
def _diagnose(log_w: Tensor, used: Tensor, is_clipped: Tensor) -> LossDiagnostics:
    """Compute the diagnostics over the tokens as if they were one sequence. [N] each"""
    mismatch = measure_mismatch(log_w[None], torch.ones_like(used)[None], weight=used[None])
    tokens = max(len(used), 1)
    return LossDiagnostics(
        ess=mismatch.ess,
        ess_clamped=mismatch.ess_clamped,
        kl_k1=mismatch.k1,
        kl_k3=mismatch.k3,
        clip_fraction=int(is_clipped.sum()) / tokens,
        truncated_fraction=int((used < log_w.exp()).sum()) / tokens,
    )


def _log_ratio(logprobs: Tensor, others: Tensor, mask: Tensor) -> Tensor:
    """Return the log of the ratio of probabilities, 0 where masked."""
    return over_tokens(logprobs, mask) - over_tokens(others, mask)


def clamped_ratio(log_ratio: Tensor) -> Tensor:
    """Return exp of log ratios, finite with a finite gradient however large they are."""
    return at_least_float32(log_ratio).clamp(max=LOG_RATIO_MAX).exp()


def _clipped(log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Return PPO's pessimistic minimum of the clipped and the unclipped objective, negated."""
    ratio, advantage = clamped_ratio(log_ratio), advantages.detach()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)


def _refuse_clip(clip_low: float, clip_high: float) -> None:
    if not (0 < clip_low < 1 and clip_high > 0):
        raise ValueError(
            f"clip bounds the ratio by [1 - clip_low, 1 + clip_high] and must have "
            f"0 < clip_low < 1 and clip_high > 0, got {clip_low} and {clip_high}"
        )
