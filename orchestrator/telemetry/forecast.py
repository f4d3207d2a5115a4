"""Forecast of a run's staleness, and the measured figures of its diagnosis.

The trainer's handle adds each batch, and :class:`RunStatistics` shows the forecast. Staleness
follows from the lengths of groups by the closed forms of ``policies/predictions.py``; what limits
the run is decided by ``policies/bottlenecks.py``. A resumed run starts again without data.
"""

import bisect
import itertools
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tidegate.orchestrator.core.ledger import LedgerSnapshot
from tidegate.orchestrator.telemetry.rows import RowsOfRollouts
from tidegate.orchestrator.telemetry.statistics import EngineStatistics, RunForecast
from tidegate.orchestrator.telemetry.timekeeping import Usage
from tidegate.policies import predictions
from tidegate.policies.bottlenecks import RunFigures, diagnose
from tidegate.policies.consumption import Window
from tidegate.policies.staleness import StalenessPolicy

BUCKETS_PER_DOUBLING = 4
"""Resolution of the length histogram: 120 buckets reach 2^30 tokens."""


class GroupLengths:
    """Histogram of the groups' longest rollouts, in tokens."""

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()
        self.rollouts = 0
        self.groups = 0
        self.tokens = 0
        self._longest_tokens = 0
        """Sum of the tokens of each group's longest rollout."""
        self._most_tokens = 0

    def add(self, tokens: npt.NDArray[np.int64], group_ids: npt.NDArray[np.int64]) -> None:
        """Add sampled tokens and group of each ended rollout; rollouts of a group are adjacent.

        Both [R]; in numpy, because thousands of rollouts end per second.
        """
        begins = np.flatnonzero(np.diff(group_ids, prepend=-1))
        longest = np.maximum.reduceat(tokens, begins)
        self.groups += len(begins)
        self.rollouts += len(tokens)
        self.tokens += int(tokens.sum())
        self._longest_tokens += int(longest.sum())
        self._most_tokens = max(self._most_tokens, int(longest.max()))
        buckets = (BUCKETS_PER_DOUBLING * np.log2(np.maximum(1, longest))).astype(np.int64)
        self._buckets.update(buckets.tolist())

    @property
    def tail_factor(self) -> float:
        """As :func:`tidegate.policies.predictions.tail_factor`, over all groups so far."""
        if not self.tokens:
            return 1.0
        return (self._longest_tokens / self.groups) / (self.tokens / self.rollouts)

    def staleness_in_order(
        self, versions_per_token: float, *, groups_per_batch: int, window_groups: int | None
    ) -> float:
        """As :func:`tidegate.policies.predictions.staleness_in_order`, with these lengths."""
        most = self._most_tokens
        kept = sorted(self._buckets)
        ends = [min(most, 2 ** ((bucket + 1) / BUCKETS_PER_DOUBLING)) for bucket in kept]
        starts = [min(most, 2 ** (bucket / BUCKETS_PER_DOUBLING)) for bucket in kept]
        before = [0, *itertools.accumulate(self._buckets[bucket] for bucket in kept)]

        def share_done(versions: float) -> float:
            tokens = versions / versions_per_token
            at = bisect.bisect_right(ends, tokens)
            if at == len(ends):
                return 1.0
            part = max(0.0, tokens - starts[at]) / max(1e-9, ends[at] - starts[at])
            return (before[at] + part * (before[at + 1] - before[at])) / self.groups

        return predictions.staleness_in_order(
            share_done,
            most * versions_per_token,
            groups_per_batch=groups_per_batch,
            window_groups=window_groups,
        )


RECENT_BATCHES = 64
"""Batches that the measured times cover, so that they follow a run whose lengths change."""

RECENT_GROUPS = 512
"""Groups whose durations are kept: their extremes decide in order of admission."""

FULL_STEPS_MIN = 50
"""Steps with waiting turns that suffice to measure the engines' throughput in them."""


COUNTERS = (
    "steps",
    "rows",
    "rows_squared",
    "busy_s",
    "rows_busy_s",
    "full_steps",
    "full_rows",
    "full_busy_s",
    "waiting_turns_s",
    "tokens",
)
"""Counters of engines that the forecast adds up."""


class BatchMark(NamedTuple):
    """The run when the trainer got a batch, and the batch's size."""

    usage: Usage
    tokens: int
    rollouts: int
    groups: int
    rollouts_s: float
    """Seconds that the batch's rollouts took, from begin to end; nan if unknown."""
    counted: Mapping[str, float]
    """Sums of the engines' :data:`COUNTERS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTotals:
    """Figures of the run so far that the forecast needs beside batches."""

    ledger: LedgerSnapshot
    outstanding_groups_max: int | None = None
    window_groups: int | None = 1
    """Number of groups, from the oldest unfinished one on, that consumption may choose from; 1 for
    the order of admission, None for the order of completion."""
    waits_for_stragglers: bool = True
    """As :attr:`~tidegate.policies.bottlenecks.RunFigures.waits_for_stragglers`."""
    eager_versions: int | None = None
    """Number of versions before admission is just in time; None: it never is."""
    activity_s: float = 0.0
    """Seconds of all episodes in named activities."""
    publish_s: float = 0.0
    """Mean seconds of a publish."""
    queue_staleness: float = 0.0
    """Mean staleness that arose in the queue, in versions."""
    prefilled_tokens: int = 0
    """Context tokens computed, not taken from a cache."""


class Forecaster:
    """Collects each batch that the trainer gets, and computes the forecast."""

    def __init__(self) -> None:
        self._lengths = GroupLengths()
        self._batches = 0
        self._trained = 0
        """Number of trained rollouts so far."""
        self._staleness = 0
        """Sum of the trained rollouts' staleness, in versions."""
        self._versions = (0, 0)
        """Trainer's version at the first and at the last batch."""
        self._recent: deque[BatchMark] = deque(maxlen=RECENT_BATCHES + 1)
        self._groups: deque[tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]] = deque()
        """Of each batch with recent groups: tokens and seconds of each rollout ([2, rollouts]), and
        rollouts of each group."""
        self._timed = (0, 0.0)
        """Number of rollouts so far whose seconds are known, and their sum."""
        self._engines: tuple[EngineStatistics, ...] = ()
        """Engines at the last batch, because they are gone when a run has ended."""
        self._alike = 0
        """Number of the last batches at which these processes were the engines."""
        self._known: tuple[int, RunForecast | None] = (0, None)
        """Number of batches, and the forecast after them."""

    def add_batch(
        self,
        tokens: npt.NDArray[np.int64],
        group_ids: npt.NDArray[np.int64],
        staleness: npt.NDArray[np.int64],
        rollout_ids: npt.NDArray[np.int64],
        *,
        began_s: npt.NDArray[np.float64],
        ended_s: npt.NDArray[np.float64],
        trainer_version: int,
        usage: Usage,
        engines: Sequence[EngineStatistics],
    ) -> None:
        """Add a batch that the trainer has; ``engines`` as they are now.

        ``tokens`` (sampled ones), ``group_ids``, ``staleness``, ``rollout_ids``, and when the
        episode began and ended (nan if unknown): [R], one value per row; rows of a group are
        adjacent.
        """
        rows = RowsOfRollouts(rollout_ids)
        tokens, staleness = rows.added(tokens), rows.highest(staleness)
        group_ids = rows.first(group_ids)
        began_s, ended_s = rows.first(began_s), rows.first(ended_s)
        if not self._batches:
            self._versions = (trainer_version, trainer_version)
        self._versions = (self._versions[0], trainer_version)
        steps = {engine.name: engine.steps for engine in self._engines}
        is_same = steps.keys() == {engine.name for engine in engines} and all(
            engine.steps >= steps[engine.name] for engine in engines
        )
        self._alike = self._alike + 1 if is_same else 1
        self._engines = tuple(engines)
        self._batches += 1
        self._lengths.add(tokens, group_ids)
        self._trained += len(staleness)
        self._staleness += int(staleness.sum())
        begins = np.flatnonzero(np.diff(group_ids, prepend=group_ids[0] - 1))
        seconds = ended_s - began_s  # nan: a resumed run knows no old begins
        size = int(tokens.sum()), len(tokens), len(begins)
        counted = _counted(engines)
        self._recent.append(BatchMark(usage, *size, float(seconds.sum()), counted))
        is_known = ~np.logical_or.reduceat(np.isnan(seconds), begins)
        sizes = np.diff(begins, append=len(seconds))
        rollouts = np.stack([tokens, seconds])[:, np.repeat(is_known, sizes)]
        self._groups.append((rollouts, sizes[is_known]))
        while (
            sum(len(sizes) for _, sizes in self._groups) - len(self._groups[0][1]) >= RECENT_GROUPS
        ):
            self._groups.popleft()
        count, total_s = self._timed
        self._timed = (count + rollouts.shape[1], total_s + float(rollouts[1].sum()))

    def forecast(self, totals: RunTotals) -> RunForecast | None:
        """Return the forecast after the last batch; None before two batches, without steps of any
        engine, or if no rollout took time or has tokens."""
        if self._known[0] != self._batches:
            self._known = (self._batches, self._forecast(totals))
        return self._known[1]

    def _forecast(self, totals: RunTotals) -> RunForecast | None:
        run = self._measured(totals)
        if run is None:
            return None
        rho = predictions.throughput_ratio(
            rollout_batch_s=run.work_s, trainer_batch_s=run.trainer_s
        )
        in_flight = self._in_flight(rho, totals.window_groups)
        diagnosis = diagnose(run)
        return RunForecast(
            throughput_ratio=rho,
            tail_factor=self._lengths.tail_factor,
            predicted_staleness=predictions.mean_staleness_so_far(
                allowed=run.max_staleness,
                free=in_flight + predictions.staleness_from_queue(rho=rho),
                rho=rho,
                first_version=self._versions[0],
                last_version=self._versions[1],
                eager_versions=totals.eager_versions,
            ),
            measured_staleness=run.staleness,
            max_useful_staleness=diagnosis.max_useful_staleness,
            batch_interval_s=run.batch_s,
            attainable_batch_interval_s=min(run.batch_s, max(run.work_s, run.trainer_s)),
            limit=diagnosis.limit,
            changes=diagnosis.changes,
            advice=str(diagnosis),
        )

    @property
    def _groups_per_version(self) -> float:
        first, last = self._versions
        return self._lengths.groups / (last - first + 1)

    def measure_last(self, batches: int, totals: RunTotals) -> RunFigures | None:
        """Return the figures of the last batches alone, all with the present engines; None if
        fewer were, or if too little is known of them."""
        return self._measured(totals, batches) if self._alike > batches else None

    def _measured(self, totals: RunTotals, last_only: int | None = None) -> RunFigures | None:
        """Measure the recent batches, without the time before the first of them; engines and
        rollouts are measured since they began, or of ``last_only`` batches alone."""
        engines, recent = self._engines, list(self._recent)
        if last_only is not None:
            recent = recent[-last_only - 1 :]
        if len(recent) < 2 or not self._lengths.tokens:
            return None
        first, last, batches = recent[0].usage, recent[-1].usage, len(recent) - 1
        wall_s = last.wall_s - first.wall_s
        load = EngineLoad(engines, recent[0].counted if last_only is not None else {})
        tokens = [mark.tokens for mark in recent[1:]]
        timed, timed_s = self._timed
        if last_only is not None:
            timed = sum(mark.rollouts for mark in recent[1:])
            timed_s = sum(mark.rollouts_s for mark in recent[1:])
        # Rollouts that a resumed run replays may take less than the clock can tell.
        if wall_s <= 0 or not (load.full_tokens_per_s and timed_s > 0 and sum(tokens)):
            return None
        mean_tokens = sum(tokens) / batches
        rollouts = max(1.0, load.tokens * self._lengths.rollouts / self._lengths.tokens)
        idle_s = last.engine_idle_share * last.wall_s - first.engine_idle_share * first.wall_s
        activity_s = totals.activity_s / rollouts
        if last_only is not None:
            idle_s = wall_s - load.busy_s / len(engines)  # of these engines alone
            activity_s = totals.activity_s / max(1, self._lengths.rollouts)
        allowed = None
        if totals.outstanding_groups_max is not None:
            allowed = predictions.allowed_staleness(
                outstanding_groups_max=totals.outstanding_groups_max,
                groups_per_version=self._groups_per_version,
            )
        rollout_s = timed_s / timed
        decode_s, queue_s = load.decode_s / rollouts, load.waiting_s / rollouts
        trainer_s = max(0.0, (last.trainer_busy_s - first.trainer_busy_s) / batches)
        return RunFigures(
            batch_s=wall_s / batches,
            trainer_s=trainer_s,
            publish_s=min(trainer_s, totals.publish_s),
            engines=len(engines),
            engine_idle_share=max(0.0, idle_s / wall_s),
            full_share=load.full_share,
            work_s=mean_tokens * _made_per_kept(totals.ledger) / load.full_tokens_per_s,
            slots=load.slots,
            full_rows=load.full_rows,
            rows=load.rows,
            cost=load.cost,
            rollout_s=rollout_s,
            decode_s=decode_s,
            queue_s=queue_s,
            activity_s=activity_s,
            group_s=self._group_s(decode_s, max(0.0, rollout_s - decode_s - queue_s)),
            groups_per_batch=max(1, round(sum(mark.groups for mark in recent[1:]) / batches)),
            waits_for_stragglers=totals.waits_for_stragglers,
            work_shares=[each / mean_tokens for each in tokens],
            max_staleness=allowed,
            staleness=self._staleness / max(1, self._trained),
            queue_staleness=totals.queue_staleness,
            prefilled_per_sampled=totals.prefilled_tokens / max(1, load.tokens),
        )

    def _group_s(self, decode_s: float, other_s: float) -> list[float]:
        """Return the seconds of the longest rollout of recent groups without time in engines'
        queues, in ascending order.

        Rollouts decode in proportion to their tokens. Of the rest of its time, each lost the same
        in queues, because what is long in tools is not long in queues; what is left has the mean
        ``other_s``.
        """
        sizes = np.concatenate([sizes for _, sizes in self._groups])[-RECENT_GROUPS:]
        rollouts = np.concatenate([rollouts for rollouts, _ in self._groups], axis=1)
        tokens, seconds = rollouts[:, -int(sizes.sum()) :]
        decode = tokens * (decode_s * self._lengths.rollouts / self._lengths.tokens)
        rest = np.maximum(0.0, seconds - decode)
        other = np.maximum(0.0, rest - max(0.0, rest.mean() - other_s))
        if other.any():
            other *= other_s / other.mean()
        begins = np.cumsum([0, *sizes[:-1]])
        longest: list[float] = np.sort(np.maximum.reduceat(decode + other, begins)).tolist()
        return longest

    def _in_flight(self, rho: float, window_groups: int | None) -> float:
        lengths, slots = self._lengths, sum(e.max_running_turns for e in self._engines)
        groups = self._groups_per_version
        rollouts_per_version = groups * lengths.rollouts / lengths.groups
        if window_groups is None:
            return predictions.staleness_from_generation(
                slots=slots,
                tail_factor=lengths.tail_factor,
                rollouts_per_batch=rollouts_per_version,
                rho=rho,
            )
        mean_tokens = lengths.tokens / lengths.rollouts
        per_token = slots / (rollouts_per_version * mean_tokens * max(1.0, rho))
        return lengths.staleness_in_order(
            per_token, groups_per_batch=max(1, round(groups)), window_groups=window_groups
        )


def window_groups(policy: StalenessPolicy) -> int | None:
    """Return the number of groups, from the oldest unfinished one on, that a policy may choose
    from; None for completion order."""
    order = getattr(policy, "consumption_order", "completion")
    if isinstance(order, Window):
        return order.groups
    return 1 if order == "admission" else None


def waits_for_stragglers(policy: StalenessPolicy) -> bool:
    """Return whether a batch waits for running groups that would become too old: in any order, if
    all that are outstanding must be trained within the bound, and none is masked or dropped."""
    bound = policy.guaranteed_bound
    if bound is None or getattr(policy, "deadline_policy", "wait") != "wait":
        return False
    most = (bound + 1) * policy.batches_per_version * policy.groups_per_batch
    return policy.allowed_groups <= most


def _made_per_kept(ledger: LedgerSnapshot) -> float:
    """Return the tokens sampled per token not discarded, without the tokens of rollouts that the
    run's end discarded."""
    cut_off = ledger.discarded.get("run_ended", 0)
    discarded = ledger.discarded_total - cut_off
    return 1 + discarded / max(1, ledger.generated - cut_off - discarded)


def _counted(engines: Iterable[EngineStatistics]) -> dict[str, float]:
    """Return the sums of engines' counters."""
    living = [engine for engine in engines if engine.is_alive]
    return {name: float(sum(getattr(engine, name) for engine in living)) for name in COUNTERS}


class EngineLoad:
    """Work of all living engines together, in figures of one engine."""

    def __init__(self, engines: Sequence[EngineStatistics], before: Mapping[str, float]) -> None:
        """``before``: sums of the engines' counters that do not count here; empty for none."""
        living = [engine for engine in engines if engine.is_alive and engine.steps]
        counted = _counted(living)

        def total(name: str) -> float:
            return counted[name] - before.get(name, 0.0)

        steps, rows, self.busy_s = total("steps"), total("rows"), total("busy_s")
        busy_s, self.tokens = self.busy_s, total("tokens")
        self.decode_s, self.waiting_s = total("rows_busy_s"), total("waiting_turns_s")
        self.full_tokens_per_s: float | None = None
        """Sampled tokens per second of all engines while turns wait; None without steps."""
        cost = predictions.fit_decode_cost(
            steps=steps,
            rows=rows,
            rows_squared=total("rows_squared"),
            busy_s=busy_s,
            rows_busy_s=self.decode_s,
        )
        if cost is None:
            return
        self.cost = cost
        self.slots = round(sum(engine.max_running_turns for engine in living) / len(living))
        self.rows = total("rows_squared") / rows
        self.full_share = total("full_busy_s") / busy_s
        self.full_rows = float(self.slots)
        rows_per_s = cost.rows_per_s(self.slots)
        if total("full_steps") >= FULL_STEPS_MIN and total("full_busy_s"):
            self.full_rows = total("full_rows") / total("full_steps")
            rows_per_s = total("full_rows") / total("full_busy_s")
        self.full_tokens_per_s = len(living) * rows_per_s * self.tokens / rows
