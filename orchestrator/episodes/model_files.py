"""Tokenizer and stop tokens of a model directory, and the tokens of texts that episodes append.

The run reads them once at its start; episodes and the HTTP servers share them, and every text of a
client is encoded by :class:`TextEncoder`. Reads no weights and imports no torch. A group's rollouts
append the same texts, so the tokens of the last few are cached.
"""

import asyncio
import concurrent.futures
import json
import re
import threading
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models

from tidegate.errors import ChatRefused, ContextFull, ModelError
from tidegate.orchestrator.core.rollout import token_array
from tidegate.orchestrator.episodes.call_counts import ToolCallCounts
from tidegate.orchestrator.episodes.tool_calls import kept_special_tokens, well_formed
from tidegate.orchestrator.settings.hub import describe_missing_model
from tidegate.transport.images import ImageReader, open_images
from tidegate.transport.regular_files import check_all_regular, read_regular
from tidegate.transport.token_bytes import BYTE_LEVEL, SPACE_MARK

TEXTS_CACHED_MAX = 64
"""Number of cached texts: a group's rollouts start together, with a few texts each."""

CACHED_CHARACTERS_MAX = 32 * 1024
"""Longest cached text, so that the cache takes some megabytes at most."""


BREAK = "\ufdd0"
"""Noncharacter of Unicode by which :class:`TextEscaper` breaks the texts of special tokens."""


class TextEscaper:
    """Keeps the special tokens of chat templates apart from the same texts in messages.

    A user's or a tool's ``<|im_end|>`` would otherwise be encoded as the token that ends a turn,
    and what follows could forge another. :meth:`escape` breaks such texts before the template is
    rendered, and :meth:`ModelFiles.encode_prompt` encodes the pieces apart, as plain text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        special = {
            token.content
            for token in tokenizer.get_added_tokens_decoder().values()
            if token.special and len(token.content) > 1
        }
        self._special = re.compile(_pattern_of(special)) if special else None
        self.escaped = 0
        """Number of new messages whose text had a special token's."""

    def escape(self, value: Any) -> Any:
        """Return a JSON value with broken texts of special tokens.

        Raises:
            ChatRefused: it is nested too deep.
        """
        if self._special is None:
            return value
        try:
            return self._escape(value, self._special)
        except RecursionError:
            raise ChatRefused("a message or a tool is nested too deep for Python's stack") from None

    def _escape(self, value: Any, special: re.Pattern[str]) -> Any:
        match value:
            case str():
                while special.search(value):  # again, because one may overlap another
                    value = special.sub(lambda found: found[0][0] + BREAK + found[0][1:], value)
            case Mapping():
                return {
                    self._escape(k, special): self._escape(v, special) for k, v in value.items()
                }
            case list() | tuple():
                return [self._escape(each, special) for each in value]
        return value


def _pattern_of(texts: Collection[str]) -> str:
    """Return a pattern of texts as a tree by their characters, because many begin alike: a plain
    alternation tries hundreds of texts at each ``<|``."""
    rests: dict[str, set[str]] = {}
    for text in filter(None, texts):
        rests.setdefault(text[0], set()).add(text[1:])
    branches = [re.escape(first) + _pattern_of(rest) for first, rest in sorted(rests.items())]
    if "" in texts:
        return f"(?:{'|'.join(branches)})?" if branches else ""
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


LONG_CHARACTERS = 32 * 1024
"""Text length from which encoding runs in a thread: about 30 ms; a megabyte takes a second."""

CHARACTERS_MAX = 4 * 1024 * 1024
"""Characters of texts that are encoded together, which takes a thread up to 8 s."""

ENCODE_S = 5.0
"""Longest time for encoding a text, beside :data:`CHARACTER_S` for each of its characters."""

CHARACTER_S = 20e-6
"""Time for a character: five times what texts of a single long word take."""

COUNTED_BYTES = 1024 * 1024
"""Bytes of a text that are counted at a time, because counting takes eight times their memory."""

COMPOSED_BYTES_MAX = 3
"""NFC leaves a third of the bytes of a text without ASCII or more, as of Hangul's letters."""


class TextEncoder:
    """Encodes texts of clients with a model's tokenizer, within limits.

    A text that no context holds is refused before it is encoded. The library can't be interrupted,
    so if a tokenizer.json has regular expressions, which may backtrack for hours, a daemon thread
    encodes, and is given up after a time. Further texts are refused until it ends, so a tokenizer
    occupies no more threads than encoded at that moment.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        parts = (tokenizer.normalizer, tokenizer.pre_tokenizer)
        self._steps = [step for part in parts if part is not None for step in _steps_of(part)]
        self._has_patterns = any(map(_has_pattern, self._steps))
        self._idle: list[_EncodingThread] = []
        self._given_up: list[_Encoded] = []

    def encode(
        self,
        *parts: str,
        adds_special_tokens: bool = False,
        tokens_before: int = 0,
        tokens_max: int | None = None,
    ) -> list[int]:
        """Return the tokens of texts that are encoded apart; the calling thread waits for them.

        ``tokens_max``: length that no context may reach, after the ``tokens_before`` it has.

        Raises:
            ContextFull: the texts surely reach ``tokens_max``; its ``tokens`` are a lower bound.
            ChatRefused: they are too long, or the tokenizer can't encode them, or takes too long.
        """
        texts = [well_formed(part) for part in parts]
        characters = sum(map(len, texts))
        if tokens_max is not None and characters >= LONG_CHARACTERS:
            tokens = tokens_before + sum(map(self.fewest_tokens, texts))
            if tokens >= tokens_max:
                raise ContextFull(tokens=tokens, tokens_max=tokens_max)
        if characters > CHARACTERS_MAX:
            raise ChatRefused(f"a text has at most {CHARACTERS_MAX} characters, got {characters}")

        def encoded() -> list[int]:
            # A batch, because the library holds the GIL while it encodes a single text.
            encodings = self.tokenizer.encode_batch_fast(
                texts, add_special_tokens=adds_special_tokens
            )
            return [token_id for encoding in encodings for token_id in encoding.ids]

        try:
            if self._has_patterns:
                return self._watched(encoded, ENCODE_S + CHARACTER_S * characters)
            return encoded()
        except BaseException as error:
            # The library gives up a match after 10,000,000 steps, by a panic that is no Exception.
            if type(error).__name__ != "PanicException":
                raise
            raise ChatRefused(
                f"the tokenizer can't encode a text of {characters} characters: {error}"
            ) from None

    def _watched(self, work: Callable[[], list[int]], timeout_s: float) -> list[int]:
        """Return what ``work`` returns in another thread, which is given up after a time."""
        self._given_up = [each for each in self._given_up if not each.done()]
        if self._given_up:
            raise ChatRefused(
                "the regular expressions of tokenizer.json are still at an earlier text; correct "
                "them, or use another model's"
            )
        try:
            thread = self._idle.pop()
        except IndexError:
            thread = _EncodingThread(self._idle)
        if not thread.is_alive():  # this process was forked since
            thread = _EncodingThread(self._idle)
        encoded: _Encoded = concurrent.futures.Future()
        thread.jobs.put((work, encoded))
        try:
            return encoded.result(timeout_s)
        except TimeoutError:
            self._given_up.append(encoded)
            raise ChatRefused(
                f"the regular expressions of tokenizer.json took {timeout_s:.0f} s and more for a "
                "text; correct them, or use another model's"
            ) from None

    def fewest_tokens(self, text: str) -> int:
        """Return a number of tokens that a text has at least, 0 if the tokenizer's kind is unknown.

        Each byte counts as one part of the longest token that has such a byte. The bytes of no
        token are more than 1 together, so a text has as many tokens as its bytes count, or more.
        """
        parts = self._token_parts
        if not parts.any():
            return 0
        content = np.frombuffer(text.encode(), np.uint8)
        counts = np.zeros(256)
        for start in range(0, len(content), COUNTED_BYTES):
            counts += np.bincount(content[start : start + COUNTED_BYTES], minlength=256)
        if not any(step["type"] == "NFC" for step in self._steps):
            return int(counts @ parts)
        # NFC composes characters: each that is not ASCII takes up one of ASCII at most.
        composing, other_bytes = len(text) - counts[:128].sum(), counts[128:].sum()
        in_ascii = max(0.0, counts[:128] @ parts[:128] - composing * parts[:128].max())
        return int(in_ascii + other_bytes / COMPOSED_BYTES_MAX * parts.min())

    @cached_property
    def _token_parts(self) -> "np.ndarray[Any, np.dtype[np.float64]]":
        """Part of a token that a byte of a text is at least. [256]; 0 if the byte may get lost."""
        tokenizer, parts = self.tokenizer, np.zeros(256)
        model = tokenizer.model
        if (
            not isinstance(model, models.BPE)
            or model.continuing_subword_prefix
            or model.end_of_word_suffix
            or tokenizer.truncation is not None
            or not all(map(_keeps_characters, self._steps))
        ):
            return parts
        is_byte_level = any(step["type"] == "ByteLevel" for step in self._steps)
        words = tokenizer.get_vocab(with_added_tokens=False)
        contents = {_content_of(word, is_byte_level=is_byte_level) for word in words}
        added = tokenizer.get_added_tokens_decoder().values()
        longest: dict[int, int] = {}
        for content in contents | {token.content.encode() for token in added}:
            for byte in set(content):
                longest[byte] = max(longest.get(byte, 0), len(content))
        for byte in range(256 if is_byte_level else 128):
            if bytes([byte]) in contents:  # else it is unknown, and may be a part of any token
                parts[byte] = 1 / longest[byte]
        if any(token.lstrip or token.rstrip for token in added):  # takes the white space around it
            parts[list(b" \t\n\r\v\f\x1c\x1d\x1e\x1f")] = 0
            parts[128:] = 0
        return parts


_Encoded = concurrent.futures.Future[list[int]]


class _EncodingThread(threading.Thread):
    """Daemon thread that encodes texts, one at a time, and is ``idle`` between them."""

    def __init__(self, idle: "list[_EncodingThread]") -> None:
        super().__init__(name="tidegate-encoding", daemon=True)
        self._idle = idle
        self.jobs: SimpleQueue[tuple[Callable[[], list[int]], _Encoded]] = SimpleQueue()
        self.start()

    def run(self) -> None:
        """Encode what callers put into ``jobs``."""
        while True:
            self._encode(*self.jobs.get())
            self._idle.append(self)

    def _encode(self, work: Callable[[], list[int]], encoded: _Encoded) -> None:
        try:
            encoded.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised by whom it concerns
            encoded.set_exception(error)


def _steps_of(part: Any) -> Iterator[dict[str, Any]]:
    """Yield the steps of a normalizer, pre-tokenizer or decoder, as in tokenizer.json."""
    pending = [json.loads(part.__getstate__())]
    while pending:
        step = pending.pop(0)
        nested = [step.get(name) for name in ("normalizers", "pretokenizers", "decoders")]
        if step["type"] != "Sequence":
            yield step
        pending = [*(each for steps in nested for each in steps or ()), *pending]


def _has_pattern(step: Mapping[str, Any]) -> bool:
    """Whether a step has a regular expression of its own."""
    return "Regex" in (step.get("pattern") or ())


def _keeps_characters(step: Mapping[str, Any]) -> bool:
    """Whether a step leaves all characters in a text; spaces may become SentencePiece's mark."""
    match step["type"]:
        case "ByteLevel" | "Digits" | "NFC" | "Prepend":
            return True
        case "Split" | "Punctuation":
            return bool(step["behavior"] != "Removed")
        case "Metaspace":
            return bool(step["replacement"] == SPACE_MARK)
        case "Replace":
            return bool(step["pattern"] == {"String": " "} and step["content"] == SPACE_MARK)
    return False


def _content_of(word: str, *, is_byte_level: bool) -> bytes:
    """Return the bytes of a text that a token of the vocabulary stands for."""
    if not is_byte_level:
        return word.replace(SPACE_MARK, " ").encode()
    try:
        return bytes([BYTE_LEVEL[character] for character in word])
    except KeyError:  # an added token, which is in the vocabulary, too
        return word.encode()


class TokenCache:
    """Cache of tokens that a run's episodes append; callers must not change its arrays."""

    def __init__(self, encoder: "TextEncoder") -> None:
        self._encoder = encoder
        self._texts: dict[str, array[int]] = {}
        """Tokens by text, oldest first."""
        self._list: list[int] = []
        self._array: array[int] = array("i")
        """Tokens of ``_list`` as an array."""

    def of(
        self,
        content: str | Sequence[int],
        *,
        tokens_before: int = 0,
        tokens_max: int | None = None,
    ) -> "array[int]":
        """Return a text's tokens, without special tokens; or given token ids as an array.
        The limits are :meth:`TextEncoder.encode`'s.

        Raises:
            ContextFull: the text is too long.
            ChatRefused: the tokenizer can't encode the text.
            TypeError: an id is not an int.
            OverflowError: an id does not fit int32.
        """
        if isinstance(content, str):
            return self._of_text(content, tokens_before, tokens_max)
        if isinstance(content, array) and content.typecode == "i":
            return content
        if type(content) is not list:
            return token_array(content)
        if content != self._list:  # comparing takes a sixth of the time of making the array
            self._array = token_array(content)
            self._list = content.copy()  # a copy: the caller may change its list
        return self._array

    def _of_text(self, text: str, tokens_before: int, tokens_max: int | None) -> "array[int]":
        tokens = self._texts.get(text)
        if tokens is None:
            tokens = token_array(
                self._encoder.encode(text, tokens_before=tokens_before, tokens_max=tokens_max)
            )
            if len(text) <= CACHED_CHARACTERS_MAX:
                self._texts[text] = tokens
            if len(self._texts) > TEXTS_CACHED_MAX:
                del self._texts[next(iter(self._texts))]
        return tokens


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The parts of a Hugging Face model directory that episodes use."""

    path: Path
    tokenizer: Tokenizer
    stop_token_ids: tuple[int, ...]
    """Tokens that end a turn unless ``generate`` is given others."""
    dtype: str = ""
    """Dtype of the weights by config.json, such as ``float32``; empty if it has none."""
    special_tokens_in_messages: bool = False
    """Whether the texts of special tokens in messages become the tokens."""
    images: ImageReader | None = None
    """Reader of the model's images; None if Tidegate processes none for it."""
    text_escaper: TextEscaper | None = field(init=False, compare=False, repr=False)
    """Breaks special tokens' texts in messages; None if they are encoded as special tokens."""
    encoder: TextEncoder = field(init=False, compare=False, repr=False)
    """Encodes texts, within limits."""
    token_cache: TokenCache = field(init=False, compare=False, repr=False)
    """Cached tokens of texts that episodes append."""
    call_counts: ToolCallCounts = field(init=False, compare=False, repr=False)
    """Counts of turns that resemble tool calls."""
    hidden_token_ids: frozenset[int] | None = field(init=False, compare=False, repr=False)
    """Special tokens that a reply's text omits; None if the text omits all special tokens."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "encoder", TextEncoder(self.tokenizer))
        object.__setattr__(self, "token_cache", TokenCache(self.encoder))
        escaper = None if self.special_tokens_in_messages else TextEscaper(self.tokenizer)
        object.__setattr__(self, "text_escaper", escaper)
        object.__setattr__(self, "call_counts", ToolCallCounts())
        object.__setattr__(self, "hidden_token_ids", _hidden_token_ids(self.tokenizer))

    def reply_text(self, token_ids: Sequence[int]) -> str:
        """Return a reply's tokens as text, without special tokens but marks of calls and channels,
        which some models have as special tokens."""
        hidden = self.hidden_token_ids
        if hidden is None:
            return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))
        shown = [token_id for token_id in token_ids if token_id not in hidden]
        return str(self.tokenizer.decode(shown, skip_special_tokens=False))

    async def encoded(self, text: str, tokens_max: int | None = None) -> list[int]:
        """Return a text as tokens, without special tokens; a long one is encoded in a thread.
        ``tokens_max`` is :meth:`TextEncoder.encode`'s."""
        if len(text) < LONG_CHARACTERS:
            return self.token_cache.of(text).tolist()
        return await asyncio.to_thread(self.encoder.encode, text, tokens_max=tokens_max)

    def encode_prompt(
        self, text: str, *, tokens_before: int = 0, tokens_max: int | None = None
    ) -> list[int]:
        """Return a rendered prompt as tokens: texts that :class:`TextEscaper` has broken are plain
        text, all others as the tokenizer reads them. The limits are :meth:`TextEncoder.encode`'s.
        """
        parts = text.split(BREAK)
        return self.encoder.encode(*parts, tokens_before=tokens_before, tokens_max=tokens_max)


def _hidden_token_ids(tokenizer: Tokenizer) -> frozenset[int] | None:
    special = {
        token.content: token_id
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
        if token.special
    }
    kept = kept_special_tokens(special)
    return frozenset(special[name] for name in special.keys() - kept) if kept else None


def read_model_files(
    path: Path,
    *,
    special_tokens_in_messages: bool = False,
    image_directories: Sequence[Path] = (),
    leaves_others: bool = False,
) -> ModelFiles:
    """Read the tokenizer, the stop tokens and the image processor of a model directory.

    ``special_tokens_in_messages``: whether texts of special tokens in messages become the tokens.
    ``image_directories`` and ``leaves_others`` are those of :class:`ImageReader`.

    Raises:
        ModelError: the directory, config.json or tokenizer.json is missing or damaged.
    """
    if not path.is_dir():
        raise ModelError(describe_missing_model(path))
    try:
        check_all_regular(path)  # engines and libraries open further files
    except OSError as error:
        raise ModelError(f"{error.filename} can't be read: {error.strerror}") from None
    config = _read_json(path / "config.json")
    generation = path / "generation_config.json"
    defaults = _read_json(generation) if generation.exists() else {}
    stop = defaults.get("eos_token_id", config.get("eos_token_id"))
    stop_token_ids = tuple(stop) if isinstance(stop, list) else () if stop is None else (stop,)
    nested = config.get("text_config")
    configs = (config, nested if isinstance(nested, dict) else {})
    dtypes = (part.get(name) for part in configs for name in ("dtype", "torch_dtype"))
    dtype = str(next(filter(None, dtypes), "")).removeprefix("torch.")
    tokenizer = read_tokenizer(path / "tokenizer.json")
    images = open_images(path, image_directories, leaves_others=leaves_others)
    return ModelFiles(path, tokenizer, stop_token_ids, dtype, special_tokens_in_messages, images)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_regular(path))
    except FileNotFoundError:
        raise ModelError(
            f"{path} is missing; give the directory of a Hugging Face model, with config.json, "
            "*.safetensors and tokenizer.json"
        ) from None
    except (ValueError, OSError) as error:
        raise ModelError(
            f"{path} can't be read ({error}); correct it, or download the model again"
        ) from None
    if not isinstance(content, dict):
        raise ModelError(
            f"{path} holds a {type(content).__name__}, not a JSON object; download the model again"
        )
    return content


def read_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer.json; raises ModelError."""
    if not path.exists():
        raise ModelError(
            f"{path} is missing; save the tokenizer in its fast form, with "
            f"AutoTokenizer.from_pretrained(…).save_pretrained(…)"
        )
    try:
        tokenizer = Tokenizer.from_buffer(read_regular(path))
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception for any damage
        raise ModelError(
            f"{path} can't be read ({error}); correct it, or download the model again"
        ) from None
    decoder = tokenizer.decoder
    if decoder is not None and any(map(_has_pattern, _steps_of(decoder))):
        raise ModelError(
            f"{path} has a decoder with a regular expression, which could block whatever decodes "
            "tokens; correct it, or use another model's"
        )
    return tokenizer
