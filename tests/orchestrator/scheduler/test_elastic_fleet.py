"""A fleet that an elasticity policy decides about, in virtual time: it follows the trainer, and
replaces what is lost, without a lost token."""

import asyncio
import itertools
import logging
import math
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

import tidegate
from tidegate.errors import ConfigError
from tidegate.orchestrator.settings.config import run_settings
from tidegate.policies.elasticity import Elastic
from tidegate.simulation.run.serve import ServeInTests, SimulatedRollouts
from tidegate.testing import ScriptedEngine, VirtualTime

ELASTIC = Elastic(engines_max=4, trainer_hour_cost=8.0, start_s=5.0, cool_down_s=30.0)

FAST_S, SLOW_S = 1.0, 60.0
"""Seconds of a train step: less than one engine takes for a batch, and far more."""


def serve(
    virtual_time: VirtualTime, *, engines: int, elastic: Elastic = ELASTIC, **settings: Any
) -> tuple[SimulatedRollouts, list[ScriptedEngine]]:
    plan = [
        ScriptedEngine(step_s=0.5, running_turn_s=0.02, max_running_turns=4) for _ in range(engines)
    ]
    rollouts = ServeInTests(virtual_time)(
        engines=plan,
        elasticity=elastic,
        says="a" * 100,
        group_size=4,
        groups_per_batch=4,
        stuck_after_s=1e9,
        episode_timeout_s=1e9,
        **settings,
    )
    return rollouts, plan


async def episode(episode: tidegate.Episode, task: int) -> float:
    episode.append([1, 2, 3])
    await episode.generate(max_tokens=8 + (task + episode.index) % 9)
    return float(episode.index % 2)


async def train(
    rollouts: SimulatedRollouts,
    received: AsyncIterator[tidegate.Batch],
    train_s: float,
    batches: int,
) -> list[int]:
    """Train batches; return the number of launched engines after each."""
    counts = []
    for _ in range(batches):
        await anext(received)
        await asyncio.sleep(train_s)
        await rollouts.publish({})
        assert rollouts.simulated.engines is not None
        counts.append(len(rollouts.simulated.engines.names))
        assert rollouts.statistics().ledger.error == 0
    return counts


def scalings(caplog: pytest.LogCaptureFixture) -> list[str]:
    messages = [r.getMessage() for r in caplog.records if r.getMessage().startswith("event=scale")]
    return [message.partition(" because=")[0] for message in messages]


async def test_a_fleet_grows_for_a_fast_trainer_and_shrinks_for_a_slow_one(
    tidegate_virtual_time: VirtualTime, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tidegate")
    rollouts, _ = serve(tidegate_virtual_time, engines=1)
    async with rollouts:
        received = rollouts.batches(itertools.count(), episode=episode)
        counts = await train(rollouts, received, FAST_S, 40)
        assert counts[-1] > 1
        assert max(counts) <= ELASTIC.engines_max
        statistics = rollouts.statistics()
        assert statistics.engines_wanted == counts[-1] == len(statistics.engines)
        assert "instead of" in statistics.scaling
        tokens = sum(engine.tokens for engine in statistics.engines)
        assert all(engine.tokens > tokens / 20 for engine in statistics.engines)
        counts = await train(rollouts, received, SLOW_S, 20)
        assert counts[-1] == 1
    ledger = rollouts.statistics().ledger
    assert ledger.error == 0
    assert ledger.discarded.keys() <= {"run_ended", "cancelled"}
    first, *_, last = scalings(caplog)
    assert first == "event=scale from=1 to=2"
    assert last.endswith("to=1")
    assert len(scalings(caplog)) == len(set(scalings(caplog)))  # it does not flap


@pytest.mark.parametrize("train_s", [FAST_S, SLOW_S])
async def test_an_engine_that_is_lost_for_good_is_replaced(
    tidegate_virtual_time: VirtualTime, train_s: float
) -> None:
    rollouts, plan = serve(
        tidegate_virtual_time, engines=2, elastic=replace(ELASTIC, engines_min=2, engines_max=2)
    )
    async with rollouts:
        received = rollouts.batches(itertools.count(), episode=episode)
        await train(rollouts, received, train_s, 3)
        for engine in plan:
            engine.restart_s = math.inf
            engine.crash()
        await train(rollouts, received, train_s, 6)
        assert [e.name for e in rollouts.statistics().engines] == ["engine-2", "engine-3"]


async def test_an_engine_kept_for_evaluations_is_neither_counted_nor_retired(
    tidegate_virtual_time: VirtualTime,
) -> None:
    rollouts, _ = serve(tidegate_virtual_time, engines=4, evaluation_engines=1)
    async with rollouts:
        received = rollouts.batches(itertools.count(), episode=episode)
        await train(rollouts, received, SLOW_S, 3)
        scheduler = rollouts.simulated.scheduler
        assert scheduler is not None
        turns = scheduler.core.turns.engines
        (kept,) = (name for name, engine in turns.items() if engine.is_for_evaluation)
        counts = await train(rollouts, received, SLOW_S, 20)
        assert counts[-1] == 2
        assert rollouts.statistics().engines_wanted == 1
        assert kept in turns
        assert turns[kept].is_for_evaluation


async def test_nothing_is_decided_by_batches_of_a_changing_fleet(
    tidegate_virtual_time: VirtualTime,
) -> None:
    rollouts, plan = serve(
        tidegate_virtual_time, engines=1, elastic=replace(ELASTIC, cool_down_s=0.0)
    )
    async with rollouts:
        received = rollouts.batches(itertools.count(), episode=episode)
        for _ in range(8):
            await train(rollouts, received, FAST_S, ELASTIC.batches - 1)
            plan[0].crash()
        assert rollouts.statistics().scaling == ""
        await train(rollouts, received, FAST_S, 2 * ELASTIC.batches)
        assert rollouts.statistics().scaling.startswith("from=1 to=2")


async def test_scale_is_refused_where_a_policy_decides(tidegate_virtual_time: VirtualTime) -> None:
    rollouts, _ = serve(tidegate_virtual_time, engines=1)
    async with rollouts:
        with pytest.raises(ConfigError, match="elasticity policy decides how many"):
            await rollouts.scale(engines=3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engines": 5}, "engines=5 begins with 5 for training, .* elasticity allows 1 to 4"),
        (
            {"engines": 1, "evaluation_engines": 1, "listen_address": "ipc:///tmp/x"},
            "begins with 0",
        ),
        ({"engine_urls": ["vllm+http://h:1"]}, "engine_urls names servers, which the run does not"),
        (
            {"cluster": "ray", "elasticity": replace(ELASTIC, start=print, stop=print)},
            "cluster='ray' starts them too",
        ),
    ],
)
def test_settings_that_contradict_elasticity_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run_settings(**{"model": "simulated", "elasticity": ELASTIC, **settings})
