"""Converts a step's samples into the columns of a step message, and filters rows without a token.

Used by the scheduler's ``complete``, sequence by sequence. Columns are numpy arrays; the message is
``transport/messages.py``'s :class:`Step`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tidegate.engine.execution.step_layout import AdapterVersion
from tidegate.engine.sampling.sampling import RowDetails, StepOutput
from tidegate.engine.scheduling.sequences import AcceptedTokens, EngineSequence
from tidegate.transport.messages import Prefill, TokenDetails


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
    details: list[TokenDetails] = field(default_factory=list)
    drafted_tokens: int = 0
    """Number of draft tokens that the step verified."""
    accepted_tokens: int = 0
    """Number of draft tokens that were accepted; at most ``drafted_tokens``."""
    adapter: str = ""
    """Adapter that sampled the step, as in ``messages.Step.adapter``."""
    others: "Sequence[StepColumns]" = ()
    """Columns of the same step for other adapters with versions of their own."""


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
    is_finite = np.isfinite(output.logprobs)
    for index, details in output.details.items():
        is_finite[index] &= details.is_finite
    if is_finite.all():
        return output.failures
    reason = (
        f"weights v{version} compute NaN or infinity for this context, so no token can be "
        f"sampled after it; publish finite weights, or smaller ones"
    )
    non_finite = np.flatnonzero(~is_finite).tolist()
    return dict.fromkeys(non_finite, reason) | dict(output.failures)


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
    details: list[TokenDetails] = field(default_factory=list)

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

    def add_details(self, handle: int, details: Sequence[RowDetails | None]) -> None:
        """Add the requested details of a sequence's accepted tokens."""
        requested = [detail for detail in details if detail is not None]
        if requested:
            raw = b"".join(detail.raw_logprobs for detail in requested)
            top_ids = b"".join(detail.top_ids for detail in requested)
            top_logprobs = b"".join(detail.top_logprobs for detail in requested)
            self.details.append(TokenDetails(handle, raw, top_ids, top_logprobs))

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
            details=self.details,
            drafted_tokens=self.drafted,
            accepted_tokens=accepted,
            adapter=adapter,
        )
