"""How do rollouts look in trajectories.parquet, and how are they read back?

One row per rollout, turns nested inside. Knows the columns and nothing of who writes them when.
"""

import json
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tidegate.errors import AuditError
from tidegate.orchestrator.core.provenance import KvRange, TurnPrefill, VersionSpan
from tidegate.orchestrator.core.rollout import Rollout, Turn
from tidegate.orchestrator.episodes.media_parts import recorded
from tidegate.transport.messages import KvSpan, SamplingParams

TRAJECTORIES_FILE = "trajectories.parquet"

ROWS_PER_READ = 256
"""Rollouts held as Python objects at a time while reading: 30 k tokens each are 0.5 GB."""

IN_COLUMNS = {"max_tokens", "temperature", "top_k", "top_p", "seed", "stop_token_ids"}
"""Of ``SamplingParams``: a turn's own columns, or no matter to the log-probs of its tokens."""

_KV_SPAN = pa.struct([("version", pa.int32()), ("start", pa.int32()), ("end", pa.int32())])
_SPAN = pa.struct(
    [
        *_KV_SPAN,
        ("engine", pa.string()),
        ("kv_oldest", pa.int32()),
        ("kv_newest", pa.int32()),
    ]
)
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
        ("raw_logprobs", pa.list_(pa.float32())),
        ("top_ids", pa.list_(pa.int32())),
        ("top_logprobs", pa.list_(pa.float32())),
        ("reward", pa.float64()),
        ("media", pa.string()),
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
    ]
)
"""Nullable throughout: a discarded rollout has no advantage, an evaluated one no staleness."""


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """One generation call, as recorded."""

    start: int
    """Index in the rollout's context of its first output token."""
    length: int
    finish_reason: str | None
    temperature: float
    top_k: int
    top_p: float
    seed: int
    options: SamplingParams | None
    """All of its sampling, where the four fields above are not all that differs from the default;
    of stop tokens, they don't tell."""
    raw_logprobs: list[float] | None
    """These three as in ``messages.TokenDetails``; None if not asked for."""
    top_ids: list[int] | None
    top_logprobs: list[float] | None
    reward: float | None
    """Its own, beside its rollout's; None: it was given none."""
    spans: tuple[VersionSpan, ...]
    prefills: tuple[TurnPrefill, ...]
    media: str | None = None
    """JSON: what its context was given beside tokens since the turn before. None: nothing."""


@dataclass(frozen=True, slots=True)
class RecordedRollout:
    """One row of trajectories.parquet."""

    rollout_id: int
    group_id: int
    index: int
    task: str
    """JSON."""
    reward: float | None
    advantage: float | None
    state: str
    discard_reason: str | None
    consumed_version: int | None
    staleness: int | None
    token_ids: list[int]
    logprobs: list[float]
    turns: tuple[RecordedTurn, ...]
    branch_of: int | None
    """Of a branch: the ``rollout_id`` of the row that it was forked from."""
    fork_reason: str


@dataclass(slots=True)
class Snapshot:
    """A rollout as it was when it was handed over, copied because the original may live on."""

    rollout_id: int
    group_id: int
    index: int
    task: object
    reward: float | None
    advantage: float | None
    state: str
    discard_reason: str | None
    consumed_version: int | None
    staleness: int | None
    token_ids: "array[int]"
    logprobs: "array[float]"
    turns: list[dict[str, Any]]
    branch_of: int | None
    fork_reason: str


def snapshot(
    rollout: Rollout,
    *,
    task: object,
    advantage: float | None,
    consumed_version: int | None,
) -> Snapshot:
    """Copy what will be recorded of ``rollout``."""
    oldest = rollout.oldest_trained_version
    known = consumed_version is not None and oldest is not None
    return Snapshot(
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
        turns=[_turn_row(turn) for turn in rollout.turns],
        branch_of=None if rollout.branch_of is None else rollout.branch_of.rollout_id,
        fork_reason=rollout.fork_reason,
    )


def _turn_row(turn: Turn) -> dict[str, Any]:
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
        "options": _options_text(sampling),
        **_details_row(turn),
        "reward": turn.reward,
        "media": to_json([recorded(each) for each in turn.media]).decode() if turn.media else None,
    }


def _options_text(sampling: SamplingParams) -> str | None:
    """Only what differs from the default is written: what the columns tell leaves nothing over."""
    if not msgspec.to_builtins(sampling).keys() - IN_COLUMNS:
        return None
    return msgspec.json.encode(sampling).decode()


def _details_row(turn: Turn) -> dict[str, Any]:
    columns: dict[str, Any] = dict.fromkeys(("raw_logprobs", "top_ids", "top_logprobs"))
    if turn.details is not None:
        columns |= {name: getattr(turn.details, name)[:] or None for name in columns}
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


def to_record_batch(snapshots: list[Snapshot]) -> pa.RecordBatch:
    """Turn rollouts into columns."""

    def column(name: str) -> list[Any]:
        values = [getattr(snapshot, name) for snapshot in snapshots]
        if name == "task":
            return [to_json(value).decode() for value in values]
        if name in ("token_ids", "logprobs"):
            # As numpy views: pyarrow copies them whole instead of boxing each token.
            return [np.frombuffer(value, dtype=value.typecode) for value in values]
        return values

    arrays = [pa.array(column(field.name), type=field.type) for field in SCHEMA]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def to_json(value: object) -> bytes:
    """Encode anything, falling back to ``str`` for what JSON has no word for."""
    try:
        return msgspec.json.encode(value, enc_hook=_jsonable)
    except (TypeError, ValueError, RecursionError):
        return json.dumps(repr(value)).encode()


def _jsonable(value: object) -> object:
    return dict(value) if isinstance(value, Mapping) else str(value)


def read_trajectories(directory: Path) -> Iterator[RecordedRollout]:
    """Yield the rollouts that a run recorded, in the order in which they ended.

    Raises:
        AuditError: there is no such file, it was cut short, or it has other columns.
    """
    with _opened(Path(directory) / TRAJECTORIES_FILE) as file:
        for batch in file.iter_batches(batch_size=ROWS_PER_READ):
            for row in batch.to_pylist():
                yield _rollout_of(row)


def find_trajectory(directory: Path, rollout_id: int) -> RecordedRollout | None:
    """The rollout of that number; None if there is none. Raises as :func:`read_trajectories`."""
    with _opened(Path(directory) / TRAJECTORIES_FILE) as file:
        for number in range(file.num_row_groups):
            ids = file.read_row_group(number, columns=["rollout_id"]).column(0).to_pylist()
            if rollout_id in ids:
                place = ids.index(rollout_id)
                (row,) = file.read_row_group(number).slice(place, 1).to_pylist()
                return _rollout_of(row)
    return None


def count_trajectories(directory: Path) -> int:
    """How many rollouts a run recorded; raises as :func:`read_trajectories` does."""
    with _opened(Path(directory) / TRAJECTORIES_FILE) as file:
        return int(file.metadata.num_rows)


@contextmanager
def _opened(path: Path) -> Iterator[pq.ParquetFile]:
    try:
        with pq.ParquetFile(path) as file:
            if not file.schema_arrow.equals(SCHEMA):
                raise AuditError(f"{path} has other columns than this version of Tidegate writes")
            yield file
    except FileNotFoundError:
        raise AuditError(f"{path} is missing: is this the directory of a recorded run?") from None
    except (pa.ArrowInvalid, OSError) as error:
        raise AuditError(
            f"{path} can't be read ({error}); a run that was killed leaves it unfinished"
        ) from error


def as_recorded(taken: Snapshot) -> RecordedRollout:
    """What is read back of this once it is recorded."""
    row = {name: getattr(taken, name) for name in Snapshot.__slots__}
    row |= {
        "task": to_json(taken.task).decode(),
        "token_ids": taken.token_ids.tolist(),
        "logprobs": taken.logprobs.tolist(),
        "turns": [dict(turn) for turn in taken.turns],
    }
    return _rollout_of(row)


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
        options = None if text is None else msgspec.json.decode(text, type=SamplingParams)
    except msgspec.DecodeError as error:
        raise AuditError(f"a turn's recorded sampling options can't be read: {error}") from None
    return RecordedTurn(**row, options=options, spans=spans, prefills=prefills)


def _span_of(row: dict[str, Any]) -> VersionSpan:
    oldest, newest = row["kv_oldest"], row["kv_newest"]
    kv = None if oldest is None or newest is None else KvRange(oldest, newest)
    return VersionSpan(row["version"], row["start"], row["end"], row["engine"], kv)
