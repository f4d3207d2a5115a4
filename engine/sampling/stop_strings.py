"""Has a turn's output come to one of its stop strings? Decodes token by token, remembers little.

Tokens cut text anywhere, in the middle of a character too, and some decoders write a token in two
ways, depending on the one before. So a few tokens are decoded together, and a character counts once
it is whole. Knows nothing of turns or steps.
"""

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer

PROMPT_TOKENS = 6
"""Before the output, decoded with its first tokens: what follows a space, say, is written without
one. A character has four bytes at most, so the last of these begin with a whole one."""

BROKEN_TOKENS_MAX = 8
"""Decoded together until they are text. Twice what one character can take: so this is no text."""

BROKEN = "\N{REPLACEMENT CHARACTER}"
"""What decoders write for bytes that are no character, or not yet."""


class StopStrings:
    """The stop strings of one turn, and the end of its text."""

    def __init__(
        self, tokenizer: Tokenizer, strings: Sequence[str], prompt_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        self._tail_chars = max(map(len, strings)) - 1
        self._tail = ""
        """The end of the output's text: no stop string that is still to come begins before it."""
        self._ids = list(prompt_ids[-PROMPT_TOKENS:])
        self._told = len(self._ids)
        """Of these, so many are in the text already."""

    def skip(self, token_ids: Iterable[int]) -> None:
        """Take in tokens that may not end the turn."""
        for token_id in token_ids:
            self.completes(token_id)

    def completes(self, token_id: int) -> bool:
        """Take in a sampled token; return whether a stop string ends in what it adds."""
        text = self._text_of(token_id)
        if not text:
            return False
        said, known = self._tail + text, len(self._tail)
        self._tail = said[-self._tail_chars :] if self._tail_chars else ""
        return any(said.find(s, max(0, known - len(s) + 1)) >= 0 for s in self._strings)

    def _text_of(self, token_id: int) -> str:
        """What the token adds to the text; nothing as long as a character is broken."""
        self._ids.append(token_id)
        told = self._decode(self._ids[: self._told])
        text = self._decode(self._ids)[len(told) :]
        is_broken = not text or text.endswith(BROKEN)
        if is_broken and len(self._ids) - self._told < BROKEN_TOKENS_MAX:
            return ""
        del self._ids[: self._told]
        self._told = len(self._ids)
        return text

    def _decode(self, token_ids: Sequence[int]) -> str:
        return (
            str(self._tokenizer.decode(token_ids, skip_special_tokens=False)) if token_ids else ""
        )
