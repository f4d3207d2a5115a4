"""Reference log-probs and tokens of a model directory, from transformers in float32.

:mod:`measuring` compares the engine's responses with them. Independent of Tidegate's engine. The
model is loaded by ``observability/audit/archived_model.py``.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer

from tidegate.errors import ModelError
from tidegate.observability.audit.archived_model import load_weights


class Reference:
    """A model directory, loaded with transformers."""

    def __init__(self, directory: Path) -> None:
        self._model = load_weights(directory)
        self._tokenizer = directory / "tokenizer.json"

    @torch.no_grad()
    def logprobs(self, prompt: Sequence[int], output: Sequence[int]) -> list[float]:
        """Return the log-prob of each token of ``output`` at temperature 1, teacher-forced.

        Raises:
            ModelError: a token is not in the model's vocabulary.
        """
        context = [*prompt, *output]
        vocab_tokens = self._model.get_input_embeddings().weight.shape[0]
        if max(context) >= vocab_tokens:
            raise ModelError(
                f"the engine uses token {max(context)}, and the model's vocabulary has "
                f"{vocab_tokens}; pass --model the directory of the weights it serves"
            )
        logits = self._model(torch.tensor([context])).logits[0, len(prompt) - 1 : -1].float()
        logprobs = torch.log_softmax(logits, dim=-1)
        return torch.gather(logprobs, 1, torch.tensor(output)[:, None])[:, 0].tolist()

    def tokenize(self, text: str) -> list[int] | None:
        """Return the token ids of ``text``, without special tokens; None without tokenizer.json."""
        if not self._tokenizer.is_file():
            return None
        ids: list[int] = (
            Tokenizer.from_file(str(self._tokenizer)).encode(text, add_special_tokens=False).ids
        )
        return ids
