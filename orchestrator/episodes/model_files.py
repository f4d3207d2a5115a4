"""Tokenizer and stop tokens of a model directory, and the tokens of texts that episodes append.

Reads no weights and imports no torch. A group's rollouts append the same texts, so the tokens of
the last few are remembered.
"""

import asyncio
import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tidegate.errors import ModelError
from tidegate.orchestrator.core.token_arrays import token_array
from tidegate.transport.regular_files import check_all_regular, read_regular

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


LONG_CHARACTERS = 32 * 1024
"""A text of so many takes its tokenizer 30 ms or so; a megabyte takes a second."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The parts of a Hugging Face directory that episodes use."""

    path: Path
    tokenizer: Tokenizer
    stop_token_ids: tuple[int, ...]
    """Those that end a turn unless ``generate`` says otherwise."""
    dtype: str = ""
    """What the weights are stored in, by config.json: ``float32``; empty: it doesn't say."""
    given: GivenTokens = field(init=False, compare=False, repr=False)
    """What episodes append, as tokens."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "given", GivenTokens(self.tokenizer))

    async def encoded(self, text: str) -> list[int]:
        """A text as tokens, none added; a long one in a thread, where it holds up nobody."""
        if len(text) < LONG_CHARACTERS:
            return self.given.of(text).tolist()
        return await asyncio.to_thread(self.encode, text)

    def encode(self, text: str) -> list[int]:
        """The same, at once."""
        return encode_text(self.tokenizer, text)


def encode_text(tokenizer: Tokenizer, text: str, adds_special_tokens: bool = False) -> list[int]:
    """Return a text as tokens, computed at once."""
    # Of a batch, for the library keeps the interpreter to itself while it encodes a single one.
    (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=adds_special_tokens)
    ids: list[int] = encoding.ids
    return ids


def read_model_files(path: Path) -> ModelFiles:
    """Read the tokenizer and the stop tokens of a model directory.

    Raises:
        ModelError: the directory, config.json or tokenizer.json is missing or damaged.
    """
    if not path.is_dir():
        raise ModelError(
            f"model directory {path} does not exist; give the path of one with "
            f"config.json, *.safetensors and tokenizer.json"
        )
    try:
        check_all_regular(path)  # engines and libraries open the others
    except OSError as error:
        raise ModelError(f"{error.filename} can't be read: {error.strerror}") from None
    config = _read_json(path / "config.json")
    generation = path / "generation_config.json"
    defaults = _read_json(generation) if generation.exists() else {}
    stop = defaults.get("eos_token_id", config.get("eos_token_id"))
    stop_token_ids = tuple(stop) if isinstance(stop, list) else () if stop is None else (stop,)
    nested = config.get("text_config")
    configs = (config, nested if isinstance(nested, dict) else {})
    dtypes = (each.get(name) for each in configs for name in ("dtype", "torch_dtype"))
    dtype = str(next(filter(None, dtypes), "")).removeprefix("torch.")
    tokenizer = read_tokenizer(path / "tokenizer.json")
    return ModelFiles(path, tokenizer, stop_token_ids, dtype)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_regular(path))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing: not a Hugging Face model directory") from None
    except (ValueError, OSError) as error:
        raise ModelError(f"{path} can't be read: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a {type(content).__name__}, not an object")
    return content


def read_tokenizer(path: Path) -> Tokenizer:
    """That of a tokenizer.json; raises ModelError."""
    if not path.exists():
        raise ModelError(
            f"{path} is missing; save the tokenizer in its fast form, with "
            f"AutoTokenizer.from_pretrained(…).save_pretrained(…)"
        )
    try:
        return Tokenizer.from_buffer(read_regular(path))
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception for any damage
        raise ModelError(f"{path} can't be read: {error}") from None
