"""Parts of a remote run that need no socket: batches on the wire, ranks, barriers, progress."""

import asyncio
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

import tidegate
from tests.orchestrator.batches.test_batches import rollout
from tidegate.errors import BadFrame, ConfigError, ResumeMismatch, TrainerLost
from tidegate.orchestrator.batches.batch_rows import select_rows, shards
from tidegate.orchestrator.batches.batches import Batch, build_batch
from tidegate.orchestrator.core.group import Group
from tidegate.orchestrator.trainer.remote.batch_wire import batch_from_wire, batch_to_wire
from tidegate.orchestrator.trainer.remote.columns import from_frames, to_frames
from tidegate.orchestrator.trainer.remote.progress import BATCHES_KEPT_MAX, TrainerProgress
from tidegate.orchestrator.trainer.remote.ranks import (
    TAKEOVER_SILENCE_S,
    Barrier,
    RankRegistry,
    RankTaken,
    TrainerTimeouts,
)
from tidegate.transport import trainer_messages
from tidegate.transport.trainer_messages import Column


def batch_of(groups: int, number: int = 1) -> Batch:
    made = []
    for group in range(groups):
        rollouts = [
            rollout(group, index, float(index), [[group, 3], [3] * index]) for index in range(2)
        ]
        rollouts[0].turns[0].reward = 0.5
        made.append(Group(group, {"task": group}, rollouts=rollouts))
    return build_batch(made, trainer_version=4, number=number)


def assert_same(one: Any, other: Any) -> None:
    for field in dataclasses.fields(one):
        mine, theirs = getattr(one, field.name), getattr(other, field.name)
        if isinstance(mine, torch.Tensor):
            assert mine.dtype == theirs.dtype, field.name
            assert torch.equal(mine, theirs), field.name
        elif dataclasses.is_dataclass(mine):
            assert_same(mine, theirs)
        else:
            assert mine == theirs, field.name


# ---------------------------------------------------------------- batches


@pytest.mark.parametrize("groups", [0, 1, 5])
def test_a_batch_is_the_same_bit_for_bit_after_its_way(groups: int) -> None:
    batch = batch_of(groups)
    message, frames = batch_to_wire(batch)
    sent = trainer_messages.encode(trainer_messages.ReplyEnvelope(request_id=1, reply=message))
    reply = trainer_messages.decode_to_trainer(sent)
    assert isinstance(reply, trainer_messages.ReplyEnvelope)
    assert isinstance(reply.reply, trainer_messages.BatchReply)
    assert_same(batch, batch_from_wire(reply.reply, frames))


def test_all_rows_in_their_order_are_the_batch_itself_and_a_few_are_padded_anew() -> None:
    batch = batch_of(3)
    assert_same(batch, select_rows(batch, range(6)))
    short = select_rows(batch, [2, 0])
    assert short.token_ids.tolist() == batch.token_ids[[2, 0], :6].tolist()
    assert short.packed.cu_seqlens.tolist() == [0, 6, 12]
    assert short.tasks == ({"task": 1}, {"task": 0})


def test_shards_hold_each_row_once_with_its_advantage_and_know_the_whole() -> None:
    batch = batch_of(4)
    parts = shards(batch, 3)
    assert sorted(i for part in parts for i in part.rollout_ids.tolist()) == sorted(
        batch.rollout_ids.tolist()
    )
    advantage = dict(zip(batch.rollout_ids.tolist(), batch.advantages.tolist(), strict=True))
    for rank, part in enumerate(parts):
        for row, value in zip(part.rollout_ids.tolist(), part.advantages.tolist(), strict=True):
            assert value == advantage[row]
        assert part.shard is not None
        assert (part.shard.rank, part.shard.world_size, part.number) == (rank, 3, 1)
        assert (part.shard.rows_total, part.shard.sampled_tokens_total) == (8, batch.sampled_tokens)


def test_a_task_that_is_no_plain_data_arrives_as_none_and_the_others_once_each() -> None:
    tasks = [object(), "plain"]
    groups = [
        Group(i, tasks[i], rollouts=[rollout(i, k, 0.0, [[1]]) for k in (0, 1)]) for i in (0, 1)
    ]
    message, frames = batch_to_wire(build_batch(groups, trainer_version=1))
    assert message.tasks == [None, "plain"]
    assert batch_from_wire(message, frames).tasks == (None, None, "plain", "plain")


def test_arrays_that_are_not_what_their_columns_say_are_refused() -> None:
    columns, frames = to_frames([("a", np.arange(3, dtype=np.int64))])
    assert [array.tolist() for array in from_frames(columns, frames)] == [[0, 1, 2]]
    for wrong in (Column("a", "int64", 4), Column("a", "int64", 2), Column("a", "object", 3)):
        with pytest.raises(BadFrame):
            from_frames([wrong], frames)
    message, frames = batch_to_wire(batch_of(1))
    with pytest.raises(BadFrame):
        batch_from_wire(message, frames[:-1])


# ---------------------------------------------------------------- ranks


def test_a_rank_is_its_process_own_until_that_is_silent_or_leaves() -> None:
    ranks = RankRegistry()
    assert ranks.join(b"a", 0, 2, now_s=0.0)
    assert not ranks.join(b"b", 1, 2, now_s=1.0)
    assert not ranks.join(b"a", 0, 2, now_s=1.0)  # asked twice
    with pytest.raises(RankTaken, match="rank 0 of 2 is held"):
        ranks.join(b"c", 0, 2, now_s=2.0)
    with pytest.raises(RankTaken, match=r"is still connected.*world_size=1"):
        ranks.join(b"c", 0, 1, now_s=2.0)
    assert ranks.message_received(b"b", TAKEOVER_SILENCE_S) is not None
    assert not ranks.join(b"c", 0, 2, now_s=1.0 + TAKEOVER_SILENCE_S)
    assert ranks.message_received(b"a", 9.0) is None
    assert ranks.leave(b"b", is_done=False) == 1
    assert not ranks.join(b"d", 1, 2, now_s=7.0)


def test_another_world_size_is_accepted_once_all_earlier_ranks_are_gone() -> None:
    ranks = RankRegistry()
    ranks.join(b"a", 0, 2, now_s=0.0)
    ranks.join(b"b", 1, 2, now_s=0.0)
    ranks.leave(b"a", is_done=False)
    assert ranks.join(b"c", 2, 3, now_s=100.0)
    assert (ranks.world_size, ranks.peers) == (3, [b"c"])
    for rank, size in ((3, 3), (-1, 3), (0, 0), (0, 5000)):
        with pytest.raises(ConfigError, match="rank must be in"):
            ranks.join(b"x", rank, size, now_s=0.0)


def test_a_trainer_has_done_when_every_rank_of_it_has() -> None:
    ranks = RankRegistry()
    ranks.join(b"a", 0, 2, now_s=0.0)
    assert ranks.leave(b"a", is_done=True) == 0
    assert not ranks.has_left_done  # of two
    ranks.join(b"b", 1, 2, now_s=0.0)
    ranks.leave(b"b", is_done=False)
    assert not ranks.has_left_done
    ranks.join(b"b", 1, 2, now_s=0.0)
    ranks.leave(b"b", is_done=True)
    assert ranks.has_left_done


# ---------------------------------------------------------------- progress


def test_a_new_process_continues_with_the_batch_that_the_one_before_had_not_done_with() -> None:
    progress = TrainerProgress()
    progress.begin(1)
    assert progress.join(0, None) == 0
    progress.add_batch(batch_of(2, number=1), 1)
    assert progress.join(0, None) == 0  # died with batch 1 in hand
    progress.set_ready(0, 1)
    assert progress.join(0, None) == 0  # died in its publish
    progress.set_consumed(0, 1)
    assert progress.join(0, None) == 1
    progress.add_batch(batch_of(2, number=2), 2)
    progress.begin(2)  # another world size
    assert [progress.join(rank, None) for rank in (0, 1)] == [1, 1]
    progress.set_consumed(1, 2)  # asked for batch 3, while rank 0 trained on batch 2
    assert [progress.join(rank, None) for rank in (0, 1)] == [1, 1]
    for rank in (0, 1):
        progress.set_consumed(rank, 2)
    progress.begin(1)
    assert progress.join(0, None) == 2


def test_ranks_wait_for_those_that_have_neither_done_nor_come_to_publish() -> None:
    progress = TrainerProgress()
    progress.begin(3)
    for rank in range(3):
        progress.join(rank, None)
    progress.add_batch(batch_of(3, number=1), 1)
    progress.set_ready(0, 1)
    progress.set_consumed(2, 1)
    progress.requested[2] = 2
    assert (progress.behind(1), progress.without_request(2)) == ([1], [0, 1])
    progress.set_ready(1, 1)
    assert progress.behind(1) == []
    progress.leave(1)
    assert progress.behind(1) == [1]


def test_batches_are_kept_until_acknowledged_a_few_of_them() -> None:
    progress = TrainerProgress()
    progress.begin(1)
    for number in range(1, BATCHES_KEPT_MAX + 3):
        progress.add_batch(batch_of(1, number=number), number)
    assert progress.shard(3, 0).number == 3
    with pytest.raises(ResumeMismatch, match=f"batch 2 .* keeps 3 to {BATCHES_KEPT_MAX + 2}"):
        progress.shard(2, 0)
    progress.acknowledge(3)
    with pytest.raises(ResumeMismatch, match="batch 3 was requested again"):
        progress.shard(3, 0)


def test_batches_that_no_version_was_made_from_are_kept_however_many_they_are() -> None:
    progress = TrainerProgress()
    progress.begin(1)
    for number in range(1, BATCHES_KEPT_MAX + 4):
        progress.add_batch(batch_of(1, number=number), 2)
    assert progress.shard(2, 0).number == 2
    with pytest.raises(ResumeMismatch, match=f"batch 1 .* keeps 2 to {BATCHES_KEPT_MAX + 3}"):
        progress.shard(1, 0)


@pytest.mark.parametrize(("rank", "world_size"), [(1, 1), (-1, 2), (0, 0)])
def test_a_rank_that_cant_be_is_refused_before_any_run_is_waited_for(
    rank: int, world_size: int
) -> None:
    unconnected = tidegate.connect_sync("ipc:///nobody/there", rank=rank, world_size=world_size)
    with pytest.raises(ConfigError, match=f"rank={rank}, world_size={world_size}"):
        unconnected.__enter__()


async def test_a_rank_is_waited_for_as_long_as_it_may_come_and_named_then() -> None:
    ranks = RankRegistry()
    now_s = asyncio.get_running_loop().time()
    for rank in range(2):
        ranks.join(bytes([65 + rank]), rank, 3, now_s)
    barrier = Barrier(ranks, TrainerTimeouts(trainer_s=0.02, rank_s=0.01))
    with pytest.raises(TrainerLost, match="rank 2 of 3 has not connected") as lost:
        await barrier.wait_until(lambda: False, lambda: [2], doing="waiting")
    assert lost.value.ranks == [2]
    with pytest.raises(TrainerLost, match="rank 0, rank 1 of 3 has sent nothing"):
        await barrier.wait_until(lambda: False, lambda: [0, 1], doing="waiting")
    ranks.leave(b"B", is_done=True)
    with pytest.raises(TrainerLost, match="rank 1 of 3 was done and has left"):
        await barrier.wait_until(lambda: False, lambda: [1], doing="waiting")
    await barrier.wait_until(lambda: True, lambda: [0], doing="waiting")
