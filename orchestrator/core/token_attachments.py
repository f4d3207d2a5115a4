"""Attachments of one turn, stored entry by entry as steps bring them.

:class:`TurnTracker` appends them for turns whose sampling options request any; ``GeneratedTurn``,
batches, recorders and saved states read them.

Letters in shapes: C output tokens of the turn, P context positions, L mixture layers, k experts per
token or top tokens.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from tidegate.transport.attachments import ATTACHMENTS, Attachment, AttachmentName
from tidegate.transport.messages import SamplingParams


class PositionReport(NamedTuple):
    """Entries of an attachment by position, for the context positions ``[start, start + P)``."""

    start: int
    entries: npt.NDArray[Any]
    """[P, *shape]"""


class AttachmentColumn:
    """Consecutive entries of one attachment, from index ``start`` on."""

    __slots__ = ("_first", "ends", "start", "values")

    def __init__(self, first: Attachment, start: int) -> None:
        """Begin an empty column of entries like those of ``first``."""
        self._first = first
        self.start = start
        self.values = bytearray()
        self.ends: list[int] | None = [0] if ATTACHMENTS[first.name].is_ragged else None
        """For ragged entries: where each ends in ``values``, in bytes, after a 0."""

    @property
    def end(self) -> int:
        """Index after the last entry."""
        if self.ends is not None:
            return self.start + len(self.ends) - 1
        return self.start + len(self.values) // self._first.entry_bytes

    def has_type_of(self, attachment: Attachment) -> bool:
        """Whether entries of ``attachment`` have this column's dtype and shape."""
        first = self._first
        return attachment.dtype == first.dtype and attachment.shape == first.shape

    def truncate(self, end: int) -> None:
        """Drop the entries from index ``end`` on."""
        entries = end - self.start
        if self.ends is not None:
            del self.ends[entries + 1 :]
            del self.values[self.ends[-1] :]
        else:
            del self.values[entries * self._first.entry_bytes :]

    def extend(self, attachment: Attachment) -> None:
        """Append all entries of ``attachment``."""
        self.values += attachment.values
        if self.ends is not None:
            counts = np.frombuffer(attachment.counts, np.uint32).astype(np.int64)
            self.ends += (self.ends[-1] + 4 * counts.cumsum()).tolist()

    def merge_equal(self, attachment: Attachment, start: int) -> bool:
        """Append the entries of ``attachment`` after :attr:`end`, if both agree before it; return
        whether they do. For entries that are not ragged."""
        offset = (start - self.start) * self._first.entry_bytes
        known = bytes(self.values[offset : offset + len(attachment.values)])
        if not attachment.values.startswith(known):
            return False
        self.values += attachment.values[len(known) :]
        return True

    def array(self) -> npt.NDArray[Any]:
        """Return a copy of all entries, [entries, *shape]; of ragged ones their values, joined."""
        values = np.frombuffer(bytes(self.values), self._first.dtype)
        return values if self.ends is not None else values.reshape(-1, *self._first.shape)

    def saved(self) -> Attachment:
        """Return the column as one attachment of turn 0, whose first index is :attr:`start`."""
        counts = b"" if self.ends is None else (np.diff(self.ends) // 4).astype("<u4").tobytes()
        first = self._first
        return Attachment(
            0, first.name, self.start, first.dtype, bytes(self.values), first.shape, counts
        )


class TurnAttachments:
    """Attachments of one turn.

    If an engine omits an entry of a token, or changes the type of entries, the attachment cannot
    be matched with tokens, and is not returned.
    """

    __slots__ = ("_columns", "_reports", "_sampling", "_unusable")

    def __init__(self, sampling: SamplingParams) -> None:
        self._sampling = sampling
        self._columns: dict[AttachmentName, AttachmentColumn] = {}
        """Attachments by output token; each column starts at token 0."""
        self._unusable: set[AttachmentName] = set()
        """Attachments that an engine has omitted for at least one token."""
        self._reports: dict[AttachmentName, list[AttachmentColumn]] = {}
        """Reports of attachments by position, in order; a later report of a position is of newer
        KV."""
        for name, kind in ATTACHMENTS.items():
            if kind.is_added:
                continue
            if not getattr(sampling, kind.option):
                self._unusable.add(name)
            elif kind.axis == "position":
                self._reports[name] = []

    def append(self, attachment: Attachment, *, tokens_before: int) -> None:
        """Store entries of a submission before which the turn had ``tokens_before`` tokens."""
        if ATTACHMENTS[attachment.name].axis == "position":
            self._append_to_positions(attachment)
        elif attachment.name not in self._unusable:
            self._append_to_tokens(attachment, tokens_before + attachment.start)

    def add(self, attachment: Attachment) -> None:
        """Store an attachment that is added to an ended turn, in place of an earlier one."""
        column = self._columns[attachment.name] = AttachmentColumn(attachment, attachment.start)
        column.extend(attachment)

    def _append_to_tokens(self, attachment: Attachment, start: int) -> None:
        column = self._columns.get(attachment.name)
        if column is None:
            column = self._columns[attachment.name] = AttachmentColumn(attachment, 0)
        kind = ATTACHMENTS[attachment.name]
        is_requested = not kind.is_sized_by_option or attachment.shape == [
            getattr(self._sampling, kind.option)
        ]
        if start > column.end or not column.has_type_of(attachment) or not is_requested:
            self._unusable.add(attachment.name)
            del self._columns[attachment.name]
            return
        column.truncate(start)
        column.extend(attachment)

    def _append_to_positions(self, attachment: Attachment) -> None:
        reports = self._reports.get(attachment.name)
        if reports is None:
            return
        last = reports[-1] if reports else None
        if (
            last is not None
            and last.has_type_of(attachment)
            and last.start <= attachment.start <= last.end
            and last.merge_equal(attachment, attachment.start)
        ):
            return
        column = AttachmentColumn(attachment, attachment.start)
        column.extend(attachment)
        reports.append(column)

    def saved(self) -> list[Attachment]:
        """Return everything stored, for :meth:`restore`."""
        columns = chain(self._columns.values(), *self._reports.values())
        return [column.saved() for column in columns]

    def restore(self, saved: Sequence[Attachment], *, tokens: int) -> None:
        """Restore what :meth:`saved` returned for a turn of ``tokens`` tokens."""
        for attachment in saved:
            if ATTACHMENTS[attachment.name].is_added:
                self.add(attachment)
            else:
                self.append(attachment, tokens_before=0)
        if tokens:
            self._unusable.update(ATTACHMENTS.keys() - self._columns.keys())

    # ------------------------------------------------------------ reading

    def _complete(self, name: AttachmentName, tokens: int) -> AttachmentColumn | None:
        """Return a column that has an entry for each of the turn's ``tokens`` tokens."""
        column = self._columns.get(name)
        return column if column is not None and column.end >= tokens else None

    def entries(self, name: AttachmentName, tokens: int) -> "npt.NDArray[Any] | None":
        """Return the entries [C, *shape] of an attachment by token that is not ragged, if known for
        all ``tokens`` tokens."""
        column = self._complete(name, tokens)
        return None if column is None else column.array()[:tokens]

    def top_logprobs(self, tokens: int, *, start: int = 0) -> list[dict[int, float]] | None:
        """Return the top tokens and their log-probs for each token from ``start`` on; None unless
        they are known for all ``tokens`` tokens.

        Likeliest first; tokens that could not be sampled (-inf) are omitted.
        """
        ids, logprobs = self.entries("top_ids", tokens), self.entries("top_logprobs", tokens)
        if ids is None or logprobs is None:
            return None
        return [
            {i: p for i, p in zip(*entry, strict=True) if p > float("-inf")}
            for entry in zip(ids[start:].tolist(), logprobs[start:].tolist(), strict=True)
        ]

    def ragged_entries(
        self, name: AttachmentName, tokens: int, *, start: int = 0
    ) -> "list[npt.NDArray[np.int32]] | None":
        """Return a ragged attachment's values of each token from ``start`` on, if known for all
        ``tokens`` tokens."""
        column = self._complete(name, tokens)
        if column is None or column.ends is None:
            return None
        values = column.array()
        return [values[a // 4 : b // 4] for a, b in pairwise(column.ends[start : tokens + 1])]

    def reports(self, name: AttachmentName) -> Iterator[PositionReport]:
        """Yield all reports of an attachment by position, in the order in which the engines made
        them.

        A position is reported again when its KV is computed again: under new weights, on another
        engine, or by later turns of the rollout. Reports that agree are joined.
        """
        for column in self._reports.get(name, ()):
            yield PositionReport(column.start, column.array())

    def newest(self, name: AttachmentName) -> "npt.NDArray[Any] | None":
        """Return the last report of each position [P, *shape]; None if there is none, or reports
        differ in shape or dtype or leave positions out."""
        reports = list(self.reports(name))
        if len({(entries.dtype, entries.shape[1:]) for _, entries in reports}) != 1:
            return None
        known = 0
        for start, entries in reports:
            if start > known:
                return None
            known = max(known, start + len(entries))
        out = np.empty((known, *reports[0].entries.shape[1:]), reports[0].entries.dtype)
        for start, entries in reports:
            out[start : start + len(entries)] = entries
        return out

    def json_fields(
        self, axis: Literal["token", "position"], tokens: int = 0, *, start: int = 0
    ) -> dict[str, Any]:
        """Return the attachments by ``axis`` that JSON answers have, by the names of their fields;
        None where not known. By token: lists of the tokens from ``start`` on, if known for all
        ``tokens`` tokens; by position: :meth:`newest`."""
        fields: dict[str, Any] = {}
        for name, kind in ATTACHMENTS.items():
            if kind.json_field and kind.axis == axis == "position":
                fields[kind.json_field] = self.newest(name)
            elif kind.json_field and kind.axis == axis:
                entries = self.ragged_entries(name, tokens, start=start)
                fields[kind.json_field] = entries and [each.tolist() for each in entries]
        return fields


NO_ATTACHMENTS = TurnAttachments(SamplingParams(max_tokens=1))
"""Those of a turn that requested none."""
