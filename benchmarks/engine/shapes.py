"""Model shapes and requests of the engine benchmarks, equal for all competitors.

Weights are random, but for those of SmolLM2, which ``make model`` makes; nothing is downloaded.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

PROMPT_TOKENS = (16, 64)
"""Range of prompt lengths, uniform and inclusive."""

LENGTH_SIGMA = 0.8
"""Sigma of the answers' log-normal lengths: some are ten times as long as others."""

LENGTH_MIN_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Shape:
    """A model, with the distribution of its answers' lengths."""

    architecture: str
    fields: dict[str, Any]
    """Fields of its Hugging Face config."""
    median_tokens: int
    """Median length of the answers; shorter for large models, to limit the benchmark's time."""
    longest_tokens: int
    weights: Path | None = None
    """Directory of the model, if its weights are not random."""


SHAPES = {
    "tiny": Shape(
        "Qwen3",
        {
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 192,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
        },
        median_tokens=64,
        longest_tokens=512,
    ),
    "small": Shape(
        "Qwen3",
        {
            "vocab_size": 8192,
            "hidden_size": 512,
            "intermediate_size": 1536,
            "num_hidden_layers": 12,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 64,
        },
        median_tokens=32,
        longest_tokens=128,
    ),
    "smollm2": Shape(  # SmolLM2-135M-Instruct
        "Llama",
        {
            "vocab_size": 49_152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
        },
        median_tokens=32,
        longest_tokens=128,
        weights=Path("runs/smollm2-135m"),
    ),
    "0.5b": Shape(  # Qwen2.5-0.5B
        "Qwen2",
        {
            "vocab_size": 151_936,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "rope_theta": 1e6,
        },
        median_tokens=16,
        longest_tokens=48,
    ),
}


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt, with the forced length of its answer."""

    prompt: list[int]
    output_tokens: int


def requests(shape: Shape, count: int, seed: int = 0) -> list[Request]:
    """Draw ``count`` requests; all are present from the start, so the batch thins out at the
    end."""
    chance = np.random.default_rng(seed)
    low, high = PROMPT_TOKENS
    prompts = chance.integers(low, high + 1, count)
    drawn = np.exp(chance.normal(np.log(shape.median_tokens), LENGTH_SIGMA, count))
    lengths = np.clip(np.round(drawn), LENGTH_MIN_TOKENS, shape.longest_tokens).astype(int)
    vocab = shape.fields["vocab_size"]
    return [
        Request(chance.integers(3, vocab, prompt).tolist(), length)
        for prompt, length in zip(prompts.tolist(), lengths.tolist(), strict=True)
    ]


def long_prompts(shape: Shape, prompt_tokens: int) -> list[Request]:
    """Draw two prompts of one length, of which each answer is one token; one warms up."""
    chance = np.random.default_rng(0)
    prompts = chance.integers(3, shape.fields["vocab_size"], (2, prompt_tokens))
    return [Request(prompt, 1) for prompt in prompts.tolist()]


def make_directory(
    path: Path, shape: Shape, dtype: str, *, tied: bool = True, device: str = "cpu"
) -> Path:
    """Write a Hugging Face model directory, which all competitors read.

    ``device`` draws random weights.
    """
    import torch
    import transformers

    classes: Any = transformers.AutoModelForCausalLM
    if shape.weights is not None:
        model = classes.from_pretrained(shape.weights, dtype=getattr(torch, dtype))
        model.save_pretrained(path)
        return path
    torch.manual_seed(0)
    config_class = getattr(transformers, f"{shape.architecture}Config")
    config = config_class(
        **shape.fields,
        max_position_embeddings=4096,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    with torch.device(device):
        model = classes.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(path)
    return path


def dump(requests: list[Request]) -> str:
    """Serialise requests for the measured processes."""
    return json.dumps([[one.prompt, one.output_tokens] for one in requests])


def load(text: str) -> list[Request]:
    """Parse the output of :func:`dump`."""
    return [Request(prompt, length) for prompt, length in json.loads(text)]
