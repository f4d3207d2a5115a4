"""Which tokens may a turn sample next? Guesses, for a step to verify several at once.

A guess that is wrong costs time and nothing else: each position of it is sampled from the model's
own logits by the random number that it would have had anyway, so tokens and log-probs are those of
an engine that guesses nothing. Knows turns, not steps.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tidegate.engine.turns import TurnState

Tokens = npt.NDArray[np.int32]

NO_TOKENS: Tokens = np.empty(0, np.int32)

DRAFT_TOKENS_FIRST = 4
"""Guessed for a turn of which nothing is known yet."""

DRAFT_TOKENS_MAX = 16
"""By then a step's own cost, shared by so many tokens, is little of what each of them costs."""

REST_TOKENS_FIRST, REST_TOKENS_MAX = 2, 64
"""A turn whose guess was all wrong samples so many tokens without one; twice as many each time."""


class DraftSource(Protocol):
    """Where guesses come from."""

    def propose(self, turns: Sequence[TurnState], counts: Sequence[int]) -> list[Tokens]:
        """For each turn, at most so many tokens that may follow those it has."""

    def ended(self, turn: TurnState, *, is_whole: bool) -> None:
        """The turn samples nothing more; ``is_whole``: it came to its own end."""


class DraftPace:
    """How many tokens to guess for one turn, by what became of its guesses so far."""

    __slots__ = ("_count", "_next_at", "_rest")

    def __init__(self) -> None:
        self._count = DRAFT_TOKENS_FIRST
        self._rest = REST_TOKENS_FIRST
        self._next_at = 0

    def count(self, length: int) -> int:
        """How many tokens are worth guessing for a turn of so many known ones."""
        return self._count if length >= self._next_at else 0

    def learn(self, drafted: int, accepted: int, length: int) -> None:
        """So many were guessed and so many of them right; the turn has ``length`` tokens now."""
        if accepted == drafted:
            self._count = min(DRAFT_TOKENS_MAX, max(self._count, 2 * drafted))
        else:
            self._count = max(1, accepted)
        if accepted:
            self._rest = REST_TOKENS_FIRST
            return
        self._next_at = length + self._rest
        self._rest = min(REST_TOKENS_MAX, 2 * self._rest)


class Speculation:
    """One engine's guesses, and what became of them."""

    def __init__(self, source: DraftSource) -> None:
        self._source = source
        self._paces: dict[int, DraftPace] = {}
        """Of the turns that have been guessed for, by handle."""

    def draft(self, turns: Sequence[TurnState], tokens_left: int) -> list[tuple[TurnState, Tokens]]:
        """Guess for turns that decode, at most ``tokens_left`` tokens together."""
        asked: list[TurnState] = []
        counts: list[int] = []
        for turn in turns:
            room = turn.length_max - turn.length - 1  # the last token need not be computed
            count = min(self._wanted(turn), room, tokens_left)
            if count > 0:
                asked.append(turn)
                counts.append(count)
                tokens_left -= count
        if not asked:
            return []
        drafts = self._source.propose(asked, counts)
        return [(turn, draft) for turn, draft in zip(asked, drafts, strict=True) if len(draft)]

    def learn(self, turn: TurnState, drafted: int, accepted: int) -> None:
        """A step has verified a guess."""
        self._paces[turn.handle].learn(drafted, accepted, turn.length)

    def ended(self, turn: TurnState, *, is_whole: bool) -> None:
        """The turn samples nothing more; ``is_whole``: it came to its own end."""
        self._paces.pop(turn.handle, None)
        self._source.ended(turn, is_whole=is_whole)

    def _wanted(self, turn: TurnState) -> int:
        """None for turns with options: what those forbid may depend on the tokens guessed."""
        if turn.sampling.options is not None:
            return 0
        pace = self._paces.get(turn.handle)
        if pace is None:
            pace = self._paces[turn.handle] = DraftPace()
        return pace.count(turn.length)
