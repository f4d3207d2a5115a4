"""Which turn does each token of a step belong to? The path of every token: no I/O, no clock.

It appends to the arrays of rollouts and marks where a version's tokens begin. Which turns there
are, and what becomes of those that end, is for :mod:`turns` to say.
"""

from itertools import accumulate, pairwise, repeat

from msgspec import Struct

from tidegate.orchestrator.core.events import Command, StepArrived
from tidegate.orchestrator.core.provenance import VersionRun
from tidegate.orchestrator.core.rollout import Turn
from tidegate.orchestrator.turns.steady import SteadySteps, splitter


class StepOutcome(Struct, gc=False):
    """What a step meant: commands, and how many of its tokens belong to whom."""

    commands: list[Command]
    train_tokens: int = 0
    evaluation_tokens: int = 0
    unwanted_tokens: int = 0
    """For turns that were over already."""


class Filing:
    """One engine's steps, as they come."""

    __slots__ = ("_last_turns", "_steady")

    def __init__(self) -> None:
        self._last_turns = b""
        """Of the last step that was filed by itself."""
        self._steady: SteadySteps | None = None

    def file(self, submissions: dict[int, Turn], event: StepArrived) -> StepOutcome:
        """Give a step's tokens to the turns they belong to; count whose they are.

        A step with the same turns as the one before is taken for the second of many.
        """
        tokens_each = _tokens_each(event)
        if self._steady is not None:
            if self._steady.takes(event, tokens_each, submissions):
                return _added(self._steady, event, tokens_each)
            self.end()
        try:
            rows = list(map(submissions.__getitem__, event.turns.tolist()))
        except KeyError:
            tokens_each = 0
        if not tokens_each:
            return _file_any(submissions, event)
        turns = event.turns.tobytes()
        if turns == self._last_turns and not event.finish and not event.prefills:
            self._steady = SteadySteps(rows, event, tokens_each)
            return _added(self._steady, event, tokens_each)
        self._last_turns = turns
        return _file_each(rows, event, tokens_each)

    def end(self) -> None:
        """Other turns come, or none."""
        if self._steady is not None:
            self._steady.end()
            self._steady = None
            self._last_turns = b""


def _tokens_each(event: StepArrived) -> int:
    """Tokens per row, if that is the same for all; else 0."""
    counts = event.counts
    if counts is None:
        return 1
    column = counts.tobytes()
    return counts[0] if column and column == column[:4] * len(counts) else 0


def _added(steady: SteadySteps, event: StepArrived, tokens_each: int) -> StepOutcome:
    steady.add(event)
    evaluation_tokens = tokens_each * steady.evaluation_rows
    return StepOutcome([], tokens_each * len(event.turns) - evaluation_tokens, evaluation_tokens)


def _file_each(rows: list[Turn], event: StepArrived, tokens_each: int) -> StepOutcome:
    """The same number of tokens in each row, and every one is wanted: an engine's usual step."""
    split = splitter(len(rows), 4 * tokens_each).unpack
    version, engine, evaluation_rows = event.version, event.engine, 0
    from_the_first = VersionRun(version, 0, engine)  # one for all turns that begin with this step
    for row, token_ids, logprobs in zip(
        rows, split(event.token_ids), split(event.logprobs), strict=True
    ):
        if not row.runs:  # as begin_run, whose call costs as much again
            row.runs.append(from_the_first)
            row.sampled_by = version
        elif row.sampled_by != version:
            row.begin_run(version, engine)
        row.filed_token_ids.frombytes(token_ids)
        row.filed_logprobs.frombytes(logprobs)
        row.filed += tokens_each
        if row.is_evaluation:
            evaluation_rows += 1
    evaluation_tokens = tokens_each * evaluation_rows
    return StepOutcome([], tokens_each * len(rows) - evaluation_tokens, evaluation_tokens)


def _file_any(submissions: dict[int, Turn], event: StepArrived) -> StepOutcome:
    """Any number of tokens per row, also none, and rows of turns that are over already."""
    outcome = StepOutcome([])
    rows = map(submissions.get, event.turns.tolist())
    token_ids, logprobs = event.token_ids.tobytes(), event.logprobs.tobytes()
    counts = repeat(1, len(event.turns)) if event.counts is None else event.counts.tolist()
    ends = accumulate(counts, initial=0)
    for row, (start, end) in zip(rows, pairwise(ends), strict=True):
        tokens = end - start
        if row is None:
            outcome.unwanted_tokens += tokens
            continue
        if not tokens:
            continue
        row.begin_run(event.version, event.engine)
        row.filed_token_ids.frombytes(token_ids[4 * start : 4 * end])
        row.filed_logprobs.frombytes(logprobs[4 * start : 4 * end])
        row.filed += tokens
        if row.is_evaluation:
            outcome.evaluation_tokens += tokens
        else:
            outcome.train_tokens += tokens
    return outcome
