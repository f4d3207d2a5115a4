"""Memory and CPU time saved by int8 weights.

``python -m benchmarks.rounded_weights [--json]`` prints ``name, value, unit, peer, ratio``. It runs
the model of :mod:`benchmarks.small_model` in this process, on one thread, alternately with the same
model unquantized; values are medians of CPU time. ``decode``: tokens sampled by that many turns at
once. ``prefill``: tokens of one context. ``weights``: bytes of one version. A command that no
module imports. Built on the engine's runner and model code.
"""

from collections.abc import Iterator
from pathlib import Path

from benchmarks.small_model import BLOCK_TOKENS, BLOCKS, compared_rates, load, show_table
from benchmarks.table import Row, compared
from tidegate.engine.execution.runner import ModelRunner
from tidegate.engine.execution.served_model import DtypeChoice, open_model
from tidegate.engine.memory.host_memory import regions_of
from tidegate.engine.models.model_weights import Quantization

DTYPES: tuple[DtypeChoice, ...] = ("float32", "bfloat16")


def make_runner(path: Path, dtype: DtypeChoice, quantization: Quantization | None) -> ModelRunner:
    """Create a runner with room for all measurements."""
    runner = open_model(path, dtype, quantization=quantization).make_runner(
        num_blocks=BLOCKS, block_tokens=BLOCK_TOKENS
    )
    assert isinstance(runner, ModelRunner)
    return runner


def rows(path: Path) -> Iterator[Row]:
    """Return the whole table."""
    load(path)
    for dtype in DTYPES:
        ours, peer = make_runner(path, dtype, "int8"), make_runner(path, dtype, None)
        yield compared(f"weights/{dtype}", "bytes", weight_bytes(ours), weight_bytes(peer))
        yield from compared_rates(dtype, ours, peer)


def weight_bytes(runner: ModelRunner) -> float:
    """Return the size of one version in bytes."""
    return float(sum(region.nbytes for region in regions_of(runner.weights.tensors())))


if __name__ == "__main__":
    show_table(__doc__, rows)
