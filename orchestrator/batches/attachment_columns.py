"""Columns of a batch for token attachments: routed experts and kept sampling sets.

Called by ``batch_of_rows``; reads the :class:`TurnAttachments` of each rollout's turns. Most
batches have none.

Letters in shapes: N tokens of all rows, M kept tokens of all tokens, L mixture layers, k experts
per token.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tidegate.orchestrator.batches.version_runs import Int64s
from tidegate.orchestrator.core.rollout import Rollout, Turn
from tidegate.orchestrator.core.token_attachments import RoutedExperts


@dataclass(frozen=True, slots=True)
class AttachmentColumns:
    """Attachments of a batch's tokens, row after row; None where no turn requested them."""

    routed_experts: torch.Tensor | None = None
    """[N, L, k], uint8, or int16 for more than 256 experts."""
    routed_experts_mask: torch.Tensor | None = None
    """[N] bool: positions whose routed experts are known."""
    kept_ids: torch.Tensor | None = None
    """[M] int32: ids of the kept tokens, one token's set after the other."""
    kept_counts: torch.Tensor | None = None
    """[N] int32: number of ``kept_ids`` of each token."""


def attachment_columns(rollouts: Sequence[Rollout], lengths: Int64s) -> AttachmentColumns:
    """Return the columns of rows whose contexts have ``lengths`` [R] tokens."""
    if not any(turn.attachments for row in rollouts for turn in row.turns):
        return AttachmentColumns()
    experts, known = _routed_experts(rollouts, lengths) or (None, None)
    kept_ids, kept_counts = _kept_tokens(rollouts, lengths) or (None, None)
    return AttachmentColumns(experts, known, kept_ids, kept_counts)


def _turns(rollouts: Sequence[Rollout], lengths: Int64s) -> Iterator[tuple[int, int, Turn]]:
    """Yield each turn with attachments, with its row's first token and number of tokens."""
    firsts = np.cumsum(lengths) - lengths
    for row, first, length in zip(rollouts, firsts.tolist(), lengths.tolist(), strict=True):
        for turn in row.turns:
            if turn.attachments is not None:
                yield first, length, turn


def _routed_experts(
    rollouts: Sequence[Rollout], lengths: Int64s
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the last report of each position, and which positions have one; None without any."""
    reports: list[tuple[int, int, RoutedExperts]] = [
        (first, length, report)
        for first, length, turn in _turns(rollouts, lengths)
        if turn.attachments is not None
        for report in turn.attachments.expert_reports()
    ]
    if not reports:
        return None
    experts = reports[0][2].experts
    dtype = np.uint8 if experts.dtype == np.uint8 else np.int16
    out = np.zeros((int(lengths.sum()), *experts.shape[1:]), dtype)
    known = np.zeros(len(out), np.bool_)
    for first, length, (start, experts) in reports:
        if experts.shape[1:] != out.shape[1:]:
            continue
        part = experts[: max(0, length - start)]
        out[first + start : first + start + len(part)] = part
        known[first + start : first + start + len(part)] = True
    return torch.from_numpy(out), torch.from_numpy(known)


def _kept_tokens(
    rollouts: Sequence[Rollout], lengths: Int64s
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return all kept sets, joined, and the size of each token's; None if no turn has any."""
    counts = np.zeros(int(lengths.sum()), np.int32)
    pieces: list[np.ndarray[tuple[int], np.dtype[np.int32]]] = []
    is_known = False
    for first, _, turn in _turns(rollouts, lengths):
        kept = turn.attachments.kept_ids(turn.length) if turn.attachments is not None else None
        if kept is None:
            continue
        is_known = True
        pieces += kept
        start = first + turn.start
        counts[start : start + len(kept)] = [len(ids) for ids in kept]
    if not is_known:
        return None
    ids = np.concatenate(pieces) if pieces else np.empty(0, np.int32)
    return torch.from_numpy(ids.astype(np.int32)), torch.from_numpy(counts)
