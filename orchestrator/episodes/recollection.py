"""What did an episode do before the crash? Followed step by step while it is run again.

A resumed run starts the user's episode function from its beginning, for a coroutine can't be
written down. As long as it appends what it appended and asks for the turns it asked for, it gets
those very turns: nothing is sampled twice. Where it goes another way, the rest is forgotten.
"""

from array import array

from tidegate.orchestrator.core.rollout import Rollout, Turn
from tidegate.transport.media import Media
from tidegate.transport.messages import SamplingParams

NOT_REPEATABLE = ("cancelled", "refused")
"""How a turn may have ended that can't be given again: its episode saw an exception."""


class Recollection:
    """A rollout's past, and how far the episode has come in it."""

    def __init__(self, rollout: Rollout) -> None:
        self._rollout = rollout
        self.turns = 0
        """Lived through again."""
        self.tokens = 0
        """Of the context, lived through again."""

    @property
    def is_over(self) -> bool:
        """Whether what comes now is new."""
        return self.turns >= len(self._rollout.turns)

    def follows(self, given: "array[int]") -> bool:
        """Whether the episode appended these then, too; if so, they are in the context already."""
        end = self.tokens + len(given)
        next_turn = self._rollout.turns[self.turns]
        if end > next_turn.start or self._rollout.token_ids[self.tokens : end] != given:
            return False
        self.tokens = end
        return True

    @property
    def next_seed(self) -> int:
        """Of the turn that comes next."""
        return self._rollout.turns[self.turns].sampling.seed

    def next_turn(self, sampling: SamplingParams, media: tuple[Media, ...] = ()) -> Turn | None:
        """The turn that the episode asked for here, then; None if it asks for another."""
        turn = self._rollout.turns[self.turns]
        is_same = self.tokens == turn.start and sampling == turn.sampling and media == turn.media
        if not is_same or turn.finish_reason in NOT_REPEATABLE:
            return None
        return turn

    def lived_through(self, turn: Turn) -> None:
        """The episode has got this turn again, whole."""
        self.turns += 1
        self.tokens = turn.start + turn.length
