"""Adapters that a run trains beside one another, on real engines."""

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tidegate
from tests.orchestrator.trainer.runs import audited
from tests.orchestrator.trainer.test_adapters_served import CONFIG, random_adapter
from tidegate.errors import AuditError, ConfigError, ResumeMismatch
from tidegate.observability.audit.audit import audit_run
from tidegate.observability.records.trajectories import read_trajectories
from tidegate.orchestrator.trainer.adapters import AdapterTrainer

pytestmark = pytest.mark.wire


async def play(episode: tidegate.Episode, task: int) -> float:
    episode.append([7, 8, 9 + task % 5])
    turn = await episode.generate(max_tokens=6)
    return float(turn.token_ids[0] % 2)


def tasks() -> Iterator[int]:
    return itertools.count()


async def started(
    rollouts: tidegate.Rollouts, model: Path, name: str, **staleness: Any
) -> AdapterTrainer:
    """Train an adapter, and publish its first version."""
    trainer = await rollouts.train_adapter(name, **staleness)
    await trainer.publish(random_adapter(model, 9), config=CONFIG)
    return trainer


async def train(trainer: AdapterTrainer, model: Path, *, batches: int) -> list[Any]:
    """Train on some batches, publish after each, and return them."""
    seen = []
    async for batch in trainer.batches(tasks(), episode=play):
        seen.append(batch)
        if len(seen) == batches:
            return seen
        await trainer.publish(random_adapter(model, len(seen)), config=CONFIG)
    raise AssertionError("the tasks are endless")


async def test_each_adapter_has_batches_versions_and_a_staleness_bound_of_its_own(
    model: Path,
) -> None:
    async with tidegate.serve(model=model, engines=2, group_size=2) as rollouts:
        solver = await started(rollouts, model, "solver", max_staleness=1, groups_per_batch=2)
        critic = await started(
            rollouts, model, "critic", max_staleness=0, groups_per_batch=3, group_size=4
        )
        trained = await asyncio.gather(
            train(solver, model, batches=6), train(critic, model, batches=3)
        )
        for batches, bound, rows in zip(trained, (1, 0), (4, 12), strict=True):
            for number, batch in enumerate(batches, 1):
                assert batch.number == number
                assert batch.trainer_version == number
                assert len(batch.rewards) == rows
                assert int(batch.staleness.max()) <= bound
                sampled = batch.weight_versions[batch.weight_versions >= 0]
                assert 1 <= int(sampled.min()) <= int(sampled.max()) <= number
        assert solver.version == 6
        assert critic.version == 3
        for each in (solver, critic):
            figures = each.statistics()
            assert figures.ledger.error == 0
            assert figures.ledger.trained > 0
        assert rollouts.statistics().ledger.generated == 0
        assert rollouts.version == 0


async def test_fifty_adapters_are_trained_at_once_by_an_engine_that_holds_sixteen(
    model: Path,
) -> None:
    async with tidegate.serve(
        model=model, engines=1, group_size=2, groups_per_batch=1, max_staleness=1, adapters_max=16
    ) as rollouts:
        trainers = [await rollouts.train_adapter(f"adapter-{number}") for number in range(50)]
        first = random_adapter(model, 9)
        await asyncio.gather(*(each.publish(first, config=CONFIG) for each in trainers))
        trained = await asyncio.gather(*(train(each, model, batches=2) for each in trainers))
        for each, batches in zip(trainers, trained, strict=True):
            assert [batch.trainer_version for batch in batches] == [1, 2]
            assert max(int(batch.staleness.max()) for batch in batches) <= 1
            assert each.statistics().ledger.error == 0


async def test_an_adapters_pause_leaves_the_other_adapters_turns_alone(model: Path) -> None:
    async with tidegate.serve(model=model, engines=1, group_size=2) as rollouts:
        solver = await started(rollouts, model, "solver", groups_per_batch=1)
        critic = await started(rollouts, model, "critic", groups_per_batch=1)
        await solver.pause()
        await solver.offer(tasks(), episode=play)
        waiting = asyncio.ensure_future(solver.next_batch())
        await train(critic, model, batches=4)
        assert not waiting.done()
        await solver.resume()
        assert (await waiting) is not None


async def test_a_rollback_of_an_adapter_discards_its_groups_of_the_bad_version_only(
    model: Path,
) -> None:
    async with tidegate.serve(model=model, engines=1, group_size=2) as rollouts:
        solver = await started(rollouts, model, "solver", groups_per_batch=1, max_staleness=3)
        critic = await started(rollouts, model, "critic", groups_per_batch=1, max_staleness=3)
        for each in (solver, critic):
            await train(each, model, batches=2)
        assert await solver.rollback(random_adapter(model, 9), config=CONFIG) == 3
        assert solver.statistics().discarded_rollouts.get("rolled_back", 0) > 0
        assert "rolled_back" not in critic.statistics().discarded_rollouts
        batch = await solver.next_batch()
        assert batch is not None
        assert 2 not in batch.weight_versions


async def test_engines_that_leave_and_join_change_no_adapters_batches_or_tags(
    model: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    async with tidegate.serve(
        model=model, engines=2, group_size=2, run_directory=directory, step_time_min_s=0.002
    ) as rollouts:
        began = asyncio.Event()
        solver = await started(
            rollouts,
            model,
            "solver",
            groups_per_batch=2,
            max_staleness=1,
            on_batch=lambda metrics: began.set(),
        )
        critic = await started(rollouts, model, "critic", groups_per_batch=2, max_staleness=2)

        async def replace_an_engine() -> None:
            await began.wait()
            await rollouts.drain(rollouts.engines[0].name, within_s=0.05)
            await rollouts.scale(engines=2)

        trained = await asyncio.gather(
            train(solver, model, batches=8), train(critic, model, batches=8), replace_an_engine()
        )
        for batches, bound in zip(trained[:2], (1, 2), strict=True):
            assert all(int(batch.staleness.max()) <= bound for batch in batches)
        for each in (solver, critic):
            assert each.statistics().ledger.error == 0
            assert not each.statistics().discarded_rollouts
    for name in ("solver", "critic"):
        await asyncio.to_thread(audited, directory / "adapters" / name)


async def test_wrong_uses_say_what_to_do(model: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    async with tidegate.serve(
        model=model, engines=1, group_size=2, run_directory=directory
    ) as rollouts:
        solver = await rollouts.train_adapter("solver", groups_per_batch=1)
        with pytest.raises(ConfigError, match=r"publish\(\) its first tensors"):
            await solver.next_batch()
        with pytest.raises(ConfigError, match="is trained already"):
            await rollouts.train_adapter("solver")
        with pytest.raises(ConfigError, match="got temperature"):
            await rollouts.train_adapter("critic", temperature=0.5)
        await solver.publish(random_adapter(model, 9), config=CONFIG)
        await train(solver, model, batches=1)
        await solver.close()
        final = solver.statistics()
        again = await rollouts.train_adapter("solver", groups_per_batch=2)
        assert not again.is_resumed
    assert solver.statistics() == final
    assert again.statistics().batches == 0
    assert (directory / "adapters" / "solver" / "part-1" / "run.json").exists()


async def test_a_resumed_run_continues_each_adapter_from_its_own_checkpoint(
    model: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "model": model,
        "engines": 1,
        "group_size": 2,
        "run_directory": tmp_path,
        "journal": True,
    }
    async with tidegate.serve(**settings) as rollouts:
        solver = await rollouts.train_adapter("solver", groups_per_batch=1, max_staleness=1)
        critic = await rollouts.train_adapter("critic", groups_per_batch=2, max_staleness=1)
        for each, batches in ((solver, 3), (critic, 2)):
            await each.publish(random_adapter(model, 9), config=CONFIG)
            first = await train(each, model, batches=batches)
            if each is critic:
                await critic.publish(random_adapter(model, 8), config=CONFIG)
            await each.ack(each.state_dict())
            again = await each.next_batch()  # not in the checkpoint: handed over again
            assert again is not None
            if each is solver:
                lost = again.token_ids
    async with tidegate.serve(**settings, resume=True) as rollouts:
        with pytest.raises(ResumeMismatch, match="was trained with policy="):
            await rollouts.train_adapter("critic", groups_per_batch=3, max_staleness=1)
        solver = await rollouts.train_adapter("solver", groups_per_batch=1, max_staleness=1)
        critic = await rollouts.train_adapter("critic", groups_per_batch=2, max_staleness=1)
        assert solver.is_resumed
        assert (solver.batches_received, critic.batches_received) == (3, 2)
        for each, new in ((solver, 1), (critic, 0)):  # the critic's weights are only restored
            version = each.version + new
            assert await each.publish(random_adapter(model, 8), config=CONFIG) == version
            await each.offer(tasks(), episode=play)
        again = await solver.next_batch()
        assert again is not None
        assert (again.token_ids == lost).all()
        assert (await critic.next_batch()) is not None
        assert solver.statistics().ledger.error == 0
    assert first[-1].number == 2


async def test_an_adapters_records_are_those_of_a_run_and_its_audit_agrees(
    model: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    async with tidegate.serve(
        model=model, engines=1, group_size=2, run_directory=directory, pause_mode="keep"
    ) as rollouts:
        solver = await rollouts.train_adapter("solver", groups_per_batch=2, max_staleness=2)
        await solver.publish(random_adapter(model, 9), config=CONFIG)
        await train(solver, model, batches=4)
    of_adapter = directory / "adapters" / "solver"
    report = await asyncio.to_thread(audited, of_adapter)
    assert report.tokens > 50
    assert report.versions >= 3
    rows = list(read_trajectories(of_adapter))
    assert {row.state for row in rows} >= {"trained"}
    assert not list(read_trajectories(directory))
    with pytest.raises(AuditError, match=r"trained adapters are in .*adapters: solver"):
        await asyncio.to_thread(audit_run, directory)
