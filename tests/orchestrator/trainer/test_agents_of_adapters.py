"""Episodes that sample several trained adapters, each trained by its own trainer."""

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest

import tidegate
from tests.orchestrator.trainer.runs import audited
from tests.orchestrator.trainer.test_adapters_served import CONFIG, random_adapter
from tidegate.errors import ConfigError
from tidegate.orchestrator.trainer.adapters import AdapterTrainer

pytestmark = pytest.mark.wire


async def debate(episode: tidegate.Episode, task: int) -> dict[str, float]:
    """The solver answers, the critic replies, the solver answers again."""
    critic = episode.agent("critic")
    episode.append([7, 8, 9 + task % 5])
    answer = await episode.generate(max_tokens=6, stop_token_ids=())
    critic.append([4, *answer.token_ids])
    reply = await critic.generate(max_tokens=5, stop_token_ids=())
    episode.append([5, *reply.token_ids])
    await episode.generate(max_tokens=4, stop_token_ids=())
    return {"solver": float(task % 2), "critic": 0.25}


async def start(rollouts: tidegate.Rollouts, model: Path) -> tuple[AdapterTrainer, AdapterTrainer]:
    solver = await rollouts.train_adapter("solver", groups_per_batch=2, max_staleness=1)
    critic = await rollouts.train_adapter("critic", groups_per_batch=3, max_staleness=2)
    for each in (solver, critic):
        await each.publish(random_adapter(model, 9), config=CONFIG)
    return solver, critic


async def take(trainer: AdapterTrainer, model: Path, *, batches: int) -> list[Any]:
    taken: list[Any] = []
    while len(taken) < batches:
        batch = await trainer.next_batch()
        assert batch is not None
        taken.append(batch)
        await trainer.publish(random_adapter(model, len(taken)), config=CONFIG)
    return taken


async def test_each_agents_trainer_gets_its_own_rollouts_and_rewards(
    model: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    async with tidegate.serve(
        model=model, engines=2, group_size=2, run_directory=directory
    ) as rollouts:
        solver, critic = await start(rollouts, model)
        await solver.offer(itertools.count(), episode=debate, agents=["critic"])
        of_solver, of_critic = await asyncio.gather(
            take(solver, model, batches=6), take(critic, model, batches=4)
        )
        for batch in of_critic:
            assert len(batch.rewards) == 3 * 2
            assert set(batch.rewards.tolist()) == {0.25}
            assert int(batch.staleness.max()) <= 2
            assert (batch.weight_versions >= 0).sum() == 5 * 6  # its own tokens only
        for batch in of_solver:
            assert set(batch.rewards.tolist()) <= {0.0, 1.0}
            assert int(batch.staleness.max()) <= 1
            assert (batch.weight_versions >= 0).sum() == 10 * 4
        for each in (solver, critic):
            assert each.statistics().ledger.error == 0
    for name in ("solver", "critic"):
        await asyncio.to_thread(audited, directory / "adapters" / name)


async def test_an_agents_trainer_that_lags_holds_new_tasks_back_and_loses_nothing(
    model: Path,
) -> None:
    async with tidegate.serve(model=model, engines=1, group_size=2) as rollouts:
        solver, critic = await start(rollouts, model)
        await solver.offer(itertools.count(), episode=debate, agents=["critic"])
        for _ in range(4):  # the critic's bound allows 9 groups, none of which it trains on
            assert await solver.next_batch() is not None
            await solver.publish(random_adapter(model, 1), config=CONFIG)
        waiting = asyncio.ensure_future(solver.next_batch())
        await asyncio.sleep(0.5)
        assert not waiting.done()
        outstanding = critic.statistics()
        assert outstanding.running_groups + outstanding.buffered_groups == 9
        await take(critic, model, batches=1)
        assert (await waiting) is not None


async def test_a_failed_episode_discards_the_rollouts_of_all_its_agents(model: Path) -> None:
    async def fail_sometimes(episode: tidegate.Episode, task: int) -> Any:
        rewards = await debate(episode, task)
        if task % 4 == 1 and episode.index == 0:
            raise ValueError("the grader is broken")
        return rewards

    async with tidegate.serve(model=model, engines=1, group_size=3) as rollouts:
        solver, critic = await start(rollouts, model)
        await solver.offer(range(12), episode=fail_sometimes, agents=["critic"])

        async def all_of(trainer: AdapterTrainer) -> int:
            rows = 0
            while (batch := await trainer.next_batch()) is not None:
                rows += len(batch.rewards)
                await trainer.publish(random_adapter(model, 1), config=CONFIG)
            return rows

        rows = await asyncio.gather(all_of(solver), all_of(critic))
        assert tuple(rows) == (33, 33)
        for each in (solver, critic):
            figures = each.statistics()
            assert sum(figures.discarded_rollouts.values()) == 3
            assert figures.ledger.error == 0
            assert figures.ledger.in_flight == figures.ledger.buffered == 0


async def test_a_resumed_run_continues_episodes_of_several_agents(
    model: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "model": model,
        "engines": 1,
        "group_size": 2,
        "run_directory": tmp_path / "run",
        "journal": True,
    }
    async with tidegate.serve(**settings, step_time_min_s=0.005) as rollouts:
        solver, critic = await start(rollouts, model)
        await solver.offer(itertools.count(), episode=debate, agents=["critic"])
        await asyncio.gather(take(solver, model, batches=2), take(critic, model, batches=1))
        for each in (solver, critic):
            await each.ack(each.state_dict())
    async with tidegate.serve(**settings, resume=True) as rollouts:
        solver = await rollouts.train_adapter("solver", groups_per_batch=2, max_staleness=1)
        critic = await rollouts.train_adapter("critic", groups_per_batch=3, max_staleness=2)
        for each in (solver, critic):
            await each.publish(random_adapter(model, 1), config=CONFIG)
        await solver.offer(itertools.count(), episode=debate, agents=["critic"])
        await asyncio.gather(take(solver, model, batches=4), take(critic, model, batches=3))
        for each in (solver, critic):
            assert each.statistics().ledger.error == 0


async def test_wrong_agents_are_refused_by_name(model: Path) -> None:
    async with tidegate.serve(model=model, engines=1, group_size=2) as rollouts:
        solver, critic = await start(rollouts, model)
        with pytest.raises(ConfigError, match=r"train_adapter\('judge'\) first"):
            await solver.offer(range(2), episode=debate, agents=["judge"])
        with pytest.raises(ConfigError, match="other adapters that the run trains"):
            await solver.offer(range(2), episode=debate, agents=["solver"])
        await solver.offer(itertools.count(), episode=debate, agents=["critic"])
        assert await solver.next_batch() is not None
        with pytest.raises(ConfigError, match="episodes of adapter 'solver' sample adapter"):
            await critic.close()
        await solver.close()
        await critic.close()
