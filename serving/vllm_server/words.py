"""Text of tokens: of a whole output, of a stream's next part, and of single tokens.

An output's text ends where a stop token or stop string is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from tokenizers import Tokenizer

from tidegate.orchestrator.episodes.growing_text import HALF_A_CHARACTER, GrowingText
from tidegate.orchestrator.episodes.model_files import LONG_CHARACTERS, encode_text
from tidegate.serving.http_server import off_loop
from tidegate.serving.listening import HttpRefused

TEXT_CHARACTERS_MAX = 4 * 1024 * 1024
"""Characters of one text that is tokenised: a thread takes up to 8 s for so many."""


@dataclass(frozen=True, slots=True)
class Ending:
    """What ends an output, and what of that is said."""

    stop_token_ids: frozenset[int] = frozenset()
    model_stops: frozenset[int] = frozenset()
    """Those of them that are the model's own."""
    stop_strings: tuple[str, ...] = ()
    is_said: bool = False
    """Whether the stop string or token itself is part of the text."""
    skips_special_tokens: bool = True


class Words:
    """A model's tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def token(self, token_id: int) -> str:
        """A token as text of its own; empty for part of a character."""
        text = self._texts.get(token_id)
        if text is None:
            text = self.decode([token_id], skips_special_tokens=False)
            text = self._texts[token_id] = "" if text.endswith(HALF_A_CHARACTER) else text
        return text

    def decode(self, token_ids: Sequence[int], *, skips_special_tokens: bool) -> str:
        """Any tokens as text."""
        ids = list(token_ids)
        text: str = self.tokenizer.decode(ids, skip_special_tokens=skips_special_tokens)
        return text

    async def encode(self, text: str, *, adds_special_tokens: bool) -> list[int]:
        """Return a text as tokens; a long one is tokenised in a thread.

        Raises:
            HttpRefused: it is too long.
        """
        if len(text) > TEXT_CHARACTERS_MAX:
            told = f"a text has at most {TEXT_CHARACTERS_MAX} characters, got {len(text)}"
            raise HttpRefused(413, told)
        encode = partial(encode_text, self.tokenizer, text, adds_special_tokens)
        return encode() if len(text) < LONG_CHARACTERS else await off_loop(encode)

    def whole(self, token_ids: Sequence[int], ending: Ending, *, has_stopped: bool) -> str:
        """A whole output's text, cut where it stopped."""
        if has_stopped and not ending.is_said and _ends_in_stop_token(token_ids, ending):
            token_ids = token_ids[:-1]
        text = self.decode(token_ids, skips_special_tokens=ending.skips_special_tokens)
        found = _first_stop(text, ending) if has_stopped else None
        if found is None:
            return text
        return text[: found.end if ending.is_said else found.start]

    def stop_reason(self, token_ids: Sequence[int], ending: Ending) -> int | str | None:
        """Of an output that stopped: the stop string or token; None for the model's own."""
        if _ends_in_stop_token(token_ids, ending):
            last = token_ids[-1]
            return None if last in ending.model_stops else last
        text = self.decode(token_ids, skips_special_tokens=False)
        found = _first_stop(text, ending)
        return None if found is None else found.string


@dataclass(frozen=True, slots=True)
class _Stop:
    string: str
    start: int

    @property
    def end(self) -> int:
        return self.start + len(self.string)


def _first_stop(text: str, ending: Ending) -> _Stop | None:
    found = [_Stop(s, at) for s in ending.stop_strings if (at := text.find(s)) >= 0]
    return min(found, key=lambda stop: stop.start, default=None)


def _ends_in_stop_token(token_ids: Sequence[int], ending: Ending) -> bool:
    return bool(token_ids) and token_ids[-1] in ending.stop_token_ids


@dataclass(slots=True)
class TextStream:
    """The text of an output that grows, in parts that are never taken back."""

    words: Words
    ending: Ending
    _sent: str = ""
    _growing: GrowingText = field(init=False)

    def __post_init__(self) -> None:
        skips = self.ending.skips_special_tokens
        self._growing = GrowingText(partial(self.words.decode, skips_special_tokens=skips))

    def more(self, token_ids: Sequence[int]) -> str:
        """What may be sent of this output, which goes on: nothing that a stop string may yet cut
        off, and no half of a character."""
        self._growing.add(token_ids[self._growing.tokens :])
        settled = self._growing.text
        held_back = max((len(s) for s in self.ending.stop_strings), default=1) - 1
        return self._send(settled[: len(settled) - held_back])

    def last(self, text: str) -> str:
        """What is left of the whole text."""
        return self._send(text)

    def _send(self, said: str) -> str:
        if not said.startswith(self._sent):
            return ""
        more, self._sent = said[len(self._sent) :], said
        return more
