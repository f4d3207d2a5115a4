"""What does ``generate`` give? A turn's tokens and words, and what was told of them.

Each is made when it is first looked at. It knows no context but its own, and asks nobody.
"""

from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

from tidegate.errors import ConfigError
from tidegate.orchestrator.core.provenance import VersionSpan
from tidegate.orchestrator.core.rollout import Turn

REWARD_TYPES = (float, int)
"""Told apart first, for looking for a method takes longer."""

REWARD_MAX = (2 - 2**-23) * 2.0**127
"""The largest that a float32 holds, which is what batches have rewards as; of either sign."""


class GeneratedTurn:
    """What one call of ``generate`` gave. Each is made when it is first looked at."""

    def __init__(self, turn: Turn, tokenizer: Tokenizer) -> None:
        self._turn = turn
        self._tokenizer = tokenizer
        self.given_reward: float | None = None
        """As :attr:`reward`, for who only reads it: each turn is asked."""
        self.message: dict[str, Any] | None = None
        """Asked for with messages: what was said, as a message to be sent with the next ones."""

    @cached_property
    def text(self) -> str:
        """Decoded, without special tokens."""
        return self._tokenizer.decode(self.token_ids, skip_special_tokens=True)

    @cached_property
    def token_ids(self) -> list[int]:
        """All tokens, the stop token included."""
        return self._turn.token_ids.tolist()

    def token_ids_from(self, start: int) -> list[int]:
        """Those from this one on, for whoever has read the others."""
        return self._turn.token_ids_from(start).tolist()

    @cached_property
    def logprobs(self) -> list[float]:
        """One per token: natural log of the probability it was drawn with."""
        return self._turn.logprobs.tolist()

    @cached_property
    def raw_logprobs(self) -> list[float] | None:
        """One per token: that before every sampling option. None unless ``raw_logprobs=True`` was
        asked for, of an engine that can tell."""
        details = self._turn.details
        return None if details is None else details.raw_of(len(self.token_ids))

    @cached_property
    def top_logprobs(self) -> list[dict[int, float]] | None:
        """For each token the likeliest ones, likeliest first, each with the log-prob that it could
        have been drawn with; as many as were asked for, or None."""
        details = self._turn.details
        return None if details is None else details.top_of(len(self.token_ids))

    def top_logprobs_from(self, start: int) -> list[dict[int, float]] | None:
        """:attr:`top_logprobs` of the tokens from ``start`` on, for readers of a growing turn."""
        details = self._turn.details
        return None if details is None else details.top_of(len(self.token_ids), start=start)

    @property
    def finish_reason(self) -> str:
        """``stop``: the last token is a stop token, or completes a stop string; ``length``: cut
        off."""
        return self._turn.finish_reason or "length"

    @property
    def goes_on(self) -> bool:
        """Whether more may be sampled, of one that was looked at before its end."""
        return self._turn.finish_reason is None

    @cached_property
    def spans(self) -> list[VersionSpan]:
        """Which weights produced which of the tokens."""
        return self._turn.spans()

    @property
    def reward(self) -> float | None:
        """Its own, beside that of the rollout: to be set before the episode returns, for trainers
        that credit single turns (``Batch.turn_rewards``). It is added to nothing."""
        return self.given_reward

    @reward.setter
    def reward(self, value: float) -> None:
        self.given_reward = checked_reward(value)

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """Of :attr:`message`, in OpenAI's form; empty if it has none."""
        calls: list[dict[str, Any]] = (self.message or {}).get("tool_calls", [])
        return calls

    @property
    def number(self) -> int:
        """Which turn of its row it is, from 0."""
        return self._turn.number

    def __repr__(self) -> str:
        return f"GeneratedTurn({self.text!r}, finish_reason={self.finish_reason!r})"


def checked_reward(value: object) -> float:
    """A reward must be a finite number, as a float32 too.

    Raises:
        ConfigError: it is something else.
    """
    if isinstance(value, REWARD_TYPES) or hasattr(value, "__float__"):
        reward = float(value)
        if abs(reward) <= REWARD_MAX:
            return reward
    raise ConfigError(
        f"an episode must return its reward as a finite number, at most {REWARD_MAX:.4g} either "
        f"way, got {value!r}"
    )
