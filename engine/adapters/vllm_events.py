"""What does vLLM stream? One event for each token of a request, and the spans in the last.

Knows nothing of requests or connections.
"""

from typing import Any

import msgspec

from tidegate.engine.adapters.adapter import Chunk, Ended, TopLogprobs, VersionLabel
from tidegate.errors import TurnRefused

IMPOSSIBLE = -9999.0
"""JSON has no infinity: so vLLM writes the log-prob of a token that could not be sampled."""


class _Top(msgspec.Struct):
    token_id: int
    logprob: float
    rank: int


class _Token(msgspec.Struct):
    token_id: int
    logprob: float
    top_logprobs: list[_Top] = []


class _Logprobs(msgspec.Struct):
    content: list[_Token] | None = None


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    weight_versions: list[_Span] | None = None


class Event(msgspec.Struct):
    """One of a stream's."""

    choices: list[_Choice] = []
    error: Any = None


_events = msgspec.json.Decoder(Event)


def read_event(data: bytes) -> Event:
    """Read the data of one event.

    Raises:
        msgspec.DecodeError: it is none.
    """
    return _events.decode(data)


def to_chunk(choice: _Choice, top_logprobs: int) -> Chunk:
    """A choice of an event, with the likeliest tokens that were asked for.

    Raises:
        TurnRefused: it ended in a way that no turn does.
    """
    token_ids = choice.token_ids or []
    told = (choice.logprobs.content if choice.logprobs is not None else None) or []
    labels = choice.weight_versions
    return Chunk(
        token_ids,
        [token.logprob for token in told],
        _ended(choice.finish_reason),
        None if labels is None else [VersionLabel(s.version, s.start, s.end) for s in labels],
        _top(told, top_logprobs) if top_logprobs and told else None,
    )


def _ended(reason: str | None) -> Ended | None:
    match reason:
        case None | "stop" | "length" | "abort":
            return reason
    raise TurnRefused(f"vLLM ended this turn by {reason!r}; its log says why")


def _top(told: list[_Token], k: int) -> TopLogprobs:
    top = TopLogprobs([], [])
    for token in told:
        likeliest = sorted(token.top_logprobs, key=lambda one: one.rank)[:k]
        top.token_ids.extend(one.token_id for one in likeliest)
        top.logprobs.extend(
            one.logprob if one.logprob > IMPOSSIBLE else float("-inf") for one in likeliest
        )
    return top
