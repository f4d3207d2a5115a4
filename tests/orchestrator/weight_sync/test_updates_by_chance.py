"""Random publishes, pauses and faults: all engines get the newest weights in the end.

The simulated engines record the weights that they really compute with, and fail the run for torn
ones, or for two sets under one number.
"""

import asyncio
import contextlib
import itertools
import random
from typing import Any

import pytest

import tidegate
from tidegate.errors import TidegateError
from tidegate.simulation.run.serve import SimulatedRollouts
from tidegate.testing import ScriptedEngine, ServeInTests

SETTINGS: dict[str, Any] = {"group_size": 2, "groups_per_batch": 2, "max_staleness": 2}


async def one_turn(episode: tidegate.Episode, task: int) -> float:
    episode.append([5, 6, task % 100])
    await episode.generate(max_tokens=60)
    return 1.0


class Chaos:
    """A trainer that publishes and pauses at the same time, and engines that fail."""

    def __init__(self, rollouts: SimulatedRollouts, engines: list[ScriptedEngine], seed: int):
        self.rollouts = rollouts
        self.engines = engines
        self.chance = random.Random(seed)
        self.numbers: list[int] = []
        """Versions of the publishes that returned."""

    async def publishes(self) -> None:
        """Publish repeatedly; each call may be cancelled at any time."""
        for _ in range(15):
            await asyncio.sleep(self.chance.choice((0.0, 0.01, 0.1, 0.5)))
            wait: Any = self.chance.choice(("live", "staged", "none"))
            timeout_s = self.chance.choice((None, None, 0.01, 0.2))
            with contextlib.suppress(TidegateError, TimeoutError):
                async with asyncio.timeout(timeout_s):
                    held = self.rollouts.statistics().held_batches
                    version = await self.rollouts.publish({}, batches=held, wait=wait)
                    self.numbers.append(version)

    async def pauses(self) -> None:
        """Pause and resume repeatedly."""
        for _ in range(8):
            await asyncio.sleep(self.chance.choice((0.05, 0.3, 1.0)))
            mode: Any = self.chance.choice(("abort", "keep", "wait"))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.chance.choice((None, 0.02))):
                    await self.rollouts.pause(mode)
            await asyncio.sleep(self.chance.choice((0.0, 0.2)))
            await self.rollouts.resume()

    async def faults(self) -> None:
        """Crash, hang or disconnect engines."""
        for _ in range(6):
            await asyncio.sleep(self.chance.uniform(0.1, 1.0))
            engine = self.chance.choice(self.engines)
            match self.chance.randrange(3):
                case 0:
                    engine.crash()
                case 1:
                    engine.hang(self.chance.choice((0.1, 3.0)))
                case 2:
                    engine.cut(self.chance.choice((0.1, 3.0)))

    async def train(self) -> None:
        """Take batches, and check that their staleness is within the bound."""
        batches = self.rollouts.batches(itertools.count(), episode=one_turn)
        while True:
            with contextlib.suppress(TidegateError):
                batch = await anext(batches)
                assert batch.staleness.max() <= 2
                continue
            batches = self.rollouts.batches(itertools.count(), episode=one_turn)
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("seed", range(12))
async def test_whatever_happens_the_newest_weights_are_everywhere_in_the_end(
    tidegate_serve: ServeInTests, tidegate_engine: type[ScriptedEngine], seed: int
) -> None:
    chance = random.Random(f"settings {seed}")
    engines = [
        tidegate_engine(
            staging_s=chance.choice((0.01, 0.3)),
            step_s=chance.choice((0.005, 0.02)),
            refuses_publishes=chance.choice((0, 0, 1)),
        )
        for _ in range(chance.randint(1, 4))
    ]
    async with tidegate_serve(
        engines=engines,
        engines_per_update_wave=chance.choice((None, 1, 2)),
        pause_mode=chance.choice(("abort", "keep", "wait")),
        engine_timeout_s=2.0,
        weight_update_timeout_s=4.0,
        heartbeat_interval_s=0.25,
        **SETTINGS,
    ) as rollouts:
        chaos = Chaos(rollouts, engines, seed)
        training = asyncio.create_task(chaos.train())
        async with asyncio.TaskGroup() as group:
            for story in (chaos.publishes(), chaos.publishes(), chaos.pauses(), chaos.faults()):
                group.create_task(story)
        training.cancel()
        await asyncio.wait([training])
        assert training.cancelled()
        await asyncio.sleep(10.0)  # all have come back
        with contextlib.suppress(TidegateError):
            await rollouts.publish({}, batches=[])
        newest = await rollouts.publish({}, batches=[])
        assert [engine.weight_version for engine in engines] == [newest] * len(engines)
        assert len(set(chaos.numbers)) == len(chaos.numbers)
        assert newest > max(chaos.numbers, default=0)
        assert (await rollouts.evaluate(range(4), episode=one_turn)).failures == 0
        assert rollouts.statistics().ledger.error == 0
