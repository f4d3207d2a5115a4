"""Stop-string detection with an incremental detokenizer.

A token may end in the middle of a character, and some decoders write a token differently after a
space, so a few tokens are decoded together, and a character counts once it is complete.
"""

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer

PROMPT_TOKENS = 6
"""Prompt tokens decoded before the first output tokens, because decoders may drop a leading space.
A character has at most 4 bytes, so the last of these tokens start with a whole character."""

INCOMPLETE_TOKENS_MAX = 8
"""Tokens decoded together before incomplete bytes are treated as invalid text: twice the length of
the longest character in bytes."""

REPLACEMENT_CHAR = "\N{REPLACEMENT CHARACTER}"
"""Character that decoders emit for incomplete or invalid bytes."""


class StopStrings:
    """The stop strings of one turn, and the tail of its output text."""

    def __init__(
        self, tokenizer: Tokenizer, strings: Sequence[str], prompt_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        self._tail_chars = max(map(len, strings)) - 1
        self._tail = ""
        """End of the output text, as long as a stop string may already have begun in it."""
        self._unsettled_chars = 0
        """Number of characters after the tail that were compared already: whole ones, of tokens
        that end within a character."""
        self._ids = list(prompt_ids[-PROMPT_TOKENS:])
        self._decoded_tokens = len(self._ids)
        """Number of the leading ``_ids`` whose text is already in the tail."""

    def add_output(self, token_ids: Iterable[int]) -> None:
        """Add tokens without ending the turn."""
        for token_id in token_ids:
            self.completes(token_id)

    def completes(self, token_id: int) -> bool:
        """Add a sampled token; return whether a stop string ends within the token's text."""
        text, is_settled = self._text_of(token_id)
        if not text:
            return False
        tail, old_chars = self._tail + text, len(self._tail) + self._unsettled_chars
        self._unsettled_chars = 0 if is_settled else len(text)
        if is_settled:
            self._tail = tail[-self._tail_chars :] if self._tail_chars else ""
        return any(tail.find(s, max(0, old_chars - len(s) + 1)) >= 0 for s in self._strings)

    def _text_of(self, token_id: int) -> tuple[str, bool]:
        """Return the whole characters after the tail, and whether they are to be added to it:
        while a character is incomplete, the tokens of those before it are decoded again."""
        self._ids.append(token_id)
        decoded = self._decode(self._ids[: self._decoded_tokens])
        text = self._decode(self._ids)[len(decoded) :]
        is_incomplete = not text or text.endswith(REPLACEMENT_CHAR)
        if is_incomplete and len(self._ids) - self._decoded_tokens < INCOMPLETE_TOKENS_MAX:
            return text.rstrip(REPLACEMENT_CHAR), False
        del self._ids[: self._decoded_tokens]
        self._decoded_tokens = len(self._ids)
        return text, True

    def _decode(self, token_ids: Sequence[int]) -> str:
        return (
            str(self._tokenizer.decode(token_ids, skip_special_tokens=False)) if token_ids else ""
        )
