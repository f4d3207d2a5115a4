"""Tests that the ranks of a trainer share one run, whichever rank dies, and whichever rows they
skip."""

import asyncio
from pathlib import Path

import pytest

import tidegate
from tests.orchestrator.trainer.remote.remote_runs import (
    SMALL,
    Trainer,
    joined,
    keys_of,
    listening,
    trained,
)
from tests.remote_trainer import weights
from tidegate.errors import ConfigError, TrainerLost
from tidegate.orchestrator.batches.batches import BatchShard

pytestmark = pytest.mark.wire


async def test_ranks_get_parts_of_the_same_batch_and_publish_once_for_all(
    run: tidegate.Rollouts, model: Path, address: str
) -> None:
    before = run.version
    async with listening(run, address, tasks=range(6)) as listen:
        ranks = [
            asyncio.to_thread(trained, run, address, model, rank=rank, world_size=2)
            for rank in (1, 0)
        ]
        (one, same), (zero, versions) = await asyncio.gather(*ranks)
        await listen
    assert versions == same == [before + 1, before + 2, before + 3]
    assert [b.number for b in zero] == [b.number for b in one] != []
    for mine, theirs in zip(zero, one, strict=True):
        assert len(mine.rewards) == len(theirs.rewards) == 2
        assert not {*mine.group_ids.tolist()} & {*theirs.group_ids.tolist()}
        total = mine.sampled_tokens + theirs.sampled_tokens
        assert mine.shard is not None
        assert theirs.shard is not None
        assert sorted(mine.shard.rows + theirs.shard.rows) == [0, 1, 2, 3]
        assert mine.shard == BatchShard(0, 2, 4, total, mine.shard.rows)
        assert theirs.shard == BatchShard(1, 2, 4, total, theirs.shard.rows)


async def test_each_rank_reports_which_rows_of_its_part_it_discarded(
    run: tidegate.Rollouts, model: Path, address: str
) -> None:
    async with listening(run, address, tasks=range(2)) as listen:
        async with (
            tidegate.connect(
                address, curve_key_directory=keys_of(run), rank=1, world_size=2
            ) as one,
            tidegate.connect(address, curve_key_directory=keys_of(run), world_size=2) as zero,
        ):
            theirs, mine = await asyncio.gather(anext(one.batches()), anext(zero.batches()))
            await one.discard(theirs, [0], reason="too_long_here")
            await zero.discard(mine, [1], reason="too_long_there")
            with pytest.raises(ConfigError, match=r"has 2 rows here, got indices \[2\]"):
                await zero.discard(mine, [2])
            await asyncio.gather(zero.publish(weights(model, 1)), one.publish())
        await listen
    discarded = run.statistics().ledger.discarded
    assert discarded["too_long_here"] == int(theirs.loss_mask[0].sum())
    assert discarded["too_long_there"] == int(mine.loss_mask[1].sum())


async def test_ranks_that_never_publish_but_the_first_are_waited_for_all_the_same(
    run: tidegate.Rollouts, model: Path, address: str
) -> None:
    def only_read() -> list[int]:
        with joined(run, address, rank=1, world_size=2) as rollouts:
            return [batch.number for batch in rollouts.batches()]

    async with listening(run, address, tasks=range(4)) as listen:
        reading = asyncio.create_task(asyncio.to_thread(only_read))
        batches, _ = await asyncio.to_thread(trained, run, address, model, rank=0, world_size=2)
        await listen
    assert await reading == [batch.number for batch in batches]


async def test_ranks_that_prefetch_name_the_batches_of_a_version_and_keep_the_bound(
    model: Path, address: str
) -> None:
    def prefetch(rank: int) -> list[tuple[int, int]]:
        """Train one batch while the next is held; return the batches with their versions."""
        done = list[tuple[int, int]]()
        with tidegate.connect_sync(address, rank=rank, world_size=2) as rollouts:
            batches = rollouts.batches()
            ahead = [next(batches)]
            while ahead:
                if len(ahead) < 2 and (batch := next(batches, None)) is not None:
                    ahead.append(batch)
                batch = ahead.pop(0)
                state = None if rank else weights(model, batch.number)
                done.append((batch.number, rollouts.publish(state, batches=[batch])))
        return done

    async with tidegate.serve(model=model, **SMALL | {"max_staleness": 2}) as run:
        async with listening(run, address, tasks=range(12)) as listen:
            zero, one = await asyncio.gather(
                *(asyncio.to_thread(prefetch, rank) for rank in (0, 1))
            )
            await listen
        assert zero == one == [(n, n) for n in range(1, 7)]
        assert run.statistics().max_staleness_seen <= 2
        assert run.statistics().held_batches == ()


async def test_a_rank_that_dies_is_named_and_its_next_process_gets_its_part_again(
    run: tidegate.Rollouts, model: Path, address: str
) -> None:
    async with listening(run, address, tasks=range(4)) as listen:
        died = asyncio.create_task(
            Trainer(
                address,
                model,
                die_at=run.batches_received + 1,
                connect={
                    "rank": 1,
                    "world_size": 2,
                    "curve_key_directory": str(keys_of(run)),
                },
            ).run()
        )
        async with tidegate.connect(
            address, curve_key_directory=keys_of(run), world_size=2
        ) as zero:
            batches = zero.batches()
            first = await anext(batches)
            lost = (await died)[-1]
            with pytest.raises(TrainerLost, match=r"waiting for all ranks .* rank 1 of 2 has sent"):
                await zero.publish(weights(model, 1))
            again = asyncio.create_task(
                asyncio.to_thread(trained, run, address, model, rank=1, world_size=2)
            )
            await zero.publish(weights(model, 1))
            async for _ in batches:
                await zero.publish(weights(model, 2))
        theirs, _ = await again
        await listen
    assert theirs[0].number == first.number
    assert theirs[0].rollout_ids.tolist() == lost["rollouts"]
