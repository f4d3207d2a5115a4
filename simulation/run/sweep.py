"""Sweeps of simulated seeds over all CPU cores, their report, and the shrinking of failed runs.

Reports come in the order of the seeds and do not depend on which process ran a seed. A scenario is
plain data whose defaults are the smallest run: shrinking drops entries and halves numbers, and
keeps each change with which the run still fails in the same way.
"""

import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import msgspec

from tidegate.errors import ConfigError
from tidegate.simulation.checks.coverage import ADAPTER_MARKS, ELASTIC_MARKS, CoverageMark
from tidegate.simulation.faults.scenario import Scenario, read_scenario
from tidegate.simulation.run.adapter_runs import AdapterRun, AdapterRunReport
from tidegate.simulation.run.crash_restart import CrashRestartReport, CrashRestartRun
from tidegate.simulation.run.simulation import SimulationReport, run_scenario

CHUNK_SEEDS = 20
"""Seeds per task of a worker process: about a second of work, so all processes end together."""

COVERAGE_SEEDS_MIN = 1000
"""Minimum number of runs for a check of coverage marks. This many runs with all faults enabled
reach every mark. If a sweep of this size misses a mark, the simulation has ceased to produce the
mark's situation."""

SEED_MARKS = [mark for mark in CoverageMark if mark not in ADAPTER_MARKS | ELASTIC_MARKS]
"""Marks that runs without adapters reach."""

RUNS_MAX = 400
"""Most runs of the simulation to shrink one failure: about twenty seconds. Most failures need a
hundred runs."""

Report = SimulationReport | CrashRestartReport | AdapterRunReport

Data = dict[str, Any]
"""Scenario in its JSON form, which leaves out settings equal to their defaults."""

SHRUNK_KINDS_MAX = 3
"""Number of kinds of failure that are shrunk, because shrinking takes about twenty seconds."""

AnyReport = TypeVar("AnyReport")


def sweep(seeds: range, run: Callable[[int], AnyReport], *, workers: int) -> Iterator[AnyReport]:
    """Run all seeds on ``workers`` processes, and yield their reports in order."""
    if workers == 1 or len(seeds) <= CHUNK_SEEDS:
        yield from map(run, seeds)
        return
    chunks = [seeds[at : at + CHUNK_SEEDS] for at in range(0, len(seeds), CHUNK_SEEDS)]
    context = multiprocessing.get_context("spawn")  # a fork would copy the terminal's threads
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_init_worker) as pool:
        try:
            done = pool.map(partial(_run_chunk, run), chunks)
            yield from chain.from_iterable(done)
        finally:
            pool.shutdown(cancel_futures=True)


def core_count() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _init_worker() -> None:
    """Ignore Ctrl-C, which the parent process handles, and exit when the parent process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, name="parent", daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run_chunk(run: Callable[[int], AnyReport], seeds: range) -> list[AnyReport]:
    return [run(seed) for seed in seeds]


class FailureLines:
    """Formatter of failed runs, which shrinks the first run of each kind of failure."""

    def __init__(self) -> None:
        self._kinds: set[str] = set()
        """Kinds of failure for which a failed run has been shrunk."""

    def lines_of(self, report: Report) -> list[str]:
        """Return the lines to print for a run; none if the run passed."""
        if report.failure is None:
            return []
        crash_note = ", with crash-restarts" if report.scenario.processes_max > 1 else ""
        crash_note = f", with adapters{crash_note}" if report.scenario.adapters else crash_note
        lines = [
            f"seed {report.scenario.seed}{crash_note}: {report.failure}",
            f"  replay: {report.replay_command}",
        ]
        kind = report.failure.kind
        if kind in self._kinds or len(self._kinds) == SHRUNK_KINDS_MAX:
            return lines
        self._kinds.add(kind)
        smallest = shrink(report)
        return [*lines, f"  smallest: {smallest.failure}", f"  replay: {smallest.replay_command}"]


class SweepSummary:
    """Totals over the runs of a sweep."""

    def __init__(self) -> None:
        self.runs = 0
        self.failures = 0
        self.trained_tokens = 0
        self.coverage: Counter[CoverageMark] = Counter()
        """Mark -> number of runs that reached it."""
        self._failed = FailureLines()

    def add(self, report: SimulationReport) -> list[str]:
        """Count a run; return the lines to print for it, none if it passed."""
        self.runs += 1
        self.trained_tokens += report.trained_tokens
        self.coverage.update(report.coverage)
        self.failures += report.failure is not None
        return self._failed.lines_of(report)

    @property
    def uncovered(self) -> list[CoverageMark]:
        """Marks that no run reached; empty if there were too few runs to decide."""
        if self.runs < COVERAGE_SEEDS_MIN:
            return []
        return [mark for mark in SEED_MARKS if not self.coverage[mark]]

    def lines(self) -> list[str]:
        """Return the summary of the sweep as lines of text."""
        passed = self.runs - self.failures
        lines = [f"{passed} of {self.runs} seeds passed; {self.trained_tokens} tokens trained"]
        if self.runs > CHUNK_SEEDS:
            lines.append("coverage, in runs per 1,000 seeds:")
            counts = self.coverage
            lines += [f"{1000 * counts[mark] / self.runs:6.0f}  {mark}" for mark in SEED_MARKS]
        lines += [f"never reached, so not tested: {mark}" for mark in self.uncovered]
        return lines


# ---------------------------------------------------------------- shrinking


def run_any(scenario: Scenario) -> Report:
    """Run a scenario: with adapters if it has some, as a crash-restart run if it allows several
    processes, else as a plain run."""
    if scenario.adapters:
        return AdapterRun(scenario).run()
    is_restarted = scenario.processes_max > 1
    return CrashRestartRun(scenario).run() if is_restarted else run_scenario(scenario)


def shrink(report: Report, *, runs_max: int = RUNS_MAX) -> Report:
    """Return the report of a smaller run that fails in the same way; the same one if there is none.

    Raises:
        ValueError: the run did not fail.
    """
    if report.failure is None:
        raise ValueError(f"shrinking needs a failed run, but seed {report.scenario.seed} passed")

    return _Shrinker(report, report.failure.kind, runs_max).run()


class _Shrinker:
    """Search for the smallest run that fails in the same way; holds the smallest one so far."""

    def __init__(self, report: Report, kind: str, runs_max: int) -> None:
        self._best = report
        self._kind = kind
        self._runs_left = runs_max

    def run(self) -> Report:
        """Drop and simplify parts of the scenario until no change keeps the failure."""
        before: Report | None = None
        while before is not self._best:
            before = self._best
            self._drop_faults()
            self._simplify(lambda data: data)
            for number in range(len(self._data.get("faults", []))):
                self._simplify(partial(_fault_of, number=number))
        return self._best

    @property
    def _data(self) -> Data:
        """Copy of the smallest failing scenario so far, as data that may be changed."""
        data: Data = msgspec.to_builtins(self._best.scenario)
        return data

    def _is_worse(self, data: Data) -> bool:
        """Run a candidate, and keep it if it fails in the same way. Return whether it was rejected.

        Invalid scenarios, and all scenarios after the limit of runs, are rejected without a run.
        """
        if not self._runs_left or data == self._data:
            return True
        try:
            scenario = read_scenario(msgspec.json.encode(data).decode())
        except ConfigError:
            return True
        self._runs_left -= 1
        report = run_any(scenario)
        if report.failure is None or report.failure.kind != self._kind:
            return True
        self._best = report
        return False

    def _drop_faults(self) -> None:
        """Drop faults in runs of all, half, a quarter, …, and single faults."""
        size = len(self._data.get("faults", []))
        while size:
            at = 0
            while at < len((data := self._data).get("faults", [])):
                del data["faults"][at : at + size]
                if self._is_worse(data):
                    at += size
            size //= 2

    def _simplify(self, part_of: Callable[[Data], Data]) -> None:
        """Drop each entry of a part of the scenario; halve the numbers that can't be dropped."""
        for name in list(part_of(self._data)):
            if name in ("faults", "kind"):
                continue
            data = self._data
            del part_of(data)[name]
            if self._is_worse(data):
                self._halve(part_of, name)

    def _halve(self, part_of: Callable[[Data], Data], name: str) -> None:
        """Halve a number repeatedly, as long as the run still fails in the same way."""
        while True:
            data = self._data
            value = part_of(data).get(name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                return
            part_of(data)[name] = value // 2 if isinstance(value, int) else round(value / 2, 3)
            if self._is_worse(data):
                return


def _fault_of(data: Data, *, number: int) -> Data:
    fault: Data = data["faults"][number]
    return fault
