"""Interface of an environment: reset, then steps; actions and observations are text.

Users implement :class:`Environment`; worker processes call its methods. Independent of models,
tokens and training. Any class with these three methods is an environment; each method may be plain
or ``async``:

    class Guess:
        def reset(self, *, seed: int, task: Any) -> Observation:
            self._secret = random.Random(seed).randrange(100)
            return Observation("Guess a number below 100: ")

        def step(self, action: str) -> Observation:
            if action.strip() == str(self._secret):
                return Observation("Right.", reward=1.0, done=True)
            return Observation("Wrong. Again: ")

        def close(self) -> None: ...

The same seed, task and actions must give the same observations: a resumed run and a pool whose
process died rely on it.
"""

import math
from collections.abc import Awaitable, Iterable, Mapping
from typing import Any, Protocol

import msgspec

TEXT_CHARACTERS_MAX = 1_000_000
"""Limit of one observation's text: four times what a context of 64,000 tokens holds."""


class Observation(msgspec.Struct, frozen=True):
    """What an environment returns from a reset and from each step."""

    text: str
    """Appended to the model's context as plain text; the environment supplies all separators."""
    reward: float = 0.0
    """Reward of the step that led here. An episode's reward is the sum over its observations."""
    done: bool = False
    """Whether the episode has ended; the environment is not called again."""
    truncated: bool = False
    """Whether the episode ended because of the environment's own limit; implies ``done``."""
    messages: tuple[dict[str, Any], ...] = ()
    """The same as chat messages, ``{"role": …, "content": …}``, for the :class:`Chat` dialogue."""

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise TypeError(f"an observation's text must be a str, got {self.text!r:.80}")
        if len(self.text) > TEXT_CHARACTERS_MAX:
            raise ValueError(
                f"an observation of {len(self.text)} characters is longer than any context; "
                f"cut it to {TEXT_CHARACTERS_MAX} or fewer"
            )
        reward = float(self.reward)  # a numpy scalar can't be encoded
        if not math.isfinite(reward):
            raise ValueError(f"an observation's reward must be finite, got {reward}")
        msgspec.structs.force_setattr(self, "reward", reward)
        msgspec.structs.force_setattr(self, "done", bool(self.done or self.truncated))


def chat(
    messages: Iterable[Mapping[str, Any]], *, reward: float = 0.0, done: bool = False
) -> Observation:
    """Return an observation of chat messages; its plain text has their contents, one per line."""
    given = tuple(dict(message) for message in messages)
    text = "".join(f"{message.get('content') or ''}\n" for message in given)
    return Observation(text, reward, done, messages=given)


class Environment(Protocol):
    """One instance of a task, used by one episode; calls do not overlap."""

    def reset(self, *, seed: int, task: Any) -> Observation | Awaitable[Observation]:
        """Start the episode. Called once, before any step."""

    def step(self, action: str) -> Observation | Awaitable[Observation]:
        """Act on the model's turn, given as text."""

    def close(self) -> object:
        """Release resources. The last call, also after a failure."""
