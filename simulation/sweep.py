"""Sweeps of thousands of simulated seeds over all cores, and the text that reports them.

The reports come in the order of the seeds and do not depend on which core ran a seed.
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
from typing import TypeVar

from tidegate.simulation.coverage_marks import CoverageMark
from tidegate.simulation.crash_restart import CrashRestartReport, simulate_lives
from tidegate.simulation.faults import FaultKind
from tidegate.simulation.shrinking import Report, shrink
from tidegate.simulation.simulation import SimulationReport, simulate

CHUNK_SEEDS = 20
"""A second of work: little enough that no core is left alone with much at the end."""

REACHED_SEEDS = 1000
"""So many runs with all faults go through everything there is to go through, or some of it is not
simulated any more."""

SHRUNKEN_MAX = 3
"""Kinds of failure that are shrunken; whoever has more begins with these."""


AnyReport = TypeVar("AnyReport")


def sweep(seeds: range, kinds: frozenset[FaultKind], *, workers: int) -> Iterator[SimulationReport]:
    """Run all seeds, on so many processes; the reports, in order."""
    return _sweep(seeds, partial(simulate, faults=kinds), workers)


def sweep_lives(seeds: range, *, workers: int) -> Iterator[CrashRestartReport]:
    """The same of runs whose trainer and orchestrator die, and go on."""
    return _sweep(seeds, simulate_lives, workers)


def _sweep(seeds: range, run: Callable[[int], AnyReport], workers: int) -> Iterator[AnyReport]:
    if workers == 1 or len(seeds) <= CHUNK_SEEDS:
        yield from map(run, seeds)
        return
    chunks = [seeds[at : at + CHUNK_SEEDS] for at in range(0, len(seeds), CHUNK_SEEDS)]
    context = multiprocessing.get_context("spawn")  # a fork would copy the terminal's threads
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_be_a_worker) as pool:
        try:
            done = pool.map(partial(_run_chunk, run), chunks)
            yield from chain.from_iterable(done)
        finally:
            pool.shutdown(cancel_futures=True)


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0))


def _be_a_worker() -> None:
    """Ctrl-C is for the process that has started this one; however that ends, this one does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run_chunk(run: Callable[[int], AnyReport], seeds: range) -> list[AnyReport]:
    return [run(seed) for seed in seeds]


class FailureLines:
    """The lines printed for failed runs. The first run of each kind of failure is shrunken."""

    def __init__(self) -> None:
        self._kinds: set[str] = set()
        """The kinds of failure that were shrunken."""

    def of(self, report: Report) -> list[str]:
        """What to print for a run; nothing if it kept every promise."""
        if report.failure is None:
            return []
        dies = ", with deaths" if report.scenario.lives > 1 else ""
        lines = [
            f"seed {report.scenario.seed}{dies}: {report.failure}",
            f"  replay: {report.replay_command}",
        ]
        kind = report.failure.kind
        if kind in self._kinds or len(self._kinds) == SHRUNKEN_MAX:
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
        self.hardships: Counter[CoverageMark] = Counter()
        """Runs that went through each."""
        self._failed = FailureLines()

    def add(self, report: SimulationReport) -> list[str]:
        """Take in a run; return what to say of it, if it failed."""
        self.runs += 1
        self.trained_tokens += report.trained_tokens
        self.hardships.update(report.hardships)
        self.failures += report.failure is not None
        return self._failed.of(report)

    @property
    def unreached(self) -> list[CoverageMark]:
        """What no run went through, although there were enough."""
        if self.runs < REACHED_SEEDS:
            return []
        return [hardship for hardship in CoverageMark if not self.hardships[hardship]]

    def lines(self) -> list[str]:
        """What to say of all."""
        kept = self.runs - self.failures
        said = [
            f"{kept} of {self.runs} seeds kept every promise; {self.trained_tokens} tokens trained"
        ]
        if self.runs > CHUNK_SEEDS:
            said.append("of 1,000 seeds, so many went through this:")
            said += [f"{1000 * self.hardships[h] / self.runs:6.0f}  {h}" for h in CoverageMark]
        said += [f"never reached, so nothing is proven of it: {h}" for h in self.unreached]
        return said
