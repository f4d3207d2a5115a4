"""Policies as users give them, in whole runs in virtual time."""

import itertools
from typing import Any

import pytest

import tidegate
from tidegate.errors import ConfigError
from tidegate.testing import ScriptedEngine, ServeInTests

Engine = type[ScriptedEngine]


async def one_turn(episode: tidegate.Episode, task: int) -> float:
    episode.append([5, 6, task % 100])
    await episode.generate(max_tokens=8 + 5 * (task % 7))
    return float(episode.index % 2)


async def train(rollouts: Any, batches: int) -> list[tidegate.Batch]:
    trained = []
    async for batch in rollouts.batches(itertools.count(), episode=one_turn):
        trained.append(batch)
        await rollouts.publish({})
        if len(trained) == batches:
            return trained
    raise AssertionError("the tasks never end")


async def test_what_the_trainer_measures_moves_eta(
    tidegate_serve: ServeInTests, tidegate_engine: Engine
) -> None:
    policy = tidegate.AdaptiveStaleness(
        groups_per_batch=2, max_staleness=2, highest=4, mismatch_kl_max=0.01
    )
    async with tidegate_serve(engines=[tidegate_engine()], policy=policy, group_size=2) as rollouts:
        batches = rollouts.batches(itertools.count(), episode=one_turn)
        for mismatch_kl, outstanding in ((1.0, 4), (1.0, 2), (0.0, 4), (0.0, 6)):
            await anext(batches)
            await rollouts.observe(mismatch_kl=mismatch_kl)
            await rollouts.publish({})
            seen = rollouts.statistics()
            groups = seen.running_groups + seen.buffered_groups + seen.training_groups
            assert groups + seen.capacity_groups == outstanding
        with pytest.raises(ConfigError, match=r"mismatch_kl is in nats per token, >= 0; got -1"):
            await rollouts.observe(mismatch_kl=-1.0)


@pytest.mark.parametrize(
    "policy",
    [
        tidegate.Synchronous(groups_per_batch=2),
        tidegate.OneStepOffPolicy(groups_per_batch=2),
        tidegate.OverSampling(groups_per_batch=2, factor=2.0),
        tidegate.TailPacking(groups_per_batch=2, factor=1.5),
        tidegate.Unbounded(groups_per_batch=2, outstanding_groups_limit=6),
        tidegate.BoundedStaleness(max_staleness=2, groups_per_batch=2, order=tidegate.Window(3)),
        tidegate.BoundedStaleness(
            max_staleness=1, groups_per_batch=2, order="completion", on_deadline="split"
        ),
    ],
    ids=lambda policy: type(policy).__name__,
)
async def test_a_run_by_any_policy_trains_batch_after_batch_within_its_bound(
    tidegate_serve: ServeInTests, tidegate_engine: Engine, policy: tidegate.StalenessPolicy
) -> None:
    engines = [tidegate_engine(step_s=0.01), tidegate_engine(step_s=0.03)]
    async with tidegate_serve(engines=engines, policy=policy, group_size=4) as rollouts:
        batches = await train(rollouts, 8)
        statistics = rollouts.statistics()
    assert len(batches) == 8
    assert statistics.staleness_bound == policy.guaranteed_bound
    if policy.guaranteed_bound is not None:
        assert max(int(batch.staleness.max()) for batch in batches) <= policy.guaranteed_bound


async def test_a_policy_and_what_it_would_contradict_are_not_both_taken(
    tidegate_serve: ServeInTests, tidegate_engine: Engine
) -> None:
    policy = tidegate.Synchronous(groups_per_batch=2)
    with pytest.raises(ConfigError, match="leave out max_staleness"):
        async with tidegate_serve(engines=[tidegate_engine()], policy=policy, max_staleness=3):
            pass
    with pytest.raises(ConfigError, match="with group_size=1 are all"):
        async with tidegate_serve(
            engines=[tidegate_engine()], group_size=1, group_filter=tidegate.DynamicSampling()
        ):
            pass
