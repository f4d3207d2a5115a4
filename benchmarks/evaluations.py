"""Training's share of throughput while an evaluation runs, by where the evaluation runs.

``python -m benchmarks.evaluations`` simulates engines and trainer in virtual time. The real
scheduler decides; an engine takes the same time for each step and has a limited number of slots, so
the share shows slots and waits alone, not the cost of a larger batch. Each row compares the trained
rollouts per second of two runs with the same lengths: with and without endless evaluations.
"""

import argparse
import asyncio
import contextlib
import random
import statistics
import sys
from dataclasses import dataclass
from typing import Any

import tidegate
from tidegate.simulation.engine.scripted import ScriptedEngine, TurnRequest
from tidegate.simulation.run.serve import ServeInTests
from tidegate.simulation.run.virtual_time import VirtualTime

ENGINES, SLOTS, STEP_S = 4, 8, 0.01
BATCHES, WARM_UP_BATCHES = 20, 4
EVALUATION_TASKS = 32
TOKENS_MAX = 200


@dataclass(frozen=True, slots=True)
class Case:
    """Where evaluations run."""

    name: str
    kept: int
    """Engines kept for evaluations."""
    is_pinned: bool


CASES = (
    Case("an engine of its own", kept=1, is_pinned=True),
    Case("one of the training engines, pinned", kept=0, is_pinned=True),
    Case("all engines, before training's turns", kept=0, is_pinned=False),
)


def rollouts_per_s(case: Case, seed: int, *, evaluates: bool) -> float:
    """Return the trained rollouts per virtual second after warm-up."""
    chance = random.Random(seed)
    lengths = [min(TOKENS_MAX, round(chance.lognormvariate(3.5, 0.7))) for _ in range(4096)]

    async def solve(episode: tidegate.Episode, task: int) -> float:
        episode.append("a sum: ")
        place = 31 * task + 7 * episode.index
        await episode.generate(max_tokens=lengths[place % len(lengths)])
        return float(episode.index % 2)

    async def evaluate(run: Any) -> None:
        tasks = range(EVALUATION_TASKS)
        while True:
            with contextlib.suppress(tidegate.errors.VersionUnavailable):
                version = run.version if case.is_pinned else None
                await run.evaluate(tasks, episode=solve, name=None, version=version)
            await asyncio.sleep(STEP_S)  # the version may just be replaced

    async def train(serve: ServeInTests) -> float:
        engines = [ScriptedEngine(step_s=STEP_S, max_running_turns=SLOTS) for _ in range(ENGINES)]
        async with serve(
            engines=engines,
            says=_endless,
            group_size=4,
            groups_per_batch=4,
            max_staleness=2,
            evaluation_engines=case.kept,
        ) as run:
            loop, started_s = asyncio.get_running_loop(), 0.0
            evaluating = asyncio.create_task(evaluate(run)) if evaluates else None
            async for batch in run.batches(iter(range(10**6)), episode=solve):
                if batch.number == WARM_UP_BATCHES:
                    started_s = loop.time()
                if batch.number == WARM_UP_BATCHES + BATCHES:
                    break
                await run.publish({})
            seconds = loop.time() - started_s
            if evaluating is not None:
                evaluating.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await evaluating
            return 16 * BATCHES / seconds

    time = VirtualTime(limit_s=10_000)
    try:
        return time.run(train(ServeInTests(time)))
    finally:
        time.close()


def _endless(request: TurnRequest) -> str:
    return "7" * TOKENS_MAX


def main() -> None:
    """Print a row per case: median share, with the least and the greatest."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    seeds = range(parser.parse_args().seeds)
    for case in CASES:
        shares = [
            rollouts_per_s(case, seed, evaluates=True) / rollouts_per_s(case, seed, evaluates=False)
            for seed in seeds
        ]
        sys.stdout.write(
            f"{case.name}: {statistics.median(shares):.2f} "
            f"({min(shares):.2f} to {max(shares):.2f})\n"
        )


if __name__ == "__main__":
    main()
