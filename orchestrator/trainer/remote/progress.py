"""How far is each rank of a remote trainer with the run's batches? Says who waits for whom.

It holds numbers and the batches that may be asked for again; it awaits nothing.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tidegate.errors import ResumeMismatch

if TYPE_CHECKING:
    from tidegate.orchestrator.batches.batches import Batch

BATCHES_KEPT_MAX = 8
"""Handed over and not acknowledged: what a trainer that went back to its checkpoint may ask for
again. A run with a journal, resumed from that checkpoint, has them all."""

PublishKey = tuple[int, int]
"""After which batch, and of several there which one."""


class TrainerProgress:
    """Which batch each rank has done with, and what was published after which."""

    def __init__(self) -> None:
        self.world_size = 1
        self.newest = 0
        """The number of the last batch that the run handed over."""
        self.done = 0
        """All have done with the batches up to this one, or weights were made from it."""
        self._acked = 0
        """Those up to this one are in a checkpoint."""
        self.consumed: dict[int, int] = {}
        """Rank -> the last batch that it has done with."""
        self.wanted: dict[int, int] = {}
        """Rank -> the batch that it waits for."""
        self._ready: dict[int, int] = {}
        """Rank -> the batch after which it calls publish; only done with once that succeeds."""
        self._holders: set[int] = set()
        """Ranks whose present process was given the newest batch."""
        self._kept: dict[int, Batch] = {}
        self._shards: tuple[int, Sequence[Batch]] = (0, ())
        """Of one batch, by rank."""

    # ------------------------------------------------------------ ranks

    def begin(self, world_size: int) -> None:
        """Another trainer has come."""
        self.world_size = world_size
        self.consumed, self.wanted, self._ready, self._shards = {}, {}, {}, (0, ())

    def join(self, rank: int, resumed_after: int | None) -> int:
        """A rank's process has come; the batch after which it goes on."""
        self.leave(rank)
        if resumed_after is not None:
            self.consumed[rank] = resumed_after
        elif rank not in self.consumed:
            self.consumed[rank] = self.done
        return self.consumed[rank]

    def leave(self, rank: int) -> None:
        """It waits for nothing any more."""
        self.wanted.pop(rank, None)
        self._ready.pop(rank, None)
        self._holders.discard(rank)

    def note_ready(self, rank: int, number: int) -> None:
        """A rank has trained on this batch, and calls publish."""
        self._ready[rank] = number

    def note_consumed(self, rank: int, number: int) -> None:
        """A rank has done with this batch, and those before it."""
        self.consumed[rank] = max(number, self.consumed.get(rank, 0))
        if len(self.consumed) == self.world_size:
            self.done = max(self.done, min(min(self.consumed.values()), self.newest))

    def behind(self, number: int) -> list[int]:
        """Ranks that have neither done with this batch nor call publish after it."""
        far = {r: max(self.consumed.get(r, -1), self._ready.get(r, -1)) for r in self._ranks}
        return [rank for rank, reached in far.items() if reached < number]

    def not_asking(self, number: int) -> list[int]:
        """Ranks that don't want this batch yet."""
        return [r for r in self._ranks if self.wanted.get(r, 0) < number]

    @property
    def _ranks(self) -> range:
        return range(self.world_size)

    # ------------------------------------------------------------ batches

    def handed_over(self, batch: "Batch") -> None:
        """The run has given the next one."""
        self.newest = batch.number
        self._holders.clear()
        self._kept[batch.number] = batch
        while len(self._kept) > BATCHES_KEPT_MAX:
            del self._kept[next(iter(self._kept))]

    def begin_after(self, batches: int) -> None:
        """The run goes on after this batch: it handed over those before to another process."""
        self.newest = self.done = self._acked = batches

    def orphan_after(self, number: int) -> int | None:
        """The newest batch, if it comes after this one and no living process was given it."""
        is_orphan = self.newest > number and self.newest > self.done and not self._holders
        return self.newest if is_orphan and self.newest in self._kept else None

    def gave_back(self, number: int) -> None:
        """The newest batch is the run's again."""
        self.newest = number - 1
        self._shards = (0, ())
        del self._kept[number]

    def published_after(self, number: int) -> None:
        """Weights were made from this batch: nobody is given it again unasked."""
        self.done = max(self.done, min(number, self.newest))

    def acknowledge(self, number: int) -> None:
        """These are in a checkpoint that is on disk."""
        self._acked = max(self._acked, number)
        for kept in [kept for kept in self._kept if kept <= self._acked]:
            del self._kept[kept]

    def shard(self, number: int, rank: int) -> "Batch":
        """A rank's part of a batch that was handed over.

        Raises:
            ResumeMismatch: it is not kept any more.
        """
        batch = self._kept.get(number)
        if batch is None:
            kept = f"{min(self._kept)} to {max(self._kept)}" if self._kept else "none"
            raise ResumeMismatch(
                f"batch {number} is asked for again, and of those before {self.newest + 1} the run "
                f"has {kept}; it keeps {BATCHES_KEPT_MAX}, and none that were acknowledged. Resume "
                f"from a newer checkpoint, or start the run anew from this one: serve(resume=…) "
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
