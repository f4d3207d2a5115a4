"""Which token comes next, and how likely was it? Temperature, top-k, top-p, then a draw.

It knows nothing of turns or seeds: the uniform numbers are arguments. The options are numpy
columns because the host decides by them which work is done at all.

Letters in shapes: S rows to sample, V vocabulary, N candidates of one draw.
"""

import numpy as np
import numpy.typing as npt
import torch

DRAW_BLOCK = 512
"""Probabilities summed into one: of 152 k tokens 297 blocks, so neither level is long."""

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
        :func:`processed_logprobs`.
    """
    logprobs = processed_logprobs(logits, temperature, top_k, top_p)
    greedy = temperature == 0
    if greedy.all():
        chosen = logits.argmax(-1)
    else:
        chosen = draw(logprobs.exp(), torch.from_numpy(uniforms))
        if greedy.any():
            chosen = torch.where(torch.from_numpy(greedy), logits.argmax(-1), chosen)
    return chosen, logprobs.gather(-1, chosen[:, None]).squeeze(-1)


def processed_logprobs(
    logits: torch.Tensor,
    temperature: npt.NDArray[np.float32],
    top_k: npt.NDArray[np.int64],
    top_p: npt.NDArray[np.float32],
) -> torch.Tensor:
    """Return the log-probabilities [S, V] really sampled from, renormalised after all options.

    Temperature comes first, then top-k, then top-p of what top-k left. Tokens that tie with the
    last one kept are kept too. Rows of temperature 0 give those at temperature 1, without limits.
    Arguments are those of :func:`sample`.
    """
    greedy = temperature == 0
    divisors = np.where(greedy, np.float32(1), temperature)
    if (divisors != 1).any():
        # Largest logit at 0, lest a tiny temperature make infinities.
        logits = (logits - logits.amax(-1, keepdim=True)) / torch.from_numpy(divisors)[:, None]
    limited = np.flatnonzero(~greedy & ((top_k > 0) | (top_p < 1)))
    if limited.size:
        rows = torch.from_numpy(limited)
        kept = _limit(logits.index_select(0, rows), top_k[limited], top_p[limited])
        logits = logits.index_copy(0, rows, kept)
    return torch.log_softmax(logits, -1)


def _limit(
    logits: torch.Tensor, top_k: npt.NDArray[np.int64], top_p: npt.NDArray[np.float32]
) -> torch.Tensor:
    """Set what top-k and top-p leave out to -inf. [S, V]

    Ranks only as many tokens as the largest top-k needs; a threshold per row does the rest, so
    nothing has to be scattered back, and ties are kept however ranking orders them.
    """
    vocab = logits.shape[-1]
    keep_most = np.where(top_k > 0, np.minimum(top_k, vocab), vocab)
    width = int(keep_most.max())
    ranked = logits.topk(width).values if width < vocab else logits.sort(descending=True).values
    most = torch.from_numpy(keep_most)[:, None]
    ranked = ranked.masked_fill(torch.arange(width) >= most, -torch.inf)
    probabilities = torch.softmax(ranked, -1)
    mass_before = probabilities.cumsum(-1) - probabilities
    # Rounding may bring the sum to 1 early; top_p = 1 still keeps every token.
    mass = torch.from_numpy(np.where(top_p < 1, top_p, np.float32(np.inf)))[:, None]
    kept = (mass_before < mass).sum(-1, keepdim=True).clamp(min=1).minimum(most)
    threshold = ranked.gather(-1, kept - 1)
    return logits.masked_fill(logits < threshold, -torch.inf)


def draw(probabilities: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Invert the cumulative distribution: first to a block of tokens, then within it.

    Args:
        probabilities: [S, V], float32, each row summing to about 1.
        uniforms: [S], float64, in [0, 1).

    Returns:
        [S], int64, never a token of probability 0.
    """
    vocab = probabilities.shape[-1]
    if vocab <= DRAW_BLOCK:
        return _pick(probabilities, uniforms)[0]
    whole = vocab - vocab % DRAW_BLOCK
    sums = torch.unflatten(probabilities[:, :whole], -1, (-1, DRAW_BLOCK)).sum(-1)
    if whole < vocab:
        sums = torch.cat([sums, probabilities[:, whole:].sum(-1, keepdim=True)], -1)
    block, uniforms = _pick(sums, uniforms)
    candidates = (block * DRAW_BLOCK)[:, None] + torch.arange(DRAW_BLOCK)
    within = probabilities.gather(-1, candidates.clamp(max=vocab - 1))
    within = within.masked_fill(candidates >= vocab, 0.0)
    return (block * DRAW_BLOCK + _pick(within, uniforms)[0]).clamp_(max=vocab - 1)


def _pick(weights: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pick an index [S] in proportion to ``weights`` [S, N], and return a uniform that is left.

    The first index whose cumulative weight exceeds the target has a weight above 0, for there the
    sum grew. Where rounding puts the target at the total, the first index that reaches the total
    is taken, which has one for the same reason. The rest of the target, as a share of the weight
    picked, is uniform again: the next level's random number.
    """
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:].contiguous()
    target = uniforms[:, None] * total
    index = torch.searchsorted(cumulative, target, right=True)
    index = index.minimum(torch.searchsorted(cumulative, total))
    index.clamp_(max=weights.shape[-1] - 1)  # NaN weights: the log-probability tells, not a crash
    weight = weights.gather(-1, index).double()
    rest = (target - (cumulative.gather(-1, index) - weight)) / weight
    return index.squeeze(-1), rest.squeeze(-1).clamp(0.0, UNIFORM_MAX)
