"""What followed when a turn's last tokens stood in its context before? Guesses by looking that up.

Costs a dictionary look-up per token, and guesses well where outputs repeat what was given: code to
edit, tables to copy, steps of a calculation. Knows one turn at a time.
"""

from collections.abc import Sequence

import numpy as np

from tidegate.engine.scheduling.drafts import NO_TOKENS, Tokens
from tidegate.engine.scheduling.turns import TurnState

NGRAM_TOKENS = 3
"""Equal tokens that make the next ones likely to be, too. Two are often equal by chance."""

Ngram = tuple[int, ...]


class NgramIndex:
    """Where each run of ``NGRAM_TOKENS`` tokens ended last, but for the very end."""

    __slots__ = ("_ends", "_indexed")

    def __init__(self) -> None:
        self._ends: dict[Ngram, int] = {}
        self._indexed = NGRAM_TOKENS - 1
        """Runs that end by here are in it."""

    def find(self, tokens: Tokens, length: int) -> int | None:
        """Where, before the end of ``tokens[:length]``, its last run ended; it grew since."""
        start = self._indexed - NGRAM_TOKENS + 1
        if length - start <= NGRAM_TOKENS:
            return None
        known: list[int] = tokens[start:length].tolist()
        columns = [known[first:] for first in range(NGRAM_TOKENS)]
        runs = list(zip(*columns, strict=False))
        last = runs.pop()
        self._ends.update(zip(runs, range(self._indexed + 1, length), strict=True))
        self._indexed = length - 1
        return self._ends.get(last)


class LookupDrafts:
    """Guesses out of turns' own contexts."""

    def __init__(self) -> None:
        self._indices: dict[int, NgramIndex] = {}

    def propose(self, turns: Sequence[TurnState], counts: Sequence[int]) -> list[Tokens]:
        """For each turn, what followed where its last tokens stood before."""
        return [self._propose(turn, count) for turn, count in zip(turns, counts, strict=True)]

    def ended(self, turn: TurnState, *, is_whole: bool) -> None:
        """Forget the turn."""
        self._indices.pop(turn.handle, None)

    def _propose(self, turn: TurnState, count: int) -> Tokens:
        index = self._indices.get(turn.handle)
        if index is None:
            index = self._indices[turn.handle] = NgramIndex()
        end = index.find(turn.tokens, turn.length)
        if end is None:
            return NO_TOKENS
        # What repeats with a period goes on beyond the end of what is known.
        places = end + np.arange(count) % (turn.length - end)
        return turn.tokens[places]
