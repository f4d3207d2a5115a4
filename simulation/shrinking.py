"""Shrink a failing scenario to the smallest one that fails in the same way.

A scenario is plain data whose defaults are the smallest run, so it is enough to drop entries and to
halve numbers, as long as the failure stays of the same kind.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from tidegate.errors import ConfigError
from tidegate.simulation.crash_restart import CrashRestartReport, run_lives
from tidegate.simulation.scenario import Scenario, read_scenario
from tidegate.simulation.simulation import SimulationReport, run_scenario

RUNS_MAX = 400
"""Of the simulation: some twenty seconds. Most failures need a hundred."""

Report = SimulationReport | CrashRestartReport

Data = dict[str, Any]
"""A scenario as JSON holds it: what is as in the smallest run is not there."""


def run_any(scenario: Scenario) -> Report:
    """Run a scenario as what it is: a plain run, or one whose process dies and is resumed."""
    return run_lives(scenario) if scenario.lives > 1 else run_scenario(scenario)


def shrink(report: Report, *, runs_max: int = RUNS_MAX) -> Report:
    """Return the report of a smaller run that fails in the same way; the same one if there is none.

    Raises:
        ValueError: the run did not fail.
    """
    if report.failure is None:
        raise ValueError("only what fails can be shrunken, but this run kept every promise")
    return _Shrinker(report, report.failure.kind, runs_max).run()


class _Shrinker:
    """The smallest failing run found so far."""

    def __init__(self, report: Report, kind: str, runs_max: int) -> None:
        self._best = report
        self._kind = kind
        self._runs_left = runs_max

    def run(self) -> Report:
        """Try what may be left out until nothing more can be."""
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
        """The best so far, to be changed freely."""
        data: Data = msgspec.to_builtins(self._best.scenario)
        return data

    def _is_worse(self, data: Data) -> bool:
        """Run a candidate; keep it if it fails in the same way."""
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
        """All of them, or half, or a quarter, …, or a single one."""
        size = len(self._data.get("faults", []))
        while size:
            at = 0
            while at < len((data := self._data).get("faults", [])):
                del data["faults"][at : at + size]
                if self._is_worse(data):
                    at += size
            size //= 2

    def _simplify(self, part_of: Callable[[Data], Data]) -> None:
        """Leave out each entry of a part; where that won't do, make numbers smaller."""
        for name in list(part_of(self._data)):
            if name in ("faults", "kind"):
                continue
            data = self._data
            del part_of(data)[name]
            if self._is_worse(data):
                self._halve(part_of, name)

    def _halve(self, part_of: Callable[[Data], Data], name: str) -> None:
        """Come nearer to the smallest by half the way, as often as it helps."""
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
