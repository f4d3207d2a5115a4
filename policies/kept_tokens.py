"""Log-probs over kept sampling sets: a token's probability among the tokens that top-p, top-k and
min-p left.

With top-p, top-k or min-p, an engine samples from the tokens that these leave, and reports
log-probs of that distribution. A trainer that normalises over the whole vocabulary computes lower
log-probs: by -log of the probability that the kept tokens have together. :func:`kept_logprobs`,
public as ``tidegate.kept_logprobs``, normalises over the kept tokens ("keep sampling mask",
DeepSeek-V3.2, arXiv:2512.02556, section 3.1).

Letters in shapes: R rows, T tokens, N tokens of all rows, V vocabulary, M kept tokens of all
tokens.
"""

import torch
from torch import Tensor


def kept_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    kept_ids: Tensor,
    kept_counts: Tensor,
    *,
    temperature: float = 1.0,
) -> Tensor:
    """Return each token's log-prob among the tokens that it was sampled from.

    With a batch's columns, for a causal model whose logits at t - 1 predict token t:

        logprobs = tidegate.kept_logprobs(
            model(batch.token_ids).logits[:, :-1],
            batch.token_ids[:, 1:],
            batch.kept_ids,
            batch.kept_counts[:, 1:],
        )

    Gradients reach the logits of kept tokens only. Accumulated in float32.

    Args:
        logits: [R, T, V] or [N, V], of the distribution before sampling options.
        token_ids: [R, T] or [N], each among its token's kept ones.
        kept_ids: [M], tokens that were left, token after token in the order of ``token_ids``.
        kept_counts: [R, T] or [N], number of kept tokens of each; 0: all V were left.
        temperature: divides the logits, as in sampling.

    Returns:
        float32, of the shape of ``token_ids``; -inf for a token that is not among its kept ones.

    Raises:
        ValueError: the shapes disagree, or ``kept_counts`` don't sum to M.
    """
    if token_ids.shape != logits.shape[:-1] or kept_counts.shape != token_ids.shape:
        raise ValueError(
            f"logits {list(logits.shape)}, token_ids {list(token_ids.shape)} and kept_counts "
            f"{list(kept_counts.shape)} must be [R, T, V], [R, T] and [R, T]"
        )
    total = int(kept_counts.sum())
    if total != len(kept_ids):
        raise ValueError(
            f"kept_counts sum to {total}, but there are {len(kept_ids)} kept_ids; pass the counts "
            "of the same tokens, all of them"
        )
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")
    scaled = logits.reshape(-1, logits.shape[-1]).float() / temperature
    tokens, counts = token_ids.reshape(-1).long(), kept_counts.reshape(-1).long()
    chosen = scaled.gather(-1, tokens[:, None])[:, 0]
    rows = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
    ids = kept_ids.long()
    hits = torch.zeros_like(counts).index_add(0, rows, (ids == tokens[rows]).long())
    logprobs = chosen - _log_sums(scaled, rows, ids, counts == 0)
    return torch.where((hits > 0) | (counts == 0), logprobs, -torch.inf).reshape(token_ids.shape)


def _log_sums(scaled: Tensor, rows: Tensor, ids: Tensor, keeps_all: Tensor) -> Tensor:
    """Return the log of each row's sum of exponentials over its kept tokens [N].

    Kept token ``ids[m]`` belongs to row ``rows[m]`` of ``scaled`` [N, V]; rows of ``keeps_all`` [N]
    have none, and keep all V.
    """
    values = scaled[rows, ids]
    peaks = torch.full_like(scaled[:, 0], -torch.inf)
    peaks = peaks.scatter_reduce(0, rows, values.detach(), "amax")
    peaks = peaks.masked_fill(keeps_all, 0.0)
    sums = torch.zeros_like(peaks).index_add(0, rows, (values - peaks[rows]).exp())
    of_kept = sums.masked_fill(keeps_all, 1.0).log() + peaks
    if not keeps_all.any():
        return of_kept
    return of_kept.index_put((keeps_all.nonzero()[:, 0],), scaled[keeps_all].logsumexp(-1))
