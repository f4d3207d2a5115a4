"""Turns of chats whose reply is parsed: content, reasoning, calls.

``response_bodies.py`` writes them as vLLM's chat completions; an :class:`AnswerForm` writes them as
OpenAI's responses and Anthropic's messages.
"""

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tidegate.orchestrator.episodes.conversation import reply_content, reply_message
from tidegate.orchestrator.episodes.tool_calls import ReplyFormat
from tidegate.serving.http.errors import ApiError
from tidegate.serving.openai.active_requests import ActiveChoice
from tidegate.serving.openai.answers import ActiveTurn

if TYPE_CHECKING:
    from tidegate.orchestrator.episodes.generated_turn import GeneratedTurn
    from tidegate.orchestrator.episodes.model_files import ModelFiles


@dataclass(slots=True, kw_only=True)
class ServedTurn(ActiveTurn):
    """Turn of a choice of a chat."""

    choice: ActiveChoice
    model: "ModelFiles"
    has_parallel_calls: bool
    """Whether a turn may have several calls; else only the first is kept, as by vLLM."""

    def parsed(self) -> "GeneratedTurn | None":
        """Return the turn of the choice, which has ended, with its message; None if there is none,
        because the choice was aborted before."""
        turn = self.choice.current_turn()
        if turn is not None and self.reply_format is not None:
            text = reply_content(self.model, turn, self.choice.options)
            turn.message = reply_message(self.reply_format.parse(text), self.name)
            if turn.tool_calls and not self.has_parallel_calls:
                turn.message["tool_calls"] = turn.tool_calls[:1]
        return turn

    def message(self) -> dict[str, Any]:
        """Return the message of the choice, which has ended."""
        turn = self.parsed()
        return {} if turn is None else turn.message or {}

    async def ended(self) -> "GeneratedTurn":
        """Wait for the end of the choice; cancelling this aborts the choice.

        Raises:
            ApiError: the choice was aborted.
        """
        try:
            await asyncio.wait([self.choice.ended])
        except asyncio.CancelledError:
            self.choice.abort()
            raise
        if self.choice.error is not None:
            raise self.choice.error
        turn = self.parsed()
        if turn is None or self.choice.is_aborted:
            raise ApiError(503, "the request was aborted; ask again")
        return turn


def served_turn(
    choice: ActiveChoice,
    model: "ModelFiles",
    reply_format: ReplyFormat,
    name: str,
    *,
    has_parallel_calls: bool,
) -> ServedTurn:
    """Return a choice as a turn whose text is parsed with ``reply_format``."""
    ids = choice.prompt.token_ids
    turn = ServedTurn(
        name=name,
        prompt_tokens=len(ids),
        prompt=lambda: ids,
        turn=asyncio.get_running_loop().create_future(),
        current_turn=choice.current_turn,
        subscribe=choice.subscribe,
        decode=model.reply_text,
        reply_format=reply_format,
        choice=choice,
        model=model,
        has_parallel_calls=has_parallel_calls,
    )
    turn.turn = asyncio.ensure_future(turn.ended())
    turn.turn.add_done_callback(lambda done: done.cancelled() or done.exception())
    return turn
