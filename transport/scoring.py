"""Messages of the scoring protocol: log-probs, embeddings or rewards of given tokens.

The orchestrator sends ``ScoreTokens``; the engine answers with ``ScoreResult``, and samples
nothing. Requests have numbers of their own and belong to no rollout. Unlike turns, they do not
survive a reconnect: after a hello an engine has none, and each is answered once.

Letters in shapes: N tokens, P reported positions, k most likely tokens, H hidden size, L labels.
"""

from typing import Literal

from tidegate.transport.limits import Count
from tidegate.transport.message import Message

ScoreKind = Literal["logprobs", "embedding", "mean_embedding", "hidden_states", "rewards"]
"""``logprobs``: of each token from ``start`` on, given those before it. ``embedding``: the normed
hidden state [H] of the last token; ``mean_embedding``: the mean of those from ``start`` on;
``hidden_states``: all of those [P, H]. ``rewards``: output of a classification head [L] at the last
token that is not padding."""

TOP_LOGPROBS_MAX = 128
"""Maximum number of most likely tokens reported per position."""

ANSWER_BYTES_MAX = 16 * 1024 * 1024
"""Maximum size of an answer over all its parts: 4 M log-probs, or 4,096 hidden states of 1,024."""

PART_BYTES_MAX = 2 * 1024 * 1024
"""Maximum size of one part: half of the frame limit towards the orchestrator."""


class ScoreTokens(Message, frozen=True, kw_only=True, tag="score_tokens"):
    """Requests scoring of these tokens; answered by ``ScoreResult``, in one or more parts."""

    request_id: Count
    """Request number, unique within a connection and independent of turn handles."""
    token_ids: bytes
    """int32 [N]: the tokens to score."""
    score_kind: ScoreKind = "logprobs"
    start: Count = 0
    """First reported position. For ``logprobs`` at least 1, because the first token has no context.
    KV of earlier positions may come from the prefix cache."""
    top_logprobs: Count = 0
    """k: number of most likely tokens reported with each log-prob."""
    temperature: float = 1.0
    """Divisor of the logits; > 0."""
    priority: int = 0
    """Scheduling priority, shared with turns: lower runs first."""
    adapter: str = ""
    """Name of the LoRA adapter to compute with; empty: none."""
    adapter_version: int | None = None
    """As ``SamplingParams.adapter_version``; an answer is of the version when it starts."""


class CancelScore(Message, frozen=True, kw_only=True, tag="cancel_score"):
    """Cancels a request; unknown and answered requests are ignored."""

    request_id: Count
    """Number of the request to cancel."""


class ScoreResult(Message, frozen=True, kw_only=True, tag="score_result"):
    """A part of an answer. All parts are consecutive and computed by one weight version."""

    request_id: Count
    """Number of the answered request."""
    version: Count
    start: Count = 0
    """Position of this part's first row."""
    logprobs: bytes = b""
    """float32 [P]: natural-log probabilities."""
    top_ids: bytes = b""
    """int32 [P * k]: the most likely tokens at each position, in descending order."""
    top_logprobs: bytes = b""
    """float32 [P * k]: log-probs of ``top_ids``."""
    values: bytes = b""
    """float32: [H], [P, H] or [L], depending on ``ScoreTokens.score_kind``."""
    is_last: bool = True
    ranks: bytes = b""
    """int32 [P]: rank of each scored token, 1 for the most likely; empty if not reported, or k is
    0."""


class ScoreFailed(Message, frozen=True, kw_only=True, tag="score_failed"):
    """The engine can never answer this request; ``message`` says why and what to change."""

    request_id: Count
    """Number of the request that can't be answered."""
    message: str
