"""Check of a process's bookkeeping columns against the provenance of its tokens.

The audit passes it every row of ``trajectories.parquet``. ``staleness``, ``consumed_version`` and
``state`` follow from data recorded elsewhere: the versions that sampled a row's tokens, the order
of the rows, and each batch's line in ``metrics.jsonl``. ``advantage`` follows from the rewards of
the group's rows. A disagreement means that a column or its source is wrong.
"""

import hashlib
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tidegate.observability.audit.replay_plan import Problem
from tidegate.observability.records.run_directories import (
    RUN_FILE,
    has_ended,
    is_part,
    read_json_lines,
    read_run_file,
)
from tidegate.observability.records.run_files import METRICS_FILE
from tidegate.observability.records.trajectories import RecordedRollout

TRAINED_COLUMNS = ("consumed_version", "advantage", "oldest_trainable")
"""Columns that are set in each trained row, and null in every other one."""


STD_EPSILON = 1e-4
"""Added to the standard deviation by which advantages are divided."""

ADVANTAGE_ERROR_MAX = 1e-4
"""Largest difference of two advantages that agree, beside 1e-4 of their size: they are recorded in
float32."""

REWARD_ERROR_MAX = 1e-3
"""Largest difference of two mean rewards that agree, beside 1e-3 of their size."""


@dataclass(frozen=True, slots=True)
class _TrainedRow:
    rollout_id: int
    branch_of: int | None
    reward: float
    advantage: float | None


class Bookkeeping:
    """Checks the states, advantages and ages that one process recorded, row by row."""

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
        self._rewards: defaultdict[int, float] = defaultdict(float)
        """Sum of the rewards of trained rollouts by ``consumed_version``."""
        self._rewards_by_task: defaultdict[bytes, list[tuple[float, ...]]] = defaultdict(list)
        """Rewards of the groups that were trained so far, by the digest of their task."""
        settings = run.get("settings") or {}
        self._lacks_siblings = is_part(directory) and settings.get("deadline_policy") == "split"
        """Whether remainders may be of groups that a process before this one has split, and whose
        rows may be lost."""
        self._group_key: tuple[int, int, bytes] | None = None
        """Group, ``consumed_version`` and task of ``_group``."""
        self._group: list[_TrainedRow] = []
        """Rows of the group that is being read."""

    def check(self, row: RecordedRollout) -> None:
        """Check one row by itself and against the rows before it."""
        messages = self._of_trained(row) if row.state == "trained" else _of_untrained(row)
        self._problems += [Problem(row.rollout_id, -1, message) for message in messages]
        if row.state == "trained" and row.consumed_version is not None:
            self._newest_consumed = max(self._newest_consumed, row.consumed_version)
            rollouts, rollout = self._rollouts[row.consumed_version], (row.group_id, row.index)
            if rollout not in rollouts:
                rollouts.add(rollout)
                self._rewards[row.consumed_version] += row.reward or 0.0
            self._tokens[row.consumed_version] += row.trained_tokens
            self._add_to_group(row, row.consumed_version)

    def problems(self) -> list[Problem]:
        """Return every disagreement, also those between whole batches and metrics.jsonl."""
        if self._has_ended:  # else the process may have been killed between rows of the last group
            self._end_group()
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

    def _add_to_group(self, row: RecordedRollout, consumed: int) -> None:
        """Add a trained row to its group; the rows of a group follow each other."""
        task = hashlib.blake2b(row.task.encode(), digest_size=16).digest()
        key = row.group_id, consumed, task
        if key != self._group_key or row.rollout_id in [each.rollout_id for each in self._group]:
            self._end_group()  # a batch that was undone is recorded again
            self._group_key, self._group = key, []
        reward = float(np.float32(row.reward or 0.0))  # as in batches
        self._group.append(_TrainedRow(row.rollout_id, row.branch_of, reward, row.advantage))

    def _end_group(self) -> None:
        """Compare the advantages of a group with those that its rewards make."""
        if self._group_key is None:
            return
        group, task = self._group, self._group_key[2]
        self._group_key, self._group = None, []
        parents = {row.rollout_id: row.branch_of for row in group}
        rewards = {row.rollout_id: row.reward for row in group if row.branch_of is None}
        known = tuple(rewards.values())
        earlier = self._rewards_by_task[task]

        def wrong_rows(first: Sequence[float] = ()) -> Iterator[tuple[_TrainedRow, float]]:
            """Yield each row whose advantage is not the expected one, and the expected one.

            ``first``: rewards that were trained first of the group, if this is its remainder.
            """
            for row in group:
                root = row.rollout_id
                for _ in group:
                    root = parents.get(root) or root
                if row.advantage is None or root not in rewards:
                    continue  # a missing advantage is a problem already
                compared = (*first, rewards[root]) if first else known
                expected = _advantage(rewards[root], first or known, compared)
                # Written so that NaN is wrong.
                if not abs(row.advantage - expected) <= ADVANTAGE_ERROR_MAX * (1 + abs(expected)):
                    yield row, expected

        wrong = next(wrong_rows(), None)
        is_remainder = wrong and any(not any(wrong_rows(first)) for first in earlier)
        earlier.append(known)
        if wrong is None or is_remainder or self._lacks_siblings:
            return
        row, expected = wrong
        message = (
            f"advantage={row.advantage:.6g}, but the rewards of its group's {len(known)} trained "
            f"rollouts make {expected:.6g}"
        )
        self._problems.append(Problem(row.rollout_id, -1, message))

    def _of_batches(self) -> Iterator[str]:
        """Compare the rows with ``metrics.jsonl``, version by version."""
        batch_rows = [line for line in self._batches if {"version", "rollouts"} <= line.keys()]
        if not batch_rows:
            if self._has_ended and self._statistics.get("batches") and self._rollouts:
                yield f"{METRICS_FILE} has no batch, and trajectories have trained rows"
            return
        rollouts: Counter[int] = Counter()
        tokens: Counter[int] = Counter()
        rewards: defaultdict[int, float] = defaultdict(float)
        for line in batch_rows:
            rollouts[line["version"]] += line["rollouts"]
            tokens[line["version"]] += line.get("sampled_tokens", 0)
            rewards[line["version"]] += line.get("reward", 0.0) * line["rollouts"]
        versions = sorted({*rollouts, *self._rollouts})
        for version in versions:
            row_count, row_tokens = len(self._rollouts[version]), self._tokens[version]
            # A process may be killed between a batch's rows and its line.
            if not self._has_ended and version == versions[-1] and row_count >= rollouts[version]:
                continue
            if not row_count and not rollouts[version]:
                continue
            if (row_count, row_tokens) != (rollouts[version], tokens[version]):
                yield (
                    f"trained at v{version}: {rollouts[version]} rollouts with {tokens[version]} "
                    f"tokens by {METRICS_FILE}, {row_count} with {row_tokens} by the rows' state "
                    f"and consumed_version"
                )
                continue
            logged, summed = rewards[version] / row_count, self._rewards[version] / row_count
            if not abs(logged - summed) <= REWARD_ERROR_MAX * (1 + abs(logged)):
                yield (
                    f"trained at v{version}: mean reward {logged:.6g} by {METRICS_FILE}, "
                    f"{summed:.6g} by the rows"
                )


def _advantage(reward: float, baseline: Sequence[float], compared: Sequence[float]) -> float:
    """Return ``(reward - mean(baseline)) / (std(compared) + epsilon)``; 0 if all are equal."""
    if not all(map(math.isfinite, compared)):
        return math.nan
    if min(compared) == max(compared):
        return 0.0
    return (reward - statistics.fmean(baseline)) / (statistics.stdev(compared) + STD_EPSILON)


def _of_untrained(row: RecordedRollout) -> Iterator[str]:
    if row.state not in ("discarded", "evaluated"):
        yield f"its state is {row.state!r}, which no row that has ended can have"
    if row.state == "discarded" and row.discard_reason is None:
        yield "its state is 'discarded', and it has no discard_reason"
    for name in (*TRAINED_COLUMNS, "staleness"):
        if (value := getattr(row, name)) is not None:
            yield f"its state is {row.state!r}, but it has {name}={value}, as trained rows have"
