"""Ranks of a sharded trainer each publish their own shards, whole or as patches."""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tidegate
from tests.forked_programs import children
from tests.models import make_model_directory
from tests.orchestrator.trainer.remote.remote_runs import listening
from tests.sharded_trainer import DENSE, SPARSE, whole_state
from tidegate.errors import ConfigError, TrainerLost, WeightsRefused
from tidegate.transport.trainer_messages import PartsPlan

pytestmark = pytest.mark.wire

TOKENS = [[7, 8, 9, 10 + n, 11, 12] for n in range(8)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model_directory(tmp_path / "model", tied=False, dtype="bfloat16")


@contextlib.asynccontextmanager
async def serving(model: Path, **options: Any) -> AsyncIterator[tidegate.Rollouts]:
    async with tidegate.serve(
        model=model,
        group_size=2,
        groups_per_batch=2,
        weight_deltas="elements",
        weight_checksums=True,
        deterministic=True,  # scores are compared to the bit, in whatever steps they are computed
        **options,
    ) as rollouts:
        yield rollouts


async def ranks(address: str, model: Path, meeting: Path, **options: Any) -> list[dict[str, Any]]:
    """Run both ranks as processes; return what rank 0 printed."""
    arguments = [
        (address, str(model), str(rank), str(meeting), json.dumps(options)) for rank in range(2)
    ]
    processes = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.sharded_trainer", *each, stdout=asyncio.subprocess.PIPE
        )
        for each in arguments
    ]
    try:
        async with asyncio.timeout(120):
            said = [(await process.communicate())[0] for process in processes]
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert [process.returncode for process in processes] == [0, 0]
    return [json.loads(line) for line in said[0].splitlines()]


async def scores(run: tidegate.Rollouts) -> list[list[float]]:
    """Return log-probs of eight sequences, which both engines compute some of."""
    return [score.logprobs.tolist() for score in await run.score(TOKENS)]


def patches_over_whole(run: tidegate.Rollouts) -> int:
    """Return how many sets of patches a late engine gets after the whole set."""
    scheduler = run._running.scheduler
    assert scheduler is not None
    base = scheduler.control.state.weights._base
    assert base is not None
    return len(base.content.patches)


@pytest.mark.parametrize("shares_memory", [True, False])
async def test_ranks_send_patches_of_their_own_shards_also_to_an_engine_that_comes_late(
    tmp_path: Path, model: Path, address: str, shares_memory: bool
) -> None:
    shares = [SPARSE] * 4
    async with serving(model, engines=2) as run:
        async with listening(run, address, tasks=range(8)) as listen:
            training = asyncio.create_task(
                ranks(
                    address, model, tmp_path / "meeting", shares=shares, shares_memory=shares_memory
                )
            )
            while run.version < 2:
                await asyncio.sleep(0.05)
                assert not training.done(), await training
            children(recursive=True)[0].kill()
            said = await training
            await listen
        assert [line["version"] for line in said] == [1, 2, 3, 4]
        assert (said[-1]["wrote"] > 0) is shares_memory
        assert patches_over_whole(run) == 3
        of_shards = await scores(run)
        await run.publish(whole_state(model, shares))
        assert await scores(run) == of_shards
        await run.publish(whole_state(model, shares[:-1]))
        assert await scores(run) != of_shards


@pytest.mark.parametrize(
    ("architecture", "sizes"),
    [
        ("qwen3", {"tensor": 2}),
        ("qwen3", {"pipeline": 2}),
        ("qwen3_moe", {"data": 2, "expert": 2}),
    ],
    ids=["tensor", "pipeline", "expert"],
)
async def test_what_ranks_of_megatrons_layout_send_is_the_checkpoint(
    tmp_path: Path, address: str, architecture: str, sizes: dict[str, int]
) -> None:
    shares = [SPARSE] * 2
    model = make_model_directory(tmp_path / "model", architecture, tied=False, dtype="bfloat16")
    async with serving(model, engines=1) as run:
        async with listening(run, address, tasks=range(4)) as listen:
            said = await ranks(
                address, model, tmp_path / "none", shares=shares, shares_memory=True, megatron=sizes
            )
            await listen
        assert [line["version"] for line in said] == [1, 2]
        assert patches_over_whole(run) == 1
        of_parts = await scores(run)
        await run.publish(whole_state(model, shares))
        assert await scores(run) == of_parts
        await run.publish(whole_state(model, shares[:-1]))
        assert await scores(run) != of_parts


async def test_where_patches_of_a_rank_are_too_large_all_ranks_send_whole_shards(
    tmp_path: Path, model: Path, address: str
) -> None:
    shares = [SPARSE, DENSE, SPARSE]
    # Patches of the small test model are below the size that is always allowed.
    large = make_model_directory(
        tmp_path / "large", tied=False, dtype="bfloat16", intermediate_size=4096
    )
    async with serving(large, engines=1) as run:
        async with listening(run, address, tasks=range(6)) as listen:
            said = await ranks(
                address, large, tmp_path / "meeting", shares=shares, shares_memory=True
            )
            await listen
        assert [line["version"] for line in said] == [1, 2, 3]
        assert patches_over_whole(run) == 0
        of_shards = await scores(run)
        await run.publish(whole_state(large, shares))
        assert await scores(run) == of_shards


@contextlib.asynccontextmanager
async def two_ranks(
    run: tidegate.Rollouts, address: str
) -> AsyncIterator[tuple[tidegate.RemoteRollouts, tidegate.RemoteRollouts]]:
    async with (
        listening(run, address, tasks=range(20)),
        tidegate.connect(address, rank=0, world_size=2) as zero,
        tidegate.connect(address, rank=1, world_size=2) as one,
    ):
        await asyncio.gather(zero.next_batch(), one.next_batch())
        yield zero, one


async def published(
    zero: tidegate.RemoteRollouts,
    one: tidegate.RemoteRollouts,
    state: dict[str, torch.Tensor],
) -> list[int]:
    """Publish from two ranks, of which the second holds no part, and take the next batch."""
    versions = await asyncio.gather(
        zero.publish(state, sharded=True), one.publish({}, sharded=True)
    )
    await asyncio.gather(zero.next_batch(), one.next_batch())
    return list(versions)


async def test_a_publish_fails_if_a_rank_is_replaced_meanwhile_and_the_next_one_is_whole(
    model: Path, address: str
) -> None:
    async with serving(model, engines=1) as run, listening(run, address, tasks=range(20)):
        async with tidegate.connect(address, rank=0, world_size=2) as zero:
            lost = tidegate.connect(address, rank=1, world_size=2)
            await lost.__aenter__()
            await asyncio.gather(zero.next_batch(), lost.next_batch())
            for version, patches in ((1, 0), (2, 1)):
                state = whole_state(model, [SPARSE] * version)
                assert await published(zero, lost, state) == [version] * 2
                assert patches_over_whole(run) == patches
            publishing = asyncio.create_task(
                zero.publish(whole_state(model, [SPARSE] * 3), sharded=True)
            )
            plan = await asyncio.wrap_future(lost._link.request(lost._prepare()))
            assert isinstance(plan.reply, PartsPlan)
            assert plan.reply.are_patches
            await lost.__aexit__(RuntimeError, RuntimeError("killed"), None)
            async with tidegate.connect(address, rank=1, world_size=2) as one:
                with pytest.raises(
                    TrainerLost, match=r"rank 1 of 2 .* publish again on every rank"
                ):
                    await publishing
                await one.next_batch()  # the batch that the lost process had
                state = whole_state(model, [SPARSE] * 3)
                assert await published(zero, one, state) == [3, 3]
                assert patches_over_whole(run) == 0
        of_parts = await scores(run)
        await run.publish(state)
        assert await scores(run) == of_parts


async def test_a_publish_of_a_rank_alone_fails_once_the_others_continue_without_it(
    model: Path, address: str
) -> None:
    async with serving(model, engines=1) as run, two_ranks(run, address) as (zero, one):
        publishing = asyncio.create_task(zero.publish(whole_state(model, []), sharded=True))
        asking = asyncio.create_task(one.next_batch())
        with pytest.raises(ConfigError, match="rank 1 has continued from batch 1 without this"):
            await publishing
        with pytest.raises(ConfigError, match="rank 1 got state_dict=None"):
            await one.publish(sharded=True)
        asking.cancel()


async def test_tensors_that_ranks_hold_in_part_only_are_refused_and_the_next_publish_is_good(
    model: Path, address: str
) -> None:
    state = whole_state(model, [])
    async with serving(model, engines=1) as run, two_ranks(run, address) as (zero, one):
        few = {name: tensor for name, tensor in state.items() if "norm" in name}
        both = [zero.publish(few, sharded=True), one.publish({}, sharded=True)]
        for failure in await asyncio.gather(*both, return_exceptions=True):
            assert isinstance(failure, WeightsRefused)
            assert "tensors are missing" in str(failure)
        assert await published(zero, one, state) == [1, 1]
        both = [
            zero.publish(few, partial=True, sharded=True),
            one.publish({}, partial=True, sharded=True),
        ]
        assert await asyncio.gather(*both) == [2, 2]
        await asyncio.gather(zero.next_batch(), one.next_batch())
        both = [zero.rollback(state, sharded=True), one.rollback({}, sharded=True)]
        assert await asyncio.gather(*both) == [3, 3]
        assert patches_over_whole(run) == 0
