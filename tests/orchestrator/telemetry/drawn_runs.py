"""Set-ups of runs, drawn from seeds, and whether what a run is advised gains what it is told.

Each set-up runs in virtual time, and again with each change that its diagnosis advises. The gain is
measured from its definition: publishes per second of the virtual clock, once the pipeline is full.
Nothing here uses a formula of the code under test.

    python -m tests.orchestrator.telemetry.drawn_runs 200 [FIRST_SEED]
"""

import asyncio
import itertools
import math
import random
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import tidegate
from tidegate.orchestrator.telemetry.statistics import RunStatistics
from tidegate.policies.asynchrony import Order
from tidegate.policies.bottlenecks import Change, Limit
from tidegate.simulation.run.serve import ServeInTests
from tidegate.simulation.run.sweep import core_count, sweep
from tidegate.simulation.run.virtual_time import VirtualTime
from tidegate.testing import ScriptedEngine

TOKENS_MAX = 80
MEASURED_VERSIONS = 32
"""Versions over which the time is measured, after those that fill the pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetUp:
    """One run's machines, workload and settings. Times are virtual seconds."""

    seed: int
    engines: int
    slots: int
    step_s: float
    running_turn_s: float
    train_s: float
    publish_s: float
    mean_tokens: float
    sigma: float
    turns: int
    tool_s: float
    group_size: int
    groups_per_batch: int
    max_staleness: int
    order: Order = "admission"


def drawn(seed: int) -> SetUp:
    """Draw a set-up: trainers from a twelfth to eight times as slow as the engines."""
    chance = random.Random(f"set-up {seed}")
    engines, slots = chance.choice((1, 2, 4)), chance.choice((2, 4, 8))
    step_s = 0.02
    running_turn_s = step_s * chance.choice((0.0, 0.02, 0.1))
    mean_tokens, group_size = chance.choice((8.0, 16.0)), chance.choice((2, 4))
    groups_per_batch = chance.choice((2, 4, 6))
    tokens = mean_tokens * group_size * groups_per_batch
    engines_s = tokens / (engines * slots) * (step_s + running_turn_s * slots)
    batch_s = engines_s * math.exp(chance.uniform(math.log(1 / 8), math.log(8)))
    publish_share = chance.choice((0.02, 0.1, 0.4))
    return SetUp(
        seed=seed,
        engines=engines,
        slots=slots,
        step_s=step_s,
        running_turn_s=running_turn_s,
        train_s=batch_s * (1 - publish_share),
        publish_s=batch_s * publish_share,
        mean_tokens=mean_tokens,
        sigma=chance.choice((0.0, 0.5, 1.0)),
        turns=chance.choice((1, 1, 3)),
        tool_s=chance.choice((0.0, 0.5, 2.0)) * mean_tokens * step_s,
        group_size=group_size,
        groups_per_batch=groups_per_batch,
        max_staleness=chance.randrange(9),
        order=chance.choice(("admission", "admission", "completion")),
    )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run took, and what it said of itself."""

    batch_s: float
    """Mean seconds between the publishes after the pipeline was filled."""
    statistics: RunStatistics


def run(set_up: SetUp, versions: int = MEASURED_VERSIONS) -> Outcome:
    """Run a set-up in virtual time."""
    virtual_time = VirtualTime(limit_s=1e7)
    try:
        return virtual_time.run(_run(set_up, virtual_time, versions))
    finally:
        virtual_time.close()


async def _run(set_up: SetUp, virtual_time: VirtualTime, versions: int) -> Outcome:
    engines = [
        ScriptedEngine(
            step_s=set_up.step_s,
            running_turn_s=set_up.running_turn_s,
            max_running_turns=set_up.slots,
            staging_s=set_up.publish_s,
        )
        for _ in range(set_up.engines)
    ]
    median = set_up.mean_tokens / math.exp(set_up.sigma**2 / 2)

    async def episode(episode: tidegate.Episode, task: int) -> float:
        own = random.Random(f"{set_up.seed}/{task}/{episode.index}")
        tokens = min(
            TOKENS_MAX, max(set_up.turns, round(median * math.exp(own.gauss(0, set_up.sigma))))
        )
        episode.append([1, 2, 3])
        for turn in range(set_up.turns):
            await episode.generate(max_tokens=tokens // set_up.turns)
            if turn + 1 < set_up.turns and set_up.tool_s:
                with episode.activity("tool:search"):
                    await asyncio.sleep(own.expovariate(1 / set_up.tool_s))
        return float(episode.index % 2)

    warm_up = 2 * set_up.max_staleness + 6
    since_s = 0.0
    serve = ServeInTests(virtual_time)
    async with serve(
        engines=engines,
        says="a" * 4 * TOKENS_MAX,
        max_staleness=set_up.max_staleness,
        group_size=set_up.group_size,
        groups_per_batch=set_up.groups_per_batch,
        consumption_order=set_up.order,
        stuck_after_s=1e6,
        episode_timeout_s=1e6,
    ) as rollouts:
        published = 0
        async for _ in rollouts.batches(itertools.count(), episode=episode):
            await asyncio.sleep(set_up.train_s)
            await rollouts.publish({})
            published += 1
            if published == warm_up:
                since_s = virtual_time.now_s
            if published == warm_up + versions:
                break
        statistics = rollouts.statistics()
        batch_s = (virtual_time.now_s - since_s) / versions
    return Outcome(batch_s, statistics)


@dataclass(frozen=True, slots=True)
class Applied:
    """A change that a set-up's diagnosis advises, and what it gained when it was made."""

    set_up: SetUp
    limit: Limit
    change: Change
    gain: float

    @property
    def is_within_error(self) -> bool:
        """Whether the gain is in the stated range; a saving may gain, too."""
        low, high = self.change.gain_range
        return low <= self.gain and (self.gain <= high or not self.change.gain)

    def __str__(self) -> str:
        verdict = "" if self.is_within_error else "  MISSED"
        return f"{self.limit}: {self.change}: gained {self.gain:+.1%}{verdict}"


def applied_advice(seed: int) -> list[Applied]:
    """Run a drawn set-up, and again with each advised change alone."""
    set_up = drawn(seed)
    before = run(set_up)
    forecast = before.statistics.forecast
    assert forecast is not None
    found = []
    for change in forecast.changes:
        advised = changed(set_up, change, before.statistics)
        if advised is None:
            continue
        after = run(advised)
        found.append(Applied(set_up, forecast.limit, change, before.batch_s / after.batch_s - 1))
    return found


def changed(set_up: SetUp, change: Change, statistics: RunStatistics) -> SetUp | None:
    """Apply a change as its sentence says; None if no shorter copy makes publishes that fast,
    because most of their time is the engines' swap between two steps."""
    match change.lever:
        case "max_staleness":
            return replace(set_up, max_staleness=round(change.value))
        case "engines":
            return replace(set_up, engines=round(change.value))
        case "training":
            return replace(set_up, train_s=set_up.train_s / change.value)
        case "publishing":
            publish_s = statistics.trainer_activity_s["publish"] / statistics.publishes
            saved_s = publish_s * (1 - 1 / change.value)
            if saved_s > set_up.publish_s:
                return None
            return replace(set_up, publish_s=set_up.publish_s - saved_s)


KEPT_MIN = 0.95
"""Least share of changes that must gain within their stated error."""


class Table:
    """Counts of the changes within their stated error, by lever."""

    def __init__(self) -> None:
        self._kept: Counter[str] = Counter()
        self._total: Counter[str] = Counter()

    def add(self, applied: Applied) -> None:
        """Count one change."""
        kind = applied.change.lever if applied.change.gain else f"fewer {applied.change.lever}"
        for name in (kind, "all"):
            self._total[name] += 1
            self._kept[name] += applied.is_within_error

    def lines(self) -> Iterator[str]:
        """Yield a line per lever."""
        for name, count in sorted(self._total.items()):
            yield f"{name:<22}{self._kept[name]:>5} of {count:<5}{self._kept[name] / count:.1%}"

    @property
    def is_kept(self) -> bool:
        """Whether enough changes gained what was stated."""
        return self._kept["all"] >= KEPT_MIN * self._total["all"]


def main() -> None:
    """Apply the advice of N set-ups; exit with status 1 if too much of it is wrong."""
    table = Table()
    count, first_seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    seeds = range(first_seed, first_seed + count)
    for outcome in sweep(seeds, applied_advice, workers=core_count()):
        for applied in outcome:
            table.add(applied)
            sys.stdout.write(f"{applied.set_up.seed:>4} {applied}\n")
    sys.stdout.writelines(f"{line}\n" for line in table.lines())
    sys.exit(not table.is_kept)


if __name__ == "__main__":
    main()
