"""Speculative decoding: the draft-source interface, and how many draft tokens to verify per turn.

Used by the scheduler's ``StepPlanner``; the sources are in ``engine/drafts``. Verification changes
no outcome: each position is sampled from the model's own logits with the random number it would
have had without drafts, so tokens and log-probs equal those of an engine without speculation. A
wrong draft token costs time only.
"""

import math
import sys
import traceback
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tidegate.engine.scheduling.sequences import EngineSequence

Tokens = npt.NDArray[np.int32]

NO_TOKENS: Tokens = np.empty(0, np.int32)

DRAFT_TOKENS_MAX = 16
"""Upper limit of draft tokens per turn and step. Beyond it a step's fixed cost is spread over so
many tokens that it is small beside each token's own cost."""

STEP_TOKENS = 4.0
"""Fixed cost of a step, in units of one token's compute time: a step reads all weights however few
tokens it has. Measured: 13 ms per step and 2.5 ms per token, 45 million weights, on a CPU."""

RIGHT_FIRST, TRIED_FIRST = 1.5, 2.0
"""Initial counts of accepted and tried draft tokens of a turn: a prior
acceptance rate of 3 in 4."""

REMEMBERED = 0.9
"""Decay of the counts of accepted and tried draft tokens per verified draft, because a turn's
acceptance rate changes as it goes on."""

REST_TOKENS_FIRST, REST_TOKENS_MAX = 2, 64
"""First and longest pause of drafting, in tokens of the turn, while its drafts do not pay. The
pause doubles with each rejected trial."""


class DraftSource(Protocol):
    """Source of draft tokens, implemented in ``engine/drafts``."""

    def propose(self, turns: Sequence[EngineSequence], counts: Sequence[int]) -> list[Tokens]:
        """Return at most ``counts[i]`` draft tokens that may follow turn i's tokens."""

    def ended(self, turn: EngineSequence, *, is_whole: bool) -> None:
        """Forget a turn; ``is_whole`` says that it was neither aborted nor cancelled."""


def share_that_pays(decodes: int) -> float:
    """Return the acceptance probability from which a draft token saves time.

    ``decodes`` turns decode in the step. In units of one token's compute time a draft token costs
    1; an accepted one saves the turn's share of another step: ``1 + STEP_TOKENS / decodes``.
    """
    return 1 / (1 + STEP_TOKENS / decodes)


class DraftLengthController:
    """Chooses a turn's number of draft tokens from the acceptance rate of its earlier drafts."""

    __slots__ = ("_next_at", "_rest", "_right", "_tried")

    def __init__(self) -> None:
        self._right = RIGHT_FIRST
        self._tried = TRIED_FIRST
        """Decayed number of draft tokens whose predecessors in the draft were all accepted."""
        self._rest = REST_TOKENS_FIRST
        self._next_at = 0

    def count(self, length: int, enough: float) -> int:
        """Return how many tokens to draft, if drafts pay above the acceptance rate ``enough``.

        The count is the largest for which the whole draft is accepted with probability ``enough``
        or more. If not even one token is, the result is 0, and 1 now and then to measure the rate
        again.
        """
        share = self._right / self._tried
        if share <= enough:
            return 1 if length >= self._next_at else 0
        if share >= enough ** (1 / DRAFT_TOKENS_MAX):
            return DRAFT_TOKENS_MAX
        return int(math.log(enough) / math.log(share))

    def learn(self, drafted: int, accepted: int, length: int) -> None:
        """Record that ``accepted`` of ``drafted`` tokens were right, at ``length`` tokens now."""
        self._right = REMEMBERED * self._right + accepted
        self._tried = REMEMBERED * self._tried + accepted + (accepted < drafted)
        if accepted:
            self._rest = REST_TOKENS_FIRST
            return
        self._next_at = length + self._rest
        self._rest = min(REST_TOKENS_MAX, 2 * self._rest)


class Speculation:
    """Asks one engine's draft source for tokens, and keeps each turn's
    ``DraftLengthController``."""

    def __init__(self, source: DraftSource) -> None:
        self._source = source
        self._has_failed = False
        """Whether the source has raised an error; it is not asked again after that."""
        self._paces: dict[int, DraftLengthController] = {}
        """Pace of each turn that has been drafted for, by turn handle."""

    def draft(
        self, turns: Sequence[EngineSequence], tokens_left: int
    ) -> list[tuple[EngineSequence, Tokens]]:
        """Return draft tokens for decoding turns, at most ``tokens_left`` over all of them."""
        if self._has_failed:
            return []
        enough = share_that_pays(max(1, len(turns)))
        asked: list[EngineSequence] = []
        counts: list[int] = []
        for turn in turns:
            room = turn.length_max - turn.length - 1  # the last token need not be computed
            count = min(self._wanted(turn, enough), room, tokens_left)
            if count > 0:
                asked.append(turn)
                counts.append(count)
                tokens_left -= count
        if not asked:
            return []
        try:
            drafts = self._source.propose(asked, counts)
        except Exception:  # noqa: BLE001 - drafts change only speed, so no error ends the engine
            sys.stderr.write("warning: no more tokens are guessed, for the source failed:\n")
            traceback.print_exc()
            self._has_failed = True
            return []
        return [(turn, draft) for turn, draft in zip(asked, drafts, strict=True) if len(draft)]

    def learn(self, turn: EngineSequence, drafted: int, accepted: int) -> None:
        """Record how many of a turn's draft tokens a step accepted."""
        self._paces[turn.handle].learn(drafted, accepted, turn.length)

    def ended(self, turn: EngineSequence, *, is_whole: bool) -> None:
        """Forget a turn; ``is_whole`` says that it was neither aborted nor cancelled."""
        self._paces.pop(turn.handle, None)
        if not self._has_failed:
            self._source.ended(turn, is_whole=is_whole)

    def _wanted(self, turn: EngineSequence, enough: float) -> int:
        """Return 0 for turns whose options edit logits by the output so far: drafts
        would be part of it."""
        options = turn.sampling.options
        if options is not None and options.edit_by_output:
            return 0
        pace = self._paces.get(turn.handle)
        if pace is None:
            pace = self._paces[turn.handle] = DraftLengthController()
        count = pace.count(turn.length, enough)
        if options is None or options.step_tokens_max is None:
            return count
        return min(count, options.step_tokens_max - 1)
