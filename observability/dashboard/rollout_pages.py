"""JSON of one rollout for the dashboard: its text token by token, with each token's provenance.

The app's `/api/rollouts/{id}` route calls :func:`rollout_page`. Model output is passed on as data;
the page renders it as text, never as HTML.
"""

from array import array
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from tidegate.observability.dashboard.frames import plain
from tidegate.observability.records.trajectories import RecordedRollout, RecordedTurn
from tidegate.orchestrator.episodes.incremental_detokenizer import TokenTexts
from tidegate.orchestrator.episodes.tool_calls import parse_reply

TOKENS_SHOWN_MAX = 20_000
"""Tokens returned at a time: as many elements as a browser lays out within a second."""

CONTEXT_TOKENS = 8
"""Tokens decoded before each token, whose text depends on them: a character may be four tokens."""

TASK_CHARACTERS_MAX = 4_000

ANY_TOOL = ("",)
"""Matches calls in tags of any tool name."""


def rollout_page(
    rollout: RecordedRollout,
    tokenizer: Tokenizer | None,
    *,
    start: int = 0,
    bound: int | None = None,
) -> dict[str, Any]:
    """Return a rollout's fields and its tokens from ``start`` on, at most :data:`TOKENS_SHOWN_MAX`.

    ``segments`` are ``[start, end, turn, version, engine, kv]`` over the context, gapless; ``kv``
    says which versions computed the KV that the tokens attended to. Given tokens have turn and
    version -1. Without a tokenizer, a token's text is its id. ``bound`` is the run's staleness
    bound, None without one.
    """
    end = min(len(rollout.token_ids), start + TOKENS_SHOWN_MAX)
    return {
        "rollout_id": rollout.rollout_id,
        "group_id": rollout.group_id,
        "index": rollout.index,
        "state": rollout.state,
        "reason": rollout.discard_reason or "",
        "task": rollout.task[:TASK_CHARACTERS_MAX],
        "reward": plain(rollout.reward),
        "advantage": plain(rollout.advantage),
        "consumed_version": rollout.consumed_version,
        "staleness": rollout.staleness,
        "bound": bound,
        "branch_of": rollout.branch_of,
        "fork_reason": rollout.fork_reason,
        "start": start,
        "end": end,
        "context_tokens": len(rollout.token_ids),
        "texts": token_texts(rollout.token_ids, tokenizer, start=start, end=end),
        "logprobs": plain(rollout.logprobs[start:end]),
        "segments": segments(rollout),
        "turns": [_turn(turn, rollout, tokenizer) for turn in rollout.turns],
    }


def segments(rollout: RecordedRollout) -> list[list[Any]]:
    """Return maximal runs of one provenance over the whole context, given tokens included."""
    found: list[list[Any]] = []
    position = 0
    for number, turn in enumerate(rollout.turns):
        if turn.start > position:
            found.append([position, turn.start, -1, -1, "", ""])
        for span in turn.spans:
            first, last = turn.start + span.start, turn.start + span.end
            found.append([first, last, number, span.version, span.engine, span.kv_label])
        position = turn.start + turn.length
    if position < len(rollout.token_ids):
        found.append([position, len(rollout.token_ids), -1, -1, "", ""])
    return found


def token_texts(
    token_ids: Sequence[int], tokenizer: Tokenizer | None, *, start: int, end: int
) -> list[str]:
    """Return the text that each token adds. A character that several tokens encode is added by the
    last of them."""
    if tokenizer is None:
        return [f"{token_id} " for token_id in token_ids[start:end]]
    texts = TokenTexts(tokenizer)
    for token_id in token_ids[max(0, start - CONTEXT_TOKENS) : start]:
        texts.add(token_id)
    return [each.text for each in texts.all(token_ids[start:end])]


def _turn(
    turn: RecordedTurn, rollout: RecordedRollout, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    return {
        "start": turn.start,
        "length": turn.length,
        "finish_reason": turn.finish_reason,
        "temperature": turn.temperature,
        "reward": plain(turn.reward),
        "versions": [[span.version, span.end - span.start, span.engine] for span in turn.spans],
        "tools": _tools(turn, rollout.token_ids, tokenizer),
    }


def _tools(
    turn: RecordedTurn, token_ids: "Sequence[int] | array[int]", tokenizer: Tokenizer | None
) -> list[str]:
    """Return the names of the tools that the turn calls."""
    if tokenizer is None or turn.length > TOKENS_SHOWN_MAX:
        return []
    text = tokenizer.decode(list(token_ids[turn.start : turn.start + turn.length]))
    return [call.name for call in parse_reply(text, ANY_TOOL).tool_calls]
