"""Incremental detokenizers: the text of a running turn, and the text and bytes of each token.

The gateway and the vLLM-compatible server stream text with :class:`IncrementalDetokenizer`, which
decodes each token at most twice. A token's text may depend on the token before it (some tokenizers
write a space only between words), and an incomplete character is held back until its last token.
Log-probs and the dashboard show single tokens with :class:`TokenTexts`.
"""

import codecs
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from tokenizers import Tokenizer

from tidegate.transport.token_bytes import TokenBytes

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


class TokenText(NamedTuple):
    """Text that one token adds to an output. The texts of all tokens join to the whole text."""

    text: str
    """Characters that the token completes; empty for one that ends within its first character."""
    raw: bytes
    """The token's own bytes, which may be a part of a character."""


class TokenTexts:
    """Text and bytes of an output's tokens, added one by one, special tokens included."""

    def __init__(self, tokenizer: Tokenizer, token_bytes: TokenBytes | None = None) -> None:
        """``token_bytes``: bytes of the tokenizer's tokens, which several outputs may share."""
        self._tokenizer = tokenizer
        self._bytes = token_bytes or TokenBytes(tokenizer)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_first = True

    def add(self, token_id: int, *, is_last: bool = False) -> TokenText:
        """Return what the next token adds; the last one also what shows a cut-off character."""
        raw = self._bytes[token_id]
        if self._is_first and raw.startswith(b" "):
            alone: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
            if not alone.startswith(" "):  # the decoder strips the space before a text's first word
                raw = raw[1:]
        self._is_first = False
        return TokenText(self._decoder.decode(raw, is_last), raw)

    def all(self, token_ids: Sequence[int]) -> list[TokenText]:
        """Return what each of an output's last tokens adds."""
        last = len(token_ids) - 1
        return [self.add(each, is_last=n == last) for n, each in enumerate(token_ids)]

    def name(self, token_id: int) -> str:
        """Return the name of a token that is no part of the output: its text on its own, or its
        bytes as OpenAI writes them if it ends within a character."""
        return token_name(self._bytes[token_id])

    def raw(self, token_id: int) -> bytes:
        """Return the bytes of any token."""
        return self._bytes[token_id]

    def names(self, sampled_id: int, sampled: TokenText, token_ids: Iterable[int]) -> list[str]:
        """Return distinct names of the likeliest tokens at one position; the sampled token's name
        is its text in the output."""
        names = [sampled.text if each == sampled_id else self.name(each) for each in token_ids]
        taken = {sampled.text}
        for number, token_id in enumerate(token_ids):
            if token_id != sampled_id and names[number] in taken:
                names[number] = f"token_id:{token_id}"  # the same text by another token
            taken.add(names[number])
        return names


def token_name(raw: bytes) -> str:
    """Return a token's text, or ``bytes:\\xf0\\x9f`` if it ends or begins within a character."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
