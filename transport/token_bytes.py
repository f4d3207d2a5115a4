"""Bytes of each token of a tokenizer, derived from its decoder.

A token can be a part of a character, which ``Tokenizer.decode`` shows as U+FFFD. Engines' grammars
and the servers' log-probs need the bytes themselves. The tokenizer is an argument, so that this
module does not import the ``tokenizers`` library.
"""

import re
from collections.abc import Iterator
from typing import Any

import msgspec

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""Token of a single byte, where the decoder has a step ``ByteFallback``."""

SPACE_MARK = "\u2581"
"""Character that stands for a space in tokens of SentencePiece's kind."""

_WITHOUT_CONTEXT = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
"""Decoder steps that write a token alike at every position but a text's first and last."""


def _byte_level_characters() -> dict[str, int]:
    """Return the byte that each character of a ``ByteLevel`` token stands for, as GPT-2 has it:
    printable characters of Latin-1 for themselves, those from U+0100 on for the other bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    characters = {chr(byte): byte for byte in printable}
    return characters | {chr(0x100 + number): byte for number, byte in enumerate(others)}


BYTE_LEVEL = _byte_level_characters()
"""Byte that each character of a ``ByteLevel`` token stands for."""


class TokenBytes:
    """Bytes that each token of a tokenizer adds within a text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        decoder = tokenizer.decoder
        steps = [] if decoder is None else list(_steps(msgspec.json.decode(decoder.__getstate__())))
        kinds = {step["type"] for step in steps}
        self._is_byte_level = "ByteLevel" in kinds
        self._has_byte_tokens = "ByteFallback" in kinds
        self._is_known = bool(kinds) and kinds <= _WITHOUT_CONTEXT
        self._replaced = [
            (step["pattern"].get("String"), step["content"])
            if step["type"] == "Replace"
            else (step.get("replacement", SPACE_MARK), " ")
            for step in steps
            if step["type"] in ("Replace", "Metaspace")
        ]
        self._is_known &= all(isinstance(pattern, str) for pattern, _ in self._replaced)

    def __getitem__(self, token_id: int) -> bytes:
        """Return the bytes of a token; empty if the tokenizer has no such token."""
        token: str | None = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            try:
                return bytes([BYTE_LEVEL[character] for character in token])
            except KeyError:  # an added token, which stands for its own text
                return token.encode()
        if self._has_byte_tokens and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        if not self._is_known:  # as it would begin a text
            text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
            return text.encode()
        for pattern, content in self._replaced:
            token = token.replace(pattern, content)
        return token.encode()


def _steps(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        yield decoder
    for step in decoder.get("decoders", ()):
        yield from _steps(step)
