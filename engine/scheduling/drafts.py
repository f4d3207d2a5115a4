"""Which tokens may a turn sample next? Guesses, for a step to verify several at once.

A guess that is wrong costs time and nothing else: each position of it is sampled from the model's
own logits by the random number that it would have had anyway, so tokens and log-probs are those of
an engine that guesses nothing. Knows turns, not steps.
"""

import math
import sys
import traceback
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tidegate.engine.scheduling.turns import TurnState

Tokens = npt.NDArray[np.int32]

NO_TOKENS: Tokens = np.empty(0, np.int32)

DRAFT_TOKENS_MAX = 16
"""By then a step's own cost, shared by so many tokens, is little of what each of them costs."""

STEP_TOKENS = 4.0
"""A step takes as long as computing so many tokens, however few it has, for it reads all weights:
13 ms of a model of 45 million of them, and 2.5 ms a token, on the CPU that we measured."""

RIGHT_FIRST, TRIED_FIRST = 1.5, 2.0
"""Of a turn that nothing was guessed for yet: as if three guessed tokens in four had been right."""

REMEMBERED = 0.9
"""Of what became of guesses, from one to the next: what a turn says changes on its way."""

REST_TOKENS_FIRST, REST_TOKENS_MAX = 2, 64
"""A turn whose guesses don't pay is tried again after so many tokens; twice as many each time."""


class DraftSource(Protocol):
    """Where guesses come from."""

    def propose(self, turns: Sequence[TurnState], counts: Sequence[int]) -> list[Tokens]:
        """For each turn, at most so many tokens that may follow those it has."""

    def ended(self, turn: TurnState, *, is_whole: bool) -> None:
        """The turn samples nothing more; ``is_whole``: it came to its own end."""


def share_that_pays(decodes: int) -> float:
    """How likely right a guessed token must be in a step of so many turns that decode.

    In time of one token, it costs 1, and saves, where it is right, the part of another step that
    its turn would have had: ``1 + STEP_TOKENS / decodes``.
    """
    return 1 / (1 + STEP_TOKENS / decodes)


class DraftPace:
    """How many tokens to guess for one turn, by what became of its guesses so far."""

    __slots__ = ("_next_at", "_rest", "_right", "_tried")

    def __init__(self) -> None:
        self._right = RIGHT_FIRST
        self._tried = TRIED_FIRST
        """Guessed tokens after only right ones; older ones count less."""
        self._rest = REST_TOKENS_FIRST
        self._next_at = 0

    def count(self, length: int, enough: float) -> int:
        """How many tokens to guess for a turn of ``length`` where a share ``enough`` pays.

        All those that are likely enough together with the ones before them; one, now and then,
        where none is, to see whether it still is so.
        """
        share = self._right / self._tried
        if share <= enough:
            return 1 if length >= self._next_at else 0
        if share >= enough ** (1 / DRAFT_TOKENS_MAX):
            return DRAFT_TOKENS_MAX
        return int(math.log(enough) / math.log(share))

    def learn(self, drafted: int, accepted: int, length: int) -> None:
        """So many were guessed and so many of them right; the turn has ``length`` tokens now."""
        self._right = REMEMBERED * self._right + accepted
        self._tried = REMEMBERED * self._tried + accepted + (accepted < drafted)
        if accepted:
            self._rest = REST_TOKENS_FIRST
            return
        self._next_at = length + self._rest
        self._rest = min(REST_TOKENS_MAX, 2 * self._rest)


class Speculation:
    """One engine's guesses, and what became of them."""

    def __init__(self, source: DraftSource) -> None:
        self._source = source
        self._has_failed = False
        """Whether the source has raised an error; then it is not asked again."""
        self._paces: dict[int, DraftPace] = {}
        """Of the turns that have been guessed for, by handle."""

    def draft(self, turns: Sequence[TurnState], tokens_left: int) -> list[tuple[TurnState, Tokens]]:
        """Guess for turns that decode, at most ``tokens_left`` tokens together."""
        if self._has_failed:
            return []
        enough = share_that_pays(max(1, len(turns)))
        asked: list[TurnState] = []
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
        except Exception:  # noqa: BLE001 - guesses change only speed: a model's code ends no engine
            sys.stderr.write("warning: no more tokens are guessed, for the source failed:\n")
            traceback.print_exc()
            self._has_failed = True
            return []
        return [(turn, draft) for turn, draft in zip(asked, drafts, strict=True) if len(draft)]

    def learn(self, turn: TurnState, drafted: int, accepted: int) -> None:
        """A step has verified a guess."""
        self._paces[turn.handle].learn(drafted, accepted, turn.length)

    def ended(self, turn: TurnState, *, is_whole: bool) -> None:
        """The turn samples nothing more; ``is_whole``: it came to its own end."""
        self._paces.pop(turn.handle, None)
        if not self._has_failed:
            self._source.ended(turn, is_whole=is_whole)

    def _wanted(self, turn: TurnState, enough: float) -> int:
        """None for turns whose options would edit a logit by the tokens guessed before it."""
        options = turn.sampling.options
        if options is not None and options.edit_by_output:
            return 0
        pace = self._paces.get(turn.handle)
        if pace is None:
            pace = self._paces[turn.handle] = DraftPace()
        count = pace.count(turn.length, enough)
        if options is None or options.step_tokens_max is None:
            return count
        return min(count, options.step_tokens_max - 1)
