"""Rows of a batch that the trainer did not train on, for ``Rollouts.discard``.

Local and remote handles check the rows here and report them to the core as one event.
"""

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, SupportsIndex

from tidegate.errors import ConfigError
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from tidegate.orchestrator.batches.batches import Batch

REASON = re.compile("[a-z][a-z0-9_]{0,39}")
"""Form of a reason: it names an account of the ledger, and is a label in Prometheus."""

NOT_TRAINED = "not_trained"
"""Reason of rows that are discarded without another."""


@dataclass(frozen=True, slots=True)
class DiscardedRows:
    """Some rows of a batch, by their positions in the whole batch."""

    batch: int
    """Number of the batch."""
    rows: tuple[int, ...]
    reason: str

    async def report(self, scheduler: Scheduler) -> None:
        """Count the rows as discarded; return once no crash can undo that.

        Raises:
            ConfigError: the run doesn't keep this batch any more, or the batch has no such rows.
        """
        handed = scheduler.core.handed
        if self.batch not in handed:
            kept = ", ".join(str(batch.number) for batch in handed.kept) or "none"
            raise ConfigError(
                f"batch {self.batch} can't be changed any more: the run still knows {kept}. Say "
                "what was left out before the next batch but one, and before ack()"
            )
        count = len(handed[self.batch].rows)
        if self.rows and not 0 <= min(self.rows) <= max(self.rows) < count:
            raise ConfigError(
                f"batch {self.batch} has {count} rows, from 0; left out: {list(self.rows)}"
            )
        scheduler.handle([ev.RowsDiscarded(self.batch, self.rows, self.reason)])
        await scheduler.wait_until_safe()


def discarded_rows(
    batch: "Batch | int", rows: Sequence[SupportsIndex], reason: str = NOT_TRAINED
) -> DiscardedRows:
    """Return checked rows of a batch, or of a rank's part; of a number, of the whole batch.

    Raises:
        ConfigError: the reason is no name, a row is no number, or the part has no such row.
    """
    if not REASON.fullmatch(reason):
        raise ConfigError(
            "a reason for leaving rows out is up to 40 small letters, digits and underscores, got "
            f"{reason!r}"
        )
    places = tuple(map(_place, rows))
    if isinstance(batch, int):
        return DiscardedRows(batch, places, reason)
    count = len(batch.rewards)
    if places and not 0 <= min(places) <= max(places) < count:
        raise ConfigError(
            f"batch {batch.number} has {count} rows here, from 0; left out: {list(places)}"
        )
    if batch.shard is None:
        return DiscardedRows(batch.number, places, reason)
    if len(batch.shard.rows) != count:
        raise ConfigError(
            f"batch {batch.number} has {count} rows here, and says of {len(batch.shard.rows)} "
            "where they are in the whole batch: give the part that the run gave, and its own rows"
        )
    return DiscardedRows(batch.number, tuple(batch.shard.rows[place] for place in places), reason)


def _place(row: SupportsIndex) -> int:
    """Return a row's number. A boolean mask is refused, because True would count as row 1."""
    dtype = getattr(row, "dtype", None)
    if isinstance(row, bool) or (dtype is not None and str(dtype).endswith("bool")):
        raise ConfigError(f"rows to leave out are numbers from 0, not a mask; got {row}")
    return operator.index(row)
