"""Attachments of one turn, stored entry by entry as steps bring them.

:class:`TurnTracker` appends them for turns whose sampling options request any; ``GeneratedTurn``,
batches, recorders and saved states read them. Depends on :mod:`tidegate.transport.attachments` for
the types, and on numpy for arrays.

Letters in shapes: C output tokens of the turn, P context positions, L mixture layers, k experts per
token or top tokens.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tidegate.transport.attachments import ATTACHMENTS, Attachment, AttachmentName
from tidegate.transport.messages import SamplingParams

Experts = npt.NDArray[np.uint8 | np.uint16]
"""Routed experts [P, L, k], in the order in which the router chose them."""


class RoutedExperts(NamedTuple):
    """Routed experts of the context positions ``[start, start + P)``."""

    start: int
    experts: Experts
    """[P, L, k]"""


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
        """Whether entries of ``attachment`` have the dtype and shape of this column's."""
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

    __slots__ = ("_columns", "_experts", "_unusable", "top_per_token")

    def __init__(self, sampling: SamplingParams) -> None:
        self.top_per_token = sampling.top_logprobs
        """Number of top tokens for each token."""
        self._columns: dict[AttachmentName, AttachmentColumn] = {}
        """Attachments by output token; each column starts at token 0."""
        self._unusable: set[AttachmentName] = set()
        """Attachments that an engine has omitted for at least one token."""
        self._experts: list[AttachmentColumn] | None = [] if sampling.routed_experts else None
        """Reports of routed experts, in order; a later report of a position is of newer KV."""
        requested: list[tuple[AttachmentName, bool]] = [
            ("raw_logprobs", sampling.raw_logprobs),
            ("top_ids", bool(sampling.top_logprobs)),
            ("top_logprobs", bool(sampling.top_logprobs)),
            ("kept_ids", sampling.kept_tokens),
            ("hidden_states", sampling.hidden_states),
        ]
        self._unusable.update(name for name, is_requested in requested if not is_requested)

    def append(self, attachment: Attachment, *, tokens_before: int) -> None:
        """Store entries of a submission before which the turn had ``tokens_before`` tokens."""
        if ATTACHMENTS[attachment.name].axis == "position":
            self._append_experts(attachment)
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
        is_top = attachment.name in ("top_ids", "top_logprobs")
        is_requested = not is_top or attachment.shape == [self.top_per_token]
        if start > column.end or not column.has_type_of(attachment) or not is_requested:
            self._unusable.add(attachment.name)
            del self._columns[attachment.name]
            return
        column.truncate(start)
        column.extend(attachment)

    def _append_experts(self, attachment: Attachment) -> None:
        if self._experts is None:
            return
        last = self._experts[-1] if self._experts else None
        if (
            last is not None
            and last.has_type_of(attachment)
            and last.start <= attachment.start <= last.end
            and last.merge_equal(attachment, attachment.start)
        ):
            return
        column = AttachmentColumn(attachment, attachment.start)
        column.extend(attachment)
        self._experts.append(column)

    def saved(self) -> list[Attachment]:
        """Return everything stored, for :meth:`restore`."""
        return [column.saved() for column in [*self._columns.values(), *(self._experts or ())]]

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

    def top_tokens(
        self, tokens: int
    ) -> "tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]] | None":
        """Return ids and log-probs of the top tokens [C, k], if known for all ``tokens`` tokens."""
        ids, logprobs = self.entries("top_ids", tokens), self.entries("top_logprobs", tokens)
        return None if ids is None or logprobs is None else (ids, logprobs)

    def top_logprobs(self, tokens: int, *, start: int = 0) -> list[dict[int, float]] | None:
        """Return the top tokens and their log-probs for each token from ``start`` on; None unless
        they are known for all ``tokens`` tokens.

        Likeliest first; tokens that could not be sampled (-inf) are omitted.
        """
        top = self.top_tokens(tokens)
        if top is None:
            return None
        ids, logprobs = top[0][start:].tolist(), top[1][start:].tolist()
        return [
            {i: p for i, p in zip(*entry, strict=True) if p > float("-inf")}
            for entry in zip(ids, logprobs, strict=True)
        ]

    def kept_ids(self, tokens: int) -> "list[npt.NDArray[np.int32]] | None":
        """Return, for each token, the tokens it was sampled from, in ascending order; an empty
        array means all tokens. None unless known for all ``tokens`` tokens."""
        column = self._complete("kept_ids", tokens)
        if column is None or column.ends is None:
            return None
        values = column.array()
        return [values[a // 4 : b // 4] for a, b in pairwise(column.ends[: tokens + 1])]

    def expert_reports(self) -> Iterator[RoutedExperts]:
        """Yield all reports of routed experts, in the order in which the engines made them.

        A position is reported again when its KV is computed again: under new weights, on another
        engine, or by later turns of the rollout. Reports that agree are joined.
        """
        for column in self._experts or ():
            yield RoutedExperts(column.start, column.array())


def newest_experts(reports: Sequence[RoutedExperts]) -> Experts | None:
    """Return the last report of each position [P, L, k]; None if there is none, or reports differ
    in shape or dtype or leave positions out."""
    types = {(experts.dtype, experts.shape[1:]) for _, experts in reports}
    if not reports or reports[0].start or len(types) > 1:
        return None
    end = 0
    for start, experts in reports:
        if start > end:
            return None
        end = max(end, start + len(experts))
    first = reports[0].experts
    out = np.empty((end, *first.shape[1:]), first.dtype)
    for start, experts in reports:
        out[start : start + len(experts)] = experts
    return out
