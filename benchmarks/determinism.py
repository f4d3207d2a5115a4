"""Cost of batch-invariant computation, which gives the same bits in every batch.

``python -m benchmarks.determinism [--json]`` prints ``name, value, unit, peer, ratio``. It runs the
model of :mod:`benchmarks.small_model` in this process, on one thread; the peer is the engine in its
default mode. Both alternate; values are medians of CPU time. ``decode``: tokens sampled by that
many turns at once. ``prefill``: tokens of one context, read in chunks of 512. A command that no
module imports. Built on the engine's runner and model code.
"""

from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.small_model import BLOCK_TOKENS, BLOCKS, compared_rates, load, show_table
from benchmarks.table import Row
from tidegate.engine.execution.runner import ModelRunner
from tidegate.engine.models.model import native_for
from tidegate.engine.models.model_config import ModelConfig
from tidegate.engine.models.model_weights import load_directory


def make_runner(path: Path, dtype: torch.dtype, *, is_deterministic: bool) -> ModelRunner:
    """Create a runner with room for all measurements."""
    config = ModelConfig.from_directory(path)
    packs = True if is_deterministic else None
    return ModelRunner(
        config,
        load_directory(path, config, dtype, is_packed=packs),
        num_blocks=BLOCKS,
        block_tokens=BLOCK_TOKENS,
        native=native_for(config, dtype),
        is_deterministic=is_deterministic,
    )


def rows(path: Path) -> Iterator[Row]:
    """Return the whole table."""
    load(path)
    for dtype in (torch.float32, torch.bfloat16):
        ours, peer = (make_runner(path, dtype, is_deterministic=exact) for exact in (True, False))
        yield from compared_rates(str(dtype).removeprefix("torch."), ours, peer)


if __name__ == "__main__":
    show_table(__doc__, rows)
