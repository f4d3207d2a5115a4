"""Encoding of a batch for a trainer in another process: a header message and column frames.

`service.py` encodes, the remote handle decodes. The decoded batch equals the run's bit for bit;
padding is not sent but added again.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tidegate.errors import BadFrame
from tidegate.orchestrator.batches.batch_rows import (
    BatchMetadata,
    batch_columns,
    batch_from_columns,
)
from tidegate.orchestrator.batches.batches import Batch, BatchShard
from tidegate.orchestrator.trainer.remote.columns import tensors_of, to_frames
from tidegate.transport.trainer_messages import BatchReply


def batch_to_wire(
    batch: Batch,
    journal: Mapping[str, Any] | None = None,
    *,
    version: int = 0,
    is_ahead: bool = False,
) -> tuple[BatchReply, list[bytes]]:
    """Return the header message and its frames. Tasks that MessagePack can't hold become None.

    ``version`` is the newest published weight version. ``is_ahead``: whether the rank requested the
    batch ahead.
    """
    columns, frames = to_frames(
        (name, column.numpy()) for name, column in batch_columns(batch).items()
    )
    index_by_id: dict[int, int] = {}
    tasks: list[object] = []
    for task in batch.tasks:
        if id(task) not in index_by_id:
            index_by_id[id(task)] = len(tasks)
            tasks.append(task if _is_plain(task) else None)
    shard = batch.shard or BatchShard(0, 1, len(batch.rewards), batch.sampled_tokens)
    message = BatchReply(
        batch_number=batch.number,
        trainer_version=batch.trainer_version,
        columns=columns,
        tasks=tasks,
        task_of_row=[index_by_id[id(task)] for task in batch.tasks],
        rank=shard.rank,
        world_size=shard.world_size,
        rows_total=shard.rows_total,
        sampled_tokens_total=shard.sampled_tokens_total,
        journal=None if journal is None else dict(journal),
        rows=list(shard.rows),
        version=version,
        is_ahead=is_ahead,
    )
    return message, frames


def batch_from_wire(message: BatchReply, frames: Sequence[bytes]) -> Batch:
    """Return the batch that was sent.

    Raises:
        BadFrame: header and frames don't fit each other.
    """
    if any(index >= len(message.tasks) for index in message.task_of_row):
        raise BadFrame(
            f"a batch's rows refer to task {max(message.task_of_row)} of {len(message.tasks)}"
        )
    totals = message.rows_total, message.sampled_tokens_total, tuple(message.rows)
    metadata = BatchMetadata(
        number=message.batch_number,
        trainer_version=message.trainer_version,
        tasks=tuple(message.tasks[index] for index in message.task_of_row),
        shard=BatchShard(message.rank, message.world_size, *totals)
        if message.world_size > 1
        else None,
    )
    return batch_from_columns(metadata, tensors_of(message.columns, frames))


def _is_plain(task: object) -> bool:
    try:
        msgspec.msgpack.encode(task)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return False
    return True
