"""Where does a simulated run's journal lie? In memory, with commits that take virtual time.

A crash loses what was appended and not committed, as it does on a disk.
"""

import asyncio
import random
from collections.abc import Callable, Iterator

from tidegate.orchestrator.journal.reading import Snapshot


class SimulatedStore:
    """What :class:`journal.Journal` is on a disk."""

    def __init__(self, *, commit_s: float, chance: random.Random) -> None:
        self._commit_s = commit_s
        self._chance = chance
        self._records: list[tuple[int, bytes]] = []
        """(lsn, record) after the snapshot."""
        self._snapshot: Snapshot | None = None
        self._appended = self._committed = 0
        self._on_committed: Callable[[int], None] | None = None
        self._commit: asyncio.TimerHandle | None = None
        self.bytes_since_snapshot = 0

    def append(self, record: bytes) -> int:
        """Have a record committed after a while. After a crash nothing is kept."""
        if self._on_committed is None:
            return self._appended
        self._appended += 1
        self._records.append((self._appended, record))
        self.bytes_since_snapshot += len(record)
        if self._commit is None:
            self._begin_commit()
        return self._appended

    def compact(self, lsn: int, snapshot: bytes) -> None:
        """Have a snapshot take the place of the records up to ``lsn``, at once."""
        assert lsn == self._appended
        self._committed = lsn
        self._snapshot = Snapshot(lsn, snapshot)
        self._records.clear()
        self.bytes_since_snapshot = 0

    def start(
        self, on_committed: Callable[[int], None], on_error: Callable[[BaseException], None]
    ) -> None:
        """Take records from now on."""
        self._on_committed = on_committed

    def read(self) -> Iterator[tuple[int, bytes]]:
        """What has survived."""
        return iter(list(self._records))

    def snapshot(self) -> Snapshot | None:
        """The newest, and the lsn up to which it holds."""
        return self._snapshot

    def crash(self) -> None:
        """The process is gone, and with it what was not committed."""
        self._on_committed = None
        if self._commit is not None:
            self._commit.cancel()
            self._commit = None
        self._records = [(lsn, record) for lsn, record in self._records if lsn <= self._committed]
        self._appended = self._committed

    def _begin_commit(self) -> None:
        delay_s = self._commit_s * self._chance.expovariate(1.0)
        loop = asyncio.get_running_loop()
        self._commit = loop.call_later(delay_s, self._end_commit, self._appended)

    def _end_commit(self, lsn: int) -> None:
        self._commit = None
        self._committed = lsn
        if self._on_committed is not None:
            self._on_committed(lsn)
        if self._committed < self._appended and self._commit is None:
            self._begin_commit()
