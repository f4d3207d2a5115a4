"""Rows of the scheduling table: an outcome's figures, beside the published model's."""

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks import table
from benchmarks.scheduling.bounds import SPREAD_PHASES, efficiency_bound
from benchmarks.scheduling.policies import Variant
from benchmarks.scheduling.run import Outcome
from benchmarks.scheduling.workloads import Workload

NAMES = (
    "efficiency",
    "max_staleness",
    "mean_staleness",
    "mixed_share",
    "masked_share",
    "wasted_share",
    "length_bias",
    "tail_bias",
    "speedup_over_sync",
    "orchestrator_cpu_share",
)
"""Figures in the order of the table."""

UNITS = {
    "max_staleness": "versions",
    "mean_staleness": "versions",
    "length_bias": "of the population's mean",
    "tail_bias": "of the population's share",
    "speedup_over_sync": "times",
}
"""Units of the figures; the others are shares of 1."""

BOUNDS = {
    "possible": (1, 1),
    "possible, even ends": (SPREAD_PHASES, 1),
    "possible, 4 batches": (1, 4),
    "possible, 4 batches, even ends": (SPREAD_PHASES, 4),
}
"""Bounds by name in the column of policies: phases of ends, and batches per version."""

PUBLISHED = Path(__file__).with_name("published.csv")
"""Figures of the published model that the workloads come from; the mode is empty where it makes no
difference. The model is an event-driven one of the same machines, with exact processor sharing in
its engines and no overhead between engines and trainer. It consumes groups in completion order
unless the policy says otherwise. Figures have two digits, so ratios are good to about a percent."""


@dataclass(frozen=True, slots=True)
class Row(table.Row):
    """One figure of a run; the peer is the published model's figure."""

    workload: str = ""
    policy: str = ""
    eta: int = 0
    mode: str = ""

    def text(self) -> str:
        """Return the row for people."""
        run = f"{self.workload}, {self.policy}, η={self.eta}, {self.mode}"
        return f"{run}: {table.Row.text(self)}"


def rows(
    workload: Workload, variant: Variant, mode: str, outcome: Outcome, sync: Outcome
) -> list[Row]:
    """Return all figures of one run; ``sync`` is the baseline of the speed-up."""
    of = (workload.name, variant.name, variant.eta, mode)
    model = published()
    peer = model.get(of) or model.get((*of[:3], "")) or {}
    values = _values(workload, outcome, sync)
    return [_row(name, values[name], peer, of) for name in NAMES]


@cache
def published() -> dict[tuple[str, str, int, str], dict[str, float]]:
    """Return the published model's figures by workload, policy, η and mode."""
    with PUBLISHED.open() as file:
        return {
            (row["workload"], row["policy"], int(row["eta"]), row["mode"]): {
                name: float(row[name]) for name in NAMES if row.get(name)
            }
            for row in csv.DictReader(file)
        }


def bound_rows(workload: Workload, eta: int) -> Iterator[list[Row]]:
    """Yield the efficiency that no policy exceeds, and the same if rollouts end evenly spread, for
    versions made from one batch and from four."""
    for policy, (phases, batches) in BOUNDS.items():
        bound = efficiency_bound(workload, eta, phases=phases, batches_per_version=batches)
        values = {
            "efficiency": bound.efficiency,
            "max_staleness": eta,
            "masked_share": bound.masked_share,
        }
        of = (workload.name, policy, eta, "keep")
        yield [_row(name, value, {}, of) for name, value in values.items()]


def _row(name: str, value: float, peer: dict[str, float], of: tuple[str, str, int, str]) -> Row:
    theirs = peer.get(name)
    ratio = value / theirs if theirs else None
    return Row(name, value, UNITS.get(name, "of 1"), theirs, ratio, *of)


def _values(workload: Workload, outcome: Outcome, sync: Outcome) -> dict[str, float]:
    tally = outcome.tally
    used_tokens = tally.trained_tokens - tally.masked_tokens
    with_age = max(1, tally.staleness.total())
    population_tail = max(outcome.tail_share, 1 / tally.rollouts)
    return {
        "efficiency": tally.efficiency(workload),
        "max_staleness": outcome.oldest_ever,
        "mean_staleness": sum(age * n for age, n in tally.staleness.items()) / with_age,
        "mixed_share": tally.mixed_rollouts / tally.rollouts,
        "masked_share": tally.masked_tokens / tally.trained_tokens,
        "wasted_share": tally.discarded_tokens / tally.generated_tokens,
        "length_bias": tally.trained_tokens / tally.rollouts / outcome.mean_tokens,
        "tail_bias": tally.tail_rollouts / tally.rollouts / population_tail,
        "speedup_over_sync": used_tokens / tally.at_s / _tokens_per_s(sync),
        "orchestrator_cpu_share": tally.orchestrator_cpu_s / tally.at_s,
    }


def _tokens_per_s(outcome: Outcome) -> float:
    return outcome.tally.trained_tokens / outcome.tally.at_s


def read(paths: Sequence[Path]) -> list[list[Row]]:
    """Read runs that ``--json`` has written; a later run replaces an earlier equal one."""
    runs: dict[tuple[str, str, int, str], dict[str, Row]] = {}
    for path in paths:
        for line in path.read_text().splitlines():
            row = Row(**json.loads(line))
            runs.setdefault((row.workload, row.policy, row.eta, row.mode), {})[row.name] = row
    return [list(run.values()) for run in runs.values()]
