"""What do weights of a byte each save, in memory and in time?

``python -m benchmarks.rounded_weights [--json]`` prints ``name, value, unit, peer, ratio``. The
model of :mod:`benchmarks.speculation` in this process, on one thread, by turns with the same model
as it is published; medians of CPU time. ``decode``: tokens sampled by that many turns at once.
``prefill``: tokens of one context. ``weights``: bytes of one version, whose peer is that one's.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks.determinism import DECODE_BLOCKS, DECODING, RUNS, decode, prefill
from benchmarks.speculation import BLOCK_TOKENS, load
from benchmarks.table import Row, compared, show
from tidegate.engine.memory.returned_memory import regions_of
from tidegate.engine.models.served_model import DtypeChoice, Quantization, open_model
from tidegate.engine.runner import ModelRunner

DTYPES: tuple[DtypeChoice, ...] = ("float32", "bfloat16")


def make_runner(path: Path, dtype: DtypeChoice, quantize: Quantization | None) -> ModelRunner:
    """A runner with room for all that is measured."""
    runner = open_model(path, dtype, quantize=quantize).make_runner(
        num_blocks=max(DECODING) * DECODE_BLOCKS, block_tokens=BLOCK_TOKENS
    )
    assert isinstance(runner, ModelRunner)
    return runner


def rows(path: Path) -> Iterator[Row]:
    """The whole table."""
    load(path)
    works: dict[str, Callable[[ModelRunner], float]] = {
        f"decode/{turns}": partial(decode, turns=turns) for turns in DECODING
    }
    works["prefill"] = prefill
    for dtype in DTYPES:
        runners = [make_runner(path, dtype, "int8"), make_runner(path, dtype, None)]
        ours, peer = (float(weight_bytes(runner)) for runner in runners)
        yield compared(f"weights/{dtype}", "bytes", ours, peer)
        for name, work in works.items():
            rates: list[list[float]] = [[], []]
            for _ in range(RUNS):
                for runner, found in zip(runners, rates, strict=True):
                    found.append(work(runner))
            ours, peer = map(statistics.median, rates)
            yield compared(f"{name}/{dtype}/tokens_per_cpu_s", "1/s", ours, peer)


def weight_bytes(runner: ModelRunner) -> int:
    """What one version takes."""
    return sum(region.nbytes for region in regions_of(runner.weights.tensors()))


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
