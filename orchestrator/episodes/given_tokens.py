"""Which tokens is it that an episode appends? A group's rollouts append the same: it is found once.

It remembers a few texts and the last list of tokens. Whose they are, it doesn't know.
"""

from array import array
from collections.abc import Sequence

from tokenizers import Tokenizer

from tidegate.orchestrator.core.token_arrays import token_array

TEXTS_REMEMBERED = 64
"""A group's rollouts begin side by side, with a few texts each."""

TEXT_CHARACTERS_MAX = 32 * 1024
"""Of one that is remembered: so all of them are some megabytes."""


class GivenTokens:
    """Of a run's episodes. What it gives out is read, never changed."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[str, array[int]] = {}
        """The oldest first."""
        self._list: list[int] = []
        self._array: array[int] = array("i")
        """The same tokens as in the list."""

    def of(self, content: str | Sequence[int]) -> "array[int]":
        """A text's tokens, none added; or these tokens.

        Raises:
            TypeError: one is no number.
            OverflowError: one is no int32.
        """
        if isinstance(content, str):
            return self._of_text(content)
        if type(content) is not list:
            return token_array(content)
        if content != self._list:  # a sixth of the time that it takes to make the array
            self._array = token_array(content)
            self._list = content.copy()  # whose it is may change it
        return self._array

    def _of_text(self, text: str) -> "array[int]":
        known = self._texts.get(text)
        if known is None:
            known = token_array(self._tokenizer.encode(text, add_special_tokens=False).ids)
            if len(text) <= TEXT_CHARACTERS_MAX:
                self._texts[text] = known
            if len(self._texts) > TEXTS_REMEMBERED:
                del self._texts[next(iter(self._texts))]
        return known
