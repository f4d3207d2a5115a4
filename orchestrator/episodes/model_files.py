"""Tokenizer and stop tokens of a model directory, and the tokens of texts that episodes append.

The run reads them once at its start; episodes and the HTTP servers share them. Reads no weights and
imports no torch. A group's rollouts append the same texts, so the tokens of the last few are
cached. Built on the ``tokenizers`` library, ``tool_calls.py`` and ``core/token_arrays.py``.
"""

import asyncio
import json
import re
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tidegate.errors import ChatRefused, ModelError
from tidegate.orchestrator.core.token_arrays import token_array
from tidegate.orchestrator.episodes.call_counts import ToolCallCounts
from tidegate.orchestrator.episodes.tool_calls import kept_special_tokens, well_formed
from tidegate.orchestrator.settings.hub import describe_missing_model
from tidegate.transport.regular_files import check_all_regular, read_regular

TEXTS_CACHED_MAX = 64
"""Number of cached texts: a group's rollouts start together, with a few texts each."""

TEXT_CHARACTERS_MAX = 32 * 1024
"""Longest cached text, so that the cache takes some megabytes at most."""


class TokenCache:
    """Cache of tokens that a run's episodes append; callers must not change its arrays."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[str, array[int]] = {}
        """Tokens by text, oldest first."""
        self._list: list[int] = []
        self._array: array[int] = array("i")
        """Tokens of ``_list`` as an array."""

    def of(self, content: str | Sequence[int]) -> "array[int]":
        """Return a text's tokens, without special tokens; or given token ids as an array.

        Raises:
            TypeError: an id is not an int.
            OverflowError: an id does not fit int32.
        """
        if isinstance(content, str):
            return self._of_text(content)
        if isinstance(content, array) and content.typecode == "i":
            return content
        if type(content) is not list:
            return token_array(content)
        if content != self._list:  # comparing takes a sixth of the time of making the array
            self._array = token_array(content)
            self._list = content.copy()  # a copy: the caller may change its list
        return self._array

    def _of_text(self, text: str) -> "array[int]":
        tokens = self._texts.get(text)
        if tokens is None:
            encoding = self._tokenizer.encode(well_formed(text), add_special_tokens=False)
            tokens = token_array(encoding.ids)
            if len(text) <= TEXT_CHARACTERS_MAX:
                self._texts[text] = tokens
            if len(self._texts) > TEXTS_CACHED_MAX:
                del self._texts[next(iter(self._texts))]
        return tokens


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
    text_escaper: TextEscaper | None = field(init=False, compare=False, repr=False)
    """Breaks special tokens' texts in messages; None if they are encoded as special tokens."""
    token_cache: TokenCache = field(init=False, compare=False, repr=False)
    """Cached tokens of texts that episodes append."""
    call_counts: ToolCallCounts = field(init=False, compare=False, repr=False)
    """Counts of turns that resemble tool calls."""
    hidden_token_ids: frozenset[int] | None = field(init=False, compare=False, repr=False)
    """Special tokens that a reply's text omits; None if the text omits all special tokens."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_cache", TokenCache(self.tokenizer))
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

    async def encoded(self, text: str) -> list[int]:
        """Return a text as tokens, without special tokens; a long one is encoded in a thread."""
        if len(text) < LONG_CHARACTERS:
            return self.token_cache.of(text).tolist()
        return await asyncio.to_thread(self.encode, text)

    def encode_prompt(self, text: str) -> list[int]:
        """Return a rendered prompt as tokens: texts that :class:`TextEscaper` has broken are plain
        text, all others as the tokenizer reads them."""
        if BREAK not in text:
            return self.encode(text)
        parts = [well_formed(part) for part in text.split(BREAK)]
        encodings = self.tokenizer.encode_batch_fast(parts, add_special_tokens=False)
        return [token_id for encoding in encodings for token_id in encoding.ids]

    def encode(self, text: str) -> list[int]:
        """Return a text as tokens, without special tokens, encoded in the calling thread."""
        return encode_text(self.tokenizer, text)


def _hidden_token_ids(tokenizer: Tokenizer) -> frozenset[int] | None:
    special = {
        token.content: token_id
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
        if token.special
    }
    kept = kept_special_tokens(special)
    return frozenset(special[name] for name in special.keys() - kept) if kept else None


def encode_text(tokenizer: Tokenizer, text: str, adds_special_tokens: bool = False) -> list[int]:
    """Return a text as tokens, encoded in the calling thread."""
    # A batch of one, because the library holds the GIL while it encodes a single text.
    (encoding,) = tokenizer.encode_batch_fast(
        [well_formed(text)], add_special_tokens=adds_special_tokens
    )
    ids: list[int] = encoding.ids
    return ids


def read_model_files(path: Path, *, special_tokens_in_messages: bool = False) -> ModelFiles:
    """Read the tokenizer and the stop tokens of a model directory.

    ``special_tokens_in_messages``: whether texts of special tokens in messages become the tokens.

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
    return ModelFiles(path, tokenizer, stop_token_ids, dtype, special_tokens_in_messages)


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
        return Tokenizer.from_buffer(read_regular(path))
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception for any damage
        raise ModelError(
            f"{path} can't be read ({error}); correct it, or download the model again"
        ) from None
