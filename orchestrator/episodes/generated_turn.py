"""Result of ``Episode.generate``: a turn's tokens, text, log-probs and provenance.

Users' episodes get it; the gateway and the HTTP servers build their responses from it. It is a view
of the core's :class:`Turn`.
"""

from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from tidegate.errors import ConfigError
from tidegate.orchestrator.core.provenance import VersionSpan
from tidegate.orchestrator.core.rollout import Turn
from tidegate.orchestrator.core.token_attachments import (
    NO_ATTACHMENTS,
    PositionReport,
    TurnAttachments,
)
from tidegate.orchestrator.episodes.tool_calls import InvalidToolCall
from tidegate.orchestrator.fleet.scores import TokenScores

REWARD_TYPES = (float, int)
"""Types checked first, because a lookup of ``__float__`` takes longer."""

REWARD_MAX = (2 - 2**-23) * 2.0**127
"""Largest float32, because batches hold rewards as float32; the limit of either sign."""


class GeneratedTurn:
    """One generated turn. Each value is computed when it is first read."""

    def __init__(self, turn: Turn, tokenizer: Tokenizer) -> None:
        self._turn = turn
        self.tokenizer = tokenizer
        self.given_reward: float | None = None
        """The value of :attr:`reward` without the property's cost: every turn is read."""
        self.teacher_scores: TokenScores | None = None
        """Another model's scores of the turn's tokens, from :meth:`Episode.attach_teacher`."""
        self.message: dict[str, Any] | None = None
        """The turn as an OpenAI message, to be sent back with the next messages; None unless the
        turn was generated from messages."""
        self.invalid_tool_calls: tuple[InvalidToolCall, ...] = ()
        """Malformed tool calls of a turn generated from messages, with what is wrong with each, so
        that the episode can tell the model. Their tokens are in the context like all others."""

    @cached_property
    def text(self) -> str:
        """Decoded text, without special tokens."""
        return self.tokenizer.decode(self.token_ids, skip_special_tokens=True)

    @cached_property
    def token_ids(self) -> list[int]:
        """All tokens, including the stop token."""
        return self._turn.token_ids.tolist()

    def token_ids_from(self, start: int) -> list[int]:
        """Return the tokens from index ``start`` on, for readers of a growing turn."""
        return self._turn.token_ids_from(start).tolist()

    @cached_property
    def logprobs(self) -> list[float]:
        """Natural log of the probability that each token was sampled with."""
        return self._turn.logprobs.tolist()

    def logprobs_from(self, start: int) -> list[float]:
        """Return :attr:`logprobs` from index ``start`` on, for readers of a growing turn."""
        return self._turn.logprobs_from(start).tolist()

    # Attachments; None unless requested by the option of the same name, or if the engine can't
    # report them.

    @cached_property
    def raw_logprobs(self) -> list[float] | None:
        """Log-prob of each token before all sampling options."""
        values = self._attachments.entries("raw_logprobs", self._turn.length)
        return None if values is None else values.tolist()

    @cached_property
    def top_logprobs(self) -> list[dict[int, float]] | None:
        """For each position, the top tokens with their log-probs after all sampling options, the
        most likely first."""
        return self.top_logprobs_from(0)

    def top_logprobs_from(self, start: int) -> list[dict[int, float]] | None:
        """Return :attr:`top_logprobs` from index ``start`` on, for readers of a growing turn."""
        return self._attachments.top_logprobs(self._turn.length, start=start)

    @cached_property
    def kept_tokens(self) -> list[list[int]] | None:
        """For each token, the ids of the tokens that the sampling options left to sample from, in
        ascending order; an empty list means all tokens."""
        kept = self._attachments.ragged_entries("kept_ids", self._turn.length)
        return None if kept is None else [ids.tolist() for ids in kept]

    @cached_property
    def hidden_states(self) -> "npt.NDArray[np.float32] | None":
        """Normed last hidden states [C, H] from which the C tokens were sampled."""
        return self._attachments.entries("hidden_states", self._turn.length)

    @property
    def routed_experts(self) -> "npt.NDArray[np.uint8 | np.uint16] | None":
        """Experts [P, L, k] that each of L mixture layers chose when the KV of the first P
        positions of the row's context was computed last. P counts all but the turn's last token,
        whose KV no token has needed."""
        return self._attachments.newest("routed_experts")

    @property
    def routed_expert_reports(self) -> list[PositionReport]:
        """Every report of routed experts: ``start``, the first position, and ``entries`` [P, L, k].

        Positions whose KV was computed again, for example under new weights, are in several
        reports. A token attended to the KV of the last report before it was sampled.
        """
        return list(self._attachments.reports("routed_experts"))

    def json_fields(self, axis: Literal["token", "position"], start: int = 0) -> dict[str, Any]:
        """Return the attachments that JSON answers have: :meth:`TurnAttachments.json_fields`."""
        return self._attachments.json_fields(axis, self._turn.length, start=start)

    @property
    def _attachments(self) -> TurnAttachments:
        return self._turn.attachments or NO_ATTACHMENTS

    @property
    def finish_reason(self) -> str:
        """``stop``: it ends with a stop token, or completes a stop string; ``length``: cut off."""
        return self._turn.finish_reason or "length"

    @property
    def is_running(self) -> bool:
        """Whether the turn is still running, if it was read before its end."""
        return self._turn.finish_reason is None

    @cached_property
    def spans(self) -> list[VersionSpan]:
        """Provenance: which weight version sampled which of the tokens."""
        return self._turn.spans()

    @property
    def reward(self) -> float | None:
        """Reward of this turn alone, for trainers that credit single turns
        (``Batch.turn_rewards``).

        Set it before the episode returns. It is not added to the rollout's reward.
        """
        return self.given_reward

    @reward.setter
    def reward(self, value: float) -> None:
        self.given_reward = checked_reward(value)

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """Tool calls of :attr:`message`, in OpenAI's form; empty without any."""
        calls: list[dict[str, Any]] = (self.message or {}).get("tool_calls", [])
        return calls

    @property
    def number(self) -> int:
        """Number of the turn in its row, from 0."""
        return self._turn.number

    @property
    def start(self) -> int:
        """Index in its row's context of the turn's first token."""
        return self._turn.start

    def __repr__(self) -> str:
        return f"GeneratedTurn({self.text!r}, finish_reason={self.finish_reason!r})"


def checked_reward(value: object) -> float:
    """Return a reward as a float, which must be finite as a float32 too.

    Raises:
        ConfigError: it is not.
    """
    if isinstance(value, REWARD_TYPES) or hasattr(value, "__float__"):
        reward = float(value)
        if -REWARD_MAX <= reward <= REWARD_MAX:
            return reward
    raise ConfigError(
        f"an episode must return its reward as a finite number, at most {REWARD_MAX:.4g} either "
        f"way, got {value!r}"
    )
