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
    Row,
    advice,
    other_rows,
    recommended,
    staleness_rows,
)
from tidegate.simulation.planning.simulated import simulate
from tidegate.simulation.planning.situation import PlanCandidate, PlanWorkload

Value = TypeVar("Value")

HEADING = (
    f"{'':<4}{'eta':>4} {'pause':<15}{'engines':>8}{'trainers':>9}{'batch':>6}   "
    f"{'tokens/s':>10}{'s/batch':>9}{'age':>6}{'idle':>6} {'limit':<10}"
    f"{'tokens/s':>10}{'s/batch':>9}{'age':>6}{'idle':>6}"
)


def rows(situation: PlanWorkload, base: PlanCandidate, options: Mapping[str, Any]) -> list[Row]:
    """Return the compared choices: staleness bounds, then the others at the recommended bound."""

    def measured(row: Row) -> Row:
        if not options["simulated"]:
            return row
        seen = simulate(situation, row.choice, versions=options["versions"])
        return dataclasses.replace(row, simulated=seen)

    bounds = parsed(options["max_staleness"], int, "--max-staleness")
    if not bounds:
        raise ConfigError(
            f"--max-staleness {options['max_staleness']!r} names no bound; give one or more, "
            f"such as 0,2"
        )
    found = [measured(row) for row in staleness_rows(situation, base, bounds)]
    others = other_rows(
        situation,
        recommended(found).choice,
        pauses=parsed(options["pause_mode"], str, "--pause-mode"),  # type: ignore[arg-type]
        splits=parsed(options["engine_trainer_split"], _split, "--engine-trainer-split"),
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


def lines(table: Sequence[Row]) -> Iterator[str]:
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


def _line(row: Row, mark: str) -> str:
    choice, closed = row.choice, row.closed
    said = (
        f"{mark:<4}{choice.max_staleness:>4} {choice.name:<15}{choice.engines:>8}"
        f"{choice.trainers:>9}{choice.groups_per_batch:>6}   {closed.tokens_per_s:>10.0f}"
        f"{closed.batch_s:>9.2f}{closed.mean_staleness:>6.2f}{closed.trainer_idle_share:>6.0%} "
        f"{closed.limit:<10}"
    )
    if (seen := row.simulated) is None:
        return said.rstrip()
    return (
        f"{said}{seen.tokens_per_s:>10.0f}{seen.batch_s:>9.2f}{seen.mean_staleness:>6.2f}"
        f"{seen.trainer_idle_share:>6.0%}"
    )


def json_lines(table: Sequence[Row]) -> Iterator[str]:
    """Yield one JSON object per row."""
    best = recommended([row for row in table if row.varied == "max_staleness"])
    for row in table:
        yield json.dumps({**dataclasses.asdict(row), "is_recommended": row is best})


def measured_line(run: MeasuredRun) -> str:
    """Return a line with the measurements of the run that the plan is based on."""
    costs, seen = run.situation.costs, run.measured
    return (
        f"measured: {seen.tokens_per_s:.0f} tokens/s, a batch every {seen.batch_s:.2f} s, mean "
        f"staleness {seen.mean_staleness:.2f}, trainer idle {seen.trainer_idle_share:.0%}, with "
        f"max_staleness={run.choice.max_staleness}; a step takes {costs.step_s * 1e3:.2f} ms + "
        f"{costs.running_turn_s * 1e3:.3f} ms a row ({run.unaccounted_factor:.2f} times what "
        f"engines say, to account for all of its time), {run.situation.mean_tokens:.1f} tokens a "
        f"rollout"
    )
