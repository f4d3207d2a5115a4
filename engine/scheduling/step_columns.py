"""Converts a step's samples into the columns of a step message, and filters rows without a token.

Values are collected in lists, sequence by sequence, and become bytes once per step.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from tidegate.engine.execution.position_cache import Entries
from tidegate.engine.execution.step_layout import AdapterVersion
from tidegate.engine.sampling.sampling import StepOutput, TokenAttachments, all_finite
from tidegate.engine.scheduling.sequences import AcceptedTokens, EngineSequence
from tidegate.transport.attachments import ATTACHMENTS, ITEM_BYTES, Attachment, AttachmentName
from tidegate.transport.messages import Prefill, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class StepColumns:
    """The scheduler's part of a step message; R rows as in ``messages.Step``."""

    version: int
    turns: bytes
    token_ids: bytes = b""
    logprobs: bytes = b""
    finish: bytes = b""
    counts: bytes = b""
    prefills: list[Prefill] = field(default_factory=list)
    attachments: list[Attachment] = field(default_factory=list)
    drafted_tokens: int = 0
    """Number of draft tokens that the step verified."""
    accepted_tokens: int = 0
    """Number of draft tokens that were accepted; at most ``drafted_tokens``."""
    adapter: str = ""
    """Adapter that sampled the step, as in ``messages.Step.adapter``."""
    others: "Sequence[StepColumns]" = ()
    """Columns of the same step for other adapters with versions of their own."""

    def message(
        self, seq: int, *, started_ns: int, busy_ns: int, queued_turns: int, free_blocks: int = 0
    ) -> Step:
        """Return the columns as step message ``seq``, with the engine's clock and load."""
        return Step(
            seq=seq,
            version=self.version,
            turns=self.turns,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            finish=self.finish,
            counts=self.counts,
            prefills=self.prefills,
            attachments=self.attachments,
            started_us=started_ns // 1000,
            busy_us=busy_ns // 1000,
            queued_turns=queued_turns,
            free_blocks=free_blocks,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
            adapter=self.adapter,
        )


@dataclass(frozen=True, slots=True)
class EndedTurn:
    """Handle and finish code of a sequence that ended without a token."""

    handle: int
    finish: int
    adapter: AdapterVersion | None = None
    """Adapter with versions of its own, if the sequence used one."""


def ended_columns(ended: Sequence[EndedTurn], version: int) -> StepColumns:
    """Return rows without tokens for sequences that ended between steps."""
    keys = dict.fromkeys(row.adapter for row in ended)
    return join_columns(
        [_ended_of([row for row in ended if row.adapter == key], key, version) for key in keys]
    )


def join_columns(columns: Sequence[StepColumns]) -> StepColumns:
    """Return the first of several columns of one step, with the others in it."""
    first, *others = columns
    return replace(first, others=others) if others else first


def _ended_of(
    ended: Sequence[EndedTurn], adapter: AdapterVersion | None, version: int
) -> StepColumns:
    name, version = adapter or ("", version)
    return StepColumns(
        version=version,
        adapter=name,
        turns=np.array([row.handle for row in ended], dtype="<u4").tobytes(),
        finish=bytes([row.finish for row in ended]),
        counts=bytes(4 * len(ended)),
    )


def failures_of(output: StepOutput, version: int) -> Mapping[int, str]:
    """Return the rows without a usable token, each with the reason.

    Finite weights may still overflow for one context. Only that sequence fails; the rest of the
    batch is unaffected.
    """
    if not output.attachments and math.isfinite(output.logprobs.sum()):  # as nearly always
        return output.failures
    is_finite = np.isfinite(output.logprobs)
    if not all_finite(output.attachments.values()):
        for index, attachments in output.attachments.items():
            is_finite[index] &= all_finite([attachments])
    if is_finite.all():
        return output.failures
    reason = (
        f"weights v{version} compute NaN or infinity for this context, so no token can be "
        f"sampled after it; publish finite weights, or smaller ones"
    )
    non_finite = np.flatnonzero(~is_finite).tolist()
    return dict.fromkeys(non_finite, reason) | dict(output.failures)


TOKEN_LAYOUTS = {
    name: (dtype := kind.dtypes[0], ITEM_BYTES[dtype], kind.is_ragged, kind.dimensions > 0)
    for name, kind in ATTACHMENTS.items()
}
"""Dtype of each attachment by token, its bytes, and whether entries are ragged or have a shape."""


@dataclass(slots=True)
class SampledRows:
    """Collects the rows of a step message."""

    handles: list[int] = field(default_factory=list)
    finish: bytearray = field(default_factory=bytearray)
    counts: list[int] = field(default_factory=list)
    accepted_indices: list[int] = field(default_factory=list)
    """Indices of the accepted tokens among the sampled ones."""
    drafted: int = 0
    """Number of draft tokens verified so far."""
    prefills: list[Prefill] = field(default_factory=list)
    attachments: list[Attachment] = field(default_factory=list)

    def add(
        self, sequence: EngineSequence, index: int, sampled: list[int], version: int
    ) -> AcceptedTokens:
        """Append accepted samples to a sequence; the first sample is at ``index``.

        There are fewer samples than draft tokens plus one if a sample's log-probs were not finite.
        """
        if sequence.is_prefilling:
            self.prefills.append(sequence.end_prefill(version))
        self.drafted += sequence.drafted
        accepted = sequence.accept(sampled)
        self.handles.append(sequence.handle)
        self.finish.append(accepted.finish)
        self.counts.append(accepted.tokens)
        self.accepted_indices.extend(range(index, index + accepted.tokens))
        return accepted

    def add_next(self, sequence: EngineSequence, index: int, token_id: int) -> int:
        """Fast path of ``add`` for a decoding sequence without drafts; return its finish code."""
        finish = sequence.append(token_id)
        self.handles.append(sequence.handle)
        self.finish.append(finish)
        self.counts.append(1)
        self.accepted_indices.append(index)
        return finish

    def add_attachments(self, sequence: EngineSequence, tokens: Sequence[TokenAttachments]) -> None:
        """Add the attachments of a sequence's newest tokens, which :meth:`add` has accepted."""
        turn, start = sequence.handle, sequence.output_tokens - len(tokens)
        add = self.attachments.append
        for name, values in tokens[0].items():  # the others have what the first has
            dtype, nbytes, is_ragged, has_shape = TOKEN_LAYOUTS[name]
            size = len(values) // nbytes
            counts = size.to_bytes(4, "little") if is_ragged else b""
            if len(tokens) > 1:
                entries = [token[name] for token in tokens]
                values = b"".join(entries)
                if is_ragged:
                    counts = np.array([len(each) // nbytes for each in entries], "<u4").tobytes()
            shape = [size] if has_shape else []
            add(Attachment(turn, name, start, dtype, values, shape, counts))

    def add_positions(
        self,
        sequence: EngineSequence,
        positions: Mapping[AttachmentName, Mapping[int, Entries]],
        accepted: Sequence[int],
    ) -> None:
        """Add the attachments of the sequence's positions that were not reported, which came with
        the ``accepted`` sampling rows."""
        start = sequence.positions_reported
        for name, of_rows in positions.items():
            if accepted[0] in of_rows:
                entries = np.concatenate([of_rows[index] for index in accepted])
                sequence.positions_reported = start + len(entries)
                self.attachments.append(Attachment.of(sequence.handle, name, start, entries))

    def columns(self, output: StepOutput, version: int, adapter: str = "") -> StepColumns:
        """Return the columns without rejected draft tokens and failed rows."""
        keeps_all = len(self.accepted_indices) == len(output.token_ids)
        accepted_indices = slice(None) if keeps_all else self.accepted_indices
        accepted = len(self.accepted_indices) - len(self.handles)
        return StepColumns(
            version=version,
            turns=np.array(self.handles, dtype="<u4").tobytes(),
            token_ids=output.token_ids[accepted_indices].tobytes(),
            logprobs=output.logprobs[accepted_indices].tobytes(),
            finish=bytes(self.finish) if any(self.finish) else b"",
            counts=np.array(self.counts, dtype="<u4").tobytes() if accepted else b"",
            prefills=self.prefills,
            attachments=self.attachments,
            drafted_tokens=self.drafted,
            accepted_tokens=accepted,
            adapter=adapter,
        )


ATTACHMENT_BYTES_MAX = 2 * 1024 * 1024
"""Bytes of attachments in one step message: half of what its frame may have."""


def split_attachments(columns: StepColumns) -> list[StepColumns]:
    """Return step messages of at most ``ATTACHMENT_BYTES_MAX`` of attachments each, in order.

    All but the last have rows without tokens. One routed prompt of 32,768 positions of
    Qwen3-30B-A3B has 12 MiB of experts.
    """
    total = sum([len(each.values) + len(each.counts) for each in columns.attachments])
    if total <= ATTACHMENT_BYTES_MAX:
        return [columns]
    parts: list[list[Attachment]] = [[]]
    room = ATTACHMENT_BYTES_MAX
    for attachment in columns.attachments:
        for piece in _pieces(attachment):
            nbytes = len(piece.values) + len(piece.counts)
            if nbytes > room and parts[-1]:
                parts.append([])
                room = ATTACHMENT_BYTES_MAX
            parts[-1].append(piece)
            room -= nbytes
    *ahead, last = parts
    return [*(_without_tokens(columns, part) for part in ahead), replace(columns, attachments=last)]


def _pieces(attachment: Attachment) -> Iterator[Attachment]:
    """Cut an attachment that is too large for one message between entries; ragged ones are small
    enough, because an entry has a token of the vocabulary once."""
    each = ATTACHMENT_BYTES_MAX // max(attachment.entry_bytes, 1)
    if attachment.counts or attachment.length <= each:
        yield attachment
        return
    for first in range(0, attachment.length, each):
        start, end = first * attachment.entry_bytes, (first + each) * attachment.entry_bytes
        yield msgspec.structs.replace(
            attachment, start=attachment.start + first, values=attachment.values[start:end]
        )


def _without_tokens(columns: StepColumns, attachments: list[Attachment]) -> StepColumns:
    """Return a message that has only these attachments, with a row for each of their turns."""
    turns = list(dict.fromkeys(attachment.turn for attachment in attachments))
    return StepColumns(
        version=columns.version,
        adapter=columns.adapter,
        turns=np.array(turns, dtype="<u4").tobytes(),
        counts=bytes(4 * len(turns)),
        attachments=attachments,
    )
