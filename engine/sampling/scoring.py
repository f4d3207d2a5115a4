"""Scores given tokens from their hidden states: log-probs, top log-probs, rewards and embeddings.

Nothing is sampled. ``scheduling/score_queue.py`` queues the requests, divides them into chunks and
joins the chunks' scores.

Letters in shapes: P positions scored, k top tokens, H hidden size, L labels, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from tidegate.engine.models.model import head_logits
from tidegate.engine.models.model_weights import Weights
from tidegate.transport.scoring import ScoreKind

Reads = Literal["logprobs", "hidden_states", "sum", "rewards"]
"""What is computed for a chunk: the given tokens' log-probs, the hidden states, their sum, or the
classification head's output at the last position."""

HIDDEN_STATE_SCORES: tuple[ScoreKind, ...] = ("embedding", "mean_embedding", "hidden_states")
"""Scores that are computed without a head. Tidegate's own models support all of them, and models
computed by transformers if they have an output embedding."""

LOGITS_MAX = 8 * 1024 * 1024
"""Largest number of logits in memory at once: 32 MB of float32, 55 tokens of a vocabulary of
151,936."""

VOCAB_PART = 4096
"""Logits per partial sum: a token's exponentials are summed in parts, and the sums combined."""

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringCapabilities:
    """Scores that a model can compute for given tokens."""

    hidden_size: int
    score_kinds: tuple[ScoreKind, ...] = ()
    labels: int = 0
    """Number of outputs of the classification head; 0 without one."""
    pad_token_id: int | None = None
    """Padding token that a classification head skips at a sequence's end."""
    image_token_id: int | None = None
    """Placeholder of images, which scoring doesn't read; None if the model reads no images."""

    @property
    def generates(self) -> bool:
        """Whether tokens can be sampled from the model."""
        return self.labels == 0


@dataclass(frozen=True, slots=True)
class RowScoring:
    """Scoring options of a row: which positions, and which values."""

    positions: int
    """P, the number of the row's last tokens to score."""
    reads: Reads
    token_ids: npt.NDArray[np.int32]
    """[P], the token after each scored position; empty unless log-probs are requested."""
    top_logprobs: int = 0
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class RowScore:
    """Scores of a row's chunk; fields that were not requested are None."""

    logprobs: Floats | None = None
    """Natural-log probability of each given token, [P]."""
    top_ids: npt.NDArray[np.int32] | None = None
    """[P, k], most likely first."""
    top_logprobs: Floats | None = None
    """Natural-log probabilities of the likeliest tokens at each position, [P, k]."""
    ranks: npt.NDArray[np.int32] | None = None
    """[P], rank of the given token, 1 for the most likely; only with top log-probs."""
    values: Floats | None = None
    """[P, H] hidden states; [1, H] their sum, for a mean embedding; [1, L] rewards."""


def score_rows(
    weights: Weights, hidden: torch.Tensor, rows: Sequence[RowScoring]
) -> list[RowScore]:
    """Score rows from their concatenated normed hidden states ``hidden`` [sum of P, H]."""
    parts = hidden.split_with_sizes([row.positions for row in rows])
    return [_score(weights, part, row) for row, part in zip(rows, parts, strict=True)]


def score_logits(logits: torch.Tensor, row: RowScoring) -> RowScore:
    """Return the log-probs [P] of a row from its logits [P, V], float32, which are overwritten."""
    logits.div_(row.temperature)
    # In parts: exponentials stay in the CPU caches, and small terms are not lost in a long sum.
    parts = [part.logsumexp(-1) for part in torch.split(logits, VOCAB_PART, -1)]
    log_z = torch.stack(parts).logsumexp(0)
    token_ids = torch.from_numpy(row.token_ids).long().to(logits.device)
    token_logits = logits.gather(-1, token_ids[:, None])
    logprobs = (token_logits.squeeze(-1) - log_z).cpu().numpy()
    if not row.top_logprobs:
        return RowScore(logprobs=logprobs)
    top = logits.topk(row.top_logprobs, -1)
    return RowScore(
        logprobs=logprobs,
        top_ids=top.indices.cpu().numpy().astype(np.int32),
        top_logprobs=(top.values - log_z[:, None]).cpu().numpy(),
        ranks=((logits > token_logits).sum(-1) + 1).cpu().numpy().astype(np.int32),
    )


def score_hidden(hidden: torch.Tensor, row: RowScoring) -> RowScore:
    """Return a row's hidden states [P, H], or their sum."""
    states = hidden.float()
    values = states.sum(0, keepdim=True) if row.reads == "sum" else states
    return RowScore(values=values.cpu().numpy())


def join_scores(scores: Sequence[RowScore]) -> RowScore:
    """Concatenate the scores of successive chunks; sums [1, H] become [chunks, H]."""

    def join(columns: Sequence[Any]) -> Any:
        return None if columns[0] is None else np.concatenate(columns)

    return RowScore(
        logprobs=join([score.logprobs for score in scores]),
        top_ids=join([score.top_ids for score in scores]),
        top_logprobs=join([score.top_logprobs for score in scores]),
        ranks=join([score.ranks for score in scores]),
        values=join([score.values for score in scores]),
    )


def in_pieces(row: RowScoring, vocab_size: int) -> Iterator[tuple[slice, RowScoring]]:
    """Yield parts of a row's positions with at most ``LOGITS_MAX`` logits each."""
    positions_max = max(1, LOGITS_MAX // vocab_size)
    for start in range(0, row.positions, positions_max):
        part = slice(start, min(row.positions, start + positions_max))
        token_ids = row.token_ids[part]
        yield part, replace(row, positions=part.stop - start, token_ids=token_ids)


def _score(weights: Weights, hidden: torch.Tensor, row: RowScoring) -> RowScore:
    if row.reads == "rewards":
        return RowScore(values=weights.logits(hidden[-1:]).cpu().numpy())
    if row.reads != "logprobs":
        return score_hidden(hidden, row)
    pieces = in_pieces(row, weights.config.vocab_size)
    return join_scores(
        [
            score_logits(head_logits(weights, hidden[positions]), piece)
            for positions, piece in pieces
        ]
    )
