"""How does an observation become context, so that the model's next turn is its answer to it?

A dialogue is made for each episode, and knows nothing of the environment but what it says.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from tidegate.orchestrator.environments.environment import Observation
from tidegate.orchestrator.episodes.episode import Episode
from tidegate.orchestrator.episodes.generated_turn import GeneratedTurn
from tidegate.orchestrator.episodes.sampling_options import SamplingOptions


@dataclass(frozen=True, slots=True)
class TurnLimits:
    """What one turn of a dialogue may take."""

    max_tokens: int | None
    """None: the run's."""
    context_tokens_max: int | None
    """Of the whole context with this turn; None: what engines take."""
    options: SamplingOptions
    """For ``generate``."""

    def max_tokens_after(self, context_tokens: int) -> int | None:
        """For a turn after so many; below 1 if there is no room."""
        if self.context_tokens_max is None:
            return self.max_tokens
        room = self.context_tokens_max - context_tokens
        return room if self.max_tokens is None else min(room, self.max_tokens)


class Dialogue(Protocol):
    """One episode's."""

    async def turn_after(self, observation: Observation) -> GeneratedTurn | None:
        """What the model says to it; None if the context has no room."""


MakeDialogue = Callable[[Episode, TurnLimits], Dialogue]


class PlainText:
    """The observation's text is appended as it is."""

    def __init__(self, episode: Episode, limits: TurnLimits) -> None:
        self._episode = episode
        self._limits = limits

    async def turn_after(self, observation: Observation) -> GeneratedTurn | None:
        """What the model goes on with."""
        self._episode.append(observation.text)
        max_tokens = self._limits.max_tokens_after(self._episode.num_tokens)
        if max_tokens is not None and max_tokens < 1:
            return None
        return await self._episode.generate(max_tokens=max_tokens, **self._limits.options)


class Chat:
    """The observation's messages, or its text as the user's, are said to the model in turn."""

    def __init__(self, episode: Episode, limits: TurnLimits) -> None:
        self._episode = episode
        self._limits = limits
        self._messages: list[dict[str, Any]] = []

    async def turn_after(self, observation: Observation) -> GeneratedTurn | None:
        """What the model says next in the whole conversation."""
        new = observation.messages or ({"role": "user", "content": observation.text},)
        self._messages += new
        max_tokens = self._limits.max_tokens
        if self._limits.context_tokens_max is not None:
            context = await self._episode.conversation.prompt_tokens(self._messages, None)
            max_tokens = self._limits.max_tokens_after(len(context))
            if max_tokens is not None and max_tokens < 1:
                return None
        turn = await self._episode.generate(
            messages=self._messages, max_tokens=max_tokens, **self._limits.options
        )
        if turn.message is not None:
            self._messages.append(turn.message)
        return turn
