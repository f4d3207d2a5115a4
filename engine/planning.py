"""Which turns compute how many tokens in the next step? Decodes first, then prefills, then guesses.

It knows no pauses, and not what comes of the step. Who runs at all, and in which blocks, is seats'
business.
"""

from tidegate.engine.cache.seats import Seats
from tidegate.engine.drafts.drafts import Speculation
from tidegate.engine.turns import TurnState


class StepPlanner:
    """Hands out the tokens and the blocks of one step at a time."""

    def __init__(self, seats: Seats, speculation: Speculation | None) -> None:
        self._seats = seats
        self._prefixes = seats.prefixes
        self._speculation = speculation
        self._planned: list[TurnState] = []

    def plan(self, tokens: int, version: int, *, may_start: bool) -> list[TurnState]:
        """The turns of a step of at most so many tokens, each told what it computes.

        ``version`` is the live weights'. Unless turns ``may_start``, only those that run go on.
        """
        planned: list[TurnState] = []
        self._planned = planned
        left = tokens - self._plan_decodes()
        for turn in self._seats.running:
            if turn.is_prefilling and left > 0:
                left -= self._plan_chunk(turn, left)
        if left > 0 and may_start:
            for turn in self._seats.start_waiting(version, tokens):
                left -= self._plan_chunk(turn, left)
                if left == 0:
                    break
        if self._speculation is not None:
            self._plan_drafts(self._speculation, left)
        return planned

    def _plan_decodes(self) -> int:
        """Plan one token for each turn that is past its prefill and has room for it."""
        planned = self._planned
        for turn in self._seats.running.copy():
            if turn.is_prefilling:
                # Recomputed turns can lack blocks. They get a first one here, in the order of
                # rank, for nobody may be thrown out who is planned already.
                if turn.computed >= turn.block_tokens_held:
                    self._seats.grow(turn)
                continue
            if turn.computed < turn.block_tokens_held or self._seats.grow(turn):
                turn.chunk_tokens, turn.drafted = 1, 0
                planned.append(turn)
        return len(planned)

    def _plan_chunk(self, turn: TurnState, tokens_left: int) -> int:
        """Plan what is left of a prefill, as far as it has room and the step has tokens."""
        self._prefixes.take(turn, self._prefixes.find(turn))
        end = min(turn.length, turn.computed + tokens_left)
        self._seats.grow_freely(turn, end)
        turn.drafted = 0
        turn.chunk_tokens = min(end, turn.block_tokens_held) - turn.computed
        if turn.chunk_tokens > 0:
            self._planned.append(turn)
            self._prefixes.share_planned(turn)
        return turn.chunk_tokens

    def _plan_drafts(self, speculation: Speculation, tokens_left: int) -> None:
        """Have decodes verify guesses, where prefills leave tokens and turns leave blocks."""
        decodes = [turn for turn in self._planned if not turn.is_prefilling]
        for turn, draft in speculation.draft(decodes, tokens_left):
            self._seats.grow_to_spare(turn, turn.length + len(draft))
            turn.drafted = min(len(draft), turn.block_tokens_held - turn.length)
            turn.tokens[turn.length : turn.length + turn.drafted] = draft[: turn.drafted]
