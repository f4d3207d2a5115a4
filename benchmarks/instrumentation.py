"""Cost of observing a run: throughput and CPU time with and without dashboard, metrics and records.

``python -m benchmarks.instrumentation [--json]`` prints ``name, value, unit, peer, ratio``. Engines
are those of :mod:`benchmarks.orchestrator`: they compute nothing, in a process of their own. "all"
means a dashboard with one viewer, a scrape every second, and a run directory; the peer is the same
run without any, alternately, each in its own process. Values are medians; a spread is the highest
minus the lowest of the runs.

    rollouts_per_s: with engines at the pace of 256 turns of 64 tokens in 0.64 s
    cpu_us_per_rollout: of the whole process, with engines as fast as requested: a rollout is one
        turn, and costs little more than being recorded, which is the worst case. Once with
        everything on, once with the dashboard only
    update_...: with 100 engines and 10,000 outstanding rollouts: bytes of an update, its
        time on the run's loop, and the interval between updates at the viewer
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tidegate
from benchmarks.orchestrator.subject import WEIGHTS, settings_for, solve, wait_for_engines
from benchmarks.table import Row, compared, show

RUNS = 5
WATCHED = ("nothing", "dashboard", "all")

PACED = {"engines": 4, "slots": 64, "tokens": 64, "steps": 64, "turn_s": 0.64, "step_s": 0.01}
FAST = {"engines": 4, "slots": 64, "tokens": 64, "steps": 4, "turn_s": 0.008, "step_s": 0.002}
FULL = {"engines": 100, "slots": 128, "tokens": 64, "steps": 64, "turn_s": 12.8, "step_s": 0.2}
BATCHES = {"paced": (4, 14), "fast": (10, 60), "full": (1, 4)}
"""Batches of 256 rollouts to warm up and to measure, by kind."""
KINDS: dict[str, dict[str, Any]] = {"paced": PACED, "fast": FAST, "full": FULL}


def work_of(kind: str) -> argparse.Namespace:
    """Return the workload, as options of :mod:`benchmarks.orchestrator.subject`."""
    rollouts = 10_000 if kind == "full" else 512
    return argparse.Namespace(
        **KINDS[kind], rollouts=rollouts, group_size=8, batch=32, in_process=False
    )


class Viewer(threading.Thread):
    """Viewer process that reads updates as a page does, and scrapes metrics."""

    CODE = """
import json, sys, threading, time, urllib.request
url = sys.argv[1]
def scrape():
    while True:
        urllib.request.urlopen(url + "metrics").read()
        time.sleep(1)
threading.Thread(target=scrape, daemon=True).start()
last = None
for line in urllib.request.urlopen(url + "api/updates"):
    if line.startswith(b"data: "):
        now = time.monotonic()
        gap = None if last is None else now - last
        last = now
        print(json.dumps([len(line), gap]), flush=True)
"""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        command = [sys.executable, "-c", self.CODE, url]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self.updates: list[tuple[int, float | None]] = []

    def run(self) -> None:
        """Record the size and interval of each update."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            size, gap_s = json.loads(line)
            self.updates.append((size, gap_s))

    def stop(self) -> None:
        """Stop the viewer process."""
        self._process.kill()
        self._process.wait()
        self.join()


def subject(kind: str, watched: str) -> dict[str, Any]:
    """Measure one run from inside."""
    warm_up, batches = BATCHES[kind]
    work = work_of(kind)
    with settings_for(work) as settings, tempfile.TemporaryDirectory() as directory:
        if watched == "all":
            settings["run_directory"] = Path(directory) / "run"
        if watched != "nothing":
            settings["dashboard_address"] = "127.0.0.1:0"
        with tidegate.serve_sync(**settings) as rollouts:
            wait_for_engines(rollouts, work.engines)
            viewer = Viewer(rollouts.dashboard_url) if rollouts.dashboard_url else None
            if viewer is not None:
                viewer.start()
            result = measured(rollouts, warm_up, batches)
            if kind == "full":
                result |= measured_reads(rollouts)
            if viewer is not None:
                viewer.stop()
                result["updates"] = viewer.updates
    return result


def measured(rollouts: tidegate.SyncRollouts, warm_up: int, batches: int) -> dict[str, Any]:
    """Return the rollouts, CPU and wall time of the batches after a warm-up."""
    started_s = cpu_started_s = 0.0
    counted = 0
    for number, batch in enumerate(rollouts.batches(itertools.count(), episode=solve)):
        counted += len(batch.rewards)
        if number == warm_up - 1:
            started_s, cpu_started_s, counted = time.perf_counter(), time.process_time(), 0
        if number == warm_up + batches - 1:
            break
        rollouts.publish(WEIGHTS)
    cpu_s, wall_s = time.process_time() - cpu_started_s, time.perf_counter() - started_s
    return {"rollouts": counted, "cpu_s": cpu_s, "wall_s": wall_s}


def measured_reads(rollouts: tidegate.SyncRollouts) -> dict[str, Any]:
    """Measure how long one observation blocks the run's loop, in CPU time of its thread."""
    from tidegate.observability.metrics.snapshots import group_lines
    from tidegate.orchestrator.scheduler.scheduler import Scheduler

    def measure(scheduler: Scheduler) -> tuple[float, int]:
        started_ns = time.thread_time_ns()
        rollouts._handle._statistics_of(scheduler)
        groups = group_lines(scheduler.core)
        taken_ms = (time.thread_time_ns() - started_ns) / 1e6
        return taken_ms, sum(group.rollouts for group in groups)

    readings = [rollouts._handle._read(measure) for _ in range(20)]
    return {
        "look_ms": statistics.median(ms for ms, _ in readings),
        "outstanding": readings[-1][1],
    }


def in_own_process(kind: str, watched: str) -> dict[str, Any]:
    """Run :func:`subject` in its own process; the result is its last line."""
    command = [sys.executable, "-m", "benchmarks.instrumentation", "--subject", kind, watched]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def rows(runs: int) -> Iterator[Row]:
    """Return all lines of the table."""
    yield from compared_rows("paced", ("nothing", "all"), runs)
    yield from compared_rows("fast", WATCHED, runs)
    yield from full_rows(in_own_process("full", "dashboard"))


def compared_rows(kind: str, ways: tuple[str, ...], runs: int) -> Iterator[Row]:
    """Compare the ways alternately, so that a busy machine slows them alike."""
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for _ in range(runs):
        for way in ways:
            found[way].append(in_own_process(kind, way))

    def figures(way: str) -> list[float]:
        if kind == "paced":
            return [each["rollouts"] / each["wall_s"] for each in found[way]]
        return [1e6 * each["cpu_s"] / each["rollouts"] for each in found[way]]

    name, unit = ("rollouts_per_s", "1/s") if kind == "paced" else ("cpu_us_per_rollout", "us")
    peer = statistics.median(figures("nothing"))
    for way in ways[1:]:
        values = figures(way)
        yield compared(f"{name}_{way}", unit, statistics.median(values), peer)
        yield Row(f"{name}_{way}_spread", max(values) - min(values), unit)
    nothing = figures("nothing")
    yield Row(f"{name}_nothing_spread", max(nothing) - min(nothing), unit)


def full_rows(found: dict[str, Any]) -> Iterator[Row]:
    """Return the figures of a page that shows a full run."""
    sizes = [size for size, _ in found["updates"]]
    gaps_s = [gap_s for _, gap_s in found["updates"] if gap_s is not None]
    yield Row("update_rollouts_outstanding", found["outstanding"], "rollouts")
    yield Row("update_bytes", statistics.median(sizes), "B")
    yield Row("update_bytes_max", max(sizes), "B")
    yield Row("update_loop_ms", found["look_ms"], "ms")
    yield Row("update_interval_s", statistics.median(gaps_s), "s")
    yield Row("update_interval_s_max", max(gaps_s), "s")


def main() -> None:
    """Measure everything, or one run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--runs", type=int, default=RUNS, help="of each kind")
    parser.add_argument("--subject", nargs=2, metavar=("KIND", "WATCHED"), help="one run only")
    options = parser.parse_args()
    if options.subject:
        print(json.dumps(subject(*options.subject)))
    else:
        show(rows(options.runs), as_json=options.json)


if __name__ == "__main__":
    main()
