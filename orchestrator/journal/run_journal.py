"""How does a run survive the death of its process? Every event is on disk before it has effects.

The core's events are appended to the journal as they happen. What must not be known outside before
it is safe (an acknowledgement to an engine, a batch for the trainer, a version for the engines)
waits for the commit; all else goes on at once. From time to time a snapshot of the core takes the
place of the events before it.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import msgspec

from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.core import Core
from tidegate.orchestrator.core.event_log import encode_event, replay
from tidegate.orchestrator.core.state import digest, load, save
from tidegate.orchestrator.journal.journal import BODY_BYTES_MAX
from tidegate.orchestrator.journal.reading import Snapshot

log = logging.getLogger("tidegate")

SNAPSHOT_AFTER_BYTES = 64 * 1024 * 1024
"""Of events: reading that many takes about ten seconds, which a resume may cost."""

SNAPSHOT_SHARE = 4
"""And at least so many times the snapshot itself, or taking it would be most of the writing."""


class Store(Protocol):
    """Where records go: :class:`Journal`, or what a simulation puts in its place."""

    @property
    def bytes_since_snapshot(self) -> int:
        """Of records appended since the last one."""

    def append(self, record: bytes) -> int:
        """Have a record committed soon; its lsn, counting from 1."""

    def compact(self, lsn: int, snapshot: bytes) -> None:
        """Have a snapshot take the place of the records up to ``lsn``."""

    def start(
        self, on_committed: Callable[[int], None], on_error: Callable[[BaseException], None]
    ) -> None:
        """Take records from now on; the callbacks may come from another thread."""

    def read(self) -> Iterator[tuple[int, bytes]]:
        """The records after the snapshot, in order; before :meth:`start`."""

    def snapshot(self) -> Snapshot | None:
        """The newest, and the lsn up to which it holds."""


class JournalHeader(msgspec.Struct, frozen=True):
    """What a run is, for those who go on with it: all that its core was made from."""

    run_id: str
    rules: dict[str, Any]
    seed: int


class RunJournal:
    """A core, and the journal that it can be made again from."""

    def __init__(
        self, store: Store, core: Core, header: JournalHeader, *, is_threaded: bool = True
    ) -> None:
        """``is_threaded``: whether the store calls back from a thread of its own."""
        self._store = store
        self._is_threaded = is_threaded
        self.core = core
        self.header = header
        self._appended = self._committed = 0
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        """(lsn, what to do once it is committed), in order."""
        self._snapshot_bytes = 0
        self._keeps_events = False

    def restore(self) -> None:
        """Bring the core to where the journal ends.

        Raises:
            ValueError: the journal holds what this version can't read.
        """
        snapshot = self._store.snapshot()
        if snapshot is not None:
            self._appended = self._committed = snapshot.lsn
            self._snapshot_bytes = len(snapshot.body)
            load(snapshot.body, self.core)
        for lsn, record in self._store.read():
            replay(record, self.core)
            self._appended = self._committed = lsn

    def restore_position(self, store: Store) -> None:
        """The core has lived through the store already: go on after its last record."""
        for lsn, _ in store.read():
            self._appended = self._committed = lsn

    def start(self, *, keeps_events: bool, on_error: Callable[[BaseException], None]) -> None:
        """Take events from now on; called on the run's event loop."""
        self._keeps_events = keeps_events
        if not self._is_threaded:
            self._store.start(self._on_committed, on_error)
            return
        loop = asyncio.get_running_loop()
        self._store.start(
            lambda lsn: _on_loop(loop, self._on_committed, lsn),
            lambda error: _on_loop(loop, on_error, error),
        )

    def log(self, event: ev.Event) -> None:
        """Have an event written; to be called before the core handles it.

        Raises:
            JournalFailed: the disk took no more.
        """
        self._appended = self._store.append(encode_event(event, self.core))

    def when_safe(self, action: Callable[[], None]) -> None:
        """Call ``action`` once all that was logged so far is committed; maybe at once."""
        if self._committed >= self._appended:
            action()
        else:
            self._waiting.append((self._appended, action))

    async def wait_until_safe(self) -> None:
        """Return once all that was logged so far is committed."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.when_safe(lambda: None if future.done() else future.set_result(None))
        await future

    def compact_if_due(self) -> None:
        """Put a snapshot of the core in the place of its events, if they have become many."""
        due = max(SNAPSHOT_AFTER_BYTES, SNAPSHOT_SHARE * self._snapshot_bytes)
        if self._keeps_events or self._store.bytes_since_snapshot < due:
            return
        snapshot = save(self.core)
        if len(snapshot) > BODY_BYTES_MAX:
            self._keeps_events = True
            log.warning(
                "journal=growing snapshot_bytes=%d limit_bytes=%d: it will not be compacted; have "
                "fewer tokens outstanding, or ask for fewer top_logprobs",
                len(snapshot),
                BODY_BYTES_MAX,
            )
            return
        self._snapshot_bytes = len(snapshot)
        self._store.compact(self._appended, snapshot)

    def note_state(self) -> None:
        """Write down which state the core is in, for a replay to be compared with."""
        self.log(ev.StateNoted(digest(self.core)))

    def _on_committed(self, lsn: int) -> None:
        self._committed = max(self._committed, lsn)
        while self._waiting and self._waiting[0][0] <= self._committed:
            self._waiting.popleft()[1]()


def _on_loop(loop: asyncio.AbstractEventLoop, function: Callable[[Any], None], value: Any) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(function, value)
