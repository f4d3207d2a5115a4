"""Output of `tidegate plan`: a table for people, or one JSON object per choice.

:mod:`tidegate.simulation.planning` computes the rows.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from tidegate.errors import ConfigError
from tidegate.simulation.planning.from_run import MeasuredRun
from tidegate.simulation.planning.plan import (
    PlanRow,
    advice,
    other_rows,
    recommended,
    staleness_rows,
)
from tidegate.simulation.planning.simulated import simulate
from tidegate.simulation.planning.workload import PlanCandidate, PlanWorkload

Value = TypeVar("Value")

HEADING = (
    f"{'':<4}{'eta':>4} {'pause':<15}{'engines':>8}{'trainers':>9}{'batch':>6}   "
    f"{'tokens/s':>10}{'s/batch':>9}{'age':>6}{'idle':>6} {'limit':<10}"
    f"{'tokens/s':>10}{'s/batch':>9}{'age':>6}{'idle':>6}"
)


def rows(workload: PlanWorkload, base: PlanCandidate, options: Mapping[str, Any]) -> list[PlanRow]:
    """Return the compared choices: first each staleness bound, then each other setting's values at
    the recommended bound."""

    def measured(row: PlanRow) -> PlanRow:
        if not options["simulated"]:
            return row
        simulated = simulate(workload, row.candidate, versions=options["versions"])
        return dataclasses.replace(row, simulated=simulated)

    bounds = parsed(options["max_staleness"], int, "--max-staleness")
    if not bounds:
        raise ConfigError(
            f"--max-staleness {options['max_staleness']!r} is empty; give one or more bounds, "
            f"such as 0,2"
        )
    found = [measured(row) for row in staleness_rows(workload, base, bounds)]
    others = other_rows(
        workload,
        recommended(found).candidate,
        pauses=parsed(options["pause_mode"], str, "--pause-mode"),  # type: ignore[arg-type]
        device_splits=parsed(options["engine_trainer_split"], _split, "--engine-trainer-split"),
        batches=parsed(options["batch_sizes"], int, "--batch-sizes"),
    )
    return [*found, *(measured(row) for row in others)]


def parsed(text: str, read: Callable[[str], Value], option: str) -> list[Value]:
    """Parse a comma-separated list.

    Raises:
        ConfigError: an item can't be parsed.
    """
    try:
        return [read(each.strip()) for each in text.split(",") if each.strip()]
    except ValueError:
        raise ConfigError(f"{option} {text!r} can't be read; see `tidegate plan --help`") from None


def _split(text: str) -> tuple[int, int]:
    engines, _, trainers = text.partition(":")
    return int(engines), int(trainers)


def lines(table: Sequence[PlanRow]) -> Iterator[str]:
    """Yield the table's lines."""
    bounds = [row for row in table if row.varied == "max_staleness"]
    best = recommended(bounds)
    yield f"{'':<50}{'closed forms':<43}simulated"
    yield HEADING
    varied = "max_staleness"
    for row in table:
        if row.varied != varied:
            varied = row.varied
            yield f"by {varied}:"
        yield _line(row, "*" if row is best else "")
    yield ""
    yield f"* {advice(bounds)}"


def _line(row: PlanRow, mark: str) -> str:
    candidate, closed = row.candidate, row.closed
    line = (
        f"{mark:<4}{candidate.max_staleness:>4} {candidate.name:<15}{candidate.engines:>8}"
        f"{candidate.trainers:>9}{candidate.groups_per_batch:>6}   {closed.tokens_per_s:>10.0f}"
        f"{closed.batch_s:>9.2f}{closed.mean_staleness:>6.2f}{closed.trainer_idle_share:>6.0%} "
        f"{closed.limit:<10}"
    )
    if (simulated := row.simulated) is None:
        return line.rstrip()
    return (
        f"{line}{simulated.tokens_per_s:>10.0f}{simulated.batch_s:>9.2f}{simulated.mean_staleness:>6.2f}"
        f"{simulated.trainer_idle_share:>6.0%}"
    )


def json_lines(table: Sequence[PlanRow]) -> Iterator[str]:
    """Yield one JSON object per row."""
    best = recommended([row for row in table if row.varied == "max_staleness"])
    for row in table:
        yield json.dumps({**dataclasses.asdict(row), "is_recommended": row is best})


def measured_line(run: MeasuredRun) -> str:
    """Return a line with the measurements of the run that the plan is based on."""
    costs, measured = run.workload.costs, run.measured
    return (
        f"measured: {measured.tokens_per_s:.0f} tokens/s, a batch every {measured.batch_s:.2f} s, "
        f"mean staleness {measured.mean_staleness:.2f}, trainer idle "
        f"{measured.trainer_idle_share:.0%}, with max_staleness={run.candidate.max_staleness}; "
        f"a step takes {costs.step_s * 1e3:.2f} ms + {costs.running_turn_s * 1e3:.3f} ms a row "
        f"({run.unaccounted_slowdown:.2f} times what engines report, to account for the time "
        f"outside steps), {run.workload.mean_tokens:.1f} tokens a rollout"
        + (f"\nthe run itself: {run.advice}" if run.advice else "")
    )
