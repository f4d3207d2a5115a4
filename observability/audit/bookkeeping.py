"""Check of a process's bookkeeping columns against the provenance of its tokens.

The audit passes it every row of ``trajectories.parquet``. ``staleness``, ``consumed_version`` and
``state`` follow from data recorded elsewhere: the versions that sampled a row's tokens, the order
of the rows, and each batch's line in ``metrics.jsonl``. A disagreement means that one of them is
wrong. Rows are read by :mod:`trajectories`.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tidegate.observability.audit.replay_plan import Problem
from tidegate.observability.run_directories import (
    RUN_FILE,
    has_ended,
    read_json_lines,
    read_run_file,
)
from tidegate.observability.run_files import METRICS_FILE
from tidegate.observability.trajectories import RecordedRollout

TRAINED_COLUMNS = ("consumed_version", "advantage", "oldest_trainable")
"""Columns that are set in each trained row, and null in every other one."""


class Bookkeeping:
    """Collects disagreements of one process's rows, passed to :meth:`check` in their order."""

    def __init__(self, directory: Path) -> None:
        has_run_file = (directory / RUN_FILE).exists()
        run: dict[str, Any] = read_run_file(directory) if has_run_file else {}
        self._has_ended = has_ended(run)
        statistics = run.get("statistics")
        self._statistics: dict[str, Any] = statistics if isinstance(statistics, dict) else {}
        metrics = directory / METRICS_FILE
        self._batches = read_json_lines(metrics) if metrics.exists() else []
        self._problems: list[Problem] = []
        self._newest_consumed = -1
        self._rollouts: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)
        """Trained rollouts by ``consumed_version``, each as its group and index."""
        self._tokens: Counter[int] = Counter()
        """Number of trained sampled tokens by ``consumed_version``."""

    def check(self, row: RecordedRollout) -> None:
        """Check one row by itself and against the rows before it."""
        messages = self._of_trained(row) if row.state == "trained" else _of_untrained(row)
        self._problems += [Problem(row.rollout_id, -1, message) for message in messages]
        if row.state == "trained" and row.consumed_version is not None:
            self._newest_consumed = max(self._newest_consumed, row.consumed_version)
            self._rollouts[row.consumed_version].add((row.group_id, row.index))
            self._tokens[row.consumed_version] += row.trained_tokens

    def problems(self) -> list[Problem]:
        """Return every disagreement so far, also those between whole batches and metrics.jsonl."""
        return [*self._problems, *(Problem(-1, -1, message) for message in self._of_batches())]

    def _of_trained(self, row: RecordedRollout) -> Iterator[str]:
        for name in TRAINED_COLUMNS:
            if getattr(row, name) is None:
                yield f"its state is 'trained', and its {name} is missing"
        if row.discard_reason is not None:
            yield f"its state is 'trained', with discard_reason={row.discard_reason!r}"
        consumed, newest = row.consumed_version, row.newest_version
        if consumed is None:
            return
        if newest is not None and consumed < newest:
            yield f"consumed_version={consumed} is before v{newest}, which sampled tokens of it"
        if consumed < self._newest_consumed:
            yield (
                f"consumed_version={consumed} follows a row with {self._newest_consumed}, though "
                f"rows are recorded as they are handed over"
            )
        oldest = row.oldest_trained_version
        computed = None if oldest is None else consumed - oldest
        if row.staleness != computed:
            yield (
                f"staleness={row.staleness}, but its oldest trained token is of "
                f"{'no version' if oldest is None else f'v{oldest}'} and it was consumed at "
                f"v{consumed}, which makes {computed}"
            )
        oldest_trainable, bound = row.oldest_trainable, self._statistics.get("staleness_bound")
        if oldest_trainable and isinstance(bound, int) and oldest_trainable != consumed - bound:
            yield (
                f"oldest_trainable={oldest_trainable}, but at v{consumed} a bound of {bound} masks "
                f"tokens before v{consumed - bound}"
            )

    def _of_batches(self) -> Iterator[str]:
        """Compare the rows with ``metrics.jsonl``, version by version."""
        batch_rows = [line for line in self._batches if {"version", "rollouts"} <= line.keys()]
        if not batch_rows:
            if self._has_ended and self._statistics.get("batches") and self._rollouts:
                yield f"{METRICS_FILE} has no batch, and trajectories have trained rows"
            return
        rollouts: Counter[int] = Counter()
        tokens: Counter[int] = Counter()
        for line in batch_rows:
            rollouts[line["version"]] += line["rollouts"]
            tokens[line["version"]] += line.get("sampled_tokens", 0)
        versions = sorted({*rollouts, *self._rollouts})
        for version in versions:
            row_count, row_tokens = len(self._rollouts[version]), self._tokens[version]
            # A process may be killed between a batch's rows and its line.
            if not self._has_ended and version == versions[-1] and row_count >= rollouts[version]:
                continue
            if (row_count, row_tokens) != (rollouts[version], tokens[version]):
                yield (
                    f"trained at v{version}: {rollouts[version]} rollouts with {tokens[version]} "
                    f"tokens by {METRICS_FILE}, {row_count} with {row_tokens} by the rows' state "
                    f"and consumed_version"
                )


def _of_untrained(row: RecordedRollout) -> Iterator[str]:
    if row.state not in ("discarded", "evaluated"):
        yield f"its state is {row.state!r}, which no row that has ended can have"
    if row.state == "discarded" and row.discard_reason is None:
        yield "its state is 'discarded', and it has no discard_reason"
    for name in (*TRAINED_COLUMNS, "staleness"):
        if (value := getattr(row, name)) is not None:
            yield f"its state is {row.state!r}, but it has {name}={value}, as trained rows have"
