"""Speculative decoding: the draft-source interface, and how many draft tokens to verify per
sequence.

The draft sources are in ``engine/drafts``. Verification changes no outcome: each position is
sampled from the model's own logits with the random number it would have had without drafts, so
tokens and log-probs equal those of an engine without speculation. A wrong draft token costs time
only.
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
"""Upper limit of draft tokens per sequence and step. Beyond it a step's fixed cost is spread over
so many tokens that it is small beside each token's own cost."""

STEP_TOKENS = 4.0
"""Fixed cost of a step, in units of one token's compute time: a step reads all weights however few
tokens it has. Measured: 13 ms per step and 2.5 ms per token, 45 million weights, on a CPU."""

PRIOR_ACCEPTED, PRIOR_TRIED = 1.5, 2.0
"""Initial counts of accepted and tried draft tokens of a sequence: a prior
acceptance rate of 3 in 4."""

COUNT_DECAY = 0.9
"""Decay of the counts of accepted and tried draft tokens per verified draft, because a sequence's
acceptance rate changes over its output."""

PAUSE_TOKENS_MIN, PAUSE_TOKENS_MAX = 2, 64
"""First and longest pause of drafting, in tokens of the sequence, while its drafts do not pay. The
pause doubles with each rejected trial."""


class DraftSource(Protocol):
    """Source of draft tokens, implemented in ``engine/drafts``."""

    def propose(self, sequences: Sequence[EngineSequence], counts: Sequence[int]) -> list[Tokens]:
        """Return at most ``counts[i]`` draft tokens that may follow sequence i's tokens."""

    def ended(self, sequence: EngineSequence, *, is_whole: bool) -> None:
        """Forget a sequence; ``is_whole`` says that it was neither aborted nor cancelled."""


def break_even_acceptance(decodes: int) -> float:
    """Return the acceptance probability from which a draft token saves time.

    ``decodes`` sequences decode in the step. In units of one token's compute time a draft token
    costs 1; an accepted one saves the sequence's share of another step: ``1 + STEP_TOKENS /
    decodes``.
    """
    return 1 / (1 + STEP_TOKENS / decodes)


class DraftLengthController:
    """Chooses a sequence's number of draft tokens from the acceptance rate of its earlier
    drafts."""

    __slots__ = ("_accepted", "_pause_tokens", "_resume_length", "_tried")

    def __init__(self) -> None:
        self._accepted = PRIOR_ACCEPTED
        self._tried = PRIOR_TRIED
        """Decayed number of draft tokens whose predecessors in the draft were all accepted."""
        self._pause_tokens = PAUSE_TOKENS_MIN
        self._resume_length = 0

    def count(self, length: int, break_even: float) -> int:
        """Return how many tokens to draft, if drafts pay above the acceptance rate ``break_even``.

        The count is the largest for which the whole draft is accepted with probability
        ``break_even`` or more. If not even one token is, the result is 0, and 1 now and then to
        measure the rate again.
        """
        acceptance = self._accepted / self._tried
        if acceptance <= break_even:
            return 1 if length >= self._resume_length else 0
        if acceptance >= break_even ** (1 / DRAFT_TOKENS_MAX):
            return DRAFT_TOKENS_MAX
        return int(math.log(break_even) / math.log(acceptance))

    def record(self, drafted: int, accepted: int, length: int) -> None:
        """Record that ``accepted`` of ``drafted`` tokens were right, at ``length`` tokens now."""
        self._accepted = COUNT_DECAY * self._accepted + accepted
        self._tried = COUNT_DECAY * self._tried + accepted + (accepted < drafted)
        if accepted:
            self._pause_tokens = PAUSE_TOKENS_MIN
            return
        self._resume_length = length + self._pause_tokens
        self._pause_tokens = min(PAUSE_TOKENS_MAX, 2 * self._pause_tokens)


class Speculation:
    """Asks one engine's draft source for tokens, and keeps each sequence's
    ``DraftLengthController``."""

    def __init__(self, source: DraftSource) -> None:
        self._source = source
        self._has_failed = False
        """Whether the source has raised an error; it is not called again after that."""
        self._controllers: dict[int, DraftLengthController] = {}
        """Draft length controller of each sequence that has been drafted for, by turn handle."""

    def draft(
        self, sequences: Sequence[EngineSequence], tokens_left: int
    ) -> list[tuple[EngineSequence, Tokens]]:
        """Return draft tokens for decoding sequences, at most ``tokens_left`` over all of them."""
        if self._has_failed:
            return []
        break_even = break_even_acceptance(max(1, len(sequences)))
        drafting: list[EngineSequence] = []
        counts: list[int] = []
        for sequence in sequences:
            length_left = (
                sequence.length_max - sequence.length - 1
            )  # the last token need not be computed
            count = min(self._draft_length(sequence, break_even), length_left, tokens_left)
            if count > 0:
                drafting.append(sequence)
                counts.append(count)
                tokens_left -= count
        if not drafting:
            return []
        try:
            drafts = self._source.propose(drafting, counts)
        except Exception:  # noqa: BLE001 - drafts change only speed, so no error ends the engine
            sys.stderr.write(
                "warning: speculative decoding is off, because the draft source failed:\n"
            )
            traceback.print_exc()
            self._has_failed = True
            return []
        return [
            (sequence, draft)
            for sequence, draft in zip(drafting, drafts, strict=True)
            if len(draft)
        ]

    def record(self, sequence: EngineSequence, drafted: int, accepted: int) -> None:
        """Record how many of a sequence's draft tokens a step accepted."""
        self._controllers[sequence.handle].record(drafted, accepted, sequence.length)

    def ended(self, sequence: EngineSequence, *, is_whole: bool) -> None:
        """Forget a sequence; ``is_whole`` says that it was neither aborted nor cancelled."""
        self._controllers.pop(sequence.handle, None)
        if not self._has_failed:
            self._source.ended(sequence, is_whole=is_whole)

    def _draft_length(self, sequence: EngineSequence, break_even: float) -> int:
        """Return the number of draft tokens to propose. It is 0 if the options edit logits by the
        output so far, because the output would include the drafts."""
        options = sequence.sampling.options
        if options is not None and options.edit_by_output:
            return 0
        controller = self._controllers.get(sequence.handle)
        if controller is None:
            controller = self._controllers[sequence.handle] = DraftLengthController()
        count = controller.count(sequence.length, break_even)
        if options is None or options.step_tokens_max is None:
            return count
        return min(count, options.step_tokens_max - 1)
