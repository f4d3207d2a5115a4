"""How much should a segment count that other weights sampled? Importance weights of packed spans.

It knows neither versions nor losses. A segment is a run of successive tokens: what one weight
version sampled of a rollout, or all of it. A GPU does in one launch what
:mod:`tidegate.policies.corrections` does by scattering, ``tis_sequence``, ``mis_sequence`` and
``mis_geometric``, where sequences lie one after another. Sources: there.

Letters in shapes: N packed tokens, S segments.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import torch

from tidegate.kernels.optional_triton import jit, tl

TOKEN_TILE = 1024
"""Tokens of one step: 8 for each of 128 threads."""


@dataclass(frozen=True, slots=True)
class WeightRule:
    """What becomes of a segment's log-ratios. Its bounds are ratios of probabilities."""

    mean: bool
    """The geometric mean of the tokens' ratios, which length does not sway; else their product."""
    outside: str
    """Of the bounds: ``truncate`` to the upper one, or ``drop``: weight 0."""
    weight_max: float
    weight_min: float = 0.0
    """With ``drop`` only."""

    def __post_init__(self) -> None:
        if self.outside not in ("truncate", "drop"):
            raise ValueError(f"outside must be 'truncate' or 'drop', got {self.outside!r}")
        if not 0 <= self.weight_min < self.weight_max < math.inf:
            raise ValueError(
                f"bounds must be 0 <= weight_min < weight_max (1 is on-policy), "
                f"got weight_min={self.weight_min}, weight_max={self.weight_max}"
            )
        if self.outside == "truncate" and self.weight_min > 0:
            raise ValueError(
                f"truncating has an upper bound only, got weight_min={self.weight_min}; "
                f"use outside='drop' for both"
            )


def segment_weights_reference(
    log_ratio: torch.Tensor, mask: torch.Tensor, offsets: torch.Tensor, rule: WeightRule
) -> torch.Tensor:
    """What :func:`segment_weights` computes, a segment at a time. Slow and obviously right."""
    weights = torch.zeros(log_ratio.shape, dtype=torch.float32, device=log_ratio.device)
    ends = offsets.tolist()
    for first, end in pairwise(ends):
        is_token = mask[first:end].bool()
        ratios = log_ratio[first:end][is_token].double()
        if not len(ratios):
            continue
        log_weight = float(ratios.mean() if rule.mean else ratios.sum())
        if rule.outside == "truncate":
            weight = math.exp(min(log_weight, math.log(rule.weight_max)))
        else:
            low, high = _log(rule.weight_min), math.log(rule.weight_max)
            weight = math.exp(log_weight) if low <= log_weight <= high else 0.0
        weights[first:end] = weight * is_token
    return weights


def segment_weights(
    log_ratio: torch.Tensor, mask: torch.Tensor, offsets: torch.Tensor, rule: WeightRule
) -> torch.Tensor:
    """Give every token the importance weight of its segment.

    Args:
        log_ratio: [N], contiguous: log of the trained over the sampling policy's probability.
        mask: [N], bool, contiguous: which are sampled tokens; the others may hold anything.
        offsets: [S + 1], int64, on the same device: segment s is ``[offsets[s], offsets[s + 1])``;
            the first is 0, the last N.
        rule: what the weights are.

    Returns:
        [N], float32, 0 off the mask. Log-ratios are summed in float64. No gradient.
    """
    if log_ratio.is_cuda:
        return segment_weights_triton(log_ratio, mask, offsets, rule)
    return segment_weights_reference(log_ratio, mask, offsets, rule)


@torch.no_grad()
def segment_weights_triton(
    log_ratio: torch.Tensor, mask: torch.Tensor, offsets: torch.Tensor, rule: WeightRule
) -> torch.Tensor:
    """:func:`segment_weights` as a kernel; on a CPU in Triton's interpreter only."""
    if log_ratio.ndim != 1 or mask.shape != log_ratio.shape or offsets.ndim != 1:
        raise ValueError(
            f"expected packed log_ratio [N], mask [N] and offsets [S + 1], "
            f"got {list(log_ratio.shape)}, {list(mask.shape)} and {list(offsets.shape)}"
        )
    if not (log_ratio.is_contiguous() and mask.is_contiguous() and offsets.is_contiguous()):
        raise ValueError("log_ratio, mask and offsets must be contiguous")
    weights = torch.empty(log_ratio.shape, dtype=torch.float32, device=log_ratio.device)
    segments = offsets.numel() - 1
    if segments > 0:
        _segment_weights_kernel[(segments,)](
            log_ratio, mask, offsets, weights, _log(rule.weight_min), math.log(rule.weight_max),
            MEAN=rule.mean, DROP=rule.outside == "drop", TILE=TOKEN_TILE,
        )  # fmt: skip
    return weights


def _log(weight: float) -> float:
    return math.log(weight) if weight > 0 else -math.inf


@jit
def _segment_weights_kernel(
    log_ratio_ptr,  # [N]
    mask_ptr,  # [N]
    offsets_ptr,  # [S + 1]
    weights_ptr,  # [N] out
    log_min,
    log_max,
    MEAN: tl.constexpr,
    DROP: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program per segment, which reads its tokens, then writes their weights."""
    segment = tl.program_id(0)
    first = tl.load(offsets_ptr + segment)
    end = tl.load(offsets_ptr + segment + 1)
    summed = tl.zeros([TILE], tl.float64)
    count = tl.zeros([TILE], tl.int32)
    for begin in range(first, end, TILE):
        at = begin + tl.arange(0, TILE)
        is_token = tl.load(mask_ptr + at, mask=at < end, other=0) != 0
        ratio = tl.load(log_ratio_ptr + at, mask=is_token, other=0.0)
        summed += ratio.to(tl.float64)
        count += is_token.to(tl.int32)
    log_weight = tl.sum(summed, axis=0)
    if MEAN:
        log_weight = log_weight / tl.maximum(tl.sum(count, axis=0), 1)
    weight = tl.exp(tl.minimum(log_weight, log_max).to(tl.float32))
    if DROP:
        weight = tl.where((log_weight >= log_min) & (log_weight <= log_max), weight, 0.0)
    for begin in range(first, end, TILE):
        at = begin + tl.arange(0, TILE)
        is_token = tl.load(mask_ptr + at, mask=at < end, other=0) != 0
        tl.store(weights_ptr + at, tl.where(is_token, weight, 0.0), mask=at < end)
