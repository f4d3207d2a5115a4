"""What known lengths, reserved engines, drafts and other splits would change for ``split``.

``python -m benchmarks.scheduling --experiments`` prints, for each idea and η, the median of
``efficiency`` and ``masked_share`` over seeds, with the lowest and highest; the peer is plain
``split`` with the same seeds. All is virtual time, the same on any machine. The ideas are engines
and policies that exist here only, unless docs/scheduling.md says otherwise.

**Lengths.** The logarithms of a group's lengths have standard deviation s and correlation c
(:data:`~benchmarks.scheduling.workloads.GROUP_CORRELATION`). Given n siblings' lengths, the best
prediction of a logarithm has an error of deviation ``s √(1 - n c² / (1 + (n - 1) c))``; given a
task's mean over many epochs, ``s √(1 - c)``.

**Drafts.** A turn that has sampled ``STRAGGLER_TOKENS`` verifies d draft tokens per step. With
acceptance p it gains ``(1 - p^(d + 1)) / (1 - p)`` tokens on average, and adds d rows to the step's
cost.
"""

import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from benchmarks.scheduling.policies import POLICIES, Make, Variant
from benchmarks.scheduling.run import MakeSpec, Outcome, run_once
from benchmarks.scheduling.workloads import GROUP_CORRELATION, ROLLOUT_MACHINES, Workload
from benchmarks.table import Row, compared
from tidegate.policies.asynchrony import BoundedStaleness
from tidegate.policies.migration import LongTailLane, MigrationPolicy
from tidegate.policies.staleness import G, OutstandingGroups
from tidegate.simulation.engine.coarse import MULTI_STEP_TOKENS_MAX, CoarseEngineSpec
from tidegate.simulation.engine.turns import SimulatedTurn
from tidegate.transport.messages import SubmitTurn

BASELINE = "split"

STRAGGLER_TOKENS = 8192
"""Tokens after which a turn counts as a straggler; 12 % of rollouts are longer."""

DRAFT_TOKENS = 2

EARLY_SHARE = 0.75
"""Share of a group that must have ended for a split before the group is due."""

EFFICIENCY_BY_TRAJECTORIES: dict[float | None, float | None] = {
    1: 0.52,
    1.5: 0.71,
    2: 0.88,
    3: 0.95,
}
"""The published model's efficiency by trajectories per slot, at a bound of 4 versions."""


def prediction_error(correlation: float, siblings: int | None, sigma: float = 1.0) -> float:
    """Return the standard deviation of a predicted length's logarithm; ``siblings=None``: of the
    prediction by a task's mean over many epochs."""
    rho = correlation
    known = rho if siblings is None else siblings * rho * rho / (1 + (siblings - 1) * rho)
    return sigma * math.sqrt(1 - known)


@dataclass(frozen=True, kw_only=True)
class LongestFirst(CoarseEngineSpec):
    """Starts, of the groups admitted together, the turns with the longest predicted outputs first.

    A turn's ``max_tokens`` is its true length in this benchmark.
    """

    error: float
    """Standard deviation of the prediction's logarithm."""
    groups: int
    """Groups per batch."""

    def rank(self, turn: SubmitTurn) -> int:
        """Return the turn's rank: that of its batch, then of its predicted length."""
        chance = random.Random(f"{turn.session}")
        predicted = turn.sampling.max_tokens * math.exp(self.error * chance.gauss(0.0, 1.0))
        return (turn.priority // self.groups << 32) - round(predicted)


@dataclass(frozen=True, kw_only=True)
class Drafting(CoarseEngineSpec):
    """Verifies draft tokens for stragglers only. For kept turns: an aborted turn begins anew."""

    acceptance: float
    _sampled: dict[int, float] = field(default_factory=dict)
    """Tokens of each running turn; the fraction is sampled with the next whole token."""

    def _rate(self, turn: SimulatedTurn) -> float:
        is_straggler = self._sampled.get(turn.message.turn, 0.0) >= STRAGGLER_TOKENS
        per_step = sum(self.acceptance**count for count in range(DRAFT_TOKENS + 1))
        return per_step if is_straggler else 1.0

    def steps(self, turns: Sequence[SimulatedTurn]) -> int:
        """Return the steps until a turn ends or becomes a straggler."""
        steps = MULTI_STEP_TOKENS_MAX
        for turn in turns:
            sampled = self._sampled.get(turn.message.turn, 0.0)
            ends = turn.message.sampling.max_tokens
            until = ends if sampled >= STRAGGLER_TOKENS else min(ends, STRAGGLER_TOKENS)
            steps = min(steps, max(1, math.ceil((until - sampled) / self._rate(turn) - 1e-9)))
        return steps

    def token_s(self, turns: Sequence[SimulatedTurn]) -> float:
        """Return the duration of a step, whose drafts count as rows."""
        drafting = sum(self._rate(turn) > 1.0 for turn in turns)
        return self.costs.token_s(len(turns) + drafting * DRAFT_TOKENS)

    def tokens(self, turn: SimulatedTurn, steps: int) -> int:
        """Return the whole tokens that the turn samples in these steps."""
        handle, ends = turn.message.turn, turn.message.sampling.max_tokens
        before = self._sampled.get(handle, 0.0)
        after = self._sampled[handle] = min(float(ends), before + steps * self._rate(turn))
        return int(after + 1e-9) - int(before + 1e-9)


@dataclass(frozen=True, kw_only=True)
class EarlySplits(BoundedStaleness):
    """``split`` that also splits groups before they are due, oldest first, so that the trainer need
    not wait for whole groups."""

    def select(
        self, waiting: OutstandingGroups[G], *, groups: int, trainer_version: int
    ) -> list[G] | None:
        """Return the usual batch, or one completed by groups most of whose rollouts have ended."""
        usual = super().select(waiting, groups=groups, trainer_version=trainer_version)
        if usual is not None:
            return usual
        due_version = trainer_version - self.max_staleness
        first: list[tuple[int, int, int, G]] = []
        remainders: list[G] = []
        for group in waiting.in_order:
            version, number = group.oldest_possible_version, group.group_id
            all_rollouts = group.finished + group.running
            share = EARLY_SHARE if version > due_version else 0.25
            if group.is_split_remainder:
                remainders += [group] if group.finished or not group.running else []
            elif not group.running or group.finished >= max(2, share * all_rollouts):
                is_early = group.running > 0 and version > due_version
                first.append((is_early, version, number, group))
        first.sort(key=lambda each: each[:3])
        if len(first) < groups:
            return None
        return [*(each[3] for each in first[:groups]), *remainders]


def _split(
    kind: type[BoundedStaleness] = BoundedStaleness, *, limit: int | None = None, batches: int = 1
) -> Make:
    return lambda batch, eta: kind(
        max_staleness=eta,
        groups_per_batch=batch // batches,
        batches_per_version=batches,
        consumption_order="completion",
        deadline_policy="split",
        split_rollouts_limit=limit,
    )


@dataclass(frozen=True, slots=True)
class Experiment:
    """One idea: what differs from plain ``split``."""

    make: Make = field(default_factory=lambda: POLICIES[BASELINE].make)
    engine: Callable[[Workload], MakeSpec] = lambda _: CoarseEngineSpec
    migration_policy: MigrationPolicy | None = None


def _longest_first(error: float) -> Experiment:
    return Experiment(
        engine=lambda workload: partial(LongestFirst, error=error, groups=workload.groups_per_batch)
    )


def _drafts(acceptance: float) -> Experiment:
    return Experiment(engine=lambda _: partial(Drafting, acceptance=acceptance))


EXPERIMENTS: dict[str, Experiment] = {
    BASELINE: Experiment(),
    "longest first, known": _longest_first(0.0),
    "longest first, from siblings": _longest_first(prediction_error(GROUP_CORRELATION, 15)),
    "one engine of 32 for stragglers": Experiment(
        migration_policy=LongTailLane(min_tokens=STRAGGLER_TOKENS, engines=1, slots=32)
    ),
    "early splits": Experiment(make=_split(EarlySplits)),
    "at most 128 stragglers": Experiment(make=_split(limit=128)),
    "4 batches per version": Experiment(make=_split(batches=4)),
    "drafts, .5 accepted": _drafts(0.5),
    "drafts, .7 accepted": _drafts(0.7),
}
"""Ideas by name, the baseline first."""


def experiment_rows(
    names: Sequence[str], etas: Sequence[int], seeds: int, workload: Workload
) -> Iterator[Row]:
    """Run the named ideas, after the baseline, and yield their rows."""
    for eta in etas:
        peers: dict[str, float] = {}
        for name in dict.fromkeys([BASELINE, *names]):
            runs = [_run(EXPERIMENTS[name], workload, eta, seed).tally for seed in range(seeds)]
            figures = {
                "efficiency": [tally.efficiency(workload) for tally in runs],
                "masked_share": [tally.masked_tokens / tally.trained_tokens for tally in runs],
            }
            for figure, values in figures.items():
                median = statistics.median(values)
                prefix = f"{workload.name}/{eta}/{name}/{figure}"
                yield compared(prefix, "of 1", median, peers.setdefault(figure, median))
                yield Row(f"{prefix}/lowest", min(values), "of 1")
                yield Row(f"{prefix}/highest", max(values), "of 1")


def _run(idea: Experiment, workload: Workload, eta: int, seed: int) -> Outcome:
    policy = replace(POLICIES[BASELINE], make=idea.make)
    return run_once(
        workload,
        Variant(BASELINE, policy, eta),
        mode="keep",
        seed=seed,
        engine=idea.engine(workload),
        migration_policy=idea.migration_policy,
    )


def trajectory_rows(workload: Workload, seed: int) -> Iterator[Row]:
    """Yield an agentic run's efficiency by the ratio of trajectories to engine slots, in the order
    of admission.

    A trajectory that waits for its tool frees its slot, so engines are busy only if there are more
    trajectories than slots. The last row has as many as admission allows.
    """
    variant = Variant("admission", POLICIES["admission"], 4)
    for per_slot, peer in {**EFFICIENCY_BY_TRAJECTORIES, None: None}.items():
        slots = ROLLOUT_MACHINES * workload.costs.slots
        at_once = None if per_slot is None else round(per_slot * slots)
        outcome = run_once(workload, variant, mode="keep", seed=seed, trajectories=at_once)
        name = "unlimited" if per_slot is None else f"{per_slot:g}x"
        yield compared(f"efficiency_{name}", "of 1", outcome.tally.efficiency(workload), peer)
