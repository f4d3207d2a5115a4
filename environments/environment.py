"""What is an environment? It is reset by a seed and a task, then answers actions, all as text.

It does not know models, tokens or training. Yours is any class with these three methods, each of
them plain or ``async``:

    class Guess:
        def reset(self, *, seed: int, task: Any) -> Observation:
            self._secret = random.Random(seed).randrange(100)
            return Observation("Guess a number below 100: ")

        def step(self, action: str) -> Observation:
            if action.strip() == str(self._secret):
                return Observation("Right.", reward=1.0, done=True)
            return Observation("Wrong. Again: ")

        def close(self) -> None: ...

The same seed, task and actions must give the same observations: a run that is resumed, and one
whose processes die, count on it.
"""

import math
from collections.abc import Awaitable, Iterable, Mapping
from typing import Any, Protocol

import msgspec

TEXT_CHARACTERS_MAX = 1_000_000
"""Of one observation: four times what a context of 64,000 tokens holds."""


class Observation(msgspec.Struct, frozen=True):
    """What an environment says: at a reset, and after each action."""

    text: str
    """Where the model goes on from here as plain text. Every separator is the environment's."""
    reward: float = 0.0
    """For what led here. An episode's reward is the sum of all of them."""
    done: bool = False
    """Whether this is the end; nothing is asked of the environment after it."""
    truncated: bool = False
    """Whether it is the end only because the environment's own limit was reached."""
    messages: tuple[dict[str, Any], ...] = ()
    """The same as messages of a chat, ``{"role": …, "content": …}``, for those who chat."""

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise TypeError(f"an observation's text must be a str, got {self.text!r:.80}")
        if len(self.text) > TEXT_CHARACTERS_MAX:
            raise ValueError(
                f"an observation of {len(self.text)} characters is longer than any context; "
                f"cut it to {TEXT_CHARACTERS_MAX} or fewer"
            )
        reward = float(self.reward)  # a numpy scalar would not travel
        if not math.isfinite(reward):
            raise ValueError(f"an observation's reward must be finite, got {reward}")
        msgspec.structs.force_setattr(self, "reward", reward)
        msgspec.structs.force_setattr(self, "done", bool(self.done or self.truncated))


def chat(
    messages: Iterable[Mapping[str, Any]], *, reward: float = 0.0, done: bool = False
) -> Observation:
    """An observation from messages; as plain text, their contents, a line each."""
    given = tuple(dict(message) for message in messages)
    text = "".join(f"{message.get('content') or ''}\n" for message in given)
    return Observation(text, reward, done, messages=given)


class Environment(Protocol):
    """One copy of a task's world. It is used by one episode, one call at a time."""

    def reset(self, *, seed: int, task: Any) -> Observation | Awaitable[Observation]:
        """Begin; called once, first."""

    def step(self, action: str) -> Observation | Awaitable[Observation]:
        """What the model has said, to the end of its turn."""

    def close(self) -> object:
        """Nothing more is asked; also after a failure."""
