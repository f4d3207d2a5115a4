"""What does an episode need of whoever runs it? That the model goes on from a context.

Nothing here says how.
"""

from collections.abc import Awaitable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from tidegate.orchestrator.core.rollout import Rollout, Turn
from tidegate.orchestrator.fleet.scores import Asked, Score
from tidegate.transport.media import Media
from tidegate.transport.messages import SamplingParams


class Generating(Protocol):
    """Who has the model continue a rollout's context."""

    def ask(
        self, rollout: Rollout, sampling: SamplingParams, media: tuple[Media, ...] = ()
    ) -> Awaitable[Turn]:
        """A new turn, asked for now, once it has ended; ``media`` are new in its context."""

    def rejoin(self, rollout: Rollout) -> Awaitable[Turn]:
        """The turn that was going on when the run was resumed, once it has ended."""

    def give_up_turn(self, rollout: Rollout) -> None:
        """Nobody waits for what ``ask`` or ``rejoin`` gave any more."""

    def cut(self, rollout: Rollout, *, turns: int, tokens: int) -> None:
        """Forget what the rollout's context holds beyond so many turns and tokens."""

    def is_over_budget(self, rollout: Rollout) -> bool:
        """Whether its episode is to be parked before its next turn, for it has taken long."""

    async def park(self, rollout: Rollout) -> None:
        """Return once newer weights are live, or the trainer waits for rollouts."""

    def doing(self, rollout: Rollout, name: str) -> AbstractContextManager[None]:
        """Within it, its episode is at something that has a name, beside generating."""

    def score(self, rollout: Rollout, asked: Sequence[Asked]) -> Awaitable[list[Score]]:
        """What the engines make of given tokens, for this rollout's episode."""

    def fork(self, rollout: Rollout, reason: str) -> Rollout:
        """Another row for this one's episode, with nothing in it yet."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What ``generate`` uses where it isn't told."""

    max_tokens: int
    temperature: float
    seed: int
    """Of the run."""
    adapter: str = ""
