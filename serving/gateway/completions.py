"""Turns of a session's rollout that requests begin, and OpenAI's form of their answers.

Each choice of a request is a turn of a row of the rollout.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from tidegate.orchestrator.episodes.tool_calls import ReplyFormat
from tidegate.serving.gateway.response_bodies import (
    FinishedChoice,
    completion,
    last_chunk,
    text_chunk,
    usage_chunk,
    weight_versions,
)
from tidegate.serving.http.errors import OpenAIErrors
from tidegate.serving.http.scaffold import DONE_EVENT, stream_event
from tidegate.serving.openai.answers import ActiveCompletion, ActiveTurn, AnswerForm
from tidegate.serving.openai.requests import OpenAIRequest

if TYPE_CHECKING:
    from tidegate.orchestrator.episodes.episode import Episode
    from tidegate.orchestrator.episodes.generated_turn import GeneratedTurn
    from tidegate.serving.gateway.sessions import Session


def choice_of(
    row: "Episode",
    turn: "Coroutine[Any, Any, GeneratedTurn]",
    reply_format: ReplyFormat | None = None,
) -> ActiveTurn:
    """Begin a turn that continues a row from its present tokens."""
    tokens = row.num_tokens
    return ActiveTurn(
        name=f"{row.rollout_id}-{tokens}",
        prompt_tokens=tokens,
        prompt=lambda: row.token_ids[:tokens],  # contexts only grow
        turn=asyncio.ensure_future(turn),
        current_turn=row.current_turn,
        decode=row.decode if reply_format is None else row.reply_text,
        reply_format=reply_format,
    )


def begin(
    session: "Session",
    request: OpenAIRequest,
    beginnings: Iterable[Callable[[], ActiveTurn]],
) -> ActiveCompletion:
    """Begin all choices of a request; one that can't begin cancels the others.

    Raises:
        ApiError: the session has too many requests.
    """
    session.refuse_if_busy()
    active = ActiveCompletion(request, weight_versions, answering=session.answering)
    try:
        for begin_choice in beginnings:
            choice = begin_choice()
            choice.turn.add_done_callback(session.record_turn)
            active.choices.append(choice)
    except BaseException:
        active.cancel()
        raise
    return active


class CompletionForm(AnswerForm):
    """OpenAI's chat and text completions."""

    def __init__(self, body_of: Callable[..., dict[str, Any]] = completion) -> None:
        """``body_of`` writes the whole answer."""
        self._body_of = body_of

    def body(self, active: ActiveCompletion) -> dict[str, Any]:
        """Return the whole answer."""
        return self._body_of(
            active.request,
            _finished(active),
            name=active.name,
            created_s=active.created_s,
        )

    def first_events(self, active: ActiveCompletion) -> Iterator[bytes]:
        """Yield each choice's first chunk, which has no text."""
        for index in range(len(active.choices)):
            yield stream_event(_text_chunk(active, index, "", is_first=True))

    def reasoning_events(
        self, active: ActiveCompletion, index: int, reasoning: str
    ) -> Iterator[bytes]:
        """Yield one chunk."""
        chunk = _text_chunk(active, index, "")
        chunk["choices"][0]["delta"] = {"reasoning_content": reasoning}
        yield stream_event(chunk)

    def text_events(self, active: ActiveCompletion, index: int, text: str) -> Iterator[bytes]:
        """Yield one chunk."""
        yield stream_event(_text_chunk(active, index, text))

    def last_events(self, active: ActiveCompletion) -> Iterator[bytes]:
        """Yield each choice's last chunk, then the usage if it was asked for."""
        request = active.request
        head: dict[str, Any] = {"name": active.name, "created_s": active.created_s}
        for index, answer in enumerate(_finished(active)):
            yield stream_event(last_chunk(request, index, answer, **head))
        if (request.stream_options or {}).get("include_usage"):
            yield stream_event(usage_chunk(request, _finished(active), **head))
        yield DONE_EVENT

    def error_events(self, error: Exception) -> Iterator[bytes]:
        """Yield the error's body."""
        form = OpenAIErrors()
        yield stream_event(form.body(form.answer_to(error)))
        yield DONE_EVENT


def _finished(active: ActiveCompletion) -> list[FinishedChoice]:
    """Return all choices, once their turns have ended."""
    return [
        FinishedChoice(each.turn.result(), each.prompt_tokens, active.prompt_token_ids(each))
        for each in active.choices
    ]


def _text_chunk(
    active: ActiveCompletion, index: int, text: str, *, is_first: bool = False
) -> dict[str, Any]:
    return text_chunk(
        active.request,
        index,
        text,
        name=active.name,
        created_s=active.created_s,
        is_first=is_first,
        prompt_token_ids=active.prompt_token_ids(active.choices[index]) if is_first else None,
    )
