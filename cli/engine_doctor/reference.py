"""What should an engine have said? The model directory's own log-probs and tokens.

transformers in float32, teacher-forced, and the directory's tokenizer.json: none of our engine's
code, nor of theirs. Knows nothing of servers.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer

from tidegate.errors import ModelError
from tidegate.observability.audit.archived_model import load_weights


class Reference:
    """One model directory."""

    def __init__(self, directory: Path) -> None:
        self._model = load_weights(directory)
        self._tokenizer = directory / "tokenizer.json"

    @torch.no_grad()
    def logprobs(self, prompt: Sequence[int], output: Sequence[int]) -> list[float]:
        """Of each token of ``output``, at temperature 1.

        Raises:
            ModelError: one of the tokens is none of the model's.
        """
        context = [*prompt, *output]
        vocab_tokens = self._model.get_input_embeddings().weight.shape[0]
        if max(context) >= vocab_tokens:
            raise ModelError(
                f"the engine uses token {max(context)}, and the model's vocabulary has "
                f"{vocab_tokens}; pass --model the directory of the weights it serves"
            )
        logits = self._model(torch.tensor([context])).logits[0, len(prompt) - 1 : -1].float()
        told = torch.log_softmax(logits, dim=-1)
        return torch.gather(told, 1, torch.tensor(output)[:, None])[:, 0].tolist()

    def tokenize(self, text: str) -> list[int] | None:
        """Its tokens for ``text``, without special ones; None if there is no tokenizer.json."""
        if not self._tokenizer.is_file():
            return None
        ids: list[int] = (
            Tokenizer.from_file(str(self._tokenizer)).encode(text, add_special_tokens=False).ids
        )
        return ids
