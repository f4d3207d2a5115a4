"""Diagnosis of a run: what limits it, by which measured figures, and what to change by how much.

:func:`diagnose` is the only place that decides. Reports, the dashboard, ``tidegate top``,
``statistics().forecast`` and ``tidegate plan`` show its sentence. It recomputes the time per batch
with one thing changed, in a model of the run that has the run's own durations:

* A batch is admitted at the publish η + 1 batches before its own. Its rollouts start when engines
  have a free slot, those of the batches before it first.
* It is ready when all its groups have ended, the batches before it are ready, and the engines have
  done its work in turn.
* The trainer takes it when it is ready and the batch before is published.
* Decoding takes longer the more rollouts share a step, and a publish the longer and the more
  frequent steps are, because it waits for them.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tidegate.policies.predictions import DecodeCost

Limit = Literal["trainer", "engines", "admission", "balance"]
"""What limits a run: one side, the staleness bound (both sides wait), or nothing in particular."""

Lever = Literal["max_staleness", "engines", "training", "publishing"]
"""What to change: to a value, or how many times as fast."""

GAIN_MIN = 0.05
"""Smallest gain to advise; smaller ones are within the variation of a run's own figures."""

NEARLY_AS_FAST, AS_FAST = 0.02, 0.005
"""How much slower the advised value may be than the largest, and a saving than the present one."""

IDLE_MAX = 0.25
"""Largest idle share of engines' time, slots and throughput at which more of them are advised."""

SPARE = 1.4
"""Factor on durations and on the engines' work at which a saving must still lose nothing."""

SHARE_SHOWN_MIN = 0.1
"""Smallest share of a rollout's or a batch's time that the evidence names."""

TAIL_SHOWN_MIN, PREFILLS_SHOWN_MIN = 1.5, 1.0
"""Least time of a group over that of a rollout, and prefilled tokens per sampled one, to name."""

INCREASE_MAX = 4
"""Largest multiple of a speed, of engines or of outstanding groups to advise: the further from what
was measured, the less is known."""

PUBLISH_STEPS = 2.5
"""Steps that a publish waits for while engines are busy: half of the one that runs, the one after
which weights are staged, and the one after which they are swapped."""

SIMULATED_BATCHES = 160
"""Batches of the model's run: a diagnosis takes 10 ms, once a batch."""


def _mixed_shares() -> list[float]:
    # A linear congruential generator: 60 has the factors of 160 and is a multiple of 4, so that the
    # order of all quantiles is mixed (Hull & Dobell 1962).
    numbers = [0]
    while len(numbers) < SIMULATED_BATCHES:
        numbers.append((61 * numbers[-1] + 77) % SIMULATED_BATCHES)
    return [(number + 0.5) / SIMULATED_BATCHES for number in numbers]


_SHARES = _mixed_shares()
"""Evenly spread quantiles in a mixed order, so that few batches show the whole distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """Figures of a run between two batches; means, if not said otherwise."""

    batch_s: float
    """Seconds from one batch to the next."""
    trainer_s: float
    """Seconds that a batch takes the trainer, publishing included."""
    publish_s: float
    """Seconds of ``trainer_s`` that it publishes."""
    engines: int
    engine_idle_share: float
    """Share of time in which an engine was in no step."""
    full_share: float
    """Share of engines' busy time in which turns waited for a slot or for KV."""
    work_s: float
    """Seconds that a batch takes all engines while turns wait."""
    slots: int
    """Decode slots per engine."""
    full_rows: float
    """Rows per step while turns wait; fewer than ``slots`` if KV or prefills hold turns back."""
    rows: float
    """Number of rows in the step that a decoding rollout is in."""
    cost: DecodeCost
    rollout_s: float
    """Seconds from an episode's begin to its end."""
    decode_s: float
    """Seconds of ``rollout_s`` in decode steps."""
    queue_s: float
    """Seconds of ``rollout_s`` in engines' queues."""
    activity_s: float
    """Seconds of ``rollout_s`` in tools, environments, scoring and named activities."""
    group_s: Sequence[float]
    """Seconds of the longest rollout of recent groups without time in engines' queues, in ascending
    order."""
    groups_per_batch: int
    waits_for_stragglers: bool
    """Whether a batch waits for the groups that the staleness bound has it train: those admitted
    next, whatever the order of consumption."""
    work_shares: Sequence[float] = (1.0,)
    """Tokens of recent batches over their mean."""
    max_staleness: float | None
    """Staleness that admission allows, in versions; None without a limit."""
    queue_staleness: float = 0.0
    """Versions of a trained rollout's staleness that arose after its group's end."""
    staleness: float = 0.0
    """Staleness of a trained rollout, in versions."""
    prefilled_per_sampled: float = 0.0
    """Prefilled tokens per sampled token."""

    @property
    def trainer_idle_share(self) -> float:
        """Share of time in which the trainer waits for a batch."""
        return max(0.0, 1 - self.trainer_s / self.batch_s)

    @property
    def served_s(self) -> float:
        """Seconds of ``rollout_s`` outside engines' queues."""
        return max(self.decode_s, self.rollout_s - self.queue_s)

    @property
    def batch_error(self) -> float:
        """Standard error of the mean tokens per batch, as a share: few batches were measured."""
        return math.sqrt(sum((each - 1) ** 2 for each in self.work_shares)) / len(self.work_shares)


@dataclass(frozen=True, slots=True)
class Change:
    """One change to a run, and its gain in batches per second if nothing else is changed."""

    lever: Lever
    value: float
    gain: float
    """Expected gain as a share; 0 for a change that saves engines or staleness at no loss."""
    noise: float = 0.0
    """Standard error of the gain, because few batches were measured."""

    @property
    def gain_range(self) -> tuple[float, float]:
        """Lowest and highest gain within the advice's stated error. The lowest is further off,
        because the model is too optimistic where two limits meet."""
        return 0.5 * self.gain - 0.05 - self.noise, 1.2 * self.gain + 0.05 + self.noise

    def __str__(self) -> str:
        what = {
            "max_staleness": f"max_staleness={self.value:.0f}",
            "engines": f"{self.value:.0f} engine{'s' if self.value > 1 else ''}",
            "training": f"training {self.value:.1f} times as fast",
            "publishing": f"publishing {self.value:.1f} times as fast",
        }[self.lever]
        if not self.gain:
            return f"{what} would lose nothing (at most {-self.gain_range[0]:.0%})"
        low, high = self.gain_range
        return f"{what} would gain about {self.gain:.0%} ({max(0.0, low):.0%} to {high:.0%})"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What limits a run, the figures that show it, and changes, that of the limit first."""

    limit: Limit
    evidence: str
    changes: tuple[Change, ...]
    max_useful_staleness: int
    """Smallest ``max_staleness`` that is about as fast as larger ones, within the advised range."""

    def __str__(self) -> str:
        return f"{self.evidence}: {self.conclusion}"

    @property
    def conclusion(self) -> str:
        """The limit and the changes."""
        name = {
            "trainer": "trainer-bound",
            "engines": "engine-bound",
            "admission": "admission-bound, both sides wait",
            "balance": "balanced, no single change gains much",
        }[self.limit]
        return "; ".join([name, *map(str, self.changes)])


def diagnose(run: RunFigures) -> Diagnosis:
    """Decide what limits a run, and what to change by how much."""
    model = RunModel(run)
    allowed = model.max_staleness
    now_s = model.batch_s()
    bounds = range(allowed, INCREASE_MAX * (allowed + 1))
    useful = _first_as_fast(bounds, lambda bound: model.batch_s(max_staleness=bound))
    gains = [
        Change("training", *_speedup(run.trainer_s - run.publish_s, run.publish_s, model, now_s)),
        Change("publishing", *_speedup(run.publish_s, run.trainer_s - run.publish_s, model, now_s)),
    ]
    if run.max_staleness is not None:
        gain = now_s / model.batch_s(max_staleness=useful) - 1
        gains.append(Change("max_staleness", useful, gain))
    if are_engines_busy(run):
        counts = range(run.engines, INCREASE_MAX * run.engines + 1)
        count = _first_as_fast(counts, lambda count: model.batch_s(engines=count))
        gains.append(Change("engines", count, now_s / model.batch_s(engines=count) - 1))
    gains = sorted((c for c in gains if c.gain >= GAIN_MIN), key=lambda change: -change.gain)
    gains = [replace(each, noise=run.batch_error * (1 + each.gain)) for each in gains]
    limit = _limit_of(gains)
    return Diagnosis(limit, evidence_of(run), (*gains, *_savings(run)), useful)


def are_engines_busy(run: RunFigures) -> bool:
    """Return whether more engines may be advised: time, slots and throughput are in use."""
    busy_min = 1 - IDLE_MAX
    return (
        1 - run.engine_idle_share >= busy_min
        and run.rows >= busy_min * run.full_rows
        and run.work_s >= busy_min * run.batch_s
    )


def batch_s_by_engines(run: RunFigures, counts: Iterable[int]) -> dict[int, float]:
    """Return the model's time per batch by the number of engines. If any is less than the run's,
    all are of a run with :data:`SPARE` times the work, because a saving must not be by chance."""
    counts = list(counts)
    model = _spare_model(run) if min(counts) < run.engines else RunModel(run)
    return {count: model.batch_s(engines=count) for count in counts}


def _spare_model(run: RunFigures) -> "RunModel":
    longer_s = [SPARE * each for each in run.group_s]
    return RunModel(replace(run, group_s=longer_s, work_s=SPARE * run.work_s))


def expected_batch_s(run: RunFigures) -> float:
    """Return the model's time per batch from figures that were not measured; ``run.batch_s`` is the
    time that its durations and rows belong to."""
    return RunModel(run).batch_s()


def _limit_of(gains: Sequence[Change]) -> Limit:
    limits: dict[Lever, Limit] = {
        "max_staleness": "admission",
        "engines": "engines",
        "training": "trainer",
        "publishing": "trainer",
    }
    return limits[gains[0].lever] if gains else "balance"


def _speedup(part_s: float, rest_s: float, model: "RunModel", now_s: float) -> tuple[float, float]:
    """Return how many times as fast a part of the trainer's time should be, and the gain."""
    least_s = model.batch_s(trainer_s=rest_s)
    free_s = max(least_s - rest_s, part_s / INCREASE_MAX)
    factor = max(1.0, math.ceil(10 * part_s / free_s) / 10) if free_s > 0 else 1.0
    return factor, now_s / model.batch_s(trainer_s=rest_s + part_s / factor) - 1


def _savings(run: RunFigures) -> Iterable[Change]:
    """Yield what may be less without a loss: engines, and the staleness bound.

    Engines are not known to be spare while turns wait; nor is the bound while the engines need its
    queue to be busy, or while it holds stragglers that others overtake.
    """
    model = _spare_model(run)
    counts = range(1, run.engines + 1)
    fewer = _first_as_fast(counts, lambda count: model.batch_s(engines=count), AS_FAST)
    if fewer < run.engines and run.full_share < SHARE_SHOWN_MIN:
        yield Change("engines", fewer, 0.0)
    bounds = range(model.max_staleness + 1)
    lower = _first_as_fast(bounds, lambda bound: model.batch_s(max_staleness=bound), AS_FAST)
    has_queue_spare = run.waits_for_stragglers and SPARE * run.work_s <= run.batch_s
    if run.max_staleness is not None and has_queue_spare and lower < model.max_staleness:
        yield Change("max_staleness", lower, 0.0)


def _first_as_fast(
    values: range, batch_s: Callable[[int], float], loss: float = NEARLY_AS_FAST
) -> int:
    """Return the first of the values whose time is within ``loss`` of the last's.

    The time falls, so bisection finds it.
    """
    wanted_s = (1 + loss) * batch_s(values[-1])
    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if batch_s(values[middle]) <= wanted_s else (middle + 1, high)
    return values[low]


def evidence_of(run: RunFigures) -> str:
    """Return the figures that show where time goes."""
    figures = [
        f"trainer idle {run.trainer_idle_share:.1%}",
        f"engines idle {run.engine_idle_share:.1%}",
        f"{run.rows:.1f} of {run.slots} slots in use while they decode",
    ]
    if run.full_share >= SHARE_SHOWN_MIN and run.full_rows < (1 - SHARE_SHOWN_MIN) * run.slots:
        figures.append(f"turns wait for KV or prefills while {run.full_rows:.1f} decode")
    if run.publish_s >= SHARE_SHOWN_MIN * run.batch_s:
        figures.append(f"publishing {run.publish_s / run.batch_s:.1%} of the time")
    for name, part_s in (("engines' queues", run.queue_s), ("tools", run.activity_s)):
        if part_s >= SHARE_SHOWN_MIN * run.rollout_s:
            figures.append(f"rollouts {part_s / run.rollout_s:.1%} of their time in {name}")
    tail = sum(run.group_s) / len(run.group_s) / run.served_s
    if tail >= TAIL_SHOWN_MIN:
        figures.append(f"groups {tail:.1f} times as long as rollouts")
    if run.prefilled_per_sampled >= PREFILLS_SHOWN_MIN:
        figures.append(f"{run.prefilled_per_sampled:.1f} tokens prefilled per sampled one")
    if run.staleness and run.queue_staleness >= SHARE_SHOWN_MIN * run.staleness:
        figures.append(
            f"{run.queue_staleness:.1f} of {run.staleness:.1f} versions of staleness in the queue"
        )
    return ", ".join(figures)


class RunModel:
    """The run as a model: the time per batch as a function of what may be changed."""

    def __init__(self, run: RunFigures) -> None:
        self._run = run
        unlimited = SIMULATED_BATCHES // 8
        self.max_staleness = unlimited if run.max_staleness is None else round(run.max_staleness)
        # The longest of B durations: its quantile u is theirs of u^(1/B). Batches of those that end
        # first are as long as their mean.
        mean_s = sum(run.group_s) / len(run.group_s)
        self._durations_s = [
            _quantile(run.group_s, share ** (1 / run.groups_per_batch))
            if run.waits_for_stragglers
            else mean_s
            for share in _SHARES
        ]
        self._decode_share = run.decode_s / run.served_s
        self._busy_share = max(0.01, 1 - run.engine_idle_share)
        step_s = run.cost.fixed_s + run.cost.row_s * run.rows
        self._publish_wait_s = min(run.publish_s, PUBLISH_STEPS * self._busy_share * step_s)

    def batch_s(
        self,
        *,
        max_staleness: int | None = None,
        engines: int | None = None,
        trainer_s: float | None = None,
    ) -> float:
        """Return the seconds per batch with these changes."""
        run = self._run
        bound = self.max_staleness if max_staleness is None else max_staleness
        trainer_s = run.trainer_s if trainer_s is None else trainer_s
        speed = (engines or run.engines) / run.engines
        batch_s = run.batch_s
        for _ in range(4):  # rows depend on the time, and the time on rows
            slowdown = self._slowdown(run.batch_s / batch_s / speed)
            stretch = 1 + self._decode_share * (slowdown - 1)
            longer_wait = slowdown * min(1 / self._busy_share, run.batch_s / batch_s)
            found_s = self._simulated_batch_s(
                [stretch * each for each in self._durations_s],
                bound,
                work_s=run.work_s / speed,
                running_s=slowdown * run.decode_s,
                trainer_s=trainer_s + self._publish_wait_s * (longer_wait - 1),
            )
            batch_s = (batch_s + found_s) / 2
        return found_s

    def _slowdown(self, load: float) -> float:
        """Return a step's time over today's, if each engine has ``load`` times today's tokens."""
        run = self._run
        if not run.cost.fixed_s:
            return 1.0  # all steps had equally many rows, so what one row costs is unknown
        step_s = run.cost.fixed_s + run.cost.row_s * run.rows
        rows_per_s = load * run.rows / step_s
        free = 1 - run.cost.row_s * rows_per_s
        longest_s = run.cost.fixed_s + run.cost.row_s * run.full_rows
        return min(longest_s, run.cost.fixed_s / free if free > 0 else longest_s) / step_s

    def _simulated_batch_s(
        self,
        durations: Sequence[float],
        bound: int,
        *,
        work_s: float,
        running_s: float,
        trainer_s: float,
    ) -> float:
        """``running_s``: seconds of the engines' work left in rollouts that fill all slots."""
        shares = self._run.work_shares
        published: list[float] = []
        ready_s = started_s = worked_s = published_s = 0.0
        for number, duration_s in enumerate(durations):
            admitted_s = published[number - bound - 1] if number > bound else 0.0
            first_s = max(started_s, admitted_s)
            worked_s = max(worked_s, admitted_s) + work_s * shares[number % len(shares)]
            # The last rollout starts when all that is left of the work is running, and the longest
            # at any time between the first and the last.
            started_s = max(first_s, worked_s - running_s)
            ready_s = max(ready_s, (first_s + started_s) / 2 + duration_s, worked_s)
            published_s = max(published_s, ready_s) + trainer_s
            published.append(published_s)
        first = min(len(durations) // 3, 2 * bound + 4)  # until then the pipeline fills
        return (published_s - published[first - 1]) / (len(durations) - first)


def _quantile(ordered: Sequence[float], share: float) -> float:
    position = share * len(ordered) - 0.5
    index = max(0, min(len(ordered) - 2, math.floor(position)))
    if len(ordered) == 1:
        return ordered[0]
    part = max(0.0, min(1.0, position - index))
    return ordered[index] + part * (ordered[index + 1] - ordered[index])
