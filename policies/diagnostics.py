"""Off-policyness metrics of a batch: effective sample size, KL, chi-squared, by lag.

Trainers compute them, log them, and report them with ``rollouts.report_off_policyness``; no
gradient passes through any.

Symbols: ``w`` is the ratio of a token's probabilities under the training policy and the behaviour
policy; ``log_ratio`` is its log. Shapes as in :mod:`tidegate.policies.aggregation`.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tidegate.policies.aggregation import Sequences, over_tokens

LAG_BUCKETS = (0, 1, 2, 3, 4, 5, 9, 17)
"""Smallest lag of each bucket, in versions; the last bucket is open. Single versions where most
tokens are, then doubling, so metric names do not depend on how stale a run gets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Divergence of the training policy from the behaviour policy over a set of tokens.

    An empty set counts as on-policy.
    """

    tokens: int
    ess: float
    """Effective sample size, ``(sum w)^2 / (N sum w^2)`` in (0, 1], of ``w`` without truncation."""
    ess_clamped: float
    """Effective sample size of the weights used in the loss (truncated or masked); 0 if all are
    0."""
    k1: float
    """``mean(-log w)``, an unbiased estimate of KL(behaviour || trained); can be negative."""
    k2: float
    """``mean((log w)^2 / 2)``, a low-variance, biased estimate of the KL; never negative."""
    k3: float
    """``mean(w - 1 - log w)``, an unbiased estimate of the KL; never negative."""
    chi2_token: float
    """``mean(w^2) - 1`` over tokens; infinite if it overflows float64."""
    chi2_seq: float
    """``mean_i((prod_{t in i} w)^2) - 1`` over sequences; infinite if it overflows float64."""
    ppl_ratio: float
    """``exp(mean_i(mean_{t in i}(-log w)))``: perplexity of the trained over the behaviour
    policy."""
    masked_share_token: float
    """Share of tokens whose weight in the loss was 0."""
    masked_share_seq: float
    """Share of sequences whose tokens all had weight 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LagBucket:
    """The mismatch of the tokens that are ``lag_min`` to ``lag_max`` versions old."""

    lag_min: int
    lag_max: int | None
    """Largest lag of the bucket, inclusive; None for the last bucket, which is open."""
    mismatch: Mismatch


@torch.no_grad()
def measure_mismatch(
    log_ratio: Tensor,
    mask: Tensor,
    *,
    row_ids: Tensor | None = None,
    weight: Tensor | None = None,
) -> Mismatch:
    """Compare two policies on the tokens of ``mask``; :class:`Mismatch` has the definitions.

    ``weight`` is the factor of the loss from :mod:`tidegate.policies.corrections`; it defaults to
    ``w``.

    Source: k1, k2, k3: Schulman 2020, "Approximating KL Divergence"; the others as in verl's
    rollout correction; ess, unclamped: PipelineRL, arXiv 2509.19128.
    """
    sequences = Sequences(mask, row_ids)
    by_token = over_tokens(log_ratio, mask).double()
    x = by_token[sequences.mask]  # float64, because k3 is a small difference of large numbers
    if not len(x):
        return _ON_POLICY
    used = x.exp() if weight is None else weight[sequences.mask].double()
    is_used = torch.where(sequences.mask, True if weight is None else weight != 0, False)
    some = ~sequences.is_empty
    return Mismatch(
        tokens=len(x),
        ess=effective_sample_size(x),
        ess_clamped=effective_sample_size(x if weight is None else used.log()),
        k1=float(-x.mean()),
        k2=float(x.square().mean() / 2),
        k3=float((x.expm1() - x).mean()),
        chi2_token=_chi2(x),
        chi2_seq=_chi2(sequences.sum(by_token)[some]),
        ppl_ratio=float((-sequences.mean(by_token)[some]).mean().exp()),
        masked_share_token=float((used == 0).double().mean()),
        masked_share_seq=float((sequences.sum(is_used.double())[some] == 0).double().mean()),
    )


def measure_mismatch_by_lag(
    log_ratio: Tensor,
    mask: Tensor,
    weight_versions: Tensor,
    *,
    trainer_version: int,
    row_ids: Tensor | None = None,
    weight: Tensor | None = None,
) -> tuple[LagBucket, ...]:
    """Split :func:`measure_mismatch` by lag, ``trainer_version - weight_versions``, per token.

    Tokens of lag 0 were sampled by the weights in training: their mismatch is engine numerics, or a
    bug, not staleness. Buckets without tokens are omitted. In each bucket, a sequence consists of
    its tokens in that bucket. ``weight_versions`` has the shape of the mask.

    Raises:
        ValueError: as for :func:`token_lags`.
    """
    lags = token_lags(weight_versions, mask, trainer_version=trainer_version)
    buckets = []
    for lag_min, end in zip(LAG_BUCKETS, (*LAG_BUCKETS[1:], None), strict=True):
        inside = mask.bool() & (lags >= lag_min)
        if end is not None:
            inside &= lags < end
        mismatch = measure_mismatch(log_ratio, inside, row_ids=row_ids, weight=weight)
        lag_max = None if end is None else end - 1
        buckets.append(LagBucket(lag_min=lag_min, lag_max=lag_max, mismatch=mismatch))
    return tuple(bucket for bucket in buckets if bucket.mismatch.tokens)


def token_lags(weight_versions: Tensor, mask: Tensor, *, trainer_version: int) -> Tensor:
    """Return ``trainer_version - weight_versions``, in versions; 0 where masked. Any shape.

    Raises:
        ValueError: a token has no version, or one that the trainer has not reached.
    """
    versions = torch.where(mask.bool(), weight_versions, trainer_version)
    wrong = versions[(versions < 0) | (versions > trainer_version)]
    if len(wrong):
        raise ValueError(
            f"sampled tokens must have a version from 0 to the trainer's, {trainer_version}; got "
            f"{int(wrong[0])}. -1 marks tokens that were not sampled: is the mask shifted against "
            f"the versions?"
        )
    return trainer_version - versions


@torch.no_grad()
def effective_sample_size(log_weights: Tensor) -> float:
    """Return ``(sum w)^2 / (N sum w^2)``, scaled so that no weight overflows. [N] -> (0, 1]

    1 if there are no weights; 0 if all weights are 0.
    """
    if not len(log_weights):
        return 1.0
    peak = log_weights.max()
    if peak == -math.inf:
        return 0.0
    weights = (log_weights.double() - peak).exp()
    return float(weights.sum().square() / weights.square().sum()) / len(weights)


def _chi2(log_weights: Tensor) -> float:
    """Return ``mean(w^2) - 1``, computed in logs, which keep precision near w = 1. [N]"""
    log_mean = torch.logsumexp(2 * log_weights, 0) - math.log(len(log_weights))
    return float(log_mean.expm1())


_ON_POLICY = Mismatch(
    tokens=0,
    ess=1.0,
    ess_clamped=1.0,
    k1=0.0,
    k2=0.0,
    k3=0.0,
    chi2_token=0.0,
    chi2_seq=0.0,
    ppl_ratio=1.0,
    masked_share_token=0.0,
    masked_share_seq=0.0,
)
