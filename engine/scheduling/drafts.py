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

PLAIN_STEPS_MIN = 4
"""Steps without drafts that are measured first, so that a slow one among them decides little."""

DRAFTED_STEPS_MAX = 256
"""Steps with drafts after which one without is measured again."""

LOSS_SHARE = 0.005
"""Share of the steps without drafts whose time drafts may lose: what trials cost, and drafts that
were expected to pay and did not."""

STEPS_SKIPPED = 8
"""Steps without drafts after one in which they would not have paid. To expect what they save takes
.5 µs a sequence."""

TRIAL_STEPS = 4
"""Steps of a trial of drafts that are not expected to save time. In the first one a draft model
also reads the contexts, or what it has missed of them, so that one is not typical."""

TRIAL_COST = 8.0
"""Time that a trial may lose at first, in steps; later as much as the last one lost."""

DEBT_MAX = 32.0
"""Steps whose time drafts may lose while they are expected to pay. A draft model first reads each
context, which its drafts earn back later."""

PRIOR_ACCEPTANCE, PRIOR_TRIED = 0.75, 2.0
"""Acceptance rate of a source's first sequences, and the count of tried tokens that it stands for.
Later sequences begin with the rate of those before."""

COUNT_DECAY = 0.9
"""Decay of the counts of accepted and tried draft tokens per verified draft, because a sequence's
acceptance rate changes over its output."""

SOURCE_DECAY = 0.99
"""Decay of the same counts over all sequences of a source, because weights change."""

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
    """Measured times of steps with and without drafts; says when to ask for drafts.

    Keeps account of the time that drafts have saved and lost, in steps without drafts. So they lose
    :data:`LOSS_SHARE` of all time at most in the long run, however wrong an expectation is.
    """

    def __init__(self) -> None:
        self._plain, self._drafted = _StepCost(), _StepCost()
        self._since_plain = self._since_drafted = self._plain_steps = 0
        self._balance = self._trial_cost = TRIAL_COST
        """Steps that drafts may lose now, and those that a trial waits for. Below 0, drafts have
        lost more than they may."""
        self._is_stopped = False
        """Whether drafts have lost :data:`DEBT_MAX`, and wait for the next trial."""
        self._trial_steps = 0
        """Steps that the trial under way still has."""
        self._trial_began = 0.0
        """Balance before the trial."""
        self._unsettled: list[tuple[int, int, float]] = []
        """Steps with drafts before :data:`PLAIN_STEPS_MIN` without have been measured."""

    def add_plain(self, decodes: int, seconds: float) -> None:
        """Record a step of ``decodes`` sequences for which no drafts were asked."""
        self._plain.add(decodes, seconds)
        self._plain_steps += 1
        self._since_plain, self._since_drafted = 0, self._since_drafted + 1
        self._balance = min(self._trial_cost, self._balance + LOSS_SHARE)
        if self._lacks_plain:
            return
        for step in self._unsettled:
            self._settle(*step)
        self._unsettled.clear()

    def add_drafted(self, decodes: int, drafted: int, accepted: int, seconds: float) -> None:
        """Record a step for which drafts were asked, including the time to make them."""
        if self._since_drafted == 0:  # see TRIAL_STEPS
            self._drafted.add(decodes + drafted, seconds)
        self._since_plain, self._since_drafted = self._since_plain + 1, 0
        if self._lacks_plain:
            self._unsettled.append((decodes, accepted, seconds))
        else:
            self._settle(decodes, accepted, seconds)

    @property
    def _lacks_plain(self) -> bool:
        return self._plain_steps < PLAIN_STEPS_MIN

    def _settle(self, decodes: int, accepted: int, seconds: float) -> None:
        """Add to the balance what a step with drafts has saved."""
        base, slope = self._plain.line()
        saved = 1.0 + accepted / decodes - seconds / (base + slope * decodes)
        self._balance = min(self._trial_cost, self._balance + saved)
        self._is_stopped |= self._balance < -DEBT_MAX
        if self._trial_steps:
            self._trial_steps -= 1
            self._trial_cost = max(TRIAL_COST, self._trial_began - self._balance)

    @property
    def is_trial(self) -> bool:
        """Whether drafts are tried that are not expected to save time."""
        return self._trial_steps > 0

    def allow(self, saved: float, *, is_timed: bool) -> bool:
        """Return whether to ask for drafts that are expected to save ``saved`` steps: if they are
        worth it, and in trials.

        ``is_timed`` says whether the step will be recorded.
        """
        if self._unsettled or self._since_plain >= DRAFTED_STEPS_MAX:
            return False
        if self._balance >= self._trial_cost and not self.is_trial and not self._lacks_plain:
            self._is_stopped = False
            if saved <= 0.0:
                self._trial_steps, self._trial_began = TRIAL_STEPS, self._balance
        if self.is_trial:
            return is_timed
        return saved > 0.0 and not self._is_stopped

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

    def __init__(self, acceptance: float = PRIOR_ACCEPTANCE) -> None:
        """``acceptance`` is the rate that is expected."""
        self._accepted = PRIOR_TRIED * acceptance
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
        self._costs = StepCosts()
        self._accepted, self._tried = PRIOR_TRIED * PRIOR_ACCEPTANCE, PRIOR_TRIED
        """Decayed numbers of draft tokens over all sequences."""
        self._has_asked = False
        """Whether the source was asked for drafts for the step under way."""
        self._skips = self._decodes = 0
        """Steps that ask for no drafts while as many sequences decode as in the last one."""
        self._step_accepted = 0
        """Draft tokens of the step under way that were accepted."""

    def draft(
        self, sequences: Sequence[EngineSequence], tokens_left: int, *, is_timed: bool
    ) -> list[tuple[EngineSequence, Tokens]]:
        """Return draft tokens for decoding sequences, at most ``tokens_left`` over all of them.

        There are none in a step in which they would take more time than they are expected to save,
        except in trials (:data:`TRIAL_STEPS`). ``is_timed`` says whether :meth:`step_took` follows.
        """
        self._has_asked, self._step_accepted = False, 0
        if self._has_failed or not sequences or tokens_left == 0:
            return []
        if self._skips and len(sequences) == self._decodes:
            self._skips -= 1
            return []
        self._decodes = len(sequences)
        counts = self._counts(sequences, tokens_left)
        saved = self._saved(sequences, counts)
        if not counts or not self._costs.allow(saved, is_timed=is_timed):
            self._skips = STEPS_SKIPPED if saved <= 0.0 or not counts else 0
            return []
        self._has_asked, self._skips = True, 0
        drafts = self._propose(counts)
        given = [(sequence, len(draft)) for sequence, draft in drafts]
        if not self._costs.is_trial and self._saved(sequences, given) <= 0.0:
            return []  # the source gave fewer than it was asked for
        return drafts

    def step_took(self, decodes: int, drafted: int, seconds: float) -> None:
        """Record the time of a step of ``decodes`` sequences and ``drafted`` draft tokens."""
        if seconds <= 0.0:
            return  # a virtual clock measures nothing
        if self._has_asked:
            self._costs.add_drafted(decodes, drafted, self._step_accepted, seconds)
        else:
            self._costs.add_plain(decodes, seconds)

    def _counts(
        self, sequences: Sequence[EngineSequence], tokens_left: int
    ) -> list[tuple[EngineSequence, int]]:
        """Return how many draft tokens to ask for, for each sequence that is worth any."""
        break_even = self._costs.break_even(len(sequences))
        counts: list[tuple[EngineSequence, int]] = []
        for sequence in sequences:
            # The last token need not be computed.
            length_left = sequence.length_max - sequence.length - 1
            count = min(self._draft_length(sequence, break_even), length_left, tokens_left)
            if count > 0:
                counts.append((sequence, count))
                tokens_left -= count
        return counts

    def _saved(
        self, sequences: Sequence[EngineSequence], drafts: Sequence[tuple[EngineSequence, int]]
    ) -> float:
        """Return how many steps draft tokens are expected to save, given their numbers."""
        drafted = sum(count for _, count in drafts)
        accepted = sum(self._controllers[each.handle].expected(count) for each, count in drafts)
        return self._costs.saved(len(sequences), drafted, accepted)

    def _propose(
        self, counts: Sequence[tuple[EngineSequence, int]]
    ) -> list[tuple[EngineSequence, Tokens]]:
        drafting = [sequence for sequence, _ in counts]
        try:
            drafts = self._source.propose(drafting, [count for _, count in counts])
        except Exception:  # noqa: BLE001 - drafts change only speed, so no error ends the engine
            sys.stderr.write(
                "warning: speculative decoding is off, because the draft source failed:\n"
            )
            traceback.print_exc()
            self._has_failed = True
            return []
        return [each for each in zip(drafting, drafts, strict=True) if len(each[1])]

    def record(self, sequence: EngineSequence, drafted: int, accepted: int) -> None:
        """Record how many of a sequence's draft tokens a step accepted."""
        self._controllers[sequence.handle].record(drafted, accepted, sequence.length)
        self._step_accepted += accepted
        self._accepted = SOURCE_DECAY * self._accepted + accepted
        self._tried = SOURCE_DECAY * self._tried + accepted + (accepted < drafted)

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
            controller = DraftLengthController(self._accepted / self._tried)
            self._controllers[sequence.handle] = controller
        count = controller.count(sequence.length, break_even)
        if options is None or options.step_tokens_max is None:
            return count
        return min(count, options.step_tokens_max - 1)
