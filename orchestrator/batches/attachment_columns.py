"""Columns of a batch for token attachments, laid out by their kind in :data:`ATTACHMENTS`.

Reads the :class:`TurnAttachments` of each rollout's turns. Most batches have none.

Letters in shapes: N tokens of all rows, M values of all tokens.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tidegate.orchestrator.batches.version_runs import Int64s
from tidegate.orchestrator.core.rollout import Rollout
from tidegate.orchestrator.core.token_attachments import TurnAttachments
from tidegate.transport.attachments import ATTACHMENTS, AttachmentName


class _Turn(NamedTuple):
    row: range
    """The row's tokens in [N]."""
    tokens: range
    """The turn's output tokens in [N]."""
    attachments: TurnAttachments | None


def attachment_columns(rollouts: Sequence[Rollout], lengths: Int64s) -> dict[str, torch.Tensor]:
    """Return the columns of rows whose contexts have ``lengths`` [R] tokens, by their names in
    :class:`AttachmentColumns`. Attachments that no turn requested are omitted."""
    if not [turn for row in rollouts for turn in row.turns if turn.attachments]:
        return {}
    turns, total = list(_turns(rollouts, lengths)), int(lengths.sum())
    columns: dict[str, torch.Tensor] = {}
    for name, kind in ATTACHMENTS.items():
        lay_out = _ragged if kind.is_ragged else _by_token
        columns |= (_by_position if kind.axis == "position" else lay_out)(turns, total, name)
    return columns


def _turns(rollouts: Sequence[Rollout], lengths: Int64s) -> Iterator[_Turn]:
    """Yield the turns of all rows."""
    ends = np.cumsum(lengths).tolist()
    for row, end, length in zip(rollouts, ends, lengths.tolist(), strict=True):
        of_row = range(end - length, end)
        for turn in row.turns:
            tokens = of_row[turn.start : turn.start + turn.length]
            yield _Turn(of_row, tokens, turn.attachments)


def _by_token(turns: Sequence[_Turn], total: int, name: AttachmentName) -> dict[str, torch.Tensor]:
    """Return an attachment of all tokens [N, *shape]. Where turns have entries of different sizes,
    shorter ones are filled up."""
    pieces = [
        (turn.tokens, entries)
        for turn in turns
        if turn.attachments is not None
        and (entries := turn.attachments.entries(name, len(turn.tokens))) is not None
    ]
    if not pieces:
        return {}
    kind = ATTACHMENTS[name]
    shape = np.max([entries.shape[1:] for _, entries in pieces], axis=0).astype(int)
    out = np.full((total, *shape), kind.padding, pieces[0][1].dtype)
    for turn in turns:
        out[turn.tokens.start : turn.tokens.stop] = kind.unknown
    for tokens, entries in pieces:
        out[tokens.start : tokens.stop, *map(slice, entries.shape[1:])] = entries
    return {name: torch.from_numpy(out)}


def _by_position(
    turns: Sequence[_Turn], total: int, name: AttachmentName
) -> dict[str, torch.Tensor]:
    """Return the last report of each position, and which positions have one."""
    reports = [
        (turn.row[report.start : report.start + len(report.entries)], report.entries)
        for turn in turns
        if turn.attachments is not None
        for report in turn.attachments.reports(name)
    ]
    if not reports:
        return {}
    # torch computes with uint8, but not with uint16.
    dtype = np.uint8 if reports[0][1].dtype == np.uint8 else np.int16
    out = np.zeros((total, *reports[0][1].shape[1:]), dtype)
    known = np.zeros(total, np.bool_)
    for at, entries in reports:
        if entries.shape[1:] == out.shape[1:]:
            out[at.start : at.stop] = entries[: len(at)]
            known[at.start : at.stop] = True
    return {name: torch.from_numpy(out), ATTACHMENTS[name].companion: torch.from_numpy(known)}


def _ragged(turns: Sequence[_Turn], total: int, name: AttachmentName) -> dict[str, torch.Tensor]:
    """Return the values of all tokens [M], joined, and each token's number of values [N]."""
    counts = np.zeros(total, np.int32)
    pieces: list[npt.NDArray[np.int32]] = [np.empty(0, np.int32)]
    is_known = False
    for _, tokens, attachments in turns:
        if attachments and (values := attachments.ragged_entries(name, len(tokens))) is not None:
            is_known = True
            pieces += values
            counts[tokens.start : tokens.stop] = [len(each) for each in values]
    if not is_known:
        return {}
    values_of_all = torch.from_numpy(np.concatenate(pieces))
    return {name: values_of_all, ATTACHMENTS[name].companion: torch.from_numpy(counts)}
