"""Small in-process model of several benchmarks, with decode and prefill rates of two variants.

``benchmarks.determinism``, ``speculation`` and ``rounded_weights`` use it. 12 layers of width 512,
a vocabulary of 8,192, random weights; one thread, no wire.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from time import process_time

import numpy as np
import torch

from benchmarks.table import Row, compared, show
from tidegate.engine.execution.runner import ModelRunner
from tidegate.engine.execution.runner import Row as EngineRow
from tidegate.engine.models.model_config import ModelConfig
from tidegate.engine.models.model_weights import Weights, load_directory
from tidegate.engine.sampling.sampling import RowSampling

LAYERS, VOCAB = 12, 8192
BLOCK_TOKENS = 16
RUNS = 3

CONTEXT_TOKENS, CHUNK_TOKENS = 1024, 512
DECODING = (1, 8, 32)
DECODE_STEPS = 20
DECODE_BLOCKS = 16

BLOCKS = max(CONTEXT_TOKENS // BLOCK_TOKENS, max(DECODING) * DECODE_BLOCKS)
"""KV blocks for everything that :func:`compared_rates` computes."""


def load(path: Path, *, kept: float = 1.0, changed: float = 0.0, layers: int = LAYERS) -> Weights:
    """Create weights; ``kept`` scales the layers' output, ``changed`` adds noise of that share,
    ``layers`` truncates."""
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config)
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.add_(changed * tensor.std() * torch.randn(tensor.shape, generator=noise))
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor.mul_(kept)
    del model.model.layers[layers:]
    model.config.num_hidden_layers = layers
    assert model.config.layer_types is not None
    model.config.layer_types = model.config.layer_types[:layers]
    model.save_pretrained(path)
    return load_directory(path, ModelConfig.from_directory(path), torch.float32)


def decode(runner: ModelRunner, turns: int) -> float:
    """Return the decoded tokens per CPU-second, from context position 128 on."""
    started = process_time()
    for step in range(DECODE_STEPS):
        token = np.array([step], np.int32)
        runner.step(
            [
                EngineRow(
                    token,
                    128 + step,
                    list(range(turn * DECODE_BLOCKS, (turn + 1) * DECODE_BLOCKS)),
                    RowSampling(1.0, 0, 1.0, turn, step),
                )
                for turn in range(turns)
            ]
        )
    return DECODE_STEPS * turns / (process_time() - started)


def prefill(runner: ModelRunner) -> float:
    """Return the prefilled tokens per CPU-second."""
    tokens = np.arange(CONTEXT_TOKENS, dtype=np.int32) % VOCAB
    blocks = list(range(CONTEXT_TOKENS // BLOCK_TOKENS))
    started = process_time()
    for start in range(0, CONTEXT_TOKENS, CHUNK_TOKENS):
        runner.step([EngineRow(tokens[start : start + CHUNK_TOKENS], start, blocks, None)])
    return CONTEXT_TOKENS / (process_time() - started)


def compared_rates(dtype: str, ours: ModelRunner, peer: ModelRunner) -> Iterator[Row]:
    """Compare both runners' decode and prefill rates, alternately; medians."""
    works: dict[str, Callable[[ModelRunner], float]] = {
        f"decode/{turns}": partial(decode, turns=turns) for turns in DECODING
    }
    works["prefill"] = prefill
    for name, work in works.items():
        rates: list[list[float]] = [[], []]
        for _ in range(RUNS):
            for runner, found in zip((ours, peer), rates, strict=True):
                found.append(work(runner))
        of_ours, of_peer = map(statistics.median, rates)
        yield compared(f"{name}/{dtype}/tokens_per_cpu_s", "1/s", of_ours, of_peer)


def show_table(
    description: str | None,
    rows: Callable[[Path], Iterator[Row]],
    argv: Sequence[str] | None = None,
) -> None:
    """Print what ``rows`` measures; it gets a directory for its models."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="one object a line")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        show(rows(Path(directory)), as_json=arguments.json)
