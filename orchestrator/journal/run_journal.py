"""Write-ahead log of a core's events: each is appended to the journal before the core handles it.

Messages that other processes rely on (an acknowledgement to an engine, a batch for the trainer, a
version for the engines) wait until the events before them are committed; all other messages are
sent at once. From time to time a snapshot of the core replaces older events.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import msgspec

from tidegate.errors import ResumeMismatch
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.core import Core
from tidegate.orchestrator.core.event_log import encode_event, replay
from tidegate.orchestrator.core.snapshot_codec import digest, load, save
from tidegate.orchestrator.journal.journal import BODY_BYTES_MAX
from tidegate.orchestrator.journal.reading import JournalSnapshot

log = logging.getLogger("tidegate")

SNAPSHOT_AFTER_BYTES = 64 * 1024 * 1024
"""Bytes of events after which a snapshot is taken; replaying them takes a resume about 10 s."""

SNAPSHOT_SHARE = 4
"""Bytes of events, per byte of the last snapshot, before the next snapshot is taken;
otherwise snapshots would be most of what is written."""


class Store(Protocol):
    """Interface of :class:`Journal`, which simulations replace."""

    @property
    def bytes_since_snapshot(self) -> int:
        """Bytes of records appended since the last snapshot."""

    def append(self, record: bytes) -> int:
        """Queue a record to be committed; return its log sequence number (lsn), from 1."""

    def compact(self, lsn: int, snapshot: bytes) -> None:
        """Queue a snapshot to replace the records up to ``lsn``."""

    def start(
        self, on_committed: Callable[[int], None], on_error: Callable[[BaseException], None]
    ) -> None:
        """Begin to accept records; the callbacks may be called from another thread."""

    def read(self) -> Iterator[tuple[int, bytes]]:
        """Yield the records after the snapshot, in order; before :meth:`start`."""

    def snapshot(self) -> JournalSnapshot | None:
        """Return the newest snapshot with its lsn; None without one."""


EVENT_FORMAT = 4
"""Number of the format of events and snapshots. From 2 on, the trainer's publishes name their
batches; the events before do not say enough to replay them so. From 3 on, admission is just in
time; from 4 on, a rollback takes turns back, and a failed publish counts in what may wait."""


class JournalHeader(msgspec.Struct, frozen=True):
    """A run's rules and seed, which the journal stores when it is created."""

    run_id: str
    rules: dict[str, Any]
    seed: int
    event_format: int = 1
    """:data:`EVENT_FORMAT` of the Tidegate that created the journal."""


def decode_header(header: bytes) -> JournalHeader:
    """Return a journal's header.

    Raises:
        ResumeMismatch: another Tidegate wrote the journal, with events of another format.
    """
    decoded = msgspec.json.decode(header, type=JournalHeader)
    if decoded.event_format != EVENT_FORMAT:
        raise ResumeMismatch(
            f"the journal of run {decoded.run_id} has events of format {decoded.event_format}, and "
            f"this Tidegate reads format {EVENT_FORMAT}; finish the run with the Tidegate that "
            f"began it, or begin a new run from the checkpoint's weights in another run_directory"
        )
    return decoded


class RunJournal:
    """A core together with the journal from which it can be restored."""

    def __init__(
        self, store: Store, core: Core, header: JournalHeader, *, is_threaded: bool = True
    ) -> None:
        """``is_threaded``: whether the store calls back from a thread of its own."""
        self._store = store
        self._is_threaded = is_threaded
        self.core = core
        self.header = header
        self._appended = self._committed = 0
        self._pending_actions: deque[tuple[int, Callable[[], None]]] = deque()
        """(lsn, action to call once it is committed), in order."""
        self._snapshot_bytes = 0
        self._is_too_large = False
        """Whether a snapshot would exceed the limit, so that no more are taken."""

    def restore(self) -> None:
        """Bring the core to the state at the journal's end: load the snapshot, replay later events.

        Raises:
            ValueError: the journal holds records that this version can't read.
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
        """Append after the last record of ``store``; the core has handled all its events
        already."""
        for lsn, _ in store.read():
            self._appended = self._committed = lsn

    def start(self, on_error: Callable[[BaseException], None]) -> None:
        """Begin to append events. Call it once, on the run's event loop, before the first
        :meth:`log`.

        ``on_error`` is called on the loop, once, if a write fails; no event is committed after
        that.
        """
        if not self._is_threaded:
            self._store.start(self._on_committed, on_error)
            return
        loop = asyncio.get_running_loop()
        self._store.start(
            lambda lsn: _call_on_loop(loop, self._on_committed, lsn),
            lambda error: _call_on_loop(loop, on_error, error),
        )

    def log(self, event: ev.Event) -> None:
        """Append an event; to be called before the core handles it.

        Raises:
            JournalFailed: an earlier write has failed.
        """
        self._appended = self._store.append(encode_event(event, self.core))

    def when_safe(self, action: Callable[[], None]) -> None:
        """Call ``action`` once everything logged so far is committed, which may be at once."""
        if self._committed >= self._appended:
            action()
        else:
            self._pending_actions.append((self._appended, action))

    def discard_actions(self) -> None:
        """Call none of the actions that wait for a commit: the run has ended, and what they use is
        closed. The records themselves are still committed."""
        self._pending_actions.clear()

    def compact_if_due(self) -> None:
        """Replace the events with a snapshot of the core, if there are many."""
        due = max(SNAPSHOT_AFTER_BYTES, SNAPSHOT_SHARE * self._snapshot_bytes)
        if self._is_too_large or self._store.bytes_since_snapshot < due:
            return
        snapshot = save(self.core)
        if len(snapshot) > BODY_BYTES_MAX:
            self._is_too_large = True
            log.warning(
                "journal=growing snapshot_bytes=%d limit_bytes=%d: no more snapshots are taken; "
                "keep fewer tokens outstanding, or request fewer top_logprobs",
                len(snapshot),
                BODY_BYTES_MAX,
            )
            return
        self._snapshot_bytes = len(snapshot)
        self._store.compact(self._appended, snapshot)

    def log_checksum(self) -> None:
        """Append a digest of the core's state, which a replay compares."""
        self.log(ev.StateChecksum(digest(self.core)))

    def _on_committed(self, lsn: int) -> None:
        self._committed = max(self._committed, lsn)
        while self._pending_actions and self._pending_actions[0][0] <= self._committed:
            self._pending_actions.popleft()[1]()


def _call_on_loop(
    loop: asyncio.AbstractEventLoop, function: Callable[[Any], None], value: Any
) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(function, value)
