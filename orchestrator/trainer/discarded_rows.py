"""Rows of a batch that the trainer did not train on, for ``Rollouts.discard``.

Local and remote handles check the rows here and report them to the core as one event.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, SupportsIndex

from tidegate.errors import REASON, ConfigError
from tidegate.orchestrator.core import events as ev

if TYPE_CHECKING:
    from tidegate.orchestrator.batches.batches import Batch
    from tidegate.orchestrator.scheduler.trainer_side import TrainerSide

NOT_TRAINED = "not_trained"
"""Reason of rows that are discarded without a given reason."""


@dataclass(frozen=True, slots=True)
class DiscardedRows:
    """Rows of one batch that the trainer discards for one reason."""

    batch: int
    """Number of the batch."""
    rows: tuple[int, ...]
    """Indices in the whole batch, also if a rank's part was given."""
    reason: str
    """Account of the ledger that the rows' tokens move to."""

    async def report(self, trainer: "TrainerSide") -> None:
        """Count the rows as discarded; return once the journal has stored the event.

        Raises:
            ConfigError: the run doesn't keep this batch any more, or the batch has no such rows.
        """
        handed = trainer.core.handed
        if self.batch not in handed:
            kept = ", ".join(str(batch.number) for batch in handed.kept) or "none"
            raise ConfigError(
                f"rows of batch {self.batch} can't be discarded any more, the run still keeps "
                f"{kept}; report discarded rows before the next batch but one, and before ack()"
            )
        count = len(handed[self.batch].rows)
        if self.rows and not 0 <= min(self.rows) <= max(self.rows) < count:
            raise ConfigError(
                f"batch {self.batch} has {count} rows, got indices {list(self.rows)} to discard"
            )
        trainer.handle(ev.RowsDiscarded(self.batch, self.rows, self.reason))
        await trainer.wait_until_safe()


def discarded_rows(
    batch: "Batch | int", rows: Sequence[SupportsIndex], reason: str = NOT_TRAINED
) -> DiscardedRows:
    """Check rows to discard, and return them by their indices in the whole batch.

    ``rows`` are indices in ``batch``, which may be a rank's part. If ``batch`` is a number, they
    are indices in the whole batch.

    Raises:
        ConfigError: the reason or a row's type is not valid, or the batch has no such row.
    """
    if not REASON.fullmatch(reason):
        raise ConfigError(
            "a discard reason is up to 40 lowercase letters, digits and underscores, and begins "
            f"with a letter; got {reason!r}"
        )
    indices = tuple(map(_row_index, rows))
    if isinstance(batch, int):
        return DiscardedRows(batch, indices, reason)
    count = len(batch.rewards)
    if indices and not 0 <= min(indices) <= max(indices) < count:
        raise ConfigError(
            f"batch {batch.number} has {count} rows here, got indices {list(indices)} to discard"
        )
    if batch.shard is None:
        return DiscardedRows(batch.number, indices, reason)
    if len(batch.shard.rows) != count:
        raise ConfigError(
            f"batch {batch.number} has {count} rows here, but its shard lists "
            f"{len(batch.shard.rows)}; pass the batch as the run returned it"
        )
    return DiscardedRows(batch.number, tuple(batch.shard.rows[row] for row in indices), reason)


def _row_index(row: SupportsIndex) -> int:
    """Return a row's index. A boolean mask is refused, because True would count as row 1."""
    dtype = getattr(row, "dtype", None)
    if isinstance(row, bool) or (dtype is not None and str(dtype).endswith("bool")):
        raise ConfigError(f"rows to discard are indices from 0, not a boolean mask; got {row}")
    return operator.index(row)
