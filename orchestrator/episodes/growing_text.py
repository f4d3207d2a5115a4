"""What do tokens say that come a few at a time? Each is decoded once or twice, however many follow.

A token's text may depend on the one before it (some tokenizers write a space only between words),
and half a character is no text yet. It knows a tokenizer's function, and no turns.
"""

from collections.abc import Callable, Sequence

HALF_A_CHARACTER = "\ufffd"
"""What tokens that are part of one decode to, until the others are there."""


class GrowingText:
    """The text of an output that goes on, up to its last whole character."""

    __slots__ = ("_decode", "_joined", "_window", "text", "tokens")

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self.text = ""
        self.tokens = 0
        """That it has been given."""
        self._window: list[int] = []
        """The last of them: those that are in the text only to be joined with, and those that are
        not in it yet."""
        self._joined = 0
        """How many of them are the former."""

    def add(self, token_ids: Sequence[int]) -> None:
        """Take in the next tokens."""
        if not token_ids:
            return
        self._window += token_ids
        self.tokens += len(token_ids)
        before = self._decode(self._window[: self._joined])
        now = self._decode(self._window)
        if len(now) > len(before) and not now.endswith(HALF_A_CHARACTER):
            self.text += now[len(before) :]
            del self._window[: self._joined]
            self._joined = len(self._window)
