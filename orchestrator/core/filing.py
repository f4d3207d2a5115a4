"""Appends each token of an engine's step to its turn: the hot path of every token, without I/O.

:class:`TurnTracker` calls it for each step. Consecutive steps with the same turns are collected as
columns, and numpy splits many steps at once into each turn's share; one by one, each token would
cost two Python appends. A turn counts its collected tokens at once, and :meth:`Turn.settle` files
them before anyone reads the rollout's tokens.

Tokens per CPU-second without each part, with 16 tokens a row, with one as fast as they go, and with
one at 1,000 steps a second (``benchmarks.transport tokens``, medians of 5 pairs): without
:class:`StepCoalescer` .64, .42 and .55; without :func:`_file_each` as well .39, .18 and .34; with
slices in place of :func:`splitter` .92 with one as fast as they go.
"""

import struct
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise, repeat
from typing import Any

import numpy as np
from msgspec import Struct

from tidegate.orchestrator.core.events import Command, StepArrived
from tidegate.orchestrator.core.rollout import Turn

STEPS_MAX = 64
"""Steps collected before they are filed; more would save hardly anything, and delay readers."""


class StepCoalescer:
    """Collected steps of one engine whose rows are the same turns, with equal tokens per row.

    It is the :class:`DeferredTokens` of each of those turns.
    """

    __slots__ = (
        "_handles",
        "_logprobs",
        "_rows",
        "_seen",
        "_token_ids",
        "_tokens_per_step",
        "_turns",
        "_version",
        "evaluation_rows",
        "tokens_each",
    )

    def __init__(self, rows: "list[Turn]", first: StepArrived, tokens_each: int) -> None:
        """Begin an empty collection; ``first`` is still to be added."""
        self._rows = rows
        self._turns = first.turns.tobytes()
        self._handles = frozenset(first.turns)
        self._seen = (-1, -1)
        """(number of submissions, newest handle) when all turns were last found in them."""
        self._version = -1
        self._tokens_per_step = tokens_each
        self._token_ids: list[memoryview] = []
        """One column per step."""
        self._logprobs: list[memoryview[float]] = []
        self.tokens_each = 0
        """Collected tokens of each turn."""
        self.evaluation_rows = sum(row.is_evaluation for row in rows)
        for row in rows:
            row.held_back = self

    def takes(self, step: StepArrived, tokens_each: int, submissions: "dict[int, Turn]") -> bool:
        """Whether ``step`` can be added: same rows and counts, and no turn begins or ends."""
        return (
            step.turns.tobytes() == self._turns
            and tokens_each == self._tokens_per_step
            and not step.finish
            and not step.prefills
            and self._are_all_wanted(submissions)
        )

    def _are_all_wanted(self, submissions: "dict[int, Turn]") -> bool:
        """Whether none of the turns was cancelled meanwhile.

        Handles are never reused: if one is missing, either the count or the newest handle has
        changed.
        """
        seen = (len(submissions), next(reversed(submissions), -1))
        if seen != self._seen:
            if not self._handles <= submissions.keys():
                return False
            self._seen = seen
        return True

    def add(self, step: StepArrived) -> None:
        """Collect one more step."""
        if step.version != self._version:
            self._begin_runs(step)
        self._token_ids.append(step.token_ids)
        self._logprobs.append(step.logprobs)
        self.tokens_each += self._tokens_per_step
        if len(self._token_ids) >= STEPS_MAX:
            self.settle()

    def _begin_runs(self, step: StepArrived) -> None:
        for row in self._rows:
            row.begin_run(step.version, step.engine)
        self._version = step.version

    def settle(self) -> None:
        """Append all collected tokens to their turns' contexts."""
        tokens = self.tokens_each
        if not tokens:
            return
        token_ids, logprobs = self._shares(self._token_ids), self._shares(self._logprobs)
        self.tokens_each = 0
        self._token_ids.clear()
        self._logprobs.clear()
        for row, own_token_ids, own_logprobs in zip(self._rows, token_ids, logprobs, strict=True):
            row.filed_token_ids.frombytes(own_token_ids)
            row.filed_logprobs.frombytes(own_logprobs)
            row.filed += tokens

    def end(self) -> None:
        """File what is collected, and detach from the turns: another set of turns follows."""
        self.settle()
        for row in self._rows:
            if row.held_back is self:
                row.held_back = None

    def _shares(self, columns: "Sequence[memoryview[Any]]") -> "tuple[bytes, ...]":
        """Return each row's bytes over all collected steps."""
        rows = len(self._rows)
        pile = np.frombuffer(b"".join(columns), np.uint32)
        by_step = pile.reshape(len(columns), rows, self._tokens_per_step)
        return splitter(rows, 4 * self.tokens_each).unpack(by_step.transpose(1, 0, 2).tobytes())


@lru_cache(maxsize=64)
def splitter(pieces: int, piece_bytes: int) -> struct.Struct:
    """Return a struct that cuts bytes into equal pieces, in a third of the time of slicing."""
    return struct.Struct(f"{piece_bytes}s" * pieces)


EVALUATION_HANDLES_FROM = 1 << 31
"""First handle of evaluation turns; lower ones are of training. A token that arrives after its turn
was dropped can still be counted in the right ledger."""


class StepOutcome(Struct, gc=False):
    """Result of filing a step: commands, and token counts by ledger account."""

    commands: list[Command]
    train_tokens: int = 0
    evaluation_tokens: int = 0
    late_tokens: int = 0
    """Tokens of training turns that were over already."""
    late_evaluation_tokens: int = 0
    """Tokens of evaluation turns that were over already."""


class TokenAppender:
    """Files the steps of one engine, in the order in which they arrive."""

    __slots__ = ("_last_turns", "_steady")

    def __init__(self) -> None:
        self._last_turns = b""
        """Handles of the last step that was filed by itself."""
        self._steady: StepCoalescer | None = None

    def file(self, submissions: dict[int, Turn], event: StepArrived) -> StepOutcome:
        """Append a step's tokens to their turns, and count them by ledger account.

        A step with the same turns as the previous one begins a collection.
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
            self._steady = StepCoalescer(rows, event, tokens_each)
            return _added(self._steady, event, tokens_each)
        self._last_turns = turns
        return _file_each(rows, event, tokens_each)

    def end(self) -> None:
        """File the current collection, if any."""
        if self._steady is not None:
            self._steady.end()
            self._steady = None
            self._last_turns = b""


def _tokens_each(event: StepArrived) -> int:
    """Return the tokens per row if all rows have equally many, else 0."""
    counts = event.counts
    if counts is None:
        return 1
    column = counts.tobytes()
    return counts[0] if column and column == column[:4] * len(counts) else 0


def _added(steady: StepCoalescer, event: StepArrived, tokens_each: int) -> StepOutcome:
    steady.add(event)
    evaluation_tokens = tokens_each * steady.evaluation_rows
    return StepOutcome([], tokens_each * len(event.turns) - evaluation_tokens, evaluation_tokens)


def _file_each(rows: list[Turn], event: StepArrived, tokens_each: int) -> StepOutcome:
    """File the usual step: every row is wanted and has the same number of tokens."""
    split = splitter(len(rows), 4 * tokens_each).unpack
    version, engine, evaluation_rows = event.version, event.engine, 0
    for row, token_ids, logprobs in zip(
        rows, split(event.token_ids), split(event.logprobs), strict=True
    ):
        if row.sampled_by != version:  # else the previous token came from here too
            row.begin_run(version, engine)
        row.filed_token_ids.frombytes(token_ids)
        row.filed_logprobs.frombytes(logprobs)
        row.filed += tokens_each
        if row.is_evaluation:
            evaluation_rows += 1
    evaluation_tokens = tokens_each * evaluation_rows
    return StepOutcome([], tokens_each * len(rows) - evaluation_tokens, evaluation_tokens)


def _file_any(submissions: dict[int, Turn], event: StepArrived) -> StepOutcome:
    """File a step with any token counts, zeros included, and rows of turns that are over."""
    outcome = StepOutcome([])
    handles = event.turns.tolist()
    rows = map(submissions.get, handles)
    token_ids, logprobs = event.token_ids.tobytes(), event.logprobs.tobytes()
    counts = repeat(1, len(event.turns)) if event.counts is None else event.counts.tolist()
    ends = accumulate(counts, initial=0)
    for handle, row, (start, end) in zip(handles, rows, pairwise(ends), strict=True):
        tokens = end - start
        if row is None and handle >= EVALUATION_HANDLES_FROM:
            outcome.late_evaluation_tokens += tokens
            continue
        if row is None:
            outcome.late_tokens += tokens
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
