"""Shrinks a failing scenario to the smallest one that fails in the same way.

`tidegate simulate` calls it for each failing seed. A scenario is plain data whose defaults are the
smallest run. Shrinking drops entries and halves numbers, and keeps each change with which the run
still fails in the same way. Built on ``scenario.py``, and on the three kinds of runs:
``simulation.py``, ``crash_restart.py``, ``adapter_runs.py``.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from tidegate.errors import ConfigError
from tidegate.simulation.faults.scenario import Scenario, read_scenario
from tidegate.simulation.run.adapter_runs import AdapterRunReport, run_adapters
from tidegate.simulation.run.crash_restart import CrashRestartReport, run_crash_restarts
from tidegate.simulation.run.simulation import SimulationReport, run_scenario

RUNS_MAX = 400
"""Most runs of the simulation for one failure: about twenty seconds. Most failures need a hundred
runs."""

Report = SimulationReport | CrashRestartReport | AdapterRunReport

Data = dict[str, Any]
"""Scenario in its JSON form, which leaves out settings equal to their defaults."""


def run_any(scenario: Scenario) -> Report:
    """Run a scenario: with adapters if it has some, as a crash-restart run if it allows several
    processes, else as a plain run."""
    if scenario.adapters:
        return run_adapters(scenario)
    return run_crash_restarts(scenario) if scenario.processes_max > 1 else run_scenario(scenario)


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
            self._simplify(_whole)
            for number in range(len(self._data.get("faults", []))):
                self._simplify(partial(_fault, number))
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


def _whole(data: Data) -> Data:
    return data


def _fault(number: int, data: Data) -> Data:
    fault: Data = data["faults"][number]
    return fault
