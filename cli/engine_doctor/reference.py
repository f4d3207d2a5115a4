"""Reference log-probs and tokens of a model directory, from transformers in float32; and copies of
a model with noise added to its weights, for the test of weight updates.

:mod:`measuring` compares the engine's responses with them. Independent of Tidegate's engine. The
model is loaded by ``observability/audit/archived_model.py``.
"""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer

from tidegate.errors import ConfigError, ModelError
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


# ---------------------------------------------------------------- altered copies

NOISE = 0.3
"""Noise relative to each tensor's deviation: changes every layer's KV, and no logit overflows."""

SEED = 7


@contextmanager
def altered(model: Path) -> Iterator[Path]:
    """Create a directory beside ``model`` with other weights of the same shapes; removed at exit.

    It is beside ``model`` because the engine probably sees that path too. It takes as much disk
    space as the model's weights.

    Raises:
        ConfigError: it can't be written, or ``model`` has no safetensors files.
    """
    model = model.resolve()
    if not list(model.glob("*.safetensors")):
        raise ConfigError(
            f"{model} has no *.safetensors, whose copies the doctor alters to see whether the "
            "engine loads them; give --model a directory that has them"
        )
    try:
        directory = Path(tempfile.mkdtemp(prefix="doctor-", dir=model.parent))
    except OSError as error:
        raise ConfigError(
            f"altered weights go beside the model, and {model.parent} can't be written to: "
            f"{error.strerror}. Put a copy of the model where it can, and serve that"
        ) from None
    try:
        directory.chmod(0o755)  # the engine may run as another user
        try:
            _write(model, directory)
        except OSError as error:
            raise ConfigError(
                f"altered weights can't be written to {directory}: {error}. Free disk space beside "
                "the model, or give a copy of it on another disk"
            ) from None
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _write(model: Path, directory: Path) -> None:
    generator = torch.Generator().manual_seed(SEED)
    for path in sorted(model.iterdir()):
        if path.suffix == ".safetensors":
            save_file(_noisy(path, generator), directory / path.name, metadata={"format": "pt"})
        elif path.is_file():
            shutil.copyfile(path, directory / path.name)


def _noisy(path: Path, generator: torch.Generator) -> dict[str, torch.Tensor]:
    tensors = {}
    with safe_open(path, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118 - no mapping
            tensor = opened.get_tensor(name)
            # Norm weights are one-dimensional and almost constant, so relative noise would vanish.
            if tensor.is_floating_point() and tensor.dim() > 1:
                noise = torch.randn(tensor.shape, generator=generator)
                scale = NOISE * float(tensor.float().std(correction=0))  # of a single number: 0
                tensor = (tensor.float() + scale * noise).to(tensor.dtype)
            tensors[name] = tensor
    return tensors
