"""Off-policy corrections: importance weights and masks per token (TIS, MIS, IcePop, DPPO, M2PO).

Trainers multiply the losses of :mod:`tidegate.policies.objectives` with them. Each takes
``log_ratio``, the log of the ratio ``w`` of a token's probabilities under the training policy and
the behaviour policy, and the ``mask`` of sampled tokens. Each returns that shape: a weight function
returns the factor of a token's loss, a mask function (``*_mask``, bool) which tokens to keep. They
combine by multiplication: ``tis_token(x, m) * veto_mask(x, m)``.

With ``log_ratio = proximal - behaviour`` they correct for staleness and engine mismatch before the
update starts, and combine with a trust region around the proximal policy. No gradient passes
through the factors. Masked positions get 0 or False, and may hold anything, NaN included.

Shapes: [R, T] for padded rows, or [N] for packed tokens, for which the per-sequence functions need
``row_ids`` (:mod:`tidegate.policies.aggregation`). In formulas, "sequence" means its tokens.
"""

import math

import torch
from torch import Tensor

from tidegate.policies.aggregation import Sequences, over_tokens, refuse_shapes


@torch.no_grad()
def tis_token(log_ratio: Tensor, mask: Tensor, *, weight_max: float = 2.0) -> Tensor:
    """Return ``min(w_t, weight_max)``: truncated importance sampling (TIS), by token.

    Trades bias for bounded variance: no token is dropped, and none weighs more than ``weight_max``
    (published: 1.5 to 5).

    Source: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
    training"; the truncation as in IMPALA, arXiv 1802.01561.
    """
    _refuse_bounds(0.0, weight_max)
    return _truncated(_over_tokens(log_ratio, mask), weight_max) * mask.bool()


@torch.no_grad()
def tis_sequence(
    log_ratio: Tensor, mask: Tensor, *, row_ids: Tensor | None = None, weight_max: float = 2.0
) -> Tensor:
    """Return ``min(prod_t w_t, weight_max)``: TIS by sequence, on each of its tokens.

    Without truncation it is unbiased, with a variance exponential in the length (published: 2 to
    10).

    Source: as :func:`tis_token`.
    """
    _refuse_bounds(0.0, weight_max)
    sequences = Sequences(mask, row_ids)
    log_weight = sequences.sum(_over_tokens(log_ratio, mask))
    return sequences.spread(_truncated(log_weight, weight_max)) * mask.bool()


@torch.no_grad()
def mis_token(
    log_ratio: Tensor, mask: Tensor, *, weight_min: float = 0.5, weight_max: float = 2.0
) -> Tensor:
    """Return ``w_t if weight_min <= w_t <= weight_max else 0``: masked importance sampling.

    A ratio far from 1 means that the engine's log-probability is suspect, so the token is dropped
    rather than down-weighted.

    Source: Liu, Li et al. 2025, "When Speed Kills Stability".
    """
    log_weight = _over_tokens(log_ratio, mask)
    return _kept(log_weight, _is_within(log_weight, weight_min, weight_max) & mask.bool())


@torch.no_grad()
def mis_sequence(
    log_ratio: Tensor,
    mask: Tensor,
    *,
    row_ids: Tensor | None = None,
    weight_min: float = 0.5,
    weight_max: float = 2.0,
) -> Tensor:
    """Return ``W if weight_min <= W <= weight_max else 0`` with ``W = prod_t w_t``, on each token.

    Source: as :func:`mis_token`.
    """
    sequences = Sequences(mask, row_ids)
    log_weight = sequences.sum(_over_tokens(log_ratio, mask))
    keep = _is_within(log_weight, weight_min, weight_max)
    return sequences.spread(_kept(log_weight, keep)) * mask.bool()


@torch.no_grad()
def mis_geometric(
    log_ratio: Tensor,
    mask: Tensor,
    *,
    row_ids: Tensor | None = None,
    weight_min: float = 0.999,
    weight_max: float = 1.001,
) -> Tensor:
    """Return ``G if weight_min <= G <= weight_max else 0``, ``G = (prod_t w_t)^(1/tokens)``.

    The geometric mean does not penalise long sequences; it varies little, hence the narrow bounds.
    To reject sequences by it and weigh tokens by another correction, use :func:`geometric_mask`.

    Source: as :func:`mis_token`.
    """
    sequences = Sequences(mask, row_ids)
    log_weight = sequences.mean(_over_tokens(log_ratio, mask))
    keep = _is_within(log_weight, weight_min, weight_max)
    return sequences.spread(_kept(log_weight, keep)) * mask.bool()


def geometric_mask(
    log_ratio: Tensor,
    mask: Tensor,
    *,
    row_ids: Tensor | None = None,
    weight_min: float = 0.999,
    weight_max: float = 1.001,
) -> Tensor:
    """Keep sequences with ``weight_min <= (prod_t w_t)^(1/tokens) <= weight_max``.

    Source: as :func:`mis_token`, where it is called geometric rejection.
    """
    bounds = {"weight_min": weight_min, "weight_max": weight_max}
    return mis_geometric(log_ratio, mask, row_ids=row_ids, **bounds) > 0


def icepop(
    log_ratio: Tensor, mask: Tensor, *, weight_min: float = 0.5, weight_max: float = 5.0
) -> Tensor:
    """Return :func:`mis_token` with wider bounds: IcePop.

    ``w_t if weight_min <= w_t <= weight_max else 0``.

    Source: Ring-1T, arXiv 2510.18855; the bounds as in INTELLECT-3, arXiv 2512.16144.
    """
    return mis_token(log_ratio, mask, weight_min=weight_min, weight_max=weight_max)


@torch.no_grad()
def k3_mask(
    log_ratio: Tensor, mask: Tensor, *, row_ids: Tensor | None = None, k3_max: float = 0.01
) -> Tensor:
    """Keep sequences with ``mean_t(w_t - 1 - log w_t) <= k3_max`` (published: 0.001 to 0.01).

    The mean estimates the sequence's KL per token; in a geometric mean, opposite ratios cancel.

    Source: verl's rollout correction; k3 is Schulman's, 2020, "Approximating KL Divergence".
    """
    if not k3_max > 0:
        raise ValueError(f"k3_max is a KL in nats per token and must be > 0, got {k3_max}")
    sequences = Sequences(mask, row_ids)
    log_weight = _over_tokens(log_ratio, mask)
    k3 = sequences.mean(log_weight.expm1() - log_weight)
    return sequences.spread(k3 <= k3_max) & mask.bool()


@torch.no_grad()
def veto_mask(
    log_ratio: Tensor, mask: Tensor, *, row_ids: Tensor | None = None, weight_min: float = 1e-4
) -> Tensor:
    """Keep sequences in which every ``w_t >= weight_min`` (published: 1e-6 to 1e-4).

    A token that the trainer would hardly ever sample indicates that trainer and engine disagree on
    the text or the weights, so the rest of the sequence is suspect too.

    Source: as :func:`mis_token`.
    """
    if not weight_min > 0:
        raise ValueError(f"weight_min must be > 0, or nothing is ever vetoed; got {weight_min}")
    sequences = Sequences(mask, row_ids)
    is_far = _over_tokens(log_ratio, mask) < math.log(weight_min)
    return sequences.spread(sequences.sum(is_far.double()) == 0) & mask.bool()


@torch.no_grad()
def dppo_mask(
    log_ratio: Tensor,
    mask: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    *,
    shift_max: float = 0.2,
) -> Tensor:
    """Drop tokens whose probability moved more than ``shift_max`` the way they are pushed.

    Drops ``|p - q| > shift_max`` and ``(p - q) A > 0`` with ``p = w q`` and ``q`` the behaviour
    policy's probability: binary total variation as a trust region. A bound on the ratio lets likely
    tokens move far and rare ones hardly at all; this bound limits the probability mass that moved.
    ``log_ratio`` is target over behaviour here.

    Source: DPPO, arXiv 2602.04879; 0.2 as in prime-rl.
    """
    if not 0 < shift_max < 1:
        raise ValueError(f"shift_max is a difference of probabilities, in (0, 1); got {shift_max}")
    refuse_shapes(mask, advantages=advantages, behaviour_logprobs=behaviour_logprobs)
    behaviour = over_tokens(behaviour_logprobs, mask)
    shift = (behaviour + _over_tokens(log_ratio, mask)).exp() - behaviour.exp()
    return mask.bool() & ~((shift.abs() > shift_max) & (shift * advantages > 0))


@torch.no_grad()
def m2po_mask(
    log_ratio: Tensor, mask: Tensor, advantages: Tensor, *, second_moment_max: float = 0.04
) -> Tensor:
    """Drop the fewest tokens that bring ``mean_t (log w_t)^2`` of the kept ones down to the limit.

    Only tokens that the update pushes further off-policy (``A > 0, w > 1`` or ``A < 0, w < 1``) can
    be dropped, the farthest first; if the limit cannot be met, all of them are dropped.
    ``log_ratio`` is target over behaviour here. The limit holds over the tokens given: pass a whole
    batch, not micro-batches.

    Source: M2PO, arXiv 2510.01161.
    """
    if not second_moment_max > 0:
        raise ValueError(
            f"second_moment_max must be > 0 (published: 0.04), got {second_moment_max}"
        )
    refuse_shapes(mask, advantages=advantages)
    log_weight = _over_tokens(log_ratio, mask).double()
    moments = log_weight.square()  # 0 where masked
    candidates = ((log_weight * advantages > 0) & mask.bool()).flatten().nonzero().squeeze(1)
    farthest, order = moments.flatten()[candidates].sort(descending=True, stable=True)
    dropped_sums = torch.cat([farthest.new_zeros(1), farthest.cumsum(0)])  # after 0, 1, … drops
    unmasked_tokens = mask.bool().sum() - torch.arange(len(dropped_sums), device=mask.device)
    is_met = moments.sum() - dropped_sums <= second_moment_max * unmasked_tokens
    drops = int(is_met.int().argmax()) if is_met.any() else len(candidates)
    keep = mask.bool().flatten().clone()
    keep[candidates[order[:drops]]] = False
    return keep.view(mask.shape)


def _over_tokens(log_ratio: Tensor, mask: Tensor) -> Tensor:
    refuse_shapes(mask, log_ratio=log_ratio)
    return over_tokens(log_ratio, mask)


def _truncated(log_weight: Tensor, weight_max: float) -> Tensor:
    """Return ``min(w, weight_max)``, clamped before exp, which overflows above 88 in float32."""
    return log_weight.clamp(max=math.log(weight_max)).exp()


def _kept(log_weight: Tensor, keep: Tensor) -> Tensor:
    """Return ``w`` where ``keep`` is true, else 0, without overflow at dropped positions."""
    return torch.where(keep, log_weight, -math.inf).exp()


def _is_within(log_weight: Tensor, weight_min: float, weight_max: float) -> Tensor:
    _refuse_bounds(weight_min, weight_max)
    log_min = math.log(weight_min) if weight_min else -math.inf
    return (log_weight >= log_min) & (log_weight <= math.log(weight_max))


def _refuse_bounds(weight_min: float, weight_max: float) -> None:
    if not 0 <= weight_min < weight_max < math.inf:
        raise ValueError(
            f"weights are probability ratios and their bounds must be 0 <= weight_min < weight_max "
            f"(1 is on-policy), got weight_min={weight_min}, weight_max={weight_max}"
        )
