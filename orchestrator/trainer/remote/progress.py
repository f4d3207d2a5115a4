"""Progress of a remote trainer's ranks through the run's batches, and the batches kept for replay.

:class:`TrainerService` calls it to find the ranks that others must wait for, and the batch to send
again to a rank that lost its reply. Does no I/O.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tidegate.errors import ResumeMismatch

if TYPE_CHECKING:
    from tidegate.orchestrator.batches.batches import Batch

BATCHES_KEPT_MAX = 8
"""Number of unacknowledged batches that are kept, for a trainer that restarts from its checkpoint.
A run that is resumed from its journal at the same checkpoint hands all of them over again."""

PublishKey = tuple[int, int]
"""Number of the batch that a publish follows, and its index among the publishes there."""


class TrainerProgress:
    """Batches that each rank is done with, and batches kept for ranks that restart."""

    def __init__(self) -> None:
        self.world_size = 1
        self.newest = 0
        """Number of the last batch that the run handed over."""
        self.done = 0
        """Newest batch that every rank is done with."""
        self._acked = 0
        """Newest batch that is in a checkpoint on disk."""
        self.consumed: dict[int, int] = {}
        """Last batch that each rank is done with. A request for the next one says so, but for rank
        0, which may have asked ahead: it is done with what its publishes and checkpoints name."""
        self.requested: dict[int, int] = {}
        """Batch that each waiting rank has requested."""
        self._ready: dict[int, int] = {}
        """Batch after which a rank has called publish, by rank. The rank has consumed the batch
        once the publish succeeds."""
        self._holders: set[int] = set()
        """Ranks whose present process has received the newest batch."""
        self._kept: dict[int, Batch] = {}
        self._shards: tuple[int, Sequence[Batch]] = (0, ())
        """Number of the batch last sharded, and its parts by rank."""

    # ------------------------------------------------------------ ranks

    def begin(self, world_size: int) -> None:
        """Start over with a new trainer of this many ranks."""
        self.world_size = world_size
        self.consumed, self.requested, self._ready, self._shards = {}, {}, {}, (0, ())

    def join(self, rank: int, resumed_after: int | None) -> int:
        """Add a rank's process; return the batch after which it continues."""
        self.leave(rank)
        if resumed_after is not None:
            self.consumed[rank] = resumed_after
        else:  # where rank 0 is, which may train on a batch before the one requested last
            zero = self.consumed.get(0, self.done)
            self.consumed[rank] = min(self.consumed.get(rank, self.done), zero)
        return self.consumed[rank]

    def leave(self, rank: int) -> None:
        """Remove a rank's process, with its open requests."""
        self.requested.pop(rank, None)
        self._ready.pop(rank, None)
        self._holders.discard(rank)

    def set_ready(self, rank: int, number: int) -> None:
        """Record that a rank has trained on this batch and calls publish."""
        self._ready[rank] = number

    def set_consumed(self, rank: int, number: int) -> None:
        """Record that a rank is done with this batch and all before it."""
        self.consumed[rank] = max(number, self.consumed.get(rank, 0))
        if len(self.consumed) == self.world_size:
            self.done = max(self.done, min(min(self.consumed.values()), self.newest))

    def behind(self, number: int) -> list[int]:
        """Return the ranks that are not done with this batch and do not call publish after it."""
        reached = {r: max(self.consumed.get(r, -1), self._ready.get(r, -1)) for r in self._ranks}
        return [rank for rank, batch in reached.items() if batch < number]

    def without_request(self, number: int) -> list[int]:
        """Return the ranks that have not requested this batch yet."""
        return [r for r in self._ranks if self.requested.get(r, 0) < number]

    @property
    def _ranks(self) -> range:
        return range(self.world_size)

    # ------------------------------------------------------------ batches

    def add_batch(self, batch: "Batch", oldest_held: int) -> None:
        """Keep the next batch, which the run has handed over, and all from the oldest on that no
        version was made from."""
        self.newest = batch.number
        self._holders.clear()
        self._kept[batch.number] = batch
        while len(self._kept) > BATCHES_KEPT_MAX and min(self._kept) < oldest_held:
            del self._kept[min(self._kept)]

    def begin_after(self, batches: int) -> None:
        """Start after this batch; the run handed over the earlier ones to an earlier process."""
        self.newest = self.done = self._acked = batches

    def orphan_after(self, number: int) -> int | None:
        """Return the newest batch's number if it is above ``number`` and no live rank has it."""
        is_orphan = self.newest > number and self.newest > self.done and not self._holders
        return self.newest if is_orphan and self.newest in self._kept else None

    def returned(self, number: int) -> None:
        """Forget the newest batch, which was returned to the run."""
        self.newest = number - 1
        self._shards = (0, ())
        del self._kept[number]

    def acknowledge(self, number: int) -> None:
        """Drop the batches up to this one, which are in a checkpoint on disk."""
        self._acked = max(self._acked, number)
        self.set_consumed(0, number)
        for kept in [kept for kept in self._kept if kept <= self._acked]:
            del self._kept[kept]

    def shard(self, number: int, rank: int) -> "Batch":
        """Return a rank's part of a batch that was handed over.

        Raises:
            ResumeMismatch: the batch is not kept any more.
        """
        batch = self._kept.get(number)
        if batch is None:
            kept = f"{min(self._kept)} to {max(self._kept)}" if self._kept else "none"
            raise ResumeMismatch(
                f"batch {number} was requested again, but of the batches up to {self.newest} the "
                f"run keeps {kept}: at most {BATCHES_KEPT_MAX}, and no acknowledged ones. Resume "
                f"from a newer checkpoint, or restart the run from this one by serve(resume=…) "
                f"with a journal"
            )
        if number == self.newest:
            self._holders.add(rank)
        if self.world_size == 1:
            return batch
        if self._shards[0] != number:
            from tidegate.orchestrator.batches.batch_rows import shards  # torch

            self._shards = (number, shards(batch, self.world_size))
        return self._shards[1][rank]
