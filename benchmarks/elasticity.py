"""Engine-hours of an elastic fleet beside those of fixed fleets as fast, in virtual time.

``python -m benchmarks.elasticity`` prints them. The real orchestrator runs over simulated engines,
of which some are lost (spot machines; another one starts at once), with a trainer whose steps take
four times as long at night as by day. Each fixed fleet from one engine to the most, and the elastic
one, train the same batches of the same tasks. For each seed:

    hours: virtual hours until the last batch
    engine_hours: hours of all engines, from the start of each to its end, start-up included
    cost_at_equal_time: engine-hours of the elastic fleet; the peer is a fixed fleet as fast: the
        engine-hours of the next faster and the next slower one, interpolated by their hours

Then the median, lowest and highest ratio. All is deterministic for a seed.
"""

import asyncio
import itertools
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import tidegate
from benchmarks.table import Row, compared, make_parser, show
from tidegate.policies.elasticity import Elastic
from tidegate.simulation.engine.engine import SimulatedEngines
from tidegate.simulation.engine.scripted import ScriptedHost
from tidegate.simulation.run.serve import ServeInTests
from tidegate.simulation.run.virtual_time import VirtualTime
from tidegate.testing import ScriptedEngine

ENGINES_MAX = 6
DAY_S = 7_200.0
"""Virtual seconds of a day and a night: each second stands for twelve."""
TRAIN_S = (10.0, 40.0)
"""Seconds of a train step at noon and at midnight; between them they follow a cosine."""
LOST_EVERY_S = DAY_S
"""Mean seconds until an engine is taken away."""
START_S = 30.0
MEAN_TOKENS, SIGMA, TOKENS_MAX = 20.0, 0.6, 48
ELASTIC = Elastic(
    engines_max=ENGINES_MAX, trainer_hour_cost=8.0, start_s=START_S, cool_down_s=150.0
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Virtual hours of a run, its engines' hours together, and the decisions of its policy."""

    hours: float
    engine_hours: float
    decisions: int


def run(engines: int, elastic: Elastic | None, *, seed: int, batches: int) -> Outcome:
    """Train so many batches with a fixed fleet, or with an elastic one that begins with it."""
    virtual_time = VirtualTime(limit_s=1e9)
    try:
        return virtual_time.run(_run(engines, elastic, seed, batches, virtual_time))
    finally:
        virtual_time.close()


async def _run(
    engines: int, elastic: Elastic | None, seed: int, batches: int, virtual_time: VirtualTime
) -> Outcome:
    async def episode(episode: tidegate.Episode, task: int) -> float:
        chance = random.Random(f"{seed}/{task}/{episode.index}")
        length = MEAN_TOKENS * math.exp(chance.gauss(-(SIGMA**2) / 2, SIGMA))
        episode.append([1, 2, 3])
        await episode.generate(max_tokens=max(1, min(TOKENS_MAX, round(length))))
        return float(episode.index % 2)

    serve, decisions = ServeInTests(virtual_time), set[str]()
    plan = [
        ScriptedEngine(step_s=0.5, running_turn_s=0.02, max_running_turns=4, restart_s=START_S)
        for _ in range(engines)
    ]
    async with serve(
        engines=plan,
        elasticity=elastic,
        says="a" * 4 * TOKENS_MAX,
        max_staleness=2,
        group_size=4,
        groups_per_batch=4,
        kv_policy="keep",
        stuck_after_s=1e9,
        episode_timeout_s=1e9,
    ) as rollouts:
        launched = serve.runs[-1].engines
        assert launched is not None
        cloud = Cloud(launched, seed)
        running = asyncio.ensure_future(cloud.run())
        received = rollouts.batches(itertools.count(), episode=episode)
        for _ in range(batches):
            await anext(received)
            night = (1 - math.cos(2 * math.pi * virtual_time.now_s / DAY_S)) / 2
            await asyncio.sleep(TRAIN_S[0] + night * (TRAIN_S[1] - TRAIN_S[0]))
            await rollouts.publish({})
            decisions.add(rollouts.statistics().scaling)
        hours = virtual_time.now_s / 3600
        running.cancel()
        assert rollouts.statistics().ledger.error == 0
    return Outcome(hours, cloud.engine_s / 3600, len(decisions - {""}))


class Cloud:
    """Counts what engines cost, and takes some away."""

    def __init__(self, launched: SimulatedEngines[ScriptedHost], seed: int) -> None:
        self._launched = launched
        self._chance = random.Random(f"cloud {seed}")
        self.engine_s = 0.0

    async def run(self) -> None:
        """Look each second, until cancelled."""
        while True:
            await asyncio.sleep(1.0)
            for name in self._launched.names:
                self.engine_s += 1.0
                if self._chance.random() < 1.0 / LOST_EVERY_S:
                    self._launched.hosts[name].crash_now()


def cost_of(hours: float, fixed: dict[int, Outcome]) -> float | None:
    """Return the engine-hours of a fixed fleet that takes so long; None if none is as fast."""
    by_hours = sorted(fixed.values(), key=lambda outcome: outcome.hours)
    for faster, slower in itertools.pairwise(by_hours):
        if faster.hours <= hours <= slower.hours:
            share = (hours - faster.hours) / (slower.hours - faster.hours)
            return faster.engine_hours + share * (slower.engine_hours - faster.engine_hours)
    return None


def rows(seeds: Sequence[int], batches: int) -> Iterator[Row]:
    """Yield the rows of each seed, and those over all."""
    ratios: list[float] = []
    for seed in seeds:
        fixed = {
            engines: run(engines, None, seed=seed, batches=batches)
            for engines in range(1, ENGINES_MAX + 1)
        }
        for engines, outcome in fixed.items():
            yield Row(f"{seed}/fixed_{engines}/hours", outcome.hours, "h")
            yield Row(f"{seed}/fixed_{engines}/engine_hours", outcome.engine_hours, "h")
        elastic = run(ENGINES_MAX // 2, ELASTIC, seed=seed, batches=batches)
        yield Row(f"{seed}/elastic/hours", elastic.hours, "h")
        yield Row(f"{seed}/elastic/decisions", elastic.decisions, "")
        peer = cost_of(elastic.hours, fixed)
        row = compared(f"{seed}/cost_at_equal_time", "h", elastic.engine_hours, peer)
        yield row
        if row.ratio is not None:
            ratios.append(row.ratio)
    if ratios:
        for name, of in (("median", statistics.median), ("lowest", min), ("highest", max)):
            yield Row(f"cost_ratio/{name}", of(ratios), "of 1")


def main() -> None:
    """Print the rows."""
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--batches", type=int, default=500, help="of each run")
    options = parser.parse_args()
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    show(rows(seeds, options.batches), as_json=options.json)


if __name__ == "__main__":
    main()
