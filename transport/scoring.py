"""How is a model asked what it makes of given tokens, and how does it answer? Nothing is sampled.

Knows nothing of turns: requests have numbers of their own, and are no part of any rollout. They
don't outlast a conversation, as turns do: after a hello an engine has none, and it answers once.

Letters in shapes: N tokens, P positions told of, k likeliest tokens, H hidden, L labels.
"""

from typing import Literal

from tidegate.transport.limits import Count
from tidegate.transport.message import Message

Want = Literal["logprobs", "embedding", "mean_embedding", "hidden_states", "rewards"]
"""``logprobs``: of each token from ``start`` on, given those before it. ``embedding``: the normed
hidden state [H] of the last token; ``mean_embedding``: the mean of those from ``start`` on;
``hidden_states``: all of those [P, H]. ``rewards``: what a classification head says [L] of the last
token that is not padding."""

TOP_LOGPROBS_MAX = 128
"""Likeliest tokens told with a position."""

ANSWER_BYTES_MAX = 16 * 1024 * 1024
"""Of all parts of an answer: 4 M log-probs, or 4,096 hidden states of 1,024."""

PART_BYTES_MAX = 2 * 1024 * 1024
"""Of one part: half of what a frame to the orchestrator may have."""


class ScoreTokens(Message, frozen=True, kw_only=True, tag="score_tokens"):
    """Say something of these tokens; answered by ``Scored``, in one or more parts."""

    request: Count
    """Used once in a conversation; turns' handles are others."""
    token_ids: bytes
    """int32 [N]"""
    want: Want = "logprobs"
    start: Count = 0
    """The first position told of. Nothing comes before the first token, so it has no log-prob:
    for ``logprobs`` that is at least 1. KV of positions before it may come from the cache."""
    top_logprobs: Count = 0
    """k: so many of the likeliest tokens are told with each log-prob."""
    temperature: float = 1.0
    """Logits are divided by it; above 0."""
    priority: int = 0
    """As a turn's: lower runs first, among turns too."""


class CancelScore(Message, frozen=True, kw_only=True, tag="cancel_score"):
    """Nobody waits for this request any more; unknown and answered ones are ignored."""

    request: Count


class Scored(Message, frozen=True, kw_only=True, tag="scored"):
    """A part of an answer. All of them come one after another, from one version of the weights."""

    request: Count
    version: Count
    start: Count = 0
    """The position that this part's first row is of."""
    logprobs: bytes = b""
    """float32 [P], natural log."""
    top_ids: bytes = b""
    """int32 [P * k], likeliest first."""
    top_logprobs: bytes = b""
    """float32 [P * k]: theirs."""
    values: bytes = b""
    """float32: [H], [P, H] or [L]."""
    last: bool = True
    ranks: bytes = b""
    """int32 [P], of the tokens themselves, 1 for the likeliest; empty: not told, or k is 0."""


class ScoreRefused(Message, frozen=True, kw_only=True, tag="score_refused"):
    """This request can never be answered as asked; ``message`` says why and what to change."""

    request: Count
    message: str
