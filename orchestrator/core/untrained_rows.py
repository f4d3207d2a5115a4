"""Rows that the trainer had but did not train on: moves their tokens to a discard account.

:class:`Core` calls it for :class:`RowsDiscarded`, and when a batch is undone. A row is a rollout or
a branch of one; a rollout counts as trained while one of its rows does. Changes
:class:`GroupTracker` and :class:`TrainedCounts`.
"""

from collections.abc import Iterable

from tidegate.orchestrator.core.group import TaskKey
from tidegate.orchestrator.core.groups import GroupTracker
from tidegate.orchestrator.core.handed_batches import HandedBatch
from tidegate.orchestrator.core.rollout import Rollout
from tidegate.orchestrator.core.trained import TrainedCounts


def discard_rows(
    batch: HandedBatch,
    indices: Iterable[int],
    reason: str,
    groups: GroupTracker,
    trained: TrainedCounts,
) -> None:
    """Count these of a batch's rows (indices in :attr:`HandedBatch.rows`) as not trained; rows
    discarded before stay so."""
    rows = batch.rows
    chosen = [rows[index] for index in sorted({*indices})]
    chosen = [row for row in chosen if row.discard_reason is None]
    roots = _roots(chosen)
    trained.count(roots, batch.trainer_version, -1)
    for row in chosen:
        row.discard_reason = reason
        groups.ledger.discard_trained(row.sampled_tokens - row.masked_tokens, reason)
    trained.count([root for root in roots if _is_trained(root)], batch.trainer_version, 1)
    keys = _keys(batch)
    for root in roots:
        if (why := root.discard_reason) is not None and not _is_trained(root):
            groups.discarded_rollouts[why] += 1
            groups.discards.count_untrained(root, why, keys[root.group_id])


def undo_batch(batch: HandedBatch, groups: GroupTracker, trained: TrainedCounts) -> None:
    """Undo a whole batch, its discarded rows included, so that it can be handed over again."""
    roots = [row for row in batch.rows if row.branch_of is None]
    trained.count([root for root in roots if _is_trained(root)], batch.trainer_version, -1)
    keys = _keys(batch)
    for root in roots:
        if (why := root.discard_reason) is not None and not _is_trained(root):
            groups.discarded_rollouts[why] -= 1
            groups.discards.uncount_untrained(root, why, keys[root.group_id])
    for row in batch.rows:
        if row.discard_reason is not None:
            groups.ledger.discard_trained(
                row.masked_tokens - row.sampled_tokens, row.discard_reason
            )
            row.discard_reason = None
    groups.return_to_buffer(batch.groups)


def _keys(batch: HandedBatch) -> dict[int, TaskKey | None]:
    return {group.group_id: group.key for group in batch.groups}


def _roots(rows: Iterable[Rollout]) -> list[Rollout]:
    return list({root.rollout_id: root for root in (row.root for row in rows)}.values())


def _is_trained(root: Rollout) -> bool:
    return any(row.discard_reason is None for row in root.rows)
