"""What does a row say of given tokens? From hidden states to log-probs, rewards and embeddings.

Knows no turns, only what a row asks of its own chunk. Nothing here is sampled.

Letters in shapes: P positions told of, k likeliest tokens, H hidden, L labels, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from tidegate.engine.models.model import head_logits
from tidegate.engine.models.model_weights import Weights
from tidegate.transport.scoring import Want

Reads = Literal["logprobs", "hidden_states", "sum", "rewards"]
"""Of the chunk's hidden states: the given tokens' log-probs, they themselves, their sum, or what a
classification head says of the last."""

HIDDEN_WANTS: tuple[Want, ...] = ("embedding", "mean_embedding", "hidden_states")
"""What any model can tell, for it takes no head."""

LOGITS_MAX = 8 * 1024 * 1024
"""There at once: 32 MB of float32, 55 tokens of a vocabulary of 151,936."""

VOCAB_PART = 4096
"""Logits of a token that are summed by themselves."""

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringTraits:
    """What a model can tell of given tokens."""

    hidden_size: int
    wants: tuple[Want, ...] = ()
    labels: int = 0
    """What a classification head tells at once; 0: the model has none."""
    pad_token_id: int | None = None
    """What a classification head passes over at a sequence's end."""

    @property
    def generates(self) -> bool:
        """Whether tokens can be sampled from it."""
        return self.labels == 0


@dataclass(frozen=True, slots=True)
class RowScoring:
    """What a row asks of its tokens."""

    positions: int
    """P: so many of the row's tokens are told of, its last ones."""
    reads: Reads
    token_ids: npt.NDArray[np.int32]
    """[P], the token after each of those; empty unless log-probs are asked for."""
    top_logprobs: int = 0
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class RowScore:
    """What a row's chunk says; what was not asked for is None."""

    logprobs: Floats | None = None
    """[P]"""
    top_ids: npt.NDArray[np.int32] | None = None
    """[P, k], likeliest first."""
    top_logprobs: Floats | None = None
    """[P, k]"""
    ranks: npt.NDArray[np.int32] | None = None
    """[P], of the tokens themselves: 1 is the likeliest. Only beside the likeliest tokens."""
    values: Floats | None = None
    """[P, H]; [1, H] for a sum; [1, L] for rewards."""


def score_rows(
    weights: Weights, hidden: torch.Tensor, rows: Sequence[RowScoring]
) -> list[RowScore]:
    """What rows say whose normed hidden states [all P, H] lie one after another."""
    parts = hidden.split_with_sizes([row.positions for row in rows])
    return [_score(weights, part, row) for row, part in zip(rows, parts, strict=True)]


def score_logits(logits: torch.Tensor, row: RowScoring) -> RowScore:
    """The log-probs [P] of a row whose logits [P, V], float32, there are; they are overwritten."""
    logits.div_(row.temperature)
    # Part by part: its exponentials stay in the caches, and no sum loses small ones to its size.
    parts = [part.logsumexp(-1) for part in torch.split(logits, VOCAB_PART, -1)]
    log_z = torch.stack(parts).logsumexp(0)
    token_ids = torch.from_numpy(row.token_ids).long().to(logits.device)
    own = logits.gather(-1, token_ids[:, None])
    logprobs = (own.squeeze(-1) - log_z).cpu().numpy()
    if not row.top_logprobs:
        return RowScore(logprobs=logprobs)
    top = logits.topk(row.top_logprobs, -1)
    return RowScore(
        logprobs=logprobs,
        top_ids=top.indices.cpu().numpy().astype(np.int32),
        top_logprobs=(top.values - log_z[:, None]).cpu().numpy(),
        ranks=((logits > own).sum(-1) + 1).cpu().numpy().astype(np.int32),
    )


def score_hidden(hidden: torch.Tensor, row: RowScoring) -> RowScore:
    """What a row says that wants its hidden states [P, H], or their sum."""
    wide = hidden.float()
    values = wide.sum(0, keepdim=True) if row.reads == "sum" else wide
    return RowScore(values=values.cpu().numpy())


def join_scores(scores: Sequence[RowScore]) -> RowScore:
    """One of several, of successive positions; sums [1, H] stay apart."""

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
    """Cut a row's positions where their logits would be too many at once."""
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
        [score_logits(head_logits(weights, hidden[at]), piece) for at, piece in pieces]
    )
