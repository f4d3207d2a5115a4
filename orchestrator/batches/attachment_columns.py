"""Columns of a batch for token attachments, laid out by their kind in :data:`ATTACHMENTS`.

Reads the :class:`TurnAttachments` of each rollout's turns. Most batches have none.

Letters in shapes: N tokens of all rows, M values of all tokens.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from tidegate.orchestrator.batches.version_runs import Int64s
from tidegate.orchestrator.core.rollout import Rollout
from tidegate.orchestrator.core.token_attachments import PositionReport, TurnAttachments
from tidegate.transport.attachments import ATTACHMENTS, AttachmentName


def attachment_columns(rollouts: Sequence[Rollout], lengths: Int64s) -> dict[str, torch.Tensor]:
    """Return the columns of rows whose contexts have ``lengths`` [R] tokens, by their names in
    :class:`PackedBatch`. Attachments that no turn requested are omitted."""
    if not [turn for row in rollouts for turn in row.turns if turn.attachments]:
        return {}
    columns: dict[str, torch.Tensor] = {}
    for name, kind in ATTACHMENTS.items():
        if kind.axis == "position":
            columns |= _by_position(rollouts, lengths, name)
        elif kind.is_ragged:
            columns |= _ragged(rollouts, lengths, name)
        else:
            columns |= _by_token(rollouts, lengths, name)
    return columns


def _turns(rollouts: Sequence[Rollout], lengths: Int64s) -> Iterator[tuple[range, TurnAttachments]]:
    """Yield the attachments of each turn that has any, with the turn's output tokens in [N]."""
    firsts = np.cumsum(lengths) - lengths
    for row, first in zip(rollouts, firsts.tolist(), strict=True):
        for turn in row.turns:
            if turn.attachments is not None:
                start = first + turn.start
                yield range(start, start + turn.length), turn.attachments


def _by_token(
    rollouts: Sequence[Rollout], lengths: Int64s, name: AttachmentName
) -> dict[str, torch.Tensor]:
    """Return an attachment of all tokens [N, *shape]. Where turns have entries of different sizes,
    shorter ones are filled up."""
    pieces = [
        (tokens, entries)
        for tokens, attachments in _turns(rollouts, lengths)
        if (entries := attachments.entries(name, len(tokens))) is not None
    ]
    if not pieces:
        return {}
    kind = ATTACHMENTS[name]
    shape = np.max([entries.shape[1:] for _, entries in pieces], axis=0).astype(int)
    out = np.full((int(lengths.sum()), *shape), kind.padding, pieces[0][1].dtype)
    firsts = (np.cumsum(lengths) - lengths).tolist()
    for row, first in zip(rollouts, firsts, strict=True):
        for turn in row.turns:
            out[first + turn.start : first + turn.start + turn.length] = kind.unknown
    for tokens, entries in pieces:
        out[tokens.start : tokens.stop, *map(slice, entries.shape[1:])] = entries
    return {name: torch.from_numpy(out)}


def _by_position(
    rollouts: Sequence[Rollout], lengths: Int64s, name: AttachmentName
) -> dict[str, torch.Tensor]:
    """Return the last report of each position, and which positions have one."""
    firsts = (np.cumsum(lengths) - lengths).tolist()
    reports: list[tuple[range, PositionReport]] = [
        (range(first, first + length), report)
        for row, first, length in zip(rollouts, firsts, lengths.tolist(), strict=True)
        for turn in row.turns
        if turn.attachments is not None
        for report in turn.attachments.reports(name)
    ]
    if not reports:
        return {}
    first_entries = reports[0][1].entries
    # torch computes with uint8, but not with uint16.
    dtype = np.uint8 if first_entries.dtype == np.uint8 else np.int16
    out = np.zeros((int(lengths.sum()), *first_entries.shape[1:]), dtype)
    known = np.zeros(len(out), np.bool_)
    for row_tokens, (start, entries) in reports:
        if entries.shape[1:] == out.shape[1:]:
            at = row_tokens[start : start + len(entries)]
            out[at.start : at.stop] = entries[: len(at)]
            known[at.start : at.stop] = True
    return {name: torch.from_numpy(out), ATTACHMENTS[name].companion: torch.from_numpy(known)}


def _ragged(
    rollouts: Sequence[Rollout], lengths: Int64s, name: AttachmentName
) -> dict[str, torch.Tensor]:
    """Return the values of all tokens [M], joined, and each token's number of values [N]."""
    counts = np.zeros(int(lengths.sum()), np.int32)
    pieces: list[np.ndarray[tuple[int], np.dtype[np.int32]]] = []
    is_known = False
    for tokens, attachments in _turns(rollouts, lengths):
        values = attachments.ragged_entries(name, len(tokens))
        if values is not None:
            is_known = True
            pieces += values
            counts[tokens.start : tokens.stop] = [len(each) for each in values]
    if not is_known:
        return {}
    joined = np.concatenate(pieces) if pieces else np.empty(0, np.int32)
    return {
        name: torch.from_numpy(joined.astype(np.int32)),
        ATTACHMENTS[name].companion: torch.from_numpy(counts),
    }
