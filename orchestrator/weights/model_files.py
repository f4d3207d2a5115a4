"""What does the orchestrator need of a model directory? Its tokenizer and its stop tokens.

The weights are the engines' business; nothing here reads them, or imports torch.
"""

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tidegate.errors import ModelError
from tidegate.orchestrator.episodes.given_tokens import GivenTokens

LONG_CHARACTERS = 32 * 1024
"""A text of so many takes its tokenizer 30 ms or so; a megabyte takes a second."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The parts of a Hugging Face directory that episodes use."""

    path: Path
    tokenizer: Tokenizer
    stop_token_ids: tuple[int, ...]
    """Those that end a turn unless ``generate`` says otherwise."""
    given: GivenTokens = field(init=False, compare=False, repr=False)
    """What episodes append, as tokens."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "given", GivenTokens(self.tokenizer))

    async def encoded(self, text: str) -> list[int]:
        """A text as tokens, none added; a long one in a thread, where it holds up nobody."""
        if len(text) < LONG_CHARACTERS:
            return self.given.of(text).tolist()
        return await encoded(self.tokenizer, text)

    def encode(self, text: str) -> list[int]:
        """The same, at once."""
        return _encode(self.tokenizer, text, False)


async def encoded(
    tokenizer: Tokenizer, text: str, *, adds_special_tokens: bool = False
) -> list[int]:
    """A text as tokens; a long one in a thread, where it holds up nobody."""
    if len(text) < LONG_CHARACTERS:
        return _encode(tokenizer, text, adds_special_tokens)
    return await asyncio.to_thread(_encode, tokenizer, text, adds_special_tokens)


def _encode(tokenizer: Tokenizer, text: str, adds_special_tokens: bool) -> list[int]:
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
    config = _read_json(path / "config.json")
    generation = path / "generation_config.json"
    defaults = _read_json(generation) if generation.exists() else {}
    stop = defaults.get("eos_token_id", config.get("eos_token_id"))
    stop_token_ids = tuple(stop) if isinstance(stop, list) else () if stop is None else (stop,)
    return ModelFiles(path, read_tokenizer(path / "tokenizer.json"), stop_token_ids)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
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
        return Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception for any damage
        raise ModelError(f"{path} can't be read: {error}") from None
