"""Conversations of ``/v1/responses`` by the id of their last answer; one per session.

Kept in memory only.
"""

from typing import Any

from tidegate.serving.http.errors import ApiError

RESPONSES_MAX = 256
"""Answers of one session that ``previous_response_id`` can name; the oldest is forgotten first."""

Message = dict[str, Any]
"""A message in the form of chat completions."""


class ResponseStore:
    """Conversations of one session by the id of their last answer."""

    def __init__(self) -> None:
        self._messages: dict[str, list[Message]] = {}

    def messages(self, response_id: str | None) -> list[Message]:
        """Return the messages up to and including an answer; empty without an id.

        Raises:
            ApiError: the session has no such answer.
        """
        if response_id is None:
            return []
        found = self._messages.get(response_id)
        if found is None:
            why = (
                f"no answer {response_id!r:.80} is known: a session keeps its last {RESPONSES_MAX}"
            )
            raise ApiError(404, why, param="previous_response_id")
        return found

    def add(self, response_id: str, messages: list[Message]) -> None:
        """Keep a conversation, without its instructions, by its answer's id."""
        self._messages[response_id] = messages
        while len(self._messages) > RESPONSES_MAX:
            del self._messages[next(iter(self._messages))]
