"""What do the same bits in every batch cost?

``python -m benchmarks.determinism [--json]`` prints ``name, value, unit, peer, ratio``. The model
of :mod:`benchmarks.speculation` in this process, on one thread. The peer is the engine as it
computes otherwise; both by turns, medians of CPU time. ``decode``: tokens sampled by that many
turns at once. ``prefill``: tokens of one context, read in chunks of 512.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import process_time

import numpy as np
import torch

from benchmarks.speculation import BLOCK_TOKENS, VOCAB, load
from benchmarks.table import Row, compared, show
from tidegate.engine.models.model import native_for
from tidegate.engine.models.model_config import ModelConfig
from tidegate.engine.runner import ModelRunner
from tidegate.engine.runner import Row as EngineRow
from tidegate.engine.sampling.sampling import RowSampling
from tidegate.engine.weights.weights import load_directory

CONTEXT_TOKENS, CHUNK_TOKENS = 1024, 512
DECODING = (1, 8, 32)
DECODE_STEPS = 20
DECODE_BLOCKS = 16
RUNS = 3


def make_runner(path: Path, dtype: torch.dtype, *, is_deterministic: bool) -> ModelRunner:
    """A runner with room for all that is measured."""
    config = ModelConfig.from_directory(path)
    packs = True if is_deterministic else None
    return ModelRunner(
        config,
        load_directory(path, config, dtype, is_packed=packs),
        num_blocks=max(CONTEXT_TOKENS // BLOCK_TOKENS, max(DECODING) * DECODE_BLOCKS),
        block_tokens=BLOCK_TOKENS,
        native=native_for(config, dtype),
        is_deterministic=is_deterministic,
    )


def decode(runner: ModelRunner, turns: int) -> float:
    """Tokens per CPU second, from the 128th position of their contexts on."""
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
    """Tokens per CPU second."""
    tokens = np.arange(CONTEXT_TOKENS, dtype=np.int32) % VOCAB
    blocks = list(range(CONTEXT_TOKENS // BLOCK_TOKENS))
    started = process_time()
    for start in range(0, CONTEXT_TOKENS, CHUNK_TOKENS):
        runner.step([EngineRow(tokens[start : start + CHUNK_TOKENS], start, blocks, None)])
    return CONTEXT_TOKENS / (process_time() - started)


def rows(path: Path) -> Iterator[Row]:
    """The whole table."""
    load(path)
    works: dict[str, Callable[[ModelRunner], float]] = {
        f"decode/{turns}": lambda runner, turns=turns: decode(runner, turns)  # type: ignore[misc]
        for turns in DECODING
    }
    works["prefill"] = prefill
    for dtype in (torch.float32, torch.bfloat16):
        runners = [make_runner(path, dtype, is_deterministic=exact) for exact in (True, False)]
        for name, work in works.items():
            rates: list[list[float]] = [[], []]
            for _ in range(RUNS):
                for runner, found in zip(runners, rates, strict=True):
                    found.append(work(runner))
            ours, peer = map(statistics.median, rates)
            full_name = f"{name}/{str(dtype).removeprefix('torch.')}/tokens_per_cpu_s"
            yield compared(full_name, "1/s", ours, peer)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one object a line")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        show(rows(Path(directory)), as_json=arguments.json)


if __name__ == "__main__":
    main()
