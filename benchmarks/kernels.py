"""Speed of the GPU kernels, against torch's operations and the hardware's roofline.

``python -m benchmarks.kernels [--json]`` prints ``name, value, unit, peer, ratio``, and writes the
same with the device's name to benchmarks/results/kernels.jsonl. ``peer`` is the time of torch's own
operations, ``ratio`` how many times ours it is. ``roofline_share`` is the minimum time of the bytes
and operations, at the rates that a copy and a large matrix product reach here, over ours.
``error_max`` is the largest difference from torch's result. Without a GPU it exits with status 2.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.kernel_cases import REAL, Case, cases

RESULTS = Path(__file__).parent / "results" / "kernels.jsonl"
RUNS = 50
CPU_RUNS = 3
"""Runs on a CPU, in Triton's interpreter, where times mean nothing."""
WARMUP_RUNS = 5
"""Runs before timing; the first compiles."""
COPY_BYTES = 2**30
GEMM_SIDE = 8192
FLUSH_BYTES = 2**28
"""Bytes written between runs, more than any GPU's cache: inputs come from memory, as in a step of
many layers."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Peak rates that this GPU reaches."""

    bytes_per_us: float
    flops_per_us: float


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    name: str
    value: float
    unit: str
    peer: float
    ratio: float
    spread: float
    """Interquartile range of our times, as a share of their median."""
    roofline_share: float
    error_max: float
    device: str
    torch: str


def times_us(work: Callable[[], torch.Tensor], device: str = "cuda") -> list[float]:
    """Return the GPU time of each run, with a cold cache; on a CPU the wall time of a few."""
    if device == "cpu":
        return [_wall_us(work) for _ in range(CPU_RUNS)]
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    for _ in range(WARMUP_RUNS):
        work()
    marks = [(_mark(), _mark()) for _ in range(RUNS)]
    for begun, ended in marks:
        flush.zero_()
        begun.record()
        work()
        ended.record()
    torch.cuda.synchronize()
    return [1e3 * begun.elapsed_time(ended) for begun, ended in marks]


def _wall_us(work: Callable[[], torch.Tensor]) -> float:
    began_s = time.perf_counter()
    work()
    return 1e6 * (time.perf_counter() - began_s)


def _mark() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def rates(device: str = "cuda", dtype: torch.dtype = REAL.dtype) -> Rates:
    """Measure a device's copy and GEMM rates."""
    copied_bytes, side = (2**24, 256) if device == "cpu" else (COPY_BYTES, GEMM_SIDE)
    source = torch.zeros(copied_bytes, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    copy_us = statistics.median(times_us(lambda: target.copy_(source), device))
    matrix = torch.randn(side, side, device=device).to(dtype)
    gemm_us = statistics.median(times_us(lambda: matrix @ matrix, device))
    return Rates(2 * copied_bytes / copy_us, 2 * side**3 / gemm_us)


def measure(case: Case, limits: Rates, device: str = "cuda") -> Row:
    """Compare the results, then time both."""
    error_max = float((case.ours().float() - case.peer().float()).abs().max())
    ours, peer = times_us(case.ours, device), statistics.median(times_us(case.peer, device))
    value = statistics.median(ours)
    low, _, high = statistics.quantiles(ours, n=4)
    least = max(case.moved_bytes / limits.bytes_per_us, case.flops / limits.flops_per_us)
    return Row(
        name=case.name,
        value=value,
        unit="us",
        peer=peer,
        ratio=peer / value,
        spread=(high - low) / value,
        roofline_share=least / value,
        error_max=error_max,
        device=device if device == "cpu" else torch.cuda.get_device_name(device),
        torch=torch.__version__,
    )


def main() -> int:
    """Measure all cases, print and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one object a line")
    as_json = parser.parse_args().json
    if not torch.cuda.is_available():
        print("benchmarks.kernels measures a GPU, and torch sees none here", file=sys.stderr)
        return 2
    limits = rates()
    lines = []
    for case in cases(REAL, "cuda"):
        row = measure(case, limits)
        lines.append(json.dumps(asdict(row)))
        print(lines[-1] if as_json else _line(row), flush=True)
    RESULTS.write_text("\n".join(lines) + "\n")
    return 0


def _line(row: Row) -> str:
    return (
        f"{row.name:28} {row.value:10.1f} {row.unit} {row.peer:10.1f} {row.ratio:6.2f}"
        f"   roofline {row.roofline_share:5.0%}   spread {row.spread:4.0%}   "
        f"error {row.error_max:.1e}"
    )


if __name__ == "__main__":
    sys.exit(main())
