"""Converts a step's samples into the columns of a step message, and filters rows without a token.

Used by the scheduler's ``complete``, turn by turn.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

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


@dataclass(frozen=True, slots=True)
class EndedTurn:
    """Handle and finish code of a turn that ended without a token."""

    handle: int
    finish: int


def ended_columns(ended: Sequence[EndedTurn], version: int) -> StepColumns:
    """Return rows without tokens for turns that ended between steps."""
    return StepColumns(
        version=version,
        turns=np.array([row.handle for row in ended], dtype="<u4").tobytes(),
        finish=bytes([row.finish for row in ended]),
        counts=bytes(4 * len(ended)),
    )


def failures_of(output: StepOutput, version: int) -> Mapping[int, str]:
    """Return the rows without a usable token, each with the reason.

    Finite weights may still overflow for one context. Only that turn fails; others are unaffected.
    """
    is_sound = np.isfinite(output.logprobs)
    for place, told in output.details.items():
        is_sound[place] &= told.is_sound
    if is_sound.all():
        return output.failures
    why = (
        f"weights v{version} make no number (NaN, or infinite) of this context, so no token can be "
        f"drawn after it; publish sound ones, or none so large"
    )
    unsound = np.flatnonzero(~is_sound).tolist()
    return dict.fromkeys(unsound, why) | dict(output.failures)


@dataclass(slots=True)
class SampledRows:
    """Collects the rows of a step message."""

    handles: list[int] = field(default_factory=list)
    finish: bytearray = field(default_factory=bytearray)
    counts: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    """Indices of the accepted tokens among the sampled ones."""
    drafted: int = 0
    """Number of draft tokens verified so far."""
    prefills: list[Prefill] = field(default_factory=list)
    details: list[TokenDetails] = field(default_factory=list)

    def add(
        self, turn: EngineSequence, place: int, sampled: list[int], version: int
    ) -> AcceptedTokens:
        """Let a turn accept its samples, the first of which is at ``place``.

        There are fewer samples than draft tokens plus one if a sample's log-probs were not finite.
        """
        if turn.is_prefilling:
            self.prefills.append(turn.end_prefill(version))
        self.drafted += turn.drafted
        accepted = turn.accept(sampled)
        self.handles.append(turn.handle)
        self.finish.append(accepted.finish)
        self.counts.append(accepted.tokens)
        self.kept.extend(range(place, place + accepted.tokens))
        return accepted

    def add_next(self, turn: EngineSequence, place: int, token_id: int) -> int:
        """Fast path of ``add`` for a decoding turn without drafts; return its finish code."""
        finish = turn.append(token_id)
        self.handles.append(turn.handle)
        self.finish.append(finish)
        self.counts.append(1)
        self.kept.append(place)
        return finish

    def tell(self, handle: int, told: Sequence[RowDetails | None]) -> None:
        """Add the details that the turn asked for of its accepted tokens."""
        known = [one for one in told if one is not None]
        if known:
            raw = b"".join(one.raw_logprobs for one in known)
            top_ids = b"".join(one.top_ids for one in known)
            top_logprobs = b"".join(one.top_logprobs for one in known)
            self.details.append(TokenDetails(handle, raw, top_ids, top_logprobs))

    def columns(self, output: StepOutput, version: int) -> StepColumns:
        """Return the columns without rejected draft tokens and failed rows."""
        are_all = len(self.kept) == len(output.token_ids)
        kept = slice(None) if are_all else self.kept
        accepted = len(self.kept) - len(self.handles)
        return StepColumns(
            version=version,
            turns=np.array(self.handles, dtype="<u4").tobytes(),
            token_ids=output.token_ids[kept].tobytes(),
            logprobs=output.logprobs[kept].tobytes(),
            finish=bytes(self.finish) if any(self.finish) else b"",
            counts=np.array(self.counts, dtype="<u4").tobytes() if accepted else b"",
            prefills=self.prefills,
            details=self.details,
            drafted_tokens=self.drafted,
            accepted_tokens=accepted,
        )
