"""Schema of ``trajectories.parquet``, conversion of rollouts into its rows, and reading them back.

:class:`RunRecorder` writes the rows; the audit and the dashboard read them. One row per rollout,
turns nested inside. While a process records, the same rows are appended to ``trajectories.arrows``,
an Arrow IPC stream. After a crash the Parquet file has no footer and can't be read, but the stream
can, up to its last complete record batch.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tidegate.errors import AuditError
from tidegate.observability.records.run_directories import process_directories
from tidegate.orchestrator.batches.tasks import to_json
from tidegate.orchestrator.core.provenance import KvRange, TurnPrefill, VersionSpan
from tidegate.orchestrator.core.rollout import Rollout, Turn
from tidegate.orchestrator.core.token_attachments import PositionReport
from tidegate.orchestrator.episodes.media_parts import recorded
from tidegate.transport.attachments import ATTACHMENTS, AttachmentColumns, AttachmentKind
from tidegate.transport.messages import LIVE_ADAPTER, KvSpan, SamplingParams

TRAJECTORIES_FILE = "trajectories.parquet"

STREAM_FILE = "trajectories.arrows"
"""Exists while a process records, and afterwards if the Parquet file is incomplete."""

ROWS_PER_READ = 256
"""Rollouts held as Python objects at a time while reading: 0.5 GB at 30,000 tokens each."""

IN_COLUMNS = {"max_tokens", "temperature", "top_k", "top_p", "seed", "stop_token_ids"}
"""Fields of ``SamplingParams`` that need no ``options`` column: they have columns of their own,
or do not affect log-probs."""

_KV_SPAN = pa.struct([("version", pa.int32()), ("start", pa.int32()), ("end", pa.int32())])
_SPAN = pa.struct(
    [
        *_KV_SPAN,
        ("engine", pa.string()),
        ("kv_oldest", pa.int32()),
        ("kv_newest", pa.int32()),
    ]
)
_REPORT = pa.struct(
    [
        ("start", pa.int32()),
        ("shape", pa.list_(pa.int32())),
        ("dtype", pa.string()),
        ("values", pa.binary()),
    ]
)
"""One report of an attachment by position: positions from ``start`` on, ``shape`` [P, …]."""


def _is_binary(kind: AttachmentKind) -> bool:
    """Whether the entries of all tokens are one value, float32, little-endian: hidden states."""
    return kind.dtypes == ("float32",) and not kind.is_logprob


def _attachment_type(kind: AttachmentKind) -> pa.DataType:
    """Return the type of an attachment's column."""
    if kind.axis == "position":
        return pa.list_(_REPORT)
    if _is_binary(kind):
        return pa.binary()
    values = pa.list_(pa.float32() if kind.is_logprob else pa.int32())
    return pa.list_(values) if kind.is_ragged else values


_TURN = pa.struct(
    [
        ("start", pa.int32()),
        ("length", pa.int32()),
        ("finish_reason", pa.string()),
        ("temperature", pa.float64()),
        ("top_k", pa.int32()),
        ("top_p", pa.float64()),
        ("seed", pa.uint64()),
        ("spans", pa.list_(_SPAN)),
        ("prefills", pa.list_(pa.struct([("at", pa.int32()), ("spans", pa.list_(_KV_SPAN))]))),
        ("options", pa.string()),
        ("reward", pa.float64()),
        ("media", pa.string()),
        *((name, _attachment_type(kind)) for name, kind in ATTACHMENTS.items()),
    ]
)
SCHEMA = pa.schema(
    [
        ("rollout_id", pa.int64()),
        ("group_id", pa.int64()),
        ("index", pa.int32()),
        ("task", pa.string()),
        ("reward", pa.float64()),
        ("advantage", pa.float64()),
        ("state", pa.string()),
        ("discard_reason", pa.string()),
        ("consumed_version", pa.int32()),
        ("staleness", pa.int32()),
        ("token_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("turns", pa.list_(_TURN)),
        ("branch_of", pa.int64()),
        ("fork_reason", pa.string()),
        ("oldest_trainable", pa.int32()),
    ]
)
"""Arrow schema of a row. All columns are nullable: a discarded rollout has no advantage, an
evaluated one no staleness."""


@dataclass(frozen=True, slots=True)
class RecordedTurn(AttachmentColumns[Any]):
    """One generation call of a recorded rollout."""

    start: int
    """Index of the turn's first output token in the rollout's ``token_ids``."""
    length: int
    """Number of output tokens."""
    finish_reason: str | None
    temperature: float
    top_k: int
    top_p: float
    seed: int
    options: SamplingParams | None
    """All sampling parameters, if others than the columns' differ from the defaults; else None.
    The columns don't include stop tokens."""
    reward: float | None
    """The turn's own reward, beside the rollout's; None if it was given none."""
    spans: tuple[VersionSpan, ...]
    prefills: tuple[TurnPrefill, ...]
    media: str | None
    """JSON of the media added to the context since the previous turn; None if there were none."""
    attachments: Mapping[str, Any]
    """Attachments that were requested, by name. By token: a list of the entries of all tokens, one
    after the other; of ragged ones a list for each token; hidden states as bytes of float32. By
    position: a tuple of reports, in the order in which engines made them."""

    def attachment(self, column: str) -> Any:
        """Return one of :attr:`attachments`; None if not requested."""
        return self.attachments.get(column)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RowFields:
    """Columns that hold the same type before they are recorded and after they are read."""

    rollout_id: int
    group_id: int
    index: int
    """Position of the rollout within its group, from 0."""
    reward: float | None
    advantage: float | None
    """Advantage that the trainer was given; None if the rollout was not trained on."""
    state: str
    discard_reason: str | None
    consumed_version: int | None
    """Trainer version at which the rollout was consumed; None if it was not."""
    staleness: int | None
    """``consumed_version`` minus the oldest trained version; None if nothing was trained on."""
    branch_of: int | None
    """``rollout_id`` of the row that this one was forked from; None if it is no branch."""
    fork_reason: str
    oldest_trainable: int | None = None
    """Oldest version whose tokens a trained row was trained on; older tokens were masked. 0 if none
    was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRollout(_RowFields):
    """One row of ``trajectories.parquet``, as read."""

    task: str
    """Task of the rollout, as JSON."""
    token_ids: list[int]
    logprobs: list[float]
    turns: tuple[RecordedTurn, ...]

    @property
    def oldest_trained_version(self) -> int | None:
        """Oldest version of a sampled token that was not masked; None if all were masked."""
        oldest_trainable = self.oldest_trainable or 0
        versions = (span.version for turn in self.turns for span in turn.spans)
        return min((version for version in versions if version >= oldest_trainable), default=None)

    @property
    def newest_version(self) -> int | None:
        """Newest version of a sampled token; None if no token was sampled."""
        return max((span.version for turn in self.turns for span in turn.spans), default=None)

    @property
    def trained_tokens(self) -> int:
        """Number of sampled tokens that were not masked."""
        oldest_trainable = self.oldest_trainable or 0
        spans = (span for turn in self.turns for span in turn.spans)
        return sum(span.end - span.start for span in spans if span.version >= oldest_trainable)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSnapshot(_RowFields):
    """A row to record, copied from a rollout when it was handed over: the rollout may change."""

    task: object
    """The task as the user's iterator gave it."""
    token_ids: "array[int]"
    logprobs: "array[float]"
    turns: list[dict[str, Any]]
    """Rows of the nested column ``turns``, by column name."""


def image_path(directory: Path, digest: str) -> Path:
    """Return where one process's record keeps the image of a digest."""
    return directory / "images" / digest


def snapshot_rollout(
    rollout: Rollout,
    *,
    task: object,
    advantage: float | None,
    consumed_version: int | None,
) -> RolloutSnapshot:
    """Copy what is recorded of ``rollout``."""
    oldest = rollout.oldest_trained_version
    known = consumed_version is not None and oldest is not None
    return RolloutSnapshot(
        rollout_id=rollout.rollout_id,
        group_id=rollout.group_id,
        index=rollout.index,
        task=task,
        reward=rollout.reward,
        advantage=advantage,
        state=str(rollout.state),
        discard_reason=rollout.discard_reason,
        consumed_version=consumed_version,
        staleness=(consumed_version or 0) - (oldest or 0) if known else None,
        token_ids=rollout.token_ids[:],
        logprobs=rollout.logprobs[:],
        turns=[_turn_row(turn, rollout.adapter) for turn in rollout.turns],
        branch_of=None if rollout.branch_of is None else rollout.branch_of.rollout_id,
        fork_reason=rollout.fork_reason,
        oldest_trainable=rollout.oldest_trainable if consumed_version is not None else None,
    )


def _turn_row(turn: Turn, trained_adapter: str) -> dict[str, Any]:
    sampling = turn.sampling
    return {
        "start": turn.start,
        "length": turn.length,
        "finish_reason": turn.finish_reason,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "seed": sampling.seed & 0xFFFF_FFFF_FFFF_FFFF,
        "spans": [_span_row(span) for span in turn.spans()],
        "prefills": [
            {"at": p.at, "spans": [msgspec.structs.asdict(span) for span in p.spans]}
            for p in turn.prefills
        ],
        "options": _options_text(_recorded_sampling(sampling, trained_adapter)),
        **_attachment_columns(turn),
        "reward": turn.reward,
        "media": to_json([recorded(each) for each in turn.media]).decode() if turn.media else None,
    }


def _recorded_sampling(sampling: SamplingParams, trained_adapter: str) -> SamplingParams:
    """Return a turn's parameters as recorded. In the records of a trained adapter, versions are
    the adapter's own, so a turn that followed the live version is recorded without an adapter
    version."""
    if sampling.adapter == trained_adapter != "" and sampling.adapter_version == LIVE_ADAPTER:
        return msgspec.structs.replace(sampling, adapter_version=None)
    return sampling


def _options_text(sampling: SamplingParams) -> str | None:
    """Return the non-default parameters as JSON; None if the columns hold all of them."""
    if not msgspec.to_builtins(sampling).keys() - IN_COLUMNS:
        return None
    return msgspec.json.encode(sampling).decode()


def _attachment_columns(turn: Turn) -> dict[str, Any]:
    """Return the columns of a turn's attachments; None where not requested, or not known."""
    columns: dict[str, Any] = dict.fromkeys(ATTACHMENTS)
    if (attachments := turn.attachments) is None:
        return columns
    for name, kind in ATTACHMENTS.items():
        if kind.axis == "position":
            columns[name] = [
                {
                    "start": start,
                    "shape": list(entries.shape),
                    "dtype": entries.dtype.name,
                    "values": entries.tobytes(),
                }
                for start, entries in attachments.reports(name)
            ] or None
        elif kind.is_ragged:
            if (values := attachments.ragged_entries(name, turn.length)) is not None:
                columns[name] = [each.tolist() for each in values]
        elif (entries := attachments.entries(name, turn.length)) is not None:
            columns[name] = entries.tobytes() if _is_binary(kind) else entries.ravel().tolist()
    return columns


def _span_row(span: VersionSpan) -> dict[str, Any]:
    kv = span.kv
    return {
        "version": span.version,
        "start": span.start,
        "end": span.end,
        "engine": span.engine,
        "kv_oldest": kv.oldest if kv else None,
        "kv_newest": kv.newest if kv else None,
    }


def to_record_batch(snapshots: list[RolloutSnapshot]) -> pa.RecordBatch:
    """Convert rollouts into an Arrow record batch."""

    def column(name: str) -> list[Any]:
        values = [getattr(snapshot, name) for snapshot in snapshots]
        if name == "task":
            return [to_json(value).decode() for value in values]
        if name in ("token_ids", "logprobs"):
            # As numpy views: pyarrow copies the buffer instead of boxing each token.
            return [np.frombuffer(value, dtype=value.typecode) for value in values]
        return values

    arrays = [pa.array(column(field.name), type=field.type) for field in SCHEMA]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def read_trajectories(directory: Path) -> Iterator[RecordedRollout]:
    """Yield the rollouts that a run recorded, in the order in which they ended.

    Covers all processes of a resumed run. A rollout that was recorded again after a resume, because
    the checkpoint did not include it, is yielded once, as recorded last.

    Raises:
        AuditError: nothing was recorded, a file is damaged, or its columns differ.
    """
    for batch in recorded_batches(directory):
        yield from _rollouts_of(batch)


def read_trajectories_of_one(directory: Path) -> Iterator[RecordedRollout]:
    """Yield what one process of a run recorded; raises like :func:`read_trajectories`."""
    for batch in _batches_of_one(directory):
        yield from _rollouts_of(batch)


def recorded_batches(
    directory: Path, columns: Sequence[str] | None = None, *, rows_per_batch: int = ROWS_PER_READ
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of :func:`read_trajectories` as Arrow record batches.

    ``columns`` selects columns, all if None; it must include ``rollout_id``.
    """
    parts = _parts(Path(directory))
    superseded = [_ids(part) for part in parts[1:]]
    for number, part in enumerate(parts):
        later: set[int] = set().union(*superseded[number:])
        for batch in _batches_of_one(part, columns, rows_per_batch):
            if later:
                ids = batch.column("rollout_id").to_pylist()
                batch = batch.filter(pa.array([each not in later for each in ids]))
            if batch.num_rows:
                yield batch


def find_trajectory(directory: Path, rollout_id: int) -> RecordedRollout | None:
    """Return the rollout with this id, as recorded last; None if there is none.

    Raises like :func:`read_trajectories`.
    """
    for part in reversed(_parts(Path(directory))):
        for batch in _batches_of_one(part, row_groups_with=rollout_id):
            ids = batch.column("rollout_id").to_pylist()
            if rollout_id in ids:
                (found,) = _rollouts_of(batch.slice(ids.index(rollout_id), 1))
                return found
    return None


def trajectories_where(directory: Path, column: str, value: int) -> list[RecordedRollout]:
    """Return the rollouts whose ``column`` has this value, such as those of one group.

    Raises like :func:`read_trajectories`.
    """
    found: list[RecordedRollout] = []
    for batch in recorded_batches(directory):
        found += _rollouts_of(batch.filter(pc.equal(batch.column(column), value)))
    return found


def count_trajectories(directory: Path) -> int:
    """Count the rows that one process recorded; raises like :func:`read_trajectories`."""
    return sum(batch.num_rows for batch in _batches_of_one(Path(directory), ["rollout_id"]))


def _parts(directory: Path) -> list[Path]:
    """Return the directories of the first process, and of later ones that recorded rollouts."""
    first, *later = process_directories(directory)
    recorded = [d for d in later if (d / TRAJECTORIES_FILE).exists() or (d / STREAM_FILE).exists()]
    is_killed_first = recorded and not (first / TRAJECTORIES_FILE).exists()
    return (
        recorded if is_killed_first and not (first / STREAM_FILE).exists() else [first, *recorded]
    )


def _ids(part: Path) -> set[int]:
    batches = _batches_of_one(part, ["rollout_id"])
    return {each for batch in batches for each in batch.column("rollout_id").to_pylist()}


def _batches_of_one(
    directory: Path,
    columns: Sequence[str] | None = None,
    rows_per_batch: int = ROWS_PER_READ,
    *,
    row_groups_with: int | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield what one process recorded, from its Parquet file, or else from its stream.

    ``row_groups_with``: skip Parquet row groups without this ``rollout_id``.
    """
    path, stream = Path(directory) / TRAJECTORIES_FILE, Path(directory) / STREAM_FILE
    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        if stream.exists():
            yield from _batches_of_stream(stream, columns)
            return
        if isinstance(error, FileNotFoundError):
            why = "is missing; give the directory of a recorded run"
            raise AuditError(f"{path} {why}") from None
        raise AuditError(
            f"{path} can't be read ({error}); it is damaged, or unfinished because the process was "
            f"killed, and there is no {STREAM_FILE} beside it"
        ) from error
    with file:
        _refuse_other_columns(path, file.schema_arrow)
        groups = list(range(file.num_row_groups))
        try:
            if row_groups_with is not None:
                groups = [
                    number
                    for number in groups
                    if row_groups_with
                    in file.read_row_group(number, columns=["rollout_id"]).column(0).to_pylist()
                ]
            for batch in file.iter_batches(
                batch_size=rows_per_batch, row_groups=groups, columns=columns
            ):
                _refuse_damaged(path, batch)
                yield batch
        except (pa.ArrowException, OSError) as error:
            raise AuditError(f"{path} can't be read: {error}") from error


def _batches_of_stream(path: Path, columns: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
    """Yield a stream's complete record batches; a crash may have truncated the last one."""
    try:
        with path.open("rb") as file, pa.ipc.open_stream(file) as reader:
            _refuse_other_columns(path, reader.schema)
            for batch in reader:
                _refuse_damaged(path, batch)
                yield batch if columns is None else batch.select(list(columns))
    except pa.ArrowException:
        return
    except OSError as error:
        if error.errno is not None:
            raise AuditError(f"{path} can't be read: {error}") from error
        return  # Arrow's own OSError, without a number: the file ends within a record batch


def _refuse_damaged(path: Path, batch: pa.RecordBatch) -> None:
    """Check offsets and texts of a batch, because Arrow follows wrong ones out of its memory."""
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid as error:
        raise AuditError(f"{path} is damaged: {error}") from None


def _refuse_other_columns(path: Path, schema: pa.Schema) -> None:
    if schema.equals(SCHEMA):
        return
    try:
        differing = sorted(set(schema.names) ^ set(SCHEMA.names))
    except UnicodeDecodeError as error:
        raise AuditError(f"{path} is damaged: {error}") from None
    raise AuditError(
        f"{path} has other columns than this version of Tidegate writes "
        f"({', '.join(differing) or 'of other types'}); "
        "read it with the version that recorded it"
    )


def as_recorded(taken: RolloutSnapshot) -> RecordedRollout:
    """Convert a snapshot into the row that would be read back after recording it."""
    row = {field.name: getattr(taken, field.name) for field in fields(taken)}
    row |= {
        "task": to_json(taken.task).decode(),
        "token_ids": taken.token_ids.tolist(),
        "logprobs": taken.logprobs.tolist(),
        "turns": [dict(turn) for turn in taken.turns],
    }
    return _rollout_of(row)


def _rollouts_of(batch: pa.RecordBatch) -> Iterator[RecordedRollout]:
    """Yield the rows as rollouts.

    Raises:
        AuditError: a row has no value where each has one, so the file is damaged.
    """
    for row in batch.to_pylist():
        try:
            rollout = _rollout_of(row)
        except (AttributeError, TypeError, ValueError) as error:
            raise AuditError(
                f"a recorded rollout can't be read, its file is damaged: {error}"
            ) from error
        yield rollout


def _rollout_of(row: dict[str, Any]) -> RecordedRollout:
    turns = tuple(_turn_of(turn) for turn in row.pop("turns") or [])
    return RecordedRollout(**row, turns=turns)


def _turn_of(row: dict[str, Any]) -> RecordedTurn:
    spans = tuple(_span_of(span) for span in row.pop("spans") or [])
    prefills = tuple(
        TurnPrefill(p["at"], tuple(KvSpan(**span) for span in p["spans"]))
        for p in row.pop("prefills") or []
    )
    text = row.pop("options")
    try:
        options = None
        if text is not None:
            options = SamplingParams.from_record(msgspec.json.decode(text, type=dict[str, Any]))
    except msgspec.DecodeError as error:
        raise AuditError(
            f"a turn's recorded sampling options are no JSON ({error}); the file was changed, or "
            "is damaged"
        ) from None
    attachments: dict[str, Any] = {}
    for name, kind in ATTACHMENTS.items():
        if (found := row.pop(name, None)) is not None:
            is_report = kind.axis == "position"
            attachments[name] = tuple(map(_report_of, found)) if is_report else found
    return RecordedTurn(
        **row, options=options, spans=spans, prefills=prefills, attachments=attachments
    )


def _report_of(row: dict[str, Any]) -> PositionReport:
    values = np.frombuffer(row["values"], row["dtype"])
    return PositionReport(row["start"], values.reshape(row["shape"]))


def _span_of(row: dict[str, Any]) -> VersionSpan:
    oldest, newest = row["kv_oldest"], row["kv_newest"]
    kv = None if oldest is None or newest is None else KvRange(oldest, newest)
    return VersionSpan(row["version"], row["start"], row["end"], row["engine"], kv)
