"""Conversions of a :class:`Batch`: the rows of one data-parallel rank, and columns for the wire.

Letters in shapes are those of :mod:`~tidegate.orchestrator.batches.batches`.
``policies/sharding.py`` decides which rank gets which rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from tidegate.errors import BadFrame
from tidegate.orchestrator.batches.batches import Batch, BatchShard, PackedBatch, padded_rows
from tidegate.orchestrator.batches.media_inputs import GRIDS, PIXELS, TOKEN_TYPES, select_images
from tidegate.policies.sharding import split_rows
from tidegate.transport.attachments import BATCH_COLUMNS, RAGGED_COLUMNS

TOKEN_COLUMNS = {
    "token_ids": torch.int32,
    "logprobs": torch.float32,
    "weight_versions": torch.int32,
    "loss_mask": torch.bool,
}
"""[N]: one value per token, with the dtype on the wire. Token ids are below 2**31."""

ROW_COLUMNS = {
    "lengths": torch.int32,
    "rewards": torch.float32,
    "advantages": torch.float32,
    "group_ids": torch.int64,
    "rollout_ids": torch.int64,
    "staleness": torch.int64,
    "uses": torch.int32,
}
"""[R]: one value per row, with the dtype on the wire."""

USES = "uses"
"""[R] int32; present only if a row is for another use than the first."""

TURN_REWARDS = "turn_rewards"
"""[N] float32; present only if a turn was rewarded."""

MEDIA_COLUMNS = (PIXELS, GRIDS)
"""One value per patch or image."""

OPTIONAL_COLUMNS = {USES, TURN_REWARDS, *BATCH_COLUMNS}

DTYPES = {**TOKEN_COLUMNS, **ROW_COLUMNS, TURN_REWARDS: torch.float32}


@dataclass(frozen=True, slots=True)
class BatchMetadata:
    """Fields of a batch that are not columns."""

    number: int
    trainer_version: int
    tasks: tuple[object, ...]
    shard: BatchShard | None = None


def shards(batch: Batch, world_size: int) -> list[Batch]:
    """Split a batch into one part per rank; groups stay whole if that gives equal counts."""
    lengths = batch.packed.cu_seqlens.diff().tolist()
    parts = split_rows(batch.group_ids.tolist(), lengths, ranks=world_size)
    totals = len(lengths), batch.sampled_tokens
    return [
        replace(select_rows(batch, part), shard=BatchShard(rank, world_size, *totals, tuple(part)))
        for rank, part in enumerate(parts)
    ]


def select_rows(batch: Batch, rows: Sequence[int]) -> Batch:
    """Return some rows of a batch, in the order given, padded to the longest of them."""
    columns = batch_columns(batch)
    chosen = torch.tensor(list(rows), dtype=torch.int64)
    bounds = batch.packed.cu_seqlens.tolist()
    token_indices = [torch.arange(bounds[row], bounds[row + 1]) for row in rows]
    tokens = torch.cat(token_indices) if token_indices else torch.empty(0, dtype=torch.int64)
    picked = {
        name: column[chosen if name in ROW_COLUMNS else tokens]
        for name, column in columns.items()
        if name not in RAGGED_COLUMNS and name not in MEDIA_COLUMNS
    }
    if PIXELS in columns:
        picked |= select_images(columns, batch.packed.row_ids, rows)
    for name, counts in RAGGED_COLUMNS.items():
        if name in columns:
            picked[name] = _ragged(columns[name], columns[counts], tokens)
    tasks = tuple(batch.tasks[row] for row in rows) if batch.tasks else ()
    return batch_from_columns(
        BatchMetadata(batch.number, batch.trainer_version, tasks, batch.shard), picked
    )


def _ragged(values: torch.Tensor, counts: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return the values of the ``chosen`` entries, of which entry n has ``counts[n]``."""
    sizes = counts[chosen].long()
    starts = (counts.cumsum(0) - counts)[chosen]
    before = sizes.cumsum(0) - sizes
    within = torch.arange(int(sizes.sum())) - torch.repeat_interleave(before, sizes)
    return values[torch.repeat_interleave(starts, sizes) + within]


def batch_columns(batch: Batch) -> dict[str, torch.Tensor]:
    """Return a batch's columns without padding, in the dtypes of the wire."""
    packed = batch.packed
    columns = {
        "token_ids": packed.token_ids,
        "logprobs": packed.logprobs,
        "weight_versions": packed.weight_versions,
        "loss_mask": packed.loss_mask,
        "lengths": packed.cu_seqlens.diff(),
        "rewards": batch.rewards,
        "advantages": batch.group_advantages,
        "group_ids": batch.group_ids,
        "rollout_ids": batch.rollout_ids,
        "staleness": batch.staleness,
    }
    if batch.turn_rewards is not None:
        columns[TURN_REWARDS] = batch.turn_rewards[batch.attention_mask]
    if (batch.uses > 1).any():
        columns[USES] = batch.uses
    sent = {name: column.to(DTYPES[name]) for name, column in columns.items()}
    media = dict(batch.media)
    if media:
        media[TOKEN_TYPES] = media[TOKEN_TYPES][batch.attention_mask]
    return {**sent, **packed.attachments, **media}


def batch_from_columns(metadata: BatchMetadata, columns: Mapping[str, torch.Tensor]) -> Batch:
    """Return the batch that :func:`batch_columns` split into columns.

    Raises:
        BadFrame: the columns don't fit each other.
    """
    _check(columns)
    lengths = columns["lengths"].to(torch.int64)
    cu_seqlens = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    packed = PackedBatch(
        token_ids=columns["token_ids"].to(torch.int64),
        cu_seqlens=cu_seqlens.to(torch.int32),
        loss_mask=columns["loss_mask"],
        logprobs=columns["logprobs"],
        weight_versions=columns["weight_versions"],
        attachments={name: columns[name] for name in BATCH_COLUMNS if name in columns},
    )
    fields = padded_rows(packed, lengths.numpy())
    turn_rewards = None
    if TURN_REWARDS in columns:
        turn_rewards = torch.zeros(fields["attention_mask"].shape)
        turn_rewards[fields["attention_mask"]] = columns[TURN_REWARDS]
    uses = columns.get(USES, torch.ones(len(lengths), dtype=torch.int64))
    media = {}
    if PIXELS in columns:
        types = torch.zeros(fields["attention_mask"].shape, dtype=torch.int32)
        types[fields["attention_mask"]] = columns[TOKEN_TYPES]
        media = {TOKEN_TYPES: types, PIXELS: columns[PIXELS], GRIDS: columns[GRIDS]}
    return Batch(
        **fields,
        rewards=columns["rewards"],
        group_advantages=columns["advantages"],
        group_ids=columns["group_ids"],
        staleness=columns["staleness"],
        trainer_version=metadata.trainer_version,
        tasks=metadata.tasks,
        rollout_ids=columns["rollout_ids"],
        uses=uses.to(torch.int64),
        turn_rewards=turn_rewards,
        media=media,
        number=metadata.number,
        shard=metadata.shard,
    )


def _check(columns: Mapping[str, torch.Tensor]) -> None:
    missing = sorted(DTYPES.keys() - OPTIONAL_COLUMNS - columns.keys())
    if missing:
        raise BadFrame(
            f"a batch lacks the columns {', '.join(missing)}; run one version of Tidegate on "
            "trainer and run"
        )
    lengths = columns["lengths"]
    rows, tokens = len(lengths), int(lengths.sum())
    if rows and int(lengths.min()) < 0:
        raise BadFrame(f"a batch has a row of {int(lengths.min())} tokens; lengths must be >= 0")
    for name, counts in RAGGED_COLUMNS.items():
        if (name in columns) != (counts in columns):
            raise BadFrame(f"a batch has only one of {name} and {counts}")
    for name, column in columns.items():
        wanted = rows if name in ROW_COLUMNS else tokens
        if name in RAGGED_COLUMNS:
            wanted = int(columns[RAGGED_COLUMNS[name]].sum())
        if name in MEDIA_COLUMNS:
            wanted = len(column) if name == GRIDS else int(columns[GRIDS].prod(-1).sum())
        if len(column) != wanted:
            raise BadFrame(f"a batch's {name} has {len(column)} values, expected {wanted}")
