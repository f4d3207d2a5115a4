"""Incremental detokenizer: decodes the tokens of a running turn, each at most twice.

The gateway and the vLLM-compatible server stream text by it. A token's text may depend on the token
before it (some tokenizers write a space only between words), and an incomplete character is held
back until its last token. Depends on no module: the decoder is an argument.
"""

from collections.abc import Callable, Sequence

HALF_A_CHARACTER = "\ufffd"
"""Text that an incomplete character decodes to."""


class IncrementalDetokenizer:
    """Text of a running output, up to its last complete character."""

    __slots__ = ("_decode", "_joined", "_window", "text", "tokens")

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self.text = ""
        self.tokens = 0
        """Number of tokens added."""
        self._window: list[int] = []
        """Last tokens: first those in the text, kept as context, then those not in it yet."""
        self._joined = 0
        """Number of tokens of the window that are already in the text."""

    def add(self, token_ids: Sequence[int]) -> None:
        """Append the next tokens."""
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
