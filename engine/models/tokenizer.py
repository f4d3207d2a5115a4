"""The model's tokenizer, loaded from tokenizer.json on first use.

Stop strings, bad words and grammars need it. Most runs never load it, because prompts and outputs
are token ids.
"""

from pathlib import Path

from tokenizers import Tokenizer

from tidegate.errors import TurnRefused


class ModelTokenizer:
    """Tokenizer of one model; loading a large one takes a second, once."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._loaded: Tokenizer | None = None

    def get(self) -> Tokenizer:
        """Return the tokenizer.

        Raises:
            TurnRefused: there is none, or it cannot be read.
        """
        if self._loaded is None:
            self._loaded = self._load()
        return self._loaded

    def _load(self) -> Tokenizer:
        if self._directory is None:
            raise TurnRefused(
                "stop strings, bad words and grammars need the model's tokenizer, and this engine "
                "was started without a model directory; start it with one, or use stop_token_ids "
                "in place of stop strings"
            )
        path = self._directory / "tokenizer.json"
        if not path.exists():
            raise TurnRefused(
                f"stop strings, bad words and grammars need the model's tokenizer, and {path} is "
                f"missing; save it there in its fast form, or use stop_token_ids"
            )
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001 - the library raises bare Exception for any damage
            raise TurnRefused(
                f"stop strings, bad words and grammars need the model's tokenizer, and {path} "
                f"can't be read: {error}. Download or save it again"
            ) from None
