"""Dashboard source that reads the files of a run that ended, was killed, or was resumed.

One line per rollout is held in memory; the tokens of a rollout are read from disk when a viewer
opens the rollout.
"""

import contextlib
import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from tokenizers import Tokenizer

from tidegate.errors import AuditError, ModelError
from tidegate.observability.dashboard.rollout_queries import RolloutQuery, contains
from tidegate.observability.dashboard.source import LISTED_MAX, RolloutList
from tidegate.observability.metrics.live import CollectedData
from tidegate.observability.metrics.snapshots import (
    AdapterLine,
    RolloutLine,
    RunSnapshot,
    recorded_adapter_line,
    shorten,
)
from tidegate.observability.metrics.timeline import timeline_of
from tidegate.observability.records.evaluations import EvaluationPoint, read_evaluations
from tidegate.observability.records.forks import read_forks
from tidegate.observability.records.run_directories import RUN_FILE, adapter_directories
from tidegate.observability.records.trace import TRAINER_TRACK, Trace, trace_of
from tidegate.observability.records.trajectories import (
    SCHEMA,
    RecordedRollout,
    find_trajectory,
    recorded_batches,
)
from tidegate.observability.reports.explain import explain_from
from tidegate.observability.reports.facts import read_batches, read_record, resumed_batches
from tidegate.observability.reports.story import RunContext, Story, Subject
from tidegate.orchestrator.core.ledger import LedgerSnapshot
from tidegate.orchestrator.episodes.model_files import read_tokenizer
from tidegate.orchestrator.telemetry.off_policy import OffPolicy, off_policy_of
from tidegate.orchestrator.telemetry.statistics import RunStatistics

log = logging.getLogger("tidegate")

ROLLOUTS_READ_MAX = 200_000
"""Number of listed rollouts, about 400 bytes each, after which later ones are omitted. Rows are
added ``ROWS_PER_READ`` at a time, so a few more may be listed."""

ROWS_PER_READ = 2_048

SEARCH_TIMEOUT_S = 10.0
"""Longest search for a text, about 10 million tokens; the rest is not searched."""


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
        self._trace = trace_of(self._directory)
        self._searched: tuple[str, str] | None = None
        self._matches: tuple[set[int], str] = (set(), "")
        self._snapshot = RunSnapshot(
            statistics=run.statistics or _no_statistics(),
            collected=_collected(self._directory, self._trace, lags),
            adapters=_adapters(self._directory),
            about={
                "name": self._directory.resolve().name,
                "model": run.model,
                "directory": str(self._directory),
                "is_live": False,
                "resumed_batches": resumed_batches(self._directory),
                "is_whole": run.is_final and run.statistics is not None,
                "settings": {**run.settings, **run.extra},
            },
            is_over=True,
        )

    @property
    def bound(self) -> int | None:
        """Bound of staleness that the run guaranteed; see :class:`Source`."""
        return self._snapshot.statistics.staleness_bound

    def observe(self, *, is_update: bool = False) -> RunSnapshot:
        """Return the snapshot, which never changes; see :meth:`Source.observe`."""
        return self._snapshot

    def timeline(self, start_us: int, end_us: int) -> CollectedData | None:
        """Return the timeline of a range, with slices short enough to fill it."""
        return None if self._trace is None else _timeline(self._trace, (start_us, end_us))

    def rollouts(self, query: RolloutQuery) -> RolloutList:
        """List rollouts in the order in which they ended; see :meth:`Source.rollouts`."""
        found = [line for line in self._lines if query.matches(line)]
        note = ""
        if query.reads_tokens:
            ids, note = self._search(query.text, query.task)
            found = [line for line in found if line.rollout_id in ids]
        page = query.ordered(found)[query.skip : query.skip + LISTED_MAX]
        return RolloutList(page, len(found), note)

    def _search(self, text: str, task: str) -> tuple[set[int], str]:
        """Return the ids of rollouts with these texts, and a note on rollouts that were not
        searched. The last search is kept, because its pages and orders are asked for one after the
        other."""
        if (text, task) != self._searched:
            self._matches = _search_rollouts(self._directory, self.tokenizer, text, task)
            self._searched = (text, task)
        return self._matches

    def rollout(self, rollout_id: int) -> RecordedRollout | None:
        """Read one rollout from disk; see :meth:`Source.rollout`."""
        return find_trajectory(self._directory, rollout_id) if self._lines else None

    def story(self, subject: Subject) -> Story | None:
        """Return the story from the run's files; see :meth:`Source.story`."""
        about, statistics = self._snapshot.about, self._snapshot.statistics
        settings = about["settings"]
        assert isinstance(settings, dict)
        run = RunContext.of(
            settings,
            bound=statistics.staleness_bound,
            is_resumed=bool(about["resumed_batches"]),
            trace=self._trace,
        )
        try:
            return explain_from(self._directory, subject, run)
        except AuditError:
            return None  # unknown, or in a part of the files that can't be read


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


def _adapters(directory: Path) -> tuple[AdapterLine, ...]:
    """Return a line per trained adapter of the run."""
    lines = []
    for path in adapter_directories(directory):
        statistics = _read_run(path).statistics or _no_statistics()
        rewards = [batch["reward"] for batch in read_batches(path) if "reward" in batch]
        lines.append(
            recorded_adapter_line(unquote(path.name), statistics, rewards[-1] if rewards else None)
        )
    return tuple(lines)


def _collected(directory: Path, trace: Trace | None, lags: Mapping[int, int]) -> CollectedData:
    batches = read_batches(directory)
    return dataclasses.replace(
        CollectedData() if trace is None else _timeline(trace),
        batches=tuple(batches),
        token_lags=dict(sorted(lags.items())),
        off_policy=off_policy_of(batches[-1]) if batches else OffPolicy(),
        forks=read_forks(directory),
        evaluations=_evaluations(directory),
    )


def _evaluations(directory: Path) -> list[EvaluationPoint]:
    try:
        return read_evaluations(directory)
    except AuditError as error:
        log.warning("run=partly_shown why=%r", str(error))
        return []


def _timeline(trace: Trace, range_us: tuple[int, int] | None = None) -> CollectedData:
    timeline = timeline_of(trace, TRAINER_TRACK, range_us)
    seconds: Counter[str] = Counter()
    for each in timeline.trainer:
        seconds[each.kind] += each.ended_us - each.started_us
    return CollectedData(
        slices=timeline.slices(),
        slice_us=timeline.slice_us,
        marks=list(timeline.marks),
        trainer=list(timeline.trainer),
        trainer_activity_s={kind: us / 1e6 for kind, us in sorted(seconds.items())},
    )


def _search_rollouts(
    directory: Path, tokenizer: Tokenizer | None, text: str, task: str
) -> tuple[set[int], str]:
    """Return the ids of recorded rollouts with ``text`` in their context and ``task`` in their
    task, and a note on rollouts that were not searched."""
    if text and tokenizer is None:
        return set(), "the model's tokenizer is gone, so texts can't be searched"
    found: set[int] = set()
    searched, end_s = 0, time.monotonic() + SEARCH_TIMEOUT_S
    try:
        for batch in recorded_batches(directory, ["rollout_id", "task", "token_ids"]):
            if time.monotonic() > end_s:
                return (
                    found,
                    f"searched the first {searched} rollouts, for {SEARCH_TIMEOUT_S:.0f} s",
                )
            searched += batch.num_rows
            found |= _ids_with(batch, tokenizer, text, task)
    except AuditError as error:
        return found, f"searched the first {searched} rollouts: {error}"
    return found, ""


def _ids_with(batch: pa.RecordBatch, tokenizer: Tokenizer | None, text: str, task: str) -> set[int]:
    rows = [row for row in batch.to_pylist() if contains(row["task"], task)]
    if not text or tokenizer is None:
        return {row["rollout_id"] for row in rows}
    texts = tokenizer.decode_batch([row["token_ids"] for row in rows], skip_special_tokens=False)
    return {row["rollout_id"] for row, its in zip(rows, texts, strict=True) if contains(its, text)}


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
                reason=row["discard_reason"] or "",
                fork_reason=row["fork_reason"] or "",
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
