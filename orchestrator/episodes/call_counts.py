"""Counts turns that look like tool calls, and warns if none of them can be parsed.

:class:`Conversation` counts, for :class:`RunStatistics`. A model whose calls are written in a form
that is not parsed trains without ever using a tool, and nothing else shows that.
"""

import logging

WARN_AFTER_TURNS = 20
"""Turns that look like calls, none of them parsed, after which the log warns; again at each ten
times as many. A model may get a few calls wrong; a form that is not known fails every time."""

TEXT_SHOWN_MAX = 200
"""Characters of a turn that the warning shows."""

log = logging.getLogger("tidegate")


class ToolCallCounts:
    """Turns of a run that look like tool calls, and those of them that were parsed."""

    def __init__(self) -> None:
        self.turns = 0
        """Number of turns with offered tools that look like a call, or are one."""
        self.parsed_turns = 0
        """Number of these turns whose calls were parsed."""
        self._warn_at_turns = WARN_AFTER_TURNS

    def count(self, text: str, *, is_parsed: bool) -> None:
        """Count one turn that looks like a call."""
        self.turns += 1
        self.parsed_turns += is_parsed
        if self.parsed_turns or self.turns < self._warn_at_turns:
            return
        self._warn_at_turns *= 10
        log.warning(
            "0 of %d turns that look like tool calls were parsed, the last one is %r: its form is "
            "none of those in docs/agents.md (Tool calls), or the model writes it wrongly. Parse "
            "turn.text in the episode, or give the tokenizer a response_template",
            self.turns,
            text[:TEXT_SHOWN_MAX],
        )
