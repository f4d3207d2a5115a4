"""What does a finished run look like to a dashboard? As its files say; nothing in them changes.

Reads what the recorder wrote and answers as a run that goes on would. Rollouts' tokens stay on disk
until one of them is looked at.
"""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from tokenizers import Tokenizer

from tidegate.errors import AuditError, ModelError
from tidegate.orchestrator.observing.earlier import lines_of_figures
from tidegate.orchestrator.observing.live import Noted
from tidegate.orchestrator.observing.observation import Observation, RolloutLine, short
from tidegate.orchestrator.observing.off_policy import OffPolicy, off_policy_of
from tidegate.orchestrator.observing.source import LISTED_MAX, RolloutQuery
from tidegate.orchestrator.observing.timeline import timeline_of
from tidegate.orchestrator.records.recording import RUN_FILE
from tidegate.orchestrator.records.run_files import METRICS_FILE
from tidegate.orchestrator.records.trace import TRACE_FILE, TRAINER_TRACK, read_trace
from tidegate.orchestrator.records.trajectories import (
    SCHEMA,
    TRAJECTORIES_FILE,
    RecordedRollout,
    find_trajectory,
)
from tidegate.orchestrator.statistics import LedgerSnapshot, RunStatistics
from tidegate.orchestrator.weights.model_files import read_tokenizer

ROLLOUTS_READ_MAX = 200_000
"""The first ones; a line of each is held in memory, 400 bytes."""

ROWS_PER_READ = 2_048


class _RunFile(msgspec.Struct):
    """What of run.json is shown."""

    settings: dict[str, Any]
    model: str
    packages: dict[str, str]
    statistics: RunStatistics | None
    extra: dict[str, Any]


class RecordedSource:
    """A run that has ended, or was killed: then there are no statistics, and no rollouts."""

    is_live = False

    def __init__(self, directory: Path) -> None:
        """Raises AuditError if there is no run there, or its files can't be read."""
        self._directory = Path(directory)
        run = _read_run(self._directory / RUN_FILE)
        self._lines, lags = _read_lines(self._directory / TRAJECTORIES_FILE)
        self.tokenizer: Tokenizer | None = None
        """None if the model has moved: tokens are shown by number then."""
        with contextlib.suppress(ModelError):
            self.tokenizer = read_tokenizer(Path(run.model) / "tokenizer.json")
        self._seen = Observation(
            statistics=run.statistics or _no_statistics(),
            noted=_noted(self._directory, lags),
            about={
                "name": self._directory.resolve().name,
                "model": run.model,
                "is_live": False,
                "is_whole": run.statistics is not None,
                "settings": {**run.settings, **run.extra},
            },
            is_over=True,
        )

    def observe(self, *, is_update: bool = False) -> Observation:
        """As :meth:`Source.observe`; it is always the same."""
        return self._seen

    def rollouts(self, query: RolloutQuery) -> tuple[list[RolloutLine], int]:
        """As :meth:`Source.rollouts`, in the order in which they ended."""
        found = [
            line
            for line in self._lines
            if query.state in ("", line.state)
            and query.group_id in (None, line.group_id)
            and not (query.is_mixed and line.oldest_version == line.newest_version)
        ]
        return found[query.skip : query.skip + LISTED_MAX], len(found)

    def rollout(self, rollout_id: int) -> RecordedRollout | None:
        """As :meth:`Source.rollout`."""
        return find_trajectory(self._directory, rollout_id) if self._lines else None


def _read_run(path: Path) -> _RunFile:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_RunFile)
    except FileNotFoundError:
        raise AuditError(f"{path} is missing: is this the directory of a recorded run?") from None
    except (OSError, msgspec.MsgspecError) as error:
        raise AuditError(f"{path} can't be read: {error}") from error


def _noted(directory: Path, lags: Mapping[int, int]) -> Noted:
    batches = lines_of_figures(directory / METRICS_FILE)
    noted = Noted(
        batches=tuple(batches),
        token_lags=dict(sorted(lags.items())),
        off_policy=off_policy_of(batches[-1]) if batches else OffPolicy(),
    )
    try:
        trace = read_trace(directory / TRACE_FILE)
    except (OSError, msgspec.MsgspecError, KeyError):
        return noted
    timeline = timeline_of(trace, TRAINER_TRACK)
    seconds: Counter[str] = Counter()
    for each in timeline.trainer:
        seconds[each.kind] += each.ended_us - each.started_us
    return dataclasses.replace(
        noted,
        slices=timeline.slices(),
        slice_us=timeline.slice_us,
        marks=list(timeline.marks),
        trainer=list(timeline.trainer),
        trainer_s={kind: us / 1e6 for kind, us in sorted(seconds.items())},
    )


def _read_lines(path: Path) -> tuple[list[RolloutLine], Counter[int]]:
    lines: list[RolloutLine] = []
    lags: Counter[int] = Counter()
    try:
        with pq.ParquetFile(path) as file:
            if not file.schema_arrow.equals(SCHEMA):
                raise AuditError(f"{path} has other columns than this version of Tidegate writes")
            for batch in file.iter_batches(batch_size=ROWS_PER_READ):
                if len(lines) < ROLLOUTS_READ_MAX:
                    _add_lines(batch, lines, lags)
    except (pa.ArrowInvalid, OSError):
        pass  # the run was killed: its file has no end, and its rollouts can't be read
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
                task=short(row["task"]),
            )
        )


def _no_statistics() -> RunStatistics:
    return RunStatistics(
        wall_s=0.0,
        trainer_version=0,
        live_version=0,
        capacity_groups=0,
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
