"""Episode function over an environment: observation, turn, observation, until one of them ends.

A dialogue turns observations into context: :class:`PlainText`, :class:`Chat`, or the user's own;
one is made for each episode.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, Unpack

from tidegate.environments.environment import Environment, Observation
from tidegate.errors import ConfigError
from tidegate.orchestrator.batches.tasks import task_digest
from tidegate.orchestrator.episodes.activities import ENVIRONMENT
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


SEED_BITS = 31
"""Every generator of random numbers takes such a seed, C's too."""


@dataclass(slots=True)
class EpisodeCounts:
    """What has become of the episodes so far."""

    begun: int = 0
    ended: int = 0
    """By the environment."""
    out_of_turns: int = 0
    out_of_context: int = 0
    turns: int = 0
    failed: int = 0
    """By the environment, the model's engines, or being cancelled."""


@dataclass(frozen=True, slots=True)
class EnvironmentEpisode:
    """An episode function for ``batches`` and ``evaluate``, which counts what it sees."""

    make: Callable[[], Environment]
    max_turns: int
    limits: TurnLimits
    dialogue: MakeDialogue
    parks_after_turns: int | None = None
    counts: EpisodeCounts = field(default_factory=EpisodeCounts)

    async def __call__(self, episode: Episode, task: Any) -> float:
        """Play one episode; the sum of the rewards."""
        self.counts.begun += 1
        environment = self.make()
        try:
            reward = await self._play(environment, episode, task)
        except BaseException:
            self.counts.failed += 1
            raise
        finally:
            await _result(environment.close())
        return reward

    async def _play(self, environment: Environment, episode: Episode, task: Any) -> float:
        seed = group_seed(task, episode.group_id)
        with episode.doing(ENVIRONMENT):
            observation = _checked(await _result(environment.reset(seed=seed, task=task)))
        dialogue = self.dialogue(episode, self.limits)
        reward = observation.reward
        for number in range(self.max_turns):
            if observation.done:
                break
            if number and self.parks_after_turns and number % self.parks_after_turns == 0:
                await episode.park()
            turn = await dialogue.turn_after(observation)
            if turn is None:
                self.counts.out_of_context += 1
                return reward
            self.counts.turns += 1
            with episode.doing(ENVIRONMENT):
                observation = _checked(await _result(environment.step(turn.text)))
            reward += observation.reward
            if observation.reward:
                turn.reward = observation.reward
        self.counts.ended += observation.done
        self.counts.out_of_turns += not observation.done
        return reward


def environment_episode(
    make: Callable[[], Environment],
    *,
    max_turns: int,
    max_tokens: int | None = None,
    context_tokens_max: int | None = None,
    dialogue: MakeDialogue = PlainText,
    parks_after_turns: int | None = None,
    **options: Unpack[SamplingOptions],
) -> EnvironmentEpisode:
    """An episode function: the model plays in an environment that ``make`` makes.

    All rollouts of a group begin by the same seed, which follows from the task: equal tasks begin
    equally, in every epoch and evaluation. Give tasks that differ, if only by a number. The reward
    is the sum of all observations', also where turns or context run out; each is its turn's
    ``reward``, too.

    Args:
        make: ``pool.environment("module:name", …)``, or a class: then it runs on the run's own
            loop, where what computes or blocks holds up every other episode.
        max_turns: of the model.
        max_tokens: of one turn.
        context_tokens_max: of the whole context; the turn that reaches it is the last.
        dialogue: how observations become context: ``PlainText`` appends their text, ``Chat`` says
            their messages through the model's chat template.
        parks_after_turns: after so many turns, each time, it leaves the engines to others and goes
            on under newer weights; see :meth:`Episode.park`.
        options: as for ``generate``.

    Raises:
        ConfigError: a limit that nothing could keep.
    """
    for name, value in (
        ("max_turns", max_turns),
        ("max_tokens", max_tokens),
        ("context_tokens_max", context_tokens_max),
        ("parks_after_turns", parks_after_turns),
    ):
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    limits = TurnLimits(max_tokens, context_tokens_max, options)
    return EnvironmentEpisode(make, max_turns, limits, dialogue, parks_after_turns)


def group_seed(task: object, group_id: int) -> int:
    """The seed by which a group's environments begin: its task's, or its own.

    Tasks that are no plain data can't be told apart; their groups can.
    """
    digest = task_digest(task) or task_digest(group_id)
    return int.from_bytes(digest, "big") >> (8 * len(digest) - SEED_BITS)


def _checked(given: Any) -> Observation:
    if not isinstance(given, Observation):
        raise TypeError(
            f"an environment must answer with a tidegate.Observation, got a "
            f"{type(given).__name__}: {given!r:.80}"
        )
    return given


async def _result(given: Any) -> Any:
    return await given if inspect.isawaitable(given) else given
