"""Forecast of a run's staleness, bottleneck and gain from another bound, from its measurements.

The trainer's handle adds each batch, and :class:`RunStatistics` shows the forecast, which applies
the closed forms of ``policies/predictions.py`` to the lengths of groups. Times are those of
engines' steps, so minutes that an episode spends in tools do not count. A resumed run starts again
without data.
"""

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tidegate.orchestrator.core.ledger import LedgerSnapshot
from tidegate.orchestrator.telemetry.rows import RowsOfRollouts
from tidegate.orchestrator.telemetry.statistics import EngineStatistics, RunForecast
from tidegate.orchestrator.telemetry.timekeeping import Usage
from tidegate.policies import predictions
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


BUSY_TRAINER_IDLE_MAX = 0.05
"""Idle share below which the trainer is the bottleneck: batches can't come closer together."""

GAIN_MIN = 0.02
"""Smallest gain to advise; smaller ones are within the variation of a run's own figures."""


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """Mean seconds per batch."""

    between_s: float
    """Time from one batch to the next."""
    rollout_s: float
    """Time that a batch takes all engines with all slots busy, discarded tokens included."""
    trainer_s: float
    """Time that a batch takes the trainer, publishing included."""

    @property
    def rho(self) -> float:
        """Throughput of the rollout over that of the trainer."""
        return predictions.throughput_ratio(
            rollout_batch_s=self.rollout_s, trainer_batch_s=self.trainer_s
        )

    @property
    def attainable_s(self) -> float:
        """Time from one batch to the next without avoidable waiting."""
        return min(self.between_s, max(self.rollout_s, self.trainer_s))


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
        self._first = Usage()
        self._last = Usage()
        self._engines: tuple[EngineStatistics, ...] = ()
        """Engines at the last batch, because they are gone when a run has ended."""

    def add_batch(
        self,
        tokens: npt.NDArray[np.int64],
        group_ids: npt.NDArray[np.int64],
        staleness: npt.NDArray[np.int64],
        rollout_ids: npt.NDArray[np.int64],
        *,
        trainer_version: int,
        usage: Usage,
        engines: Sequence[EngineStatistics],
    ) -> None:
        """Add a batch that the trainer has; ``engines`` as they are now.

        ``tokens`` (sampled ones), ``group_ids``, ``staleness`` and ``rollout_ids``: [R], one value
        per row; rows of a group are adjacent.
        """
        rows = RowsOfRollouts(rollout_ids)
        tokens, staleness = rows.added(tokens), rows.highest(staleness)
        group_ids = rows.first(group_ids)
        if not self._batches:
            self._first, self._versions = usage, (trainer_version, trainer_version)
        self._last, self._versions = usage, (self._versions[0], trainer_version)
        self._engines = tuple(engines)
        self._batches += 1
        self._lengths.add(tokens, group_ids)
        self._trained += len(staleness)
        self._staleness += int(staleness.sum())

    def forecast(
        self,
        ledger: LedgerSnapshot,
        *,
        outstanding_groups_max: int | None,
        window_groups: int | None,
        eager_versions: int | None = None,
    ) -> RunForecast | None:
        """Return the forecast; None before two batches, or without steps of any engine.

        ``window_groups``: number of groups, from the oldest unfinished one on, that consumption may
        choose from; 1 for the order of admission, None for the order of completion.
        ``eager_versions``: number of versions before admission is just in time; None: it never is.
        """
        times = self._times(ledger)
        if times is None:
            return None
        in_flight = self._in_flight(times.rho, window_groups)
        in_queue = predictions.staleness_from_queue(rho=times.rho)
        saturating = predictions.max_useful_staleness(in_flight, in_queue)
        allowed = self._allowed(outstanding_groups_max)
        first, last = self._versions
        return RunForecast(
            throughput_ratio=times.rho,
            tail_factor=self._lengths.tail_factor,
            predicted_staleness=predictions.mean_staleness_so_far(
                allowed=allowed,
                free=in_flight + in_queue,
                rho=times.rho,
                first_version=first,
                last_version=last,
                eager_versions=eager_versions,
            ),
            measured_staleness=self._staleness / max(1, self._trained),
            max_useful_staleness=saturating,
            batch_interval_s=times.between_s,
            attainable_batch_interval_s=times.attainable_s,
            advice=advise(times, allowed=allowed, saturating=saturating),
        )

    @property
    def _groups_per_version(self) -> float:
        first, last = self._versions
        return self._lengths.groups / (last - first + 1)

    def _times(self, ledger: LedgerSnapshot) -> BatchTimes | None:
        """Measure from the first batch to the last, without the time before the first."""
        intervals = self._batches - 1
        tokens_per_s = sum(_peak_tokens_per_s(engine) for engine in self._engines)
        if intervals < 1 or not tokens_per_s or not self._lengths.tokens:
            return None
        tokens = self._lengths.tokens / self._batches * _made_per_kept(ledger)
        between_s = (self._last.wall_s - self._first.wall_s) / intervals
        trainer_s = (self._last.trainer_busy_s - self._first.trainer_busy_s) / intervals
        if between_s <= 0:
            return None
        return BatchTimes(between_s, tokens / tokens_per_s, max(0.0, trainer_s))

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

    def _allowed(self, outstanding_groups_max: int | None) -> float | None:
        if outstanding_groups_max is None:
            return None
        return predictions.allowed_staleness(
            outstanding_groups_max=outstanding_groups_max,
            groups_per_version=self._groups_per_version,
        )


def advise(times: BatchTimes, *, allowed: float | None, saturating: int) -> str:
    """Return one sentence of advice on ``max_staleness``, which now allows a staleness of
    ``allowed`` versions (None: any).

    While admission is the bottleneck, a group's latency does not depend on the bound, so a batch
    takes ``D / (η + 1)``; the gain follows from that.
    """
    between_s, attainable_s = times.between_s, times.attainable_s
    if 1 - times.trainer_s / between_s <= BUSY_TRAINER_IDLE_MAX:
        advice = "trainer-bound: a larger max_staleness gains nothing"
        is_more = allowed is None or allowed > saturating
        return f"{advice}; {saturating} would be enough" if is_more else advice
    if allowed is None:
        return "rollout-bound: only faster or more engines would gain anything"
    needed = math.ceil(between_s * (allowed + 1) / attainable_s - 1e-6) - 1
    suggested = max(math.floor(allowed) + 1, min(saturating, needed))
    gain = between_s / max(attainable_s, between_s * (allowed + 1) / (suggested + 1)) - 1
    if allowed < saturating and gain >= GAIN_MIN:
        bound = "rollout-bound" if times.rho <= 1 else "admission-bound, both sides wait"
        return f"{bound}: max_staleness={suggested} would gain about {gain:.0%}"
    return "rollout-bound: a larger max_staleness gains nothing; faster or more engines would"


def window_groups(policy: StalenessPolicy) -> int | None:
    """Return the number of groups, from the oldest unfinished one on, that a policy may choose
    from; None for completion order."""
    order = getattr(policy, "consumption_order", "completion")
    if isinstance(order, Window):
        return order.groups
    return 1 if order == "admission" else None


def _made_per_kept(ledger: LedgerSnapshot) -> float:
    """Return the tokens sampled per token not discarded, without the tokens of rollouts that the
    run's end discarded."""
    cut_off = ledger.discarded.get("run_ended", 0)
    discarded = ledger.discarded_total - cut_off
    return 1 + discarded / max(1, ledger.generated - cut_off - discarded)


def _peak_tokens_per_s(engine: EngineStatistics) -> float:
    """Return the throughput with all slots busy, from a linear fit of step time over rows."""
    cost = predictions.fit_decode_cost(
        steps=engine.steps,
        rows=engine.rows,
        rows_squared=engine.rows_squared,
        busy_s=engine.busy_s,
        rows_busy_s=engine.rows_busy_s,
    )
    if cost is None or not engine.is_alive:
        return 0.0
    return cost.rows_per_s(engine.max_running_turns) * engine.tokens / engine.rows
