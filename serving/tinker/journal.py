"""Journal of the Tinker server: sessions, models and requests, read again after a restart.

    STATE/sessions.journal            sessions and samplers, since the server's last start
    STATE/RUN/journal/N.requests      requests of one model that were accepted since its request N
    STATE/RUN/journal/N/              the model's weights and optimizer before request N

A request is appended and synced before the client gets its ``request_id``. After a crash the server
loads the older of the two snapshots that are kept, and carries out the requests since then again:
the same requests in the same order give the same weights and results. One snapshot more than
needed is kept, and the next waits for clients, so that results which they have not read yet are
computed again.

A record is its length and its CRC-32 (4 bytes each, little-endian), then MessagePack. If the crash
cut the last record short, the rest of it is removed from the file. An append that fails, as on a
full disk, leaves the file as it was. Methods block.
"""

import contextlib
import fcntl
import logging
import os
import shutil
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tidegate.errors import ConfigError
from tidegate.serving.tinker.training import LoraSpec

log = logging.getLogger("tidegate")

HEADER = struct.Struct("<II")

RECORD_BYTES_MAX = 128 * 1024 * 1024
"""Longest record: a request's body has at most 64 MiB."""

SNAPSHOT_REQUESTS = 64
"""Requests of a model after which its weights are saved, at its next optimizer step."""

SNAPSHOT_BYTES = 64 * 1024 * 1024
"""Bytes of a model's requests after which its weights are saved, too."""

AWAITED_BYTES = 8 * SNAPSHOT_BYTES
"""Bytes of a model's requests up to which a snapshot waits for clients that read results."""

ATTEMPTS_MAX = 3
"""Starts of the server that may end while they repeat one request; the next start refuses it."""


class SessionOpened(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A client's session began."""

    session_id: str
    tenant: str


class SessionEnded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A session ended with its models and samplers."""

    session_id: str


class SamplerOpened(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A sampling session began."""

    session_id: str
    seq_id: int
    path: str | None = None
    """The ``tinker://`` path of its weights; None for the base model or a live adapter."""
    model_path: str | None = None
    """The path that its client named."""
    live_model_id: str | None = None
    """The model whose in-flight weights it follows."""
    other_model: str | None = None
    """Name of its base model, if that is another than the trained one."""


class ModelCreated(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A model began, as a new adapter or as a checkpoint's."""

    model_seq_id: int
    session_id: str
    spec: LoraSpec
    user_metadata: dict[str, Any] | None = None
    checkpoint_path: str | None = None
    """The checkpoint that it was made from."""
    optimizer: bool = False
    """Whether the checkpoint's optimizer state was loaded, too."""


class RequestAccepted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A request of a model, before its client was answered."""

    seq_id: int
    path: str
    """Last part of its HTTP path."""
    body: bytes


class FailureRecorded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A request failed by no fault of its client's; a restarted server does not try it again,
    because it might succeed, and the client was told that it did not."""

    seq_id: int
    message: str
    loses_gradient: bool
    """Whether the gradient since the last optimizer step is incomplete without it."""


class SegmentStarted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """First record of each file of requests."""

    created: ModelCreated
    seq_id: int
    """The request that the snapshot is before."""
    steps: int = 0
    """The model's optimizer steps at that time."""


SessionRecord = SessionOpened | SessionEnded | SamplerOpened
ModelRecord = SegmentStarted | RequestAccepted | FailureRecorded


def append_record(path: Path, record: SessionRecord | ModelRecord) -> int:
    """Append a record to a file and sync it, or leave the file as it was; return its bytes.

    Raises:
        OSError: the disk is full, or broken.
    """
    data = _framed(record)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        end = os.fstat(descriptor).st_size
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
        except OSError:
            os.ftruncate(descriptor, end)  # a torn record would hide those after it
            raise
    finally:
        os.close(descriptor)
    return len(data)


def write_records(path: Path, records: Iterable[SessionRecord | ModelRecord]) -> None:
    """Replace a file by one of these records; a crash leaves the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}")
    with open(beside, "wb") as file:
        for record in records:
            file.write(_framed(record))
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    sync_file(path.parent)


def read_records(path: Path, kind: Any) -> list[Any]:
    """Read a file's records, up to the first that is cut off or damaged; none if it is missing.

    The file is shortened to these records, so that others can be appended. A whole record that is
    of none of the types ``kind``, a union, is passed over.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    decoder = msgspec.msgpack.Decoder(kind)
    records = []
    end = 0
    while end + HEADER.size <= len(data):
        length, checksum = HEADER.unpack_from(data, end)
        start = end + HEADER.size
        body = data[start : start + length]
        if length > RECORD_BYTES_MAX or len(body) < length or zlib.crc32(body) != checksum:
            break
        try:
            records.append(decoder.decode(body))
        except (msgspec.MsgspecError, RecursionError) as error:
            log.error("file=%s byte=%d: a record is passed over: %s", path, end, error)
        end = start + length
    if end < len(data):
        os.truncate(path, end)
    return records


def _framed(record: SessionRecord | ModelRecord) -> bytes:
    body = msgspec.msgpack.encode(record)
    return HEADER.pack(len(body), zlib.crc32(body)) + body


def sync_file(path: Path) -> None:
    """Flush a file or a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------- the server


class ServerState:
    """Directory of one server's state, which no other server uses at the same time."""

    def __init__(self, root: Path) -> None:
        """Lock the directory.

        Raises:
            ConfigError: another server uses it.
        """
        root.mkdir(parents=True, exist_ok=True)
        self.root = root
        self._sessions = root / "sessions.journal"
        self._lock = os.open(root / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise ConfigError(
                f"another server uses the state directory {root}; end it, or name another directory"
            ) from None

    def close(self) -> None:
        """Unlock the directory."""
        os.close(self._lock)

    def note(self, record: SessionRecord) -> None:
        """Append a record of a session, and sync it."""
        append_record(self._sessions, record)

    def open_sessions(self) -> tuple[list[SessionOpened], list[SamplerOpened]]:
        """Return the sessions that have not ended, and their samplers; forget the others."""
        records = read_records(self._sessions, SessionRecord)
        ended = {each.session_id for each in records if isinstance(each, SessionEnded)}
        kept = [each for each in records if each.session_id not in ended]
        if len(kept) < len(records):
            try:
                write_records(self._sessions, kept)
            except OSError as error:
                log.error("file=%s is not shortened: %s", self._sessions, error)
        sessions = [each for each in kept if isinstance(each, SessionOpened)]
        samplers = [each for each in kept if isinstance(each, SamplerOpened)]
        return sessions, samplers

    def model_directory(self, model_id: str) -> Path:
        """Return the directory of a model's journal."""
        return self.root / model_id / "journal"

    def models(self) -> list[Path]:
        """Return the directories of all models' journals."""
        return sorted(self.root.glob("*:train:*/journal"))


# ---------------------------------------------------------------- one model


@dataclass(slots=True)
class ModelJournal:
    """Files of one model's requests. Calls come one at a time."""

    directory: Path
    created: ModelCreated
    segment: int
    """``seq_id`` that the file being appended to is named after."""
    requests: int = 0
    """Requests in that file."""
    size_bytes: int = 0

    @property
    def is_long(self) -> bool:
        """Whether it is time for another snapshot."""
        return self.requests >= SNAPSHOT_REQUESTS or self.size_bytes >= SNAPSHOT_BYTES

    @property
    def is_too_large(self) -> bool:
        """Whether the snapshot may wait no longer for clients that read results."""
        return self.size_bytes >= AWAITED_BYTES

    def begin(self) -> None:
        """Write the file of a new model."""
        start = SegmentStarted(created=self.created, seq_id=self.segment)
        write_records(self._file(self.segment), [start])

    def append(self, record: RequestAccepted) -> None:
        """Append a request, and sync it."""
        self.size_bytes += append_record(self._file(self.segment), record)
        self.requests += 1

    def append_failure(self, record: FailureRecorded) -> None:
        """Append the failure of a request, and sync it."""
        append_record(self._file(self.segment), record)

    def begin_attempt(self, seq_id: int) -> bool:
        """Record that a request is being repeated (0: the model's creation), until
        :meth:`end_attempt`; False if ATTEMPTS_MAX starts of the server have ended meanwhile."""
        file, attempts = self._attempts(seq_id), 0
        with contextlib.suppress(OSError):
            attempts = file.stat().st_size  # a byte each
        if attempts < ATTEMPTS_MAX:
            with contextlib.suppress(OSError), file.open("ab") as appended:
                appended.write(b".")
        return attempts < ATTEMPTS_MAX

    def end_attempt(self, seq_id: int) -> None:
        """Record that a request was repeated."""
        self._attempts(seq_id).unlink(missing_ok=True)

    def _attempts(self, seq_id: int) -> Path:
        return self.directory / f"{seq_id}.attempts"

    def begin_segment(
        self,
        seq_id: int,
        steps: int,
        waiting: Sequence[RequestAccepted],
        save: Callable[[Path], None],
    ) -> None:
        """Save the model before its request ``seq_id``, and begin the file after that.

        ``waiting`` are the requests from that one on that were accepted already. Files before the
        last snapshot are deleted.
        """
        snapshot = self.directory / str(seq_id)
        beside = self.directory / f".{seq_id}"
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        try:
            save(beside)
            for path in [*beside.iterdir(), beside]:
                sync_file(path)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)  # perhaps the disk is full
            raise
        shutil.rmtree(snapshot, ignore_errors=True)
        os.rename(beside, snapshot)
        start = SegmentStarted(created=self.created, seq_id=seq_id, steps=steps)
        write_records(self._file(seq_id), [start, *waiting])
        for old in segments(self.directory):
            if old < self.segment:
                self._file(old).unlink()
                shutil.rmtree(self.directory / str(old), ignore_errors=True)
        self.segment, self.requests = seq_id, len(waiting)
        self.size_bytes = sum(len(each.body) for each in waiting)

    def remove(self) -> None:
        """Delete the journal of a model that has ended."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def _file(self, segment: int) -> Path:
        return self.directory / f"{segment}.requests"


def segments(directory: Path) -> list[int]:
    """Return the numbers of a model's files of requests, in order."""
    return sorted(int(path.stem) for path in directory.glob("[0-9]*.requests"))


@dataclass(frozen=True, slots=True)
class RecoveredModel:
    """State of one model as its journal has it: snapshot, and requests to repeat."""

    journal: ModelJournal
    start: SegmentStarted
    snapshot: Path | None
    """Directory of its weights and optimizer; None if it begins as it was created."""
    requests: Sequence[RequestAccepted]
    """Requests since the snapshot, by ``seq_id``."""
    failures: Mapping[int, FailureRecorded]
    """Failures of these requests that are the server's fault, by ``seq_id``."""


def read_model(directory: Path) -> RecoveredModel | None:
    """Read a model's journal from its directory; None if it holds none."""
    numbers = segments(directory)
    files = [read_records(directory / f"{number}.requests", ModelRecord) for number in numbers]
    start = files[0][0] if files and files[0] else None
    if not isinstance(start, SegmentStarted):
        return None
    everything = [record for records in files for record in records]
    accepted = {
        record.seq_id: record
        for record in everything
        if isinstance(record, RequestAccepted) and record.seq_id >= start.seq_id
    }
    failures = {each.seq_id: each for each in everything if isinstance(each, FailureRecorded)}
    last = [each for each in files[-1] if isinstance(each, RequestAccepted)]
    size_bytes = sum(len(each.body) for each in last)
    journal = ModelJournal(directory, start.created, numbers[-1], len(last), size_bytes)
    snapshot = directory / str(numbers[0])
    return RecoveredModel(
        journal,
        start,
        snapshot if snapshot.is_dir() else None,
        [accepted[seq_id] for seq_id in sorted(accepted)],
        failures,
    )
