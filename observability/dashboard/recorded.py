"""Dashboard source that reads the files of a run that ended, was killed, or was resumed.

Used by `tidegate dashboard` and `tidegate top`. One line per rollout is held in memory; the tokens
of a rollout are read from disk when a viewer opens the rollout. Built on :mod:`facts`,
:mod:`trajectories` and :mod:`trace`.
"""

import contextlib
import dataclasses
import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from tokenizers import Tokenizer

from tidegate.errors import AuditError, ModelError
from tidegate.observability.dashboard.live import CollectedData
from tidegate.observability.dashboard.snapshots import DashboardSnapshot, RolloutLine, shorten
from tidegate.observability.dashboard.source import LISTED_MAX, RolloutQuery
from tidegate.observability.dashboard.timeline import timeline_of
from tidegate.observability.facts import read_batches, read_record
from tidegate.observability.run_directories import RUN_FILE
from tidegate.observability.trace import TRAINER_TRACK, read_trace, trace_path
from tidegate.observability.trajectories import (
    SCHEMA,
    RecordedRollout,
    find_trajectory,
    recorded_batches,
)
from tidegate.orchestrator.core.ledger import LedgerSnapshot
from tidegate.orchestrator.episodes.model_files import read_tokenizer
from tidegate.orchestrator.telemetry.off_policy import OffPolicy, off_policy_of
from tidegate.orchestrator.telemetry.statistics import RunStatistics

log = logging.getLogger("tidegate")

ROLLOUTS_READ_MAX = 200_000
"""Number of listed rollouts, about 400 bytes each, after which later ones are left out. Rows
are added ``ROWS_PER_READ`` at a time, so a few more may be listed."""

ROWS_PER_READ = 2_048


class _RunFile(msgspec.Struct):
    """The fields of run.json that the dashboard shows."""

    settings: dict[str, Any]
    model: str
    packages: dict[str, str]
    statistics: RunStatistics | None
    is_final: bool
    extra: dict[str, Any]


class RecordedSource:
    """Source of a run that ended or was killed; implements :class:`Source`."""

    is_live = False

    def __init__(self, directory: Path) -> None:
        """Read the run's files.

        Raises:
            AuditError: the directory holds no run, or its files can't be read.
        """
        self._directory = Path(directory)
        run = _read_run(self._directory)
        self._lines, lags = _read_lines(self._directory)
        self.tokenizer: Tokenizer | None = None
        """Tokenizer of the run's model; None if the model's directory has moved, so that tokens are
        shown by id."""
        with contextlib.suppress(ModelError):
            self.tokenizer = read_tokenizer(Path(run.model) / "tokenizer.json")
        self._snapshot = DashboardSnapshot(
            statistics=run.statistics or _no_statistics(),
            collected=_collected(self._directory, lags),
            about={
                "name": self._directory.resolve().name,
                "model": run.model,
                "is_live": False,
                "is_whole": run.is_final and run.statistics is not None,
                "settings": {**run.settings, **run.extra},
            },
            is_over=True,
        )

    def observe(self, *, is_update: bool = False) -> DashboardSnapshot:
        """Return the snapshot, which never changes; see :meth:`Source.observe`."""
        return self._snapshot

    def rollouts(self, query: RolloutQuery) -> tuple[list[RolloutLine], int]:
        """List rollouts in the order in which they ended; see :meth:`Source.rollouts`."""
        found = [
            line
            for line in self._lines
            if query.state in ("", line.state)
            and query.group_id in (None, line.group_id)
            and not (query.is_mixed and line.oldest_version == line.newest_version)
        ]
        return found[query.skip : query.skip + LISTED_MAX], len(found)

    def rollout(self, rollout_id: int) -> RecordedRollout | None:
        """Read one rollout from disk; see :meth:`Source.rollout`."""
        return find_trajectory(self._directory, rollout_id) if self._lines else None


def _read_run(directory: Path) -> _RunFile:
    try:
        # Not strict: in JSON, keys that are numbers are strings.
        return msgspec.convert(read_record(directory), type=_RunFile, strict=False)
    except msgspec.ValidationError as error:
        raise AuditError(
            f"{directory / RUN_FILE} is not what this version of Tidegate writes ({error}): "
            f"the run was recorded by another version, or the file is damaged; show the run with "
            f"the version that recorded it"
        ) from error


def _collected(directory: Path, lags: Mapping[int, int]) -> CollectedData:
    batches = read_batches(directory)
    collected = CollectedData(
        batches=tuple(batches),
        token_lags=dict(sorted(lags.items())),
        off_policy=off_policy_of(batches[-1]) if batches else OffPolicy(),
    )
    try:
        trace = read_trace(trace_path(directory))
    except (OSError, msgspec.MsgspecError, KeyError):
        return collected
    timeline = timeline_of(trace, TRAINER_TRACK)
    seconds: Counter[str] = Counter()
    for each in timeline.trainer:
        seconds[each.kind] += each.ended_us - each.started_us
    return dataclasses.replace(
        collected,
        slices=timeline.slices(),
        slice_us=timeline.slice_us,
        marks=list(timeline.marks),
        trainer=list(timeline.trainer),
        trainer_activity_s={kind: us / 1e6 for kind, us in sorted(seconds.items())},
    )


def _read_lines(directory: Path) -> tuple[list[RolloutLine], Counter[int]]:
    lines: list[RolloutLine] = []
    lags: Counter[int] = Counter()
    columns = [name for name in SCHEMA.names if name != "logprobs"]
    try:
        for batch in recorded_batches(directory, columns, rows_per_batch=ROWS_PER_READ):
            if len(lines) < ROLLOUTS_READ_MAX:
                _add_lines(batch, lines, lags)
    except AuditError as error:
        # For damaged files, or a killed run of an older version, show what is readable.
        log.warning("run=partly_shown why=%r", str(error))
    return lines, lags


def _add_lines(batch: pa.RecordBatch, lines: list[RolloutLine], lags: Counter[int]) -> None:
    tokens = pc.list_value_length(batch.column("token_ids")).to_pylist()
    kept = [name for name in SCHEMA.names if name not in ("token_ids", "logprobs")]
    for row, context_tokens in zip(batch.select(kept).to_pylist(), tokens, strict=True):
        spans = [span for turn in row["turns"] for span in turn["spans"]]
        versions = [span["version"] for span in spans]
        if row["state"] == "trained" and row["consumed_version"] is not None:
            for span in spans:
                lags[row["consumed_version"] - span["version"]] += span["end"] - span["start"]
        lines.append(
            RolloutLine(
                rollout_id=row["rollout_id"],
                group_id=row["group_id"],
                index=row["index"],
                state=row["state"],
                reason=row["discard_reason"] or row["fork_reason"],
                context_tokens=context_tokens,
                turns=len(row["turns"]),
                reward=row["reward"],
                staleness=row["staleness"],
                oldest_version=min(versions, default=None),
                newest_version=max(versions, default=None),
                task=shorten(row["task"]),
            )
        )


def _no_statistics() -> RunStatistics:
    return RunStatistics(
        wall_s=0.0,
        trainer_version=0,
        live_version=0,
        admissible_groups=0,
        running_groups=0,
        buffered_groups=0,
        training_groups=0,
        batches=0,
        trained_rollouts=0,
        mixed_version_rollouts=0,
        discarded_rollouts={},
        max_staleness_seen=0,
        staleness_bound=None,
        mean_staleness=0.0,
        staleness_histogram={},
        trainer_idle_share=0.0,
        engine_idle_share=0.0,
        tokens_per_s=0.0,
        ledger=LedgerSnapshot(),
        evaluation_ledger=LedgerSnapshot(),
    )
