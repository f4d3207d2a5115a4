"""A trainer in another process, for real: its batches, its weights, its death and its return."""

import asyncio
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tidegate
from tests.orchestrator.trainer.remote.remote_runs import (
    SMALL,
    Trainer,
    joined,
    keys_of,
    listening,
    named_turn,
    one_turn,
    refused,
)
from tests.remote_trainer import weights
from tidegate.errors import (
    ConfigError,
    PublishUnclear,
    ResumeMismatch,
    RunClosed,
    RunLost,
    TrainerLost,
    VersionUnavailable,
)
from tidegate.observability.audit.audit import audit_run

pytestmark = pytest.mark.wire

# ---------------------------------------------------------------- processes


async def test_what_a_killed_trainer_had_in_hand_is_given_to_the_next_and_all_is_audited(
    model: Path, tmp_path: Path, address: str
) -> None:
    async with (
        tidegate.serve(model=model, **SMALL, run_directory=tmp_path / "run") as rollouts,
        listening(rollouts, address, tasks=range(8)) as listen,
    ):
        first = await Trainer(address, model, die_at=2).run()
        second = await Trainer(address, model).run()
        await listen
    numbers = [[line["number"] for line in said if "number" in line] for said in (first, second)]
    assert numbers == [[1, 2], [2, 3, 4]]
    held = [line for line in (*first, *second) if line.get("number") == 2]
    assert held[0] == held[1]
    tasks = {line["number"]: line["tasks"][::2] for line in (*first, *second) if "number" in line}
    assert [*itertools.chain(*tasks.values())] == [*range(8)]
    statistics = rollouts.statistics()
    assert second[-1] == {"trained": statistics.ledger.trained}
    assert (statistics.batches, statistics.trainer_version, statistics.ledger.error) == (4, 4, 0)
    report = audit_run(tmp_path / "run")
    assert report.agrees, report.lines()
    assert report.tokens == statistics.ledger.trained > 0


async def test_a_remote_trainer_that_reads_advantages_of_0_is_found_and_one_that_does_not_is_not(
    model: Path, address: str
) -> None:
    for reads_advantages in (True, False):
        async with (
            tidegate.serve(model=model, **{**SMALL, "group_size": 1}) as run,
            listening(run, address, tasks=range(8), episode=by_task) as listen,
        ):
            async with tidegate.connect(address) as rollouts:
                async for batch in rollouts.batches():
                    signal = batch.advantages if reads_advantages else batch.rewards
                    assert signal.any() == (not reads_advantages)
                    await rollouts.publish(weights(model, batch.number))
            await listen
        found = [(stuck.kind, "group_size=1" in stuck.where) for stuck in run.statistics().stuck]
        assert found == ([("learning", True)] if reads_advantages else [])


async def by_task(episode: tidegate.Episode, task: int) -> float:
    await one_turn(episode, task)
    return 1.0 + task


# ---------------------------------------------------------------- batches ahead


async def test_a_remote_prefetcher_that_names_its_batches_keeps_the_bound(
    model: Path, address: str
) -> None:
    settings = {**SMALL, "max_staleness": 2}
    async with (
        tidegate.serve(model=model, **settings) as run,
        listening(run, address, tasks=range(20)) as listen,
    ):
        async with tidegate.connect(address) as rollouts:
            batches, ahead, trained = rollouts.batches(), list[tidegate.Batch](), 0
            while True:
                while len(ahead) < 2 and (batch := await anext(batches, None)) is not None:
                    ahead.append(batch)
                if not ahead:
                    break
                batch = ahead.pop(0)
                trained += 1
                assert batch.trainer_version == run.version == trained - 1
                assert run.version - min(v for v in batch.weight_versions.flatten() if v >= 0) <= 2
                if trained == 2:
                    with pytest.raises(PublishUnclear, match=r"batches 2, 3.*batches=\[2\]"):
                        await rollouts.publish(weights(model, trained))
                    assert run.version == 1
                await rollouts.publish(weights(model, trained), batches=[batch])
        await listen
        assert trained == run.batches_received > 2
        assert run.statistics().max_staleness_seen <= 2
        assert run.statistics().held_batches == ()


async def test_a_prefetcher_that_dies_gets_all_again_that_no_version_was_made_from(
    model: Path, address: str
) -> None:
    async def hold_two_and_die() -> list[list[int]]:
        trainer = tidegate.connect(address)
        await trainer.__aenter__()
        batches = trainer.batches()
        first, second = await anext(batches), await anext(batches)
        await trainer.publish(weights(model, 1), batches=[first])
        third = await anext(batches)
        trainer._exit(RuntimeError())
        return [batch.rollout_ids.tolist() for batch in (second, third)]

    settings = {**SMALL, "max_staleness": 2}
    async with (
        tidegate.serve(model=model, **settings) as run,
        listening(run, address, tasks=range(10)) as listen,
    ):
        held = await hold_two_and_die()
        async with tidegate.connect(address) as rollouts:
            again, numbers = [], []
            async for batch in rollouts.batches():
                again.append(batch.rollout_ids.tolist())
                numbers.append(batch.number)
                await rollouts.publish(weights(model, batch.number))
        await listen
        assert (again[:2], numbers) == (held, [2, 3, 4, 5])
        statistics = run.statistics()
        assert statistics.max_staleness_seen <= 2
        assert statistics.held_batches == ()
        assert (statistics.batches, statistics.ledger.error) == (5, 0)


async def test_a_remote_position_names_the_batch_that_the_checkpoint_has(
    model: Path, address: str
) -> None:
    settings = {**SMALL, "max_staleness": 2}
    async with (
        tidegate.serve(model=model, **settings) as run,
        listening(run, address, tasks=range(8)) as listen,
    ):
        async with tidegate.connect(address) as rollouts:
            batches = rollouts.batches()
            first = await anext(batches)
            assert rollouts.state_dict()["batches"] == 1
            await anext(batches)
            with pytest.raises(ConfigError, match=r"batch 2, received last.*trained=batch"):
                rollouts.state_dict()
            assert rollouts.state_dict(trained=first)["batches"] == 1
            await rollouts.publish(weights(model, 1), batches=[1, 2])
            assert rollouts.state_dict()["batches"] == 2
            async for _ in batches:
                await rollouts.publish(weights(model, 2))
        await listen


# ---------------------------------------------------------------- one interface for both


async def test_a_remote_run_answers_as_one_in_this_process_does(
    run: tidegate.Rollouts, model: Path, address: str
) -> None:
    keys = keys_of(run)
    async with listening(run, address, tasks=range(2), episodes={"named": named_turn}) as listen:
        async with tidegate.connect(address, curve_key_directory=keys) as rollouts:
            (batch,) = [batch async for batch in rollouts.batches()]
            sequences = [[10, 11, 12, 13], [20, 21]]
            ours = await run.score(sequences, top_logprobs=2)
            theirs = await rollouts.score(sequences, top_logprobs=2)
            (state,) = await rollouts.embed(sequences[:1], pooling="none")
            (wanted,) = await run.embed(sequences[:1], pooling="none")
            rewards = (await rollouts.evaluate([{"first": 3}], episode="named")).rewards
            with pytest.raises(VersionUnavailable, match="v99"):
                await rollouts.evaluate([{"first": 3}], episode="named", version=99)
            same = (await run.evaluate([{"first": 3}], episode=named_turn)).rewards
            await rollouts.pause("keep")
            paused = (await rollouts.statistics()).pause_mode
            await rollouts.resume()
            before = await rollouts.publish(weights(model, 1), wait="staged")
            part = {"model.norm.weight": weights(model, 2)["model.norm.weight"]}
            after = await rollouts.publish(part, partial=True)
            statistics = await rollouts.statistics()
            with pytest.raises(ConfigError, match=r"has no episode 'unknown'.*'named'"):
                await rollouts.evaluate([1], episode="unknown")
            with pytest.raises(ConfigError, match="has its own tasks"):
                await anext(rollouts.batches([1]))
            with pytest.raises(ConfigError, match="in the process that calls serve"):
                await rollouts.train_adapter("solver", max_staleness=1)
        await listen
    assert batch.number == run.batches_received
    assert batch.tasks == (0, 0, 1, 1)
    for one, other in zip(ours, theirs, strict=True):
        assert (one.logprobs == other.logprobs).all()
        assert (one.top_ids == other.top_ids).all()
        assert (one.version, one.engine, one.start) == (other.version, other.engine, other.start)
    assert state.values.shape == wanted.values.shape
    assert (state.values == wanted.values).all()
    assert (rewards, paused, after) == (same, "keep", before + 1)
    assert statistics == run.statistics() or statistics.ledger == run.statistics().ledger


async def test_a_remote_trainer_has_engines_join_and_leave(
    run: tidegate.Rollouts, address: str
) -> None:
    def names(statistics: tidegate.RunStatistics) -> list[str]:
        return [engine.name for engine in statistics.engines]

    async with listening(run, address, tasks=range(2)) as listen:
        async with tidegate.connect(address, curve_key_directory=keys_of(run)) as rollouts:
            await rollouts.scale(engines=2)
            assert names(await rollouts.statistics()) == ["engine-0", "engine-1"]
            assert await rollouts.retire("engine-1") == 0
            assert names(await rollouts.statistics()) == ["engine-0"]
            with pytest.raises(ConfigError, match=r"'engine-1' has left \(drained; 0 turns moved"):
                await rollouts.drain("engine-1", within_s=1.0)
            assert len([batch async for batch in rollouts.batches()]) == 1
        await listen


async def test_a_trainer_brings_its_own_tasks_and_weights_in_pieces_to_a_run_on_another_host(
    run: tidegate.Rollouts, model: Path, unused_tcp_port: int
) -> None:
    def train(tasks: Iterator[dict[str, int]]) -> list[object]:
        seen: list[object] = []
        with joined(run, f"tcp://127.0.0.1:{unused_tcp_port}") as rollouts:
            assert (
                not rollouts._handle._weights.reads_shared_memory
            )  # so what follows is what it says
            for batch in rollouts.batches(tasks, episode="named"):
                seen += batch.tasks[::2]
                rollouts.publish(weights(model, batch.number))
        return seen

    tasks = [{"first": number} for number in range(80)]
    how = {
        "episode": None,
        "episodes": {"named": "tests.orchestrator.trainer.remote.remote_runs:named_turn"},
    }
    async with listening(run, f"tcp://0.0.0.0:{unused_tcp_port}", **how) as listen:
        seen = await asyncio.to_thread(train, iter(tasks))
        await listen
    assert seen == tasks
    (scores,) = await run.score([[10, 11, 12]])
    assert scores.version == run.version


async def test_the_error_of_a_trainers_own_tasks_is_raised_once_begun_tasks_are_trained(
    run: tidegate.Rollouts, model: Path, address: str
) -> None:
    def broken() -> Iterator[int]:
        yield from range(2)
        raise ZeroDivisionError("of the user's")

    numbers: list[int] = []

    def train(rollouts: tidegate.SyncRemoteRollouts) -> None:
        for batch in rollouts.batches(broken()):
            numbers.append(batch.number)
            rollouts.publish(weights(model, batch.number))

    def train_till_it_fails() -> None:
        with joined(run, address) as rollouts, pytest.raises(ZeroDivisionError):
            train(rollouts)

    async with listening(run, address) as listen:
        await asyncio.to_thread(train_till_it_fails)
        await listen
    assert len(numbers) == 1


# ---------------------------------------------------------------- checkpoints


async def test_a_trainer_that_goes_back_to_its_checkpoint_gets_what_came_after_it_again(
    run: tidegate.Rollouts, model: Path, address: str
) -> None:
    def until(count: int, resume: Any, *, acks: bool) -> tuple[list[list[int]], Any]:
        seen, state = [], resume
        rollouts = joined(run, address, resume=resume)
        try:
            with rollouts:
                for batch in rollouts.batches():
                    seen.append(batch.rollout_ids.tolist())
                    if len(seen) == 1:
                        state = rollouts.state_dict()
                        if acks:
                            rollouts.ack(state)
                    rollouts.publish(weights(model, batch.number))
                    if len(seen) == count:
                        raise InterruptedError("the trainer fails")
        except InterruptedError:
            pass
        return seen, state

    async with listening(run, address, tasks=range(8)) as listen:
        first, state = await asyncio.to_thread(until, 3, None, acks=True)
        second, _ = await asyncio.to_thread(until, 0, state, acks=False)
        with pytest.raises(ResumeMismatch, match="was requested again, but of the batches up to"):
            await asyncio.to_thread(until, 0, state | {"batches": state["batches"] - 1}, acks=False)
        with pytest.raises(ResumeMismatch, match="is of run other"):
            await asyncio.to_thread(until, 0, state | {"run_id": "other"}, acks=False)
        assert not listen.done()
    assert first[1:] == second[:2]
    assert len(second) == 3
    async for _ in run.batches(range(0), episode=one_turn):
        pass


# ---------------------------------------------------------------- what goes wrong


async def test_what_only_a_dead_trainer_had_is_aged_by_the_weights_that_the_next_one_restores(
    run: tidegate.Rollouts, model: Path, address: str
) -> None:
    def take_and_die() -> int:
        trainer = joined(run, address)
        trainer.__enter__()
        number = next(trainer.batches()).number
        trainer._handle._exit(RuntimeError())
        return number

    def restore_and_train() -> tuple[int, int, int, int]:
        with joined(run, address) as rollouts:
            version = rollouts.publish(weights(model, 0))
            batches = rollouts.batches()
            batch = next(batches)
            assert rollouts.version == version
            rollouts.publish(weights(model, 1))
            for _ in batches:
                rollouts.publish(weights(model, 1))
        oldest = min(v for v in batch.weight_versions.flatten().tolist() if v >= 0)
        return batch.number, version, batch.trainer_version, oldest

    async with listening(run, address, tasks=range(4)) as listen:
        number = await asyncio.to_thread(take_and_die)
        again, version, trained_at, oldest = await asyncio.to_thread(restore_and_train)
        await listen
    assert again == number
    assert trained_at == version
    bound = run.statistics().staleness_bound
    assert bound is not None
    assert version - oldest <= bound


async def test_a_run_that_no_trainer_comes_to_says_so(run: tidegate.Rollouts, address: str) -> None:
    with pytest.raises(TrainerLost, match=r"waiting for a trainer at ipc://.* sent nothing for"):
        await tidegate.listen(
            run, address, episode=one_turn, rank_timeout_s=3.0, trainer_timeout_s=3.0
        )


async def test_a_trainer_is_notified_when_its_run_ends_and_gives_up_a_silent_one(
    run: tidegate.Rollouts, address: str
) -> None:
    is_begun = threading.Event()

    async def never_ends(episode: tidegate.Episode, task: int) -> float:
        is_begun.set()
        await asyncio.Event().wait()
        return 0.0

    async with listening(run, address, episode=never_ends) as listen:
        rollouts = joined(run, address)
        await asyncio.to_thread(rollouts.__enter__)
        waiting = asyncio.create_task(asyncio.to_thread(rollouts.evaluate, [0]))
        assert await asyncio.to_thread(is_begun.wait, 60.0)
        listen.cancel()
        with pytest.raises(RunClosed):
            await waiting
        with pytest.raises(RunClosed):
            rollouts.statistics()
        rollouts._handle._exit(RuntimeError())
    with pytest.raises(RunLost, match=r"could not join the run at .* no run answered"):
        joined(run, address, connect_timeout_s=0.1).__enter__()


async def test_strangers_second_processes_and_impossible_ranks_are_refused_by_name(
    run: tidegate.Rollouts, address: str
) -> None:
    refusals: list[tuple[dict[str, int], type[Exception], str]] = [
        ({}, RunLost, "rank 0 of 1 is held by a process that sent a message"),
        ({"world_size": 2}, RunLost, "rank 0 of 1 is still connected"),
        ({"rank": 3, "world_size": 2}, ConfigError, "got rank=3, world_size=2"),
    ]
    async with listening(run, address), tidegate.connect(address, curve_key_directory=keys_of(run)):
        for who, kind, why in refusals:
            with pytest.raises(kind, match=why):
                await refused(run, address, **who)
        with pytest.raises(ConfigError, match="requires keys: `tidegate keys DIRECTORY"):
            await asyncio.to_thread(tidegate.connect_sync(address).__enter__)
