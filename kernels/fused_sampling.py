"""Sampling on a GPU in one launch: temperature, min-p, top-k, top-p and the draw.

The CPU's counterpart is :mod:`tidegate.kernels.sampling`. Nothing is sorted. Top-k and top-p are
thresholds on the logits, found bit by bit: floats are mapped to integer keys of the same order, and
the count (top-k) or probability (top-p) at or above a candidate decides one bit, in one pass over a
row that stays in the GPU's cache. Without top-k and top-p, a row is read twice, and one of its
tiles a third time.

A draw inverts the cumulative distribution with the same uniform number as on a CPU, so both draw
the same token except where rounding decides. Gumbel noise would need no cumulative sum, but one
random number per token of the vocabulary, and would draw other tokens than a CPU: a turn that moves
from one to the other would continue under another sampling rule. One program sums a row in a fixed
order, so a draw does not depend on the batch.

Sources: radix selection, Alabi et al. 2012, doi:10.1145/2133803.2345676; the draw, Devroye 1986,
section III.2.

Letters in shapes: S rows to sample, V vocabulary.
"""

from dataclasses import dataclass

import torch

from tidegate.kernels.optional_triton import jit, next_power_of_2, tl

VOCAB_TILE = 4096
"""Logits per loop step: 16 for each of 256 threads; 38 tiles for V = 151,936."""


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """Sampling parameters per row, on the logits' device; as in ``SamplingParams``."""

    temperature: torch.Tensor
    """[S], float32; 0 takes the most likely token."""
    top_k: torch.Tensor
    """[S], int64; 0 keeps all."""
    top_p: torch.Tensor
    """[S], float32; 1 keeps all."""
    min_p: torch.Tensor
    """[S], float32; 0 keeps all."""
    uniforms: torch.Tensor
    """[S], float64, in [0, 1)."""


def fused_sample_triton(
    logits: torch.Tensor, columns: SamplingColumns
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row.

    Applies temperature, min-p, top-k and top-p in this order, each to the tokens that the options
    before it have kept; tokens that tie with the last one kept are kept too. Bias and penalties
    touch few logits: add them before.

    Runs on a CPU only with Triton's interpreter.

    Args:
        logits: [S, V], float32, each row contiguous.
        columns: of the same S rows.

    Returns:
        Token ids [S], int64, and their log-probabilities [S], float32, under the distribution drawn
            from; at temperature 0, under the softmax of the logits.
    """
    _refuse_shapes(logits, columns)
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        _sample_kernel[(rows,)](
            logits, columns.temperature, columns.top_k, columns.top_p, columns.min_p,
            columns.uniforms, tokens, logprobs, vocab, logits.stride(0),
            TILE=VOCAB_TILE, TILES=next_power_of_2(-(-vocab // VOCAB_TILE)), num_warps=8,
        )  # fmt: skip
    return tokens, logprobs


def _refuse_shapes(logits: torch.Tensor, columns: SamplingColumns) -> None:
    """Check the kernel's assumptions, because a wrong address raises no error on a GPU."""
    if logits.ndim != 2 or logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ValueError(
            f"expected logits [S, V], float32, with contiguous rows; "
            f"got {list(logits.shape)}, {logits.dtype}"
        )
    rows = logits.shape[0]
    dtypes = {"top_k": torch.int64, "uniforms": torch.float64}
    for name in ("temperature", "top_k", "top_p", "min_p", "uniforms"):
        column, dtype = getattr(columns, name), dtypes.get(name, torch.float32)
        if column.shape != (rows,) or column.dtype != dtype:
            raise ValueError(
                f"{name} must be {dtype} with one entry for each of {rows} rows, "
                f"got {list(column.shape)}, {column.dtype}"
            )


# Below, ``row`` is (its logits' pointer, V), and ``rule`` (peak, divisor, floor): a token's scaled
# logit is (logit - peak) / divisor, at most 0, and at least floor.


@jit
def _read(row, first, TILE: tl.constexpr):
    """Load the logits of a tile of tokens, -inf past the vocabulary."""
    logits_ptr, vocab = row
    v = first + tl.arange(0, TILE)
    return tl.load(logits_ptr + v, mask=v < vocab, other=float("-inf"))


@jit
def _key(x):
    """Map floats x to integers of the same order: flip the sign bit, or all bits if negative."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)  # + 0.0: the two zeros are one
    # Not ~bits: to Triton 3.7's interpreter that is -1 in a uint32, which NumPy 2 refuses.
    return tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@jit
def _weigh(row, rule, threshold, first, TILE: tl.constexpr):
    """Return a tile's scaled logits, which of them are kept, and their weights in a draw."""
    peak, divisor, cutoff = rule
    x = _read(row, first, TILE)
    scaled = (x - peak) / divisor
    kept = (_key(x) >= threshold) & ~(scaled < cutoff)  # not >=, so that NaN is kept and detected
    return scaled, kept, tl.where(kept, tl.exp(scaled), 0.0)


@jit
def _peak(row, TILE: tl.constexpr):
    """Return the largest logit, and the first token that has it."""
    peak = tl.full((), float("-inf"), tl.float32)
    best = tl.full((), 0, tl.int32)
    for first in range(0, row[1], TILE):
        tile_peak, lane = tl.max(_read(row, first, TILE), axis=0, return_indices=True)
        best = tl.where(tile_peak > peak, first + lane, best)
        peak = tl.maximum(peak, tile_peak)
    return peak, best


@jit
def _threshold(row, rule, target, COUNTS: tl.constexpr, TILE: tl.constexpr):
    """Return the largest key such that the tokens that min-p keeps, with keys at or above it, have
    a total weight of at least the target.

    With COUNTS each token weighs 1, else exp(its scaled logit). Return 0, below all keys, if no key
    reaches the target.
    """
    threshold = tl.full((), 0, tl.uint32)
    bit = tl.full((), 0x80000000, tl.uint32)
    for _ in range(0, 32):
        candidate = threshold | bit
        reached = tl.full((), 0.0, tl.float64)
        for first in range(0, row[1], TILE):
            _scaled, kept, weight = _weigh(row, rule, candidate, first, TILE)
            if COUNTS:
                weight = kept.to(tl.float32)
            reached += tl.sum(weight, axis=0).to(tl.float64)
        threshold = tl.where(reached >= target, candidate, threshold)
        bit = bit >> 1
    return threshold


@jit
def _mass(row, rule, threshold, top_k, TILE: tl.constexpr):
    """Return the total weight of the tokens that top-k keeps.

    Of the tokens that tie for the last of the k places, only as many as complete k are counted.
    """
    count = tl.full((), 0, tl.int32)
    lowest = tl.full((), 0.0, tl.float32)
    mass = tl.full((), 0.0, tl.float64)
    for first in range(0, row[1], TILE):
        scaled, kept, weight = _weigh(row, rule, threshold, first, TILE)
        count += tl.sum(kept.to(tl.int32), axis=0)
        lowest = tl.minimum(lowest, tl.min(tl.where(kept, scaled, 0.0), axis=0))
        mass += tl.sum(weight, axis=0).to(tl.float64)
    surplus = tl.where((top_k > 0) & (count > top_k), count - top_k, 0)
    return mass - surplus.to(tl.float64) * tl.exp(lowest).to(tl.float64)


@jit
def _draw(row, rule, threshold, uniform, TILE: tl.constexpr, TILES: tl.constexpr):
    """Return the token whose interval holds the uniform number, and the sum of all weights."""
    tiles = tl.arange(0, TILES)
    sums = tl.zeros([TILES], tl.float64)
    for first in range(0, row[1], TILE):
        _scaled, _kept, weight = _weigh(row, rule, threshold, first, TILE)
        sums = tl.where(tiles == first // TILE, tl.sum(weight, axis=0).to(tl.float64), sums)
    total = tl.sum(sums, axis=0)
    target = uniform * total
    # The first tile whose cumulative sum exceeds the target; rounding may leave none.
    tile = tl.sum((tl.cumsum(sums, axis=0) <= target).to(tl.int32), axis=0)
    tile = tl.minimum(tile, tl.max(tl.where(sums > 0, tiles, 0), axis=0))
    target -= tl.sum(tl.where(tiles < tile, sums, 0.0), axis=0)
    lanes = tl.arange(0, TILE)
    _scaled, _kept, weight = _weigh(row, rule, threshold, tile * TILE, TILE)
    cumulative = tl.cumsum(weight.to(tl.float64), axis=0)
    lane = tl.sum((cumulative <= target).to(tl.int32), axis=0)
    lane = tl.minimum(lane, tl.max(tl.where(weight > 0, lanes, 0), axis=0))
    return tl.minimum(tile * TILE + lane, row[1] - 1), total.to(tl.float32)


@jit
def _sample_kernel(
    logits_ptr,  # [S, V]
    temperature_ptr,  # [S], as are the next four
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    uniforms_ptr,
    tokens_ptr,  # [S] out
    logprobs_ptr,  # [S] out
    vocab,
    row_stride,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """Sample one row per program: find its peak and thresholds, sum its tiles, and draw."""
    s = tl.program_id(0).to(tl.int64)
    row = (logits_ptr + s * row_stride, vocab)
    temperature = tl.load(temperature_ptr + s)
    is_greedy = temperature == 0
    divisor = tl.where(is_greedy, 1.0, temperature)
    top_k = tl.where(is_greedy, 0, tl.load(top_k_ptr + s))
    top_p = tl.where(is_greedy, 1.0, tl.load(top_p_ptr + s))
    min_p = tl.where(is_greedy, 0.0, tl.load(min_p_ptr + s))
    cutoff = tl.where(min_p > 0, tl.log(tl.where(min_p > 0, min_p, 1.0)), float("-inf"))

    peak, best = _peak(row, TILE)
    rule = (peak, divisor, cutoff)
    threshold = tl.full((), 0, tl.uint32)
    if (top_k > 0) & (top_k < vocab):
        threshold = _threshold(row, rule, top_k.to(tl.float64), True, TILE)
    if top_p < 1:
        target = top_p.to(tl.float64) * _mass(row, rule, threshold, top_k, TILE)
        by_mass = _threshold(row, rule, target, False, TILE)
        threshold = tl.maximum(threshold, by_mass)
    uniform = tl.load(uniforms_ptr + s)
    drawn, total = _draw(row, rule, threshold, uniform, TILE, TILES)
    token = tl.where(is_greedy, best, drawn)
    scaled = (tl.load(logits_ptr + s * row_stride + token) - peak) / divisor
    tl.store(tokens_ptr + s, token.to(tl.int64))
    tl.store(logprobs_ptr + s, scaled - tl.log(total))
