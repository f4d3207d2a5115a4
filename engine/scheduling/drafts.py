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

import numpy as np
import numpy.typing as npt

from tidegate.engine.scheduling.sequences import EngineSequence

Tokens = npt.NDArray[np.int32]

NO_TOKENS: Tokens = np.empty(0, np.int32)

DRAFT_TOKENS_MAX = 16
"""Upper limit of draft tokens per sequence and step. Beyond it a step's fixed cost is spread over
so many tokens that it is small beside each token's own cost."""

STEP_TOKENS = 4.0
"""Fixed cost of a step, in units of one token's compute time, until steps have been measured: a
step reads all weights however few tokens it has. 13 ms per step and 2.5 ms per token were measured
with 45 million weights, on a CPU."""

COST_DECAY = 0.98
"""Decay of the measured times per step, because context lengths and the machine's load change."""

TRIAL_STEPS = 256
"""Steps of one kind, with or without drafts, after which one of the other kind is measured again
although it is not expected to save time. Even if it takes twice the time, that is under 1 %."""

STEPS_SKIPPED_MAX = 64
"""Most steps without asking the source for drafts, after it gave some that would not pay."""

PRIOR_ACCEPTED, PRIOR_TRIED = 1.5, 2.0
"""Initial counts of accepted and tried draft tokens of a sequence: a prior
acceptance rate of 3 in 4."""

COUNT_DECAY = 0.9
"""Decay of the counts of accepted and tried draft tokens per verified draft, because a sequence's
acceptance rate changes over its output."""

PAUSE_TOKENS_MIN, PAUSE_TOKENS_MAX = 2, 64
"""First and longest pause of drafting, in tokens of the sequence, while its drafts do not pay. The
pause doubles with each rejected trial."""


class DraftSource:
    """Source of draft tokens; those in ``engine/drafts`` are subclasses."""

    def propose(self, sequences: Sequence[EngineSequence], counts: Sequence[int]) -> list[Tokens]:
        """Return at most ``counts[i]`` draft tokens that may follow sequence i's tokens."""
        raise NotImplementedError

    def ended(self, sequence: EngineSequence, *, is_whole: bool) -> None:
        """Forget a sequence; ``is_whole`` says that it was neither aborted nor cancelled."""

    def forget_kv(self) -> None:
        """Recompute the source's own KV, if it has any, because the KV memory is gone."""


class _StepCost:
    """Measured time of one kind of step: a line over its number of tokens, by least squares."""

    __slots__ = ("_weight", "_x", "_xx", "_xy", "_y")

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        """Decayed sums of 1, tokens, seconds, tokens squared, and tokens times seconds."""

    @property
    def is_measured(self) -> bool:
        return self._weight > 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Record a step. One that was held up, as by another process, counts as four at most."""
        if self.is_measured:
            seconds = min(seconds, 4.0 * self._y / self._weight)
        self._weight = COST_DECAY * self._weight + 1.0
        self._x = COST_DECAY * self._x + tokens
        self._y = COST_DECAY * self._y + seconds
        self._xx = COST_DECAY * self._xx + tokens * tokens
        self._xy = COST_DECAY * self._xy + tokens * seconds

    def line(self) -> tuple[float, float]:
        """Return the seconds of a step without tokens, and of each token.

        One assumed step with :data:`STEP_TOKENS` of fixed cost decides the slope while all steps
        have about the same number of tokens.
        """
        x, y = self._x / self._weight, self._y / self._weight
        assumed = y / (x + STEP_TOKENS)
        spread = self._xx / self._weight - x * x
        covariance = self._xy / self._weight - x * y
        slope = (covariance + assumed) / (spread + 1.0)
        slope = min(max(slope, 1e-3 * assumed), y / x)  # no part of a step takes less than nothing
        return y - slope * x, slope


class StepCosts:
    """What steps with and without drafts take, and so which drafts save time."""

    def __init__(self) -> None:
        self._plain, self._drafted = _StepCost(), _StepCost()
        self._since_plain = self._since_drafted = 0

    def add(self, decodes: int, drafted: int, seconds: float) -> None:
        """Record a step of ``decodes`` sequences and ``drafted`` draft tokens."""
        if seconds <= 0.0:
            return  # a virtual clock measures nothing
        if drafted:
            self._drafted.add(decodes + drafted, seconds)
            self._since_plain, self._since_drafted = self._since_plain + 1, 0
        else:
            self._plain.add(decodes, seconds)
            self._since_plain, self._since_drafted = 0, self._since_drafted + 1

    @property
    def lack_plain(self) -> bool:
        """Whether the next step should have no drafts, to measure what it takes."""
        if not self._plain.is_measured:
            return self._drafted.is_measured
        return self._since_plain >= TRIAL_STEPS

    @property
    def lack_drafted(self) -> bool:
        """Whether the next step should have drafts, to measure what it takes."""
        return self._since_drafted >= TRIAL_STEPS

    def break_even(self, decodes: int) -> float:
        """Return the acceptance probability from which one more draft token saves time.

        ``decodes`` sequences decode in the step. An accepted token saves the sequence's share of
        another step.
        """
        (base, slope), (_, draft) = self._lines()
        return min(1.0, draft / (base / decodes + slope))

    def saved(self, decodes: int, drafted: int, accepted: float) -> float:
        """Return how many steps without drafts one step with ``drafted`` draft tokens saves, if
        ``accepted`` of them are: below 0 if it costs more than it saves."""
        (base, slope), (draft_base, draft_slope) = self._lines()
        cost = (draft_base + draft_slope * (decodes + drafted)) / (base + slope * decodes)
        return 1.0 + accepted / decodes - cost

    def _lines(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Return the times of steps without and with drafts, each by the other's until measured."""
        plain = self._plain.line() if self._plain.is_measured else None
        drafted = self._drafted.line() if self._drafted.is_measured else None
        known = plain or drafted or (STEP_TOKENS, 1.0)
        return plain or known, drafted or known


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

    def expected(self, drafted: int) -> float:
        """Return how many of ``drafted`` tokens will be accepted, on average."""
        acceptance = self._accepted / self._tried
        return sum(acceptance**count for count in range(1, drafted + 1))

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
    """Asks one engine's draft source for tokens where they save time by what steps took."""

    def __init__(self, source: DraftSource) -> None:
        self._source = source
        self._has_failed = False
        """Whether the source has raised an error; it is not called again after that."""
        self._controllers: dict[int, DraftLengthController] = {}
        """Draft length controller of each sequence that has been drafted for, by turn handle."""
        self.costs = StepCosts()
        self._skips = self._skipped = 0
        """How many steps do not ask the source, because its last drafts would not have paid; and
        how many steps have not."""

    def draft(
        self, sequences: Sequence[EngineSequence], tokens_left: int
    ) -> list[tuple[EngineSequence, Tokens]]:
        """Return draft tokens for decoding sequences, at most ``tokens_left`` over all of them.

        There are none in a step in which they would take more time than they are expected to save,
        except in trials (:data:`TRIAL_STEPS`).
        """
        if self._has_failed or not sequences or self.costs.lack_plain:
            return []
        if self._skipped < self._skips:
            self._skipped += 1
            return []
        self._skipped = 0
        drafts = self._propose(sequences, tokens_left)
        if not drafts:
            return []
        drafted = sum(len(draft) for _, draft in drafts)
        accepted = sum(
            self._controllers[each.handle].expected(len(draft)) for each, draft in drafts
        )
        if self.costs.saved(len(sequences), drafted, accepted) > 0.0:
            self._skips = 0
            return drafts
        self._skips = min(STEPS_SKIPPED_MAX, 2 * self._skips + 1)
        return drafts if self.costs.lack_drafted else []

    def _propose(
        self, sequences: Sequence[EngineSequence], tokens_left: int
    ) -> list[tuple[EngineSequence, Tokens]]:
        break_even = self.costs.break_even(len(sequences))
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

    def forget_kv(self) -> None:
        """Have the source recompute its KV, because the KV memory is gone."""
        self._source.forget_kv()

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
