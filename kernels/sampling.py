"""Sampling on the CPU with torch: temperature, min-p, top-k, top-p, the draw, and log-probs.

The uniform random numbers are arguments. Options are numpy columns, because the host decides from
them which work to skip.

Letters in shapes: S rows to sample, V vocabulary, N block sums of a draw, R rows with limits.
"""

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

DRAW_BLOCK = 512
"""Probabilities per block sum: 297 blocks for 152 k tokens, so neither level of
the search is long."""

RANKED_FIRST = 128
"""Tokens ranked for a top-p: trained models mostly reach theirs within a hundred."""

RANKED_GROWTH = 16
"""Factor by which the ranked tokens grow if too few: 2,048, then 32,768, then all."""

UNIFORM_MAX = 1.0 - 2.0**-53
"""The largest double below 1."""


def sample(
    logits: torch.Tensor,
    temperature: npt.NDArray[np.float32],
    top_k: npt.NDArray[np.int64],
    top_p: npt.NDArray[np.float32],
    uniforms: npt.NDArray[np.float64],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row.

    Args:
        logits: [S, V], float32.
        temperature: [S], 0 takes the most likely token.
        top_k: [S], keeps that many most likely tokens; 0 keeps all.
        top_p: [S], keeps the fewest most likely tokens that together have at least this.
        uniforms: [S], in [0, 1).

    Returns:
        Token ids [S], int64, and their log-probabilities [S], float32, under the distribution of
        :func:`weigh`.
    """
    distribution = weigh(logits, temperature, top_k, top_p)
    chosen = distribution.draw(temperature, uniforms)
    return chosen, distribution.logprobs(chosen[:, None]).squeeze(-1)


@dataclass(frozen=True, slots=True)
class TokenDistribution:
    """Rows of logits with their weights in a draw; no [S, V] of log-probabilities is made."""

    logits: torch.Tensor
    """[S, V], float32, divided by the temperature."""
    peaks: torch.Tensor
    """[S, 1], float32: the largest logit of each row."""
    weights: torch.Tensor
    """[S, V], float32: ``exp(logits - peaks)``, and 0 for excluded tokens."""
    sums: torch.Tensor
    """[S, N], float32: sums of ``DRAW_BLOCK`` weights each."""
    cutoffs: torch.Tensor | None = None
    """[S, 1], float32: lower logits are excluded; -inf in rows that keep all."""

    def draw(
        self, temperature: npt.NDArray[np.float32], uniforms: npt.NDArray[np.float64]
    ) -> torch.Tensor:
        """Return one token [S] per row: drawn by weight, or the most likely at temperature 0."""
        greedy = temperature == 0
        if greedy.all():
            return self.logits.argmax(-1)
        chosen = draw(self.weights, torch.from_numpy(uniforms), self.sums)
        if greedy.any():
            chosen = torch.where(torch.from_numpy(greedy), self.logits.argmax(-1), chosen)
        return chosen

    def logprobs(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities [S, k], float32, of tokens ``token_ids`` [S, k];
        -inf if excluded."""
        return self._logprobs(self.logits.gather(-1, token_ids), slice(None))

    def likeliest(self, count: int, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids and log-probs [len(rows), count] of some rows' top tokens, in order."""
        logits = self.logits if len(rows) == len(self.logits) else self.logits[rows]
        values, token_ids = logits.topk(count)
        return token_ids, self._logprobs(values, rows)

    def kept(self, rows: list[int]) -> list[bytes]:
        """Return the ids of the tokens that each row keeps, int32, in ascending order; empty if
        all."""
        logits = self.logits if len(rows) == len(self.logits) else self.logits[rows]
        kept = logits > -torch.inf
        if self.cutoffs is not None:
            kept &= logits >= self.cutoffs[rows]
        flags = kept.numpy()
        token_ids = np.nonzero(flags)[1].astype(np.int32).tobytes()
        counts = np.count_nonzero(flags, axis=1).tolist()
        ends = [4 * end for end in accumulate(counts)]
        vocab = flags.shape[1]
        return [
            b"" if count == vocab else token_ids[end - 4 * count : end]
            for count, end in zip(counts, ends, strict=True)
        ]

    def _logprobs(self, logits: torch.Tensor, rows: list[int] | slice) -> torch.Tensor:
        """Subtract the peak first and in float32, so that the bits do not depend on whether it has
        been subtracted before, which happens if another row has a temperature."""
        log_sums = self.sums[rows].sum(-1, keepdim=True, dtype=torch.float64).log()
        result = ((logits - self.peaks[rows]).double() - log_sums).float()
        if self.cutoffs is None:
            return result
        return result.masked_fill(logits < self.cutoffs[rows], -torch.inf)

    def without(self, cutoffs: torch.Tensor) -> "TokenDistribution":
        """Exclude logits lower than ``cutoffs``, too. The weights are changed in place."""
        # Faster than masked_fill, and far faster than exp of -inf.
        kept = torch.ge(self.logits, cutoffs, out=torch.empty_like(self.weights))
        weights = self.weights.mul_(kept)
        if self.cutoffs is not None:
            cutoffs = cutoffs.maximum(self.cutoffs)
        return TokenDistribution(self.logits, self.peaks, weights, _block_sums(weights), cutoffs)


def weigh(
    logits: torch.Tensor,
    temperature: npt.NDArray[np.float32],
    top_k: npt.NDArray[np.int64],
    top_p: npt.NDArray[np.float32],
    min_p: npt.NDArray[np.float32] | None = None,
) -> TokenDistribution:
    """Prepare the draw from logits [S, V].

    Temperature comes first, then min-p, then top-k, then top-p of what they left. Tokens that tie
    with the last one kept are kept too. Rows of temperature 0 are weighed at temperature 1, without
    limits. ``min_p`` [S] keeps tokens with at least that share of the most likely one's
    probability; 0 keeps all. The other arguments are those of :func:`sample`.
    """
    greedy = temperature == 0
    divisors = np.where(greedy, np.float32(1), temperature)
    is_limited = (top_k > 0).any() or (top_p < 1).any() or min_p is not None
    if is_limited or (divisors != 1).any():
        # Largest logit at 0, so that a tiny temperature makes no infinities. Also whenever rounding
        # decides what is kept, so that a row's set does not depend on other rows' options.
        logits = (logits - logits.amax(-1, keepdim=True)) / torch.from_numpy(divisors)[:, None]
    distribution = weights_of(logits)
    if min_p is not None and (min_p[~greedy] > 0).any():
        with np.errstate(divide="ignore"):
            below_peak = np.log(np.where(greedy, np.float32(0), min_p))
        distribution = distribution.without(
            distribution.peaks + torch.from_numpy(below_peak)[:, None]
        )
    limited = np.flatnonzero(~greedy & ((top_k > 0) | (top_p < 1)))
    if limited.size:
        distribution = distribution.without(_cutoffs(distribution, limited, top_k, top_p))
    return distribution


def weights_of(logits: torch.Tensor) -> TokenDistribution:
    """Weigh logits [S, V] as they are.

    Sums are blockwise, because a float32 ``torch.log_softmax`` loses terms that are small beside
    the largest; an error of 1e-4 was seen with 152 k tokens.
    """
    peaks = logits.amax(-1, keepdim=True)
    weights = (logits - peaks).exp_()
    return TokenDistribution(logits, peaks, weights, _block_sums(weights))


def _cutoffs(
    distribution: TokenDistribution,
    limited: npt.NDArray[np.int64],
    top_k: npt.NDArray[np.int64],
    top_p: npt.NDArray[np.float32],
) -> torch.Tensor:
    """Return the last logit that top-k and top-p keep in the rows ``limited``; -inf
    in others. [S, 1]

    A threshold needs no scatter, and keeps ties whatever their order. Ranking a whole large
    vocabulary takes thirty times as long as drawing from it, so more tokens are ranked only in rows
    that do not reach their top-p.
    """
    vocab = distribution.logits.shape[-1]
    kept_max = np.where(top_k > 0, np.minimum(top_k, vocab), vocab)
    width = min(vocab, int(np.where(top_k > 0, kept_max, RANKED_FIRST)[limited].max()))
    cutoffs = torch.full_like(distribution.peaks, -torch.inf)
    pending = limited
    while pending.size:
        result, is_decided = _cutoffs_within(
            width, distribution, pending, kept_max[pending], top_p[pending]
        )
        cutoffs[torch.from_numpy(pending)] = result
        pending = pending[~is_decided]
        width = min(vocab, RANKED_GROWTH * width)
    return cutoffs


def _cutoffs_within(
    width: int,
    distribution: TokenDistribution,
    pending: npt.NDArray[np.int64],
    kept_max: npt.NDArray[np.int64],
    top_p: npt.NDArray[np.float32],
) -> tuple[torch.Tensor, npt.NDArray[np.bool_]]:
    """Return the last logit kept in each row ``pending`` [R, 1], and whether ``width``
    ranks decide it [R].

    Sums are in double and in the order of ranks, so they do not depend on ``width``, which depends
    on the other rows.
    """
    rows, kept_max_column = torch.from_numpy(pending), torch.from_numpy(kept_max)[:, None]
    is_all = pending.size == len(distribution.logits)
    logits = distribution.logits if is_all else distribution.logits.index_select(0, rows)
    vocab = logits.shape[-1]
    ranked = logits.topk(width).values if width < vocab else logits.sort(descending=True).values
    is_excluded = torch.arange(width) >= kept_max_column
    if distribution.cutoffs is not None:
        is_excluded |= ranked < distribution.cutoffs[rows]
    weights = (ranked - distribution.peaks[rows]).exp().masked_fill_(is_excluded, 0.0).double()
    mass = weights.cumsum(-1)
    full_mass = distribution.sums[rows].sum(-1, keepdim=True, dtype=torch.float64)
    total = torch.where(kept_max_column == vocab, full_mass, mass[:, -1:])
    # Rounding may bring the sum to the total early; top_p = 1 still keeps every token.
    share = torch.from_numpy(np.where(top_p < 1, top_p, np.inf))[:, None]
    kept = (
        (mass - weights < share * total).sum(-1, keepdim=True).clamp(min=1).minimum(kept_max_column)
    )
    is_decided = (kept < width) | (kept_max_column <= width)
    return ranked.gather(-1, kept - 1), is_decided.squeeze(-1).numpy()


def draw(
    weights: torch.Tensor, uniforms: torch.Tensor, sums: torch.Tensor | None = None
) -> torch.Tensor:
    """Invert the cumulative distribution: first to a block of tokens, then within it.

    Args:
        weights: [S, V], float32.
        uniforms: [S], float64, in [0, 1).
        sums: [S, N], the weights' :func:`_block_sums`, if they are known.

    Returns:
        [S], int64, never a token of weight 0.
    """
    vocab = weights.shape[-1]
    if vocab <= DRAW_BLOCK:
        return _pick(weights, uniforms)[0]
    block, uniforms = _pick(_block_sums(weights) if sums is None else sums, uniforms)
    candidates = (block * DRAW_BLOCK)[:, None] + torch.arange(DRAW_BLOCK)
    within = weights.gather(-1, candidates.clamp(max=vocab - 1))
    within = within.masked_fill(candidates >= vocab, 0.0)
    return (block * DRAW_BLOCK + _pick(within, uniforms)[0]).clamp_(max=vocab - 1)


def _block_sums(weights: torch.Tensor) -> torch.Tensor:
    """Return sums of ``DRAW_BLOCK`` weights each [S, N], independent of the number of rows."""
    vocab = weights.shape[-1]
    if vocab <= DRAW_BLOCK:
        return weights.sum(-1, keepdim=True)
    full_blocks = vocab - vocab % DRAW_BLOCK
    sums = torch.unflatten(weights[:, :full_blocks], -1, (-1, DRAW_BLOCK)).sum(-1)
    if full_blocks == vocab:
        return sums
    return torch.cat([sums, weights[:, full_blocks:].sum(-1, keepdim=True)], -1)


def _pick(weights: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pick an index [S] in proportion to ``weights`` [S, N]; return it with a new uniform number.

    The first index whose cumulative weight exceeds the target has a positive weight, because the
    sum grew there. If rounding puts the target at the total, the first index that reaches the total
    is taken, which is positive for the same reason. The rest of the target, as a share of the
    picked weight, is uniform again: the next level's random number.
    """
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:].contiguous()
    target = uniforms[:, None] * total
    index = torch.searchsorted(cumulative, target, right=True)
    index = index.minimum(torch.searchsorted(cumulative, total))
    index.clamp_(max=weights.shape[-1] - 1)  # NaN weights: a NaN log-prob, not a crash
    weight = weights.gather(-1, index).double()
    remainder = (target - (cumulative.gather(-1, index) - weight)) / weight
    return index.squeeze(-1), remainder.squeeze(-1).clamp(0.0, UNIFORM_MAX)
