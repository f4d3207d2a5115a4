"""Columns of a batch for token attachments: routed experts, kept sampling sets, top log-probs.

Called by ``batch_of_rows``; reads the :class:`TurnAttachments` of each rollout's turns. Most
batches have none. Built on ``core/token_attachments.py`` and numpy.

Letters in shapes: N tokens of all rows, M kept tokens of all tokens, L mixture layers, k experts
per token.
"""

from collections.abc import Iterator, Sequence
from math import inf, nan

import numpy as np
import torch

from tidegate.orchestrator.batches.version_runs import Int64s
from tidegate.orchestrator.core.rollout import Rollout, Turn
from tidegate.orchestrator.core.token_attachments import RoutedExperts
from tidegate.transport.attachments import AttachmentName

UNKNOWN: dict[AttachmentName, float] = {
    "raw_logprobs": nan,
    "top_ids": 0,
    "top_logprobs": -inf,
    "hidden_states": 0,
    "teacher_logprobs": nan,
    "teacher_top_ids": 0,
    "teacher_top_logprobs": -inf,
}
"""Attachments by token that are not ragged, with the values of sampled tokens whose attachment is
not known."""


def attachment_columns(rollouts: Sequence[Rollout], lengths: Int64s) -> dict[str, torch.Tensor]:
    """Return the columns of rows whose contexts have ``lengths`` [R] tokens, by their names in
    :class:`PackedBatch`. Attachments that no turn requested are omitted."""
    if not [turn for row in rollouts for turn in row.turns if turn.attachments]:
        return {}
    columns = _routed_experts(rollouts, lengths) | _kept_tokens(rollouts, lengths)
    for name in UNKNOWN:
        if (column := _entries(rollouts, lengths, name)) is not None:
            columns[name] = column
    return columns


def _turns(rollouts: Sequence[Rollout], lengths: Int64s) -> Iterator[tuple[int, int, Turn]]:
    """Yield each turn with attachments, with its row's first token and number of tokens."""
    firsts = np.cumsum(lengths) - lengths
    for row, first, length in zip(rollouts, firsts.tolist(), lengths.tolist(), strict=True):
        for turn in row.turns:
            if turn.attachments is not None:
                yield first, length, turn


def _entries(
    rollouts: Sequence[Rollout], lengths: Int64s, name: AttachmentName
) -> torch.Tensor | None:
    """Return an attachment of all tokens [N, *shape]; None if no turn has any. Where turns have
    entries of different sizes, shorter ones are filled up."""
    pieces = [
        (first + turn.start, entries)
        for first, _, turn in _turns(rollouts, lengths)
        if turn.attachments is not None
        and (entries := turn.attachments.entries(name, turn.length)) is not None
    ]
    if not pieces:
        return None
    shape = np.max([entries.shape[1:] for _, entries in pieces], axis=0).astype(int)
    given = -inf if name.endswith("top_logprobs") else 0
    out = np.full((int(lengths.sum()), *shape), given, pieces[0][1].dtype)
    firsts = (np.cumsum(lengths) - lengths).tolist()
    for row, first in zip(rollouts, firsts, strict=True):
        for turn in row.turns:
            out[first + turn.start : first + turn.start + turn.length] = UNKNOWN[name]
    for start, entries in pieces:
        out[start : start + len(entries), *map(slice, entries.shape[1:])] = entries
    return torch.from_numpy(out)


def _routed_experts(rollouts: Sequence[Rollout], lengths: Int64s) -> dict[str, torch.Tensor]:
    """Return the last report of each position, and which positions have one."""
    reports: list[tuple[int, int, RoutedExperts]] = [
        (first, length, report)
        for first, length, turn in _turns(rollouts, lengths)
        if turn.attachments is not None
        for report in turn.attachments.expert_reports()
    ]
    if not reports:
        return {}
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
    return {
        "routed_experts": torch.from_numpy(out),
        "routed_experts_mask": torch.from_numpy(known),
    }


def _kept_tokens(rollouts: Sequence[Rollout], lengths: Int64s) -> dict[str, torch.Tensor]:
    """Return all kept sets, joined, and the size of each token's."""
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
        return {}
    ids = np.concatenate(pieces) if pieces else np.empty(0, np.int32)
    return {
        "kept_ids": torch.from_numpy(ids.astype(np.int32)),
        "kept_counts": torch.from_numpy(counts),
    }
