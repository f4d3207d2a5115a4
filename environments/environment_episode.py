"""Episode function that lets the model play in an environment: observation, turn, observation, ….

Users pass the result of :func:`environment_episode` to ``batches`` and ``evaluate``. Environments
run in an :class:`EnvironmentPool`. A dialogue turns observations into context: :class:`PlainText`,
:class:`Chat`, or a user's; one is created per episode.
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
    """Limits and sampling options of a dialogue's turns."""

    max_tokens: int | None
    """Token limit of one turn; None for the run's limit."""
    context_tokens_max: int | None
    """Token limit of the whole context including the turn; None for the engines' limit."""
    options: SamplingOptions
    """Further keyword arguments of each ``Episode.generate``."""

    def max_tokens_after(self, context_tokens: int) -> int | None:
        """Return the limit of a turn after ``context_tokens``; below 1 if the context is full."""
        if self.context_tokens_max is None:
            return self.max_tokens
        tokens_left = self.context_tokens_max - context_tokens
        return tokens_left if self.max_tokens is None else min(tokens_left, self.max_tokens)


class Dialogue(Protocol):
    """Conversion between observations and turns, for one episode."""

    async def turn_after(self, observation: Observation) -> GeneratedTurn | None:
        """Add the observation to the context and generate a turn; None if the context is full."""


MakeDialogue = Callable[[Episode, TurnLimits], Dialogue]


class PlainText:
    """Dialogue that appends the observation's text as it is."""

    def __init__(self, episode: Episode, limits: TurnLimits) -> None:
        self._episode = episode
        self._limits = limits

    async def turn_after(self, observation: Observation) -> GeneratedTurn | None:
        """Append the text, and generate a turn."""
        self._episode.append(observation.text)
        max_tokens = self._limits.max_tokens_after(self._episode.num_tokens)
        if max_tokens is not None and max_tokens < 1:
            return None
        return await self._episode.generate(max_tokens=max_tokens, **self._limits.options)


class Chat:
    """Dialogue by chat template: the observation's messages, or its text as a user message."""

    def __init__(self, episode: Episode, limits: TurnLimits) -> None:
        self._episode = episode
        self._limits = limits
        self._messages: list[dict[str, Any]] = []

    async def turn_after(self, observation: Observation) -> GeneratedTurn | None:
        """Add the messages, and generate the assistant's turn."""
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
"""31 bits suit every random number generator, C's included."""


@dataclass(slots=True)
class EpisodeCounts:
    """Counts of episodes by outcome."""

    begun: int = 0
    ended: int = 0
    """Number of episodes that the environment ended."""
    out_of_turns: int = 0
    out_of_context: int = 0
    turns: int = 0
    failed: int = 0
    """Ended by an exception of the environment or the engines, or cancelled."""


@dataclass(frozen=True, slots=True)
class EnvironmentEpisode:
    """Episode function that counts outcomes; made by :func:`environment_episode`."""

    make: Callable[[], Environment]
    max_turns: int
    limits: TurnLimits
    dialogue: MakeDialogue
    parks_after_turns: int | None = None
    counts: EpisodeCounts = field(default_factory=EpisodeCounts)

    async def __call__(self, episode: Episode, task: Any) -> float:
        """Play one episode, and return the sum of the rewards."""
        self.counts.begun += 1
        environment = self.make()
        try:
            reward = await self._play(environment, episode, task)
        except BaseException:
            self.counts.failed += 1
            raise
        finally:
            await _maybe_await(environment.close())
        return reward

    async def _play(self, environment: Environment, episode: Episode, task: Any) -> float:
        seed = group_seed(task, episode.group_id)
        with episode.activity(ENVIRONMENT):
            observation = _checked_observation(
                await _maybe_await(environment.reset(seed=seed, task=task))
            )
        dialogue = self.dialogue(episode, self.limits)
        reward = observation.reward
        for turn_index in range(self.max_turns):
            if observation.done:
                break
            if turn_index and self.parks_after_turns and turn_index % self.parks_after_turns == 0:
                await episode.park()
            turn = await dialogue.turn_after(observation)
            if turn is None:
                self.counts.out_of_context += 1
                return reward
            self.counts.turns += 1
            with episode.activity(ENVIRONMENT):
                observation = _checked_observation(await _maybe_await(environment.step(turn.text)))
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
    """Return an episode function in which the model plays in environments that ``make`` creates.

    All rollouts of a group start with the same seed, derived from the task: equal tasks start
    equally, in every epoch and evaluation. So tasks should differ, at least by a number. The
    episode's reward is the sum over all observations, also if turns or context run out; each
    observation's reward is also its turn's ``reward``.

    Args:
        make: ``pool.environment("module:name", …)``, or an environment class. A class runs on the
            run's own event loop, where blocking code delays every other episode.
        max_turns: limit of the model's turns.
        max_tokens: limit of one turn.
        context_tokens_max: limit of the whole context; the turn that reaches it is the last.
        dialogue: how observations become context: ``PlainText`` appends their text, ``Chat``
            applies the model's chat template to their messages.
        parks_after_turns: after every this many turns, the episode yields its engine slot and
            continues under newer weights; see :meth:`Episode.park`.
        options: keyword arguments of ``generate``.

    Raises:
        ConfigError: a limit is below 1.
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
    """Return the seed of a group's environments, derived from its task.

    If the task is not plain data, the seed is derived from the group's id.
    """
    digest = task_digest(task) or task_digest(group_id)
    return int.from_bytes(digest, "big") >> (8 * len(digest) - SEED_BITS)


def _checked_observation(given: Any) -> Observation:
    if not isinstance(given, Observation):
        raise TypeError(
            f"an environment must return a tidegate.Observation, got a "
            f"{type(given).__name__}: {given!r:.80}"
        )
    return given


async def _maybe_await(given: Any) -> Any:
    return await given if inspect.isawaitable(given) else given
