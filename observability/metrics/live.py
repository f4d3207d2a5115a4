"""In-memory recorder of a running run; fixed memory.

The run calls it as a :class:`Recorder`, from several threads; the dashboard's thread reads it. A
lock is held for microseconds.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tidegate.observability.metrics.timeline import Activity, Mark, Slice, Timeline
from tidegate.observability.records.evaluations import EvaluationPoint, add_point, point_of
from tidegate.observability.records.forks import ForkCounter, ForkCounts
from tidegate.observability.records.trajectories import RolloutSnapshot, snapshot_rollout
from tidegate.orchestrator.core.rollout import Rollout
from tidegate.orchestrator.telemetry.off_policy import OffPolicy
from tidegate.orchestrator.telemetry.recorder import EngineStep, Recorder, TrainerActivity

BATCHES_KEPT = 2_000
"""Limit of batches kept for curves: more points than pixels."""

ENDED_KEPT = 2_000
"""Limit of ended rollouts kept: minutes of a run with short rollouts, hours with long ones."""
ENDED_TOKENS_KEPT = 2_000_000
"""Limit of their tokens, 16 MB; the oldest rollouts are dropped."""


ENDED_TOGETHER = 32
"""Rollouts of a batch that are kept and dropped as one entry, at 1/32 of the cost."""


@dataclass(frozen=True, slots=True)
class EndedRollout:
    """An ended rollout, not copied, because it no longer changes."""

    rollout: Rollout
    task: object
    advantage: float | None
    consumed_version: int | None

    def snapshot(self) -> RolloutSnapshot:
        """Return the rollout as it would be recorded."""
        return snapshot_rollout(
            self.rollout,
            task=self.task,
            advantage=self.advantage,
            consumed_version=self.consumed_version,
        )


@dataclass(frozen=True, slots=True)
class _EndedBatch:
    """Rollouts that ended together, stored without conversion, because most are never viewed."""

    rows: Sequence[tuple[Rollout, object]]
    advantages: Sequence[float | None]
    consumed_version: int | None
    tokens: int

    def newest_first(self) -> Iterator[EndedRollout]:
        """Yield the batch's rollouts, the newest first."""
        for (rollout, task), advantage in zip(
            reversed(self.rows), reversed(self.advantages), strict=True
        ):
            yield EndedRollout(rollout, task, advantage, self.consumed_version)


@dataclass(frozen=True, slots=True)
class CollectedData:
    """Immutable copy of what was collected, as of one instant."""

    batches: tuple[Mapping[str, float], ...] = ()
    slices: Mapping[str, Sequence[Slice]] = field(default_factory=dict)
    slice_us: int = 1
    """Length of the timeline's slices in microseconds."""
    marks: Sequence[Mark] = ()
    trainer: Sequence[Activity] = ()
    token_lags: Mapping[int, int] = field(default_factory=dict)
    """Number of trained tokens by lag in versions."""
    trainer_activity_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds that the trainer spent, by activity."""
    off_policy: OffPolicy = field(default_factory=OffPolicy)
    """What the trainer reported about its last batch."""
    forks: ForkCounts = field(default_factory=ForkCounts)
    """Forks of the rollouts that ended; of a running run, since its process began."""
    evaluations: Sequence[EvaluationPoint] = ()
    """Evaluations so far, in their order."""


def monotonic_us() -> int:
    """Return the monotonic clock in microseconds; engines on this host stamp steps with it."""
    return time.monotonic_ns() // 1000


class LiveRecorder(Recorder):
    """Keeps what the dashboard shows of a running run. Thread-safe."""

    def __init__(self, now_us: Callable[[], int] = monotonic_us) -> None:
        self._now_us = now_us
        self._lock = threading.Lock()
        self._timeline = Timeline()
        self._batches: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=BATCHES_KEPT)
        self._ended: deque[_EndedBatch] = deque()
        self._ended_rows = self._ended_tokens = 0
        self.has_dropped = False
        """Whether older ended rollouts were dropped."""
        self._token_lags: Counter[int] = Counter()
        self._trainer_us: Counter[str] = Counter()
        self._off_policy = OffPolicy()
        self._forks = ForkCounter()
        self._evaluations: dict[tuple[str, int], EvaluationPoint] = {}
        self.adapter_rewards: dict[str, float] = {}
        """Mean reward of the last batch of each trained adapter."""

    # ------------------------------------------------------------ called by the run

    def rollout(
        self,
        rollout: Rollout,
        *,
        task: object,
        advantage: float | None,
        consumed_version: int | None,
    ) -> None:
        """Keep an ended rollout for the list of rollouts."""
        self._keep([(rollout, task)], [advantage], consumed_version)

    def trained(
        self,
        rows: Sequence[tuple[Rollout, object]],
        *,
        advantages: Sequence[float],
        consumed_version: int,
    ) -> None:
        """Keep the rollouts of a batch, at most :data:`ENDED_KEPT`."""
        for start in range(max(0, len(rows) - ENDED_KEPT), len(rows), ENDED_TOGETHER):
            part = slice(start, start + ENDED_TOGETHER)
            self._keep(rows[part], advantages[part], consumed_version)

    def _keep(
        self,
        rows: Sequence[tuple[Rollout, object]],
        advantages: Sequence[float | None],
        consumed_version: int | None,
    ) -> None:
        tokens = sum([len(rollout.token_ids) for rollout, _ in rows])
        with self._lock:
            for rollout, _ in rows:
                self._forks.count(rollout)
            self._ended.append(_EndedBatch(rows, advantages, consumed_version, tokens))
            self._ended_rows += len(rows)
            self._ended_tokens += tokens
            while self._ended_rows > ENDED_KEPT or (
                self._ended_tokens > ENDED_TOKENS_KEPT and len(self._ended) > 1
            ):
                dropped = self._ended.popleft()
                self.has_dropped = True
                self._ended_rows -= len(dropped.rows)
                self._ended_tokens -= dropped.tokens

    def engine_step(self, step: EngineStep) -> None:
        """Add a step to the timeline, in 1 to 2 microseconds."""
        with self._lock:
            self._timeline.engine_step(
                step.engine,
                started_us=step.started_us,
                busy_us=step.busy_us,
                version=step.version,
                is_prefill=step.prefills > 0,
                now_us=self._now_us(),
            )

    def engine_event(self, engine: str, name: str, at_us: int, **args: object) -> None:
        """Add an instant to the timeline."""
        version = args.get("version", -1)
        with self._lock:
            self._timeline.mark(engine, name, at_us, version if isinstance(version, int) else -1)

    def engine_dtype(self, engine: str, dtype: str) -> None:
        """Do nothing: the statistics of engines include the dtype."""

    def trainer_interval(
        self, kind: TrainerActivity, started_us: int, ended_us: int, version: int
    ) -> None:
        """Add an activity to the timeline and to the trainer's totals."""
        with self._lock:
            self._timeline.trainer_interval(kind, started_us, ended_us, version)
            self._trainer_us[kind] += ended_us - started_us

    def recall(
        self, batches: Sequence[Mapping[str, float]], evaluations: Sequence[EvaluationPoint]
    ) -> None:
        """Add batches and evaluations from before a resume; they have no time on the timeline."""
        with self._lock:
            self._batches.extend((0, metrics) for metrics in batches)
            for point in evaluations:
                add_point(self._evaluations, point)

    def batch(self, metrics: Mapping[str, float]) -> None:
        """Add a batch's figures to the curves."""
        with self._lock:
            self._batches.append((self._now_us(), metrics))

    def evaluation(self, figures: Mapping[str, object]) -> None:
        """Add an evaluation to the curve of rewards."""
        with self._lock:
            add_point(self._evaluations, point_of(figures))

    def trained_lags(self, tokens_by_lag: Mapping[int, int]) -> None:
        """Add a batch's number of tokens by lag in versions."""
        with self._lock:
            self._token_lags.update(tokens_by_lag)

    def off_policy(self, measured: OffPolicy) -> None:
        """Keep what the trainer reported about its last batch."""
        with self._lock:
            self._off_policy = measured

    # ------------------------------------------------------------ called by the dashboard

    @property
    def ended(self) -> list[EndedRollout]:
        """Rollouts that are over, newest first."""
        with self._lock:
            kept = list(self._ended)
        return [ended for part in reversed(kept) for ended in part.newest_first()]

    def collected(self, since_us: int = 0) -> CollectedData:
        """Return a copy of all data; time-stamped data since ``since_us``, plus the last batch."""
        with self._lock:  # the run's loop waits for the lock, so slow work is done on copies
            timeline, batches = self._timeline.copy(), list(self._batches)
            token_lags, trainer_us = dict(self._token_lags), dict(self._trainer_us)
            off_policy, forks = self._off_policy, self._forks.counts()
            evaluations = tuple(self._evaluations.values())[-BATCHES_KEPT:]
        recent = [m for at_us, m in batches if at_us >= since_us] or [m for _, m in batches[-1:]]
        return CollectedData(
            batches=tuple(recent),
            slices=timeline.slices(since_us),
            slice_us=timeline.slice_us,
            marks=timeline.marks_since(since_us),
            trainer=timeline.trainer_since(since_us),
            token_lags=dict(sorted(token_lags.items())),
            trainer_activity_s={kind: us / 1e6 for kind, us in sorted(trainer_us.items())},
            off_policy=off_policy,
            forks=forks,
            evaluations=evaluations,
        )


class LiveAdapterRecorder(Recorder):
    """Keeps what the dashboard shows of one trained adapter that the run's state does not hold."""

    def __init__(self, run: LiveRecorder, name: str) -> None:
        self._run = run
        self._name = name

    def batch(self, metrics: Mapping[str, float]) -> None:
        """Keep the mean reward of the adapter's last batch."""
        if "reward" in metrics:
            self._run.adapter_rewards[self._name] = metrics["reward"]
