"""Counts turns that resemble tool calls, and warns if none of them can be parsed.

:class:`Conversation` counts its turns here; :class:`RunStatistics` shows the counts. A model whose
calls have a form that :mod:`tool_calls` does not parse trains without ever using a tool, and no
other figure shows it.
"""

import logging

WARN_AFTER_TURNS = 20
"""Number of turns that resemble calls, none of them parsed, after which a warning is logged;
repeated at each tenfold number. A model may get a few calls wrong, but a form that is not supported
fails every time."""

TEXT_SHOWN_MAX = 200
"""Characters of a turn that the warning shows."""

log = logging.getLogger("tidegate")


class ToolCallCounts:
    """Counts of a run's turns that resemble tool calls, and of the parsed ones among them."""

    def __init__(self) -> None:
        self.turns = 0
        """Number of turns with offered tools whose text resembles or is a tool call."""
        self.parsed_turns = 0
        """Number of these turns whose calls were parsed."""
        self._warn_at_turns = WARN_AFTER_TURNS

    def count(self, text: str, *, is_parsed: bool) -> None:
        """Count one turn that resembles a tool call."""
        self.turns += 1
        self.parsed_turns += is_parsed
        if self.parsed_turns or self.turns < self._warn_at_turns:
            return
        self._warn_at_turns *= 10
        log.warning(
            "0 of %d turns that resemble tool calls were parsed, the last one is %r: its form is "
            "none of those in docs/agents.md (Tool calls), or the model writes it wrongly. Parse "
            "turn.text in the episode, or give the tokenizer a response_template",
            self.turns,
            text[:TEXT_SHOWN_MAX],
        )
