"""Check of a run's journal: a new core handles the recorded events, and the states are compared.

A resume replays events too, but compares nothing (:meth:`RunJournal.restore`). The core reads no
clock and draws no random number, so the same events must give the same state, bit for bit. A
difference is a bug; the report names its first event.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tidegate.errors import JournalCorrupt, JournalError, ResumeMismatch, TidegateError
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.event_log import replay
from tidegate.orchestrator.core.ledger import LedgerSnapshot
from tidegate.orchestrator.core.snapshot_codec import digest, load
from tidegate.orchestrator.journal.journal import Journal
from tidegate.orchestrator.journal.resuming import JOURNAL_FILE, core_from_header
from tidegate.orchestrator.journal.run_journal import decode_header


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """Result of a replay."""

    run_id: str
    snapshot_lsn: int
    """Lsn of the last event that the snapshot covers; 0 without a snapshot."""
    events: dict[str, int]
    """Number of replayed events, by kind."""
    states_compared: int
    """Number of states of the replay that were compared with a recorded digest."""
    difference: str | None
    """First event after which the state differed or an invariant was broken; None without one."""
    trainer_version: int
    batches: int
    ledger: LedgerSnapshot
    digest: str

    def lines(self) -> Iterator[str]:
        """Yield the report as lines of text."""
        ledger = self.ledger
        yield f"run {self.run_id}: {sum(self.events.values())} events after lsn {self.snapshot_lsn}"
        yield "  ".join(f"{kind} {count}" for kind, count in sorted(self.events.items()))
        yield (
            f"trainer at v{self.trainer_version}, {self.batches} batches; tokens: "
            f"{ledger.generated} generated = {ledger.trained} trained + {ledger.buffered} buffered "
            f"+ {ledger.in_flight} in flight + {ledger.discarded_total} discarded"
        )
        if self.difference is not None:
            yield f"DIFFERS: {self.difference}"
        elif self.states_compared:
            yield f"equal states at all {self.states_compared} recorded checksums"
        else:
            yield "the run recorded no checksum to compare with, because its process was killed"
        yield f"digest {self.digest}"


def replay_journal(run_directory: Path, *, policies: Iterable[type] = ()) -> ReplayReport:
    """Replay a run's journal, checking the core's invariants after every event.

    ``policies``: the user's own policy classes that the run was started with. A journal that names
    any other user class is refused: no class is ever imported because a journal names it.

    Raises:
        ResumeMismatch: the run was started with a policy that is not in ``policies``.
        JournalError: there is no journal, it is in use, or can't be read.
    """
    path = Path(run_directory) / JOURNAL_FILE
    with Journal.open(path) as journal:
        try:
            return _replay(journal, policies)
        except TidegateError as error:
            if isinstance(error, JournalError | ResumeMismatch):
                raise
            raise JournalCorrupt(path=path, where=str(error)) from error
        except Exception as error:  # records of a foreign journal may break any assumption
            where = f"{type(error).__name__}: {error}"
            raise JournalCorrupt(path=path, where=where) from error


def _replay(journal: Journal, policies: Iterable[type]) -> ReplayReport:
    header = decode_header(journal.header)
    core = core_from_header(header, policies)
    snapshot = journal.snapshot()
    if snapshot is not None:
        load(snapshot.body, core)
    events: Counter[str] = Counter()
    states = 0
    difference: str | None = None
    for lsn, record in journal.read():
        event, _ = replay(record, core)
        events[type(event).__name__] += 1
        try:
            core.check()
        except AssertionError as error:
            difference = difference or f"after event {lsn}, {event}: {error}"
        if isinstance(event, ev.StateChecksum):
            states += 1
            if event.digest != digest(core, is_replayed=True):
                difference = difference or f"the state at event {lsn} differs from its checksum"
    return ReplayReport(
        run_id=header.run_id,
        snapshot_lsn=snapshot.lsn if snapshot is not None else 0,
        events=dict(events),
        states_compared=states,
        difference=difference,
        trainer_version=core.trainer_version,
        batches=core.trained.batches,
        ledger=core.ledger.snapshot(),
        digest=digest(core, is_replayed=True),
    )
