"""Effect of staleness on learning, per sample and per second, in virtual time.

Trains the demo's model with the real scheduler, the real engine
code (``simulation/engine/computing.py``) and the demo's trainer. Only time is modelled: steps,
prefills, swaps and training take what ``COSTS`` and ``TRAINER_TOKENS_PER_S`` say. So each run has
the same result on any machine, under any load.

    python -m benchmarks.learning                       # 66 runs: 20 CPU-minutes, then plans
    python -m benchmarks.learning --seeds 1 --ways sync,eta4
    python -m benchmarks.learning --picture docs/learning.png

A finished run is kept in ``--runs`` and not repeated. Draws with matplotlib.

Shapes: P rows of one pass, T tokens in the longest of them.
"""

import argparse
import asyncio
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tidegate
from benchmarks.table import make_parser, print_figures
from examples.async_grpo import HELD_OUT_SEED
from examples.calculator import Task, long_tailed_tasks, solve
from examples.grpo import WeighTokens, load_trainer, train_step
from examples.imitation import demonstration_logprobs
from examples.tiny_model import make_model, make_tokenizer
from examples.warm_up import demonstrate, tool_actions
from tidegate.policies import corrections
from tidegate.policies.asynchrony import BoundedStaleness, OneStepOffPolicy
from tidegate.policies.staleness import StalenessPolicy
from tidegate.simulation.engine.computing import ComputingEngine
from tidegate.simulation.engine.spec import EngineCosts
from tidegate.simulation.planning import simulated
from tidegate.simulation.planning.workload import PlanCandidate, PlanWorkload
from tidegate.simulation.run.serve import SimulatedRollouts, run_plan
from tidegate.simulation.run.virtual_time import VirtualTime
from tidegate.transport.messages import KvPolicy, PauseMode

ENGINES = 2
GROUPS_PER_BATCH = 8
GROUP_SIZE = 8
LEARNING_RATE = 3e-4

COSTS = EngineCosts(
    slots=64,
    step_s=0.02,
    running_turn_s=0.0001,
    prefill_tokens_per_s=25_000.0,
    swap_s=0.05,
    prompt_tokens=8,
    group_size=1,
)
"""Modelled engine: the step time of a large model on an accelerator, and slots for a whole batch.
So the longest of a batch's rollouts, up to 17 turns, takes several times as long as its tokens
would with all slots in use. The prompt is the new tokens that a turn prefills."""

TRAINER_TOKENS_PER_S = 20_000.0
"""Sampled tokens that the modelled trainer trains on per second: about four times as many as the
engines sample at most, so that generation limits the run."""

REWARDS_WANTED = (0.8, 0.85)
"""Rewards whose times are compared: one that nearly every corrected run reaches, and one near the
end."""

CURVE_TASKS = 64
"""Held-out tasks on which each version is measured."""

PATHS_TOGETHER = 16
"""Paths of similar length that are measured together, to bound padding."""

EVALUATION_TASKS = 128
"""Held-out tasks that the last version plays."""

TIME_LIMIT_S = 1e5
"""Virtual time after which a run counts as stuck, in seconds."""


def _weighed_by(weight: Callable[[Tensor, Tensor], Tensor]) -> WeighTokens:
    """Return a correction that needs only log-ratios and mask."""
    return lambda log_ratio, behaviour, advantages, mask: weight(log_ratio, mask)


def _tis_times(keep: WeighTokens) -> WeighTokens:
    """Return TIS by token times a mask."""
    return lambda log_ratio, behaviour, advantages, mask: (
        corrections.tis_token(log_ratio, mask) * keep(log_ratio, behaviour, advantages, mask)
    )


def _dppo(log_ratio: Tensor, behaviour: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return corrections.dppo_mask(log_ratio, mask, behaviour, advantages.expand(mask.shape))


def _m2po(log_ratio: Tensor, behaviour: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return corrections.m2po_mask(log_ratio, mask, advantages.expand(mask.shape))


CORRECTIONS: dict[str, WeighTokens] = {
    "none": lambda log_ratio, behaviour, advantages, mask: mask.float(),
    "TIS by token": _weighed_by(corrections.tis_token),
    "TIS by sequence": _weighed_by(corrections.tis_sequence),
    "MIS by token": _weighed_by(corrections.mis_token),
    "MIS by sequence": _weighed_by(corrections.mis_sequence),
    "MIS geometric": _weighed_by(corrections.mis_geometric),
    "IcePop": _weighed_by(corrections.icepop),
    "TIS, geometric mask": _tis_times(_weighed_by(corrections.geometric_mask)),
    "TIS, K3 mask": _tis_times(_weighed_by(corrections.k3_mask)),
    "TIS, veto mask": _tis_times(_weighed_by(corrections.veto_mask)),
    "TIS, DPPO mask": _tis_times(_dppo),
    "TIS, M2PO mask": _tis_times(_m2po),
}
"""Every correction of ``policies/corrections.py``, with its default bounds."""

DEFAULT_CORRECTION = "TIS by token"


@dataclass(frozen=True, slots=True)
class Way:
    """One configuration of a run."""

    key: str
    """Short name, for the command line and files."""
    name: str
    max_staleness: int
    pause_mode: PauseMode = "keep"
    kv_policy: KvPolicy = "keep"
    correction: str = DEFAULT_CORRECTION
    is_one_step: bool = False
    """Whether a batch is generated entirely by the weights before those being trained."""
    max_uses: int = 1
    """Number of times that a group may be trained on."""

    @property
    def peer(self) -> str:
        """Name of the configuration that the figures are relative to."""
        return "sync" if self.max_uses == 1 else f"async η={self.max_staleness}"

    def staleness_policy(self) -> StalenessPolicy:
        """Return the policy of the run."""
        if self.is_one_step:
            return OneStepOffPolicy(groups_per_batch=GROUPS_PER_BATCH)
        return BoundedStaleness(
            groups_per_batch=GROUPS_PER_BATCH,
            max_staleness=self.max_staleness,
            max_uses=self.max_uses,
        )


CORRECTED_STALENESS = 8
"""Staleness bound at which corrections are compared: at small ones they hardly differ."""

WAYS = (
    Way("sync", "sync", 0),
    Way("one-step", "one-step", 1, is_one_step=True),
    Way("eta1", "async η=1", 1),
    Way("eta2", "async η=2", 2),
    Way("eta4", "async η=4", 4),
    Way("eta8", "async η=8", 8),
    Way("eta4-abort", "η=4, abort", 4, pause_mode="abort"),
    Way("eta4-recompute", "η=4, recompute", 4, kv_policy="recompute"),
    Way("eta4-uses2", "η=4, 2 uses", 4, max_uses=2),
    Way("eta4-uses3", "η=4, 3 uses", 4, max_uses=3),
    Way("eta8-uses2", "η=8, 2 uses", 8, max_uses=2),
    *(
        Way(
            f"eta8-{name.replace(',', '').replace(' ', '-')}",
            f"η=8, {name}",
            CORRECTED_STALENESS,
            correction=name,
        )
        for name in CORRECTIONS
        if name != DEFAULT_CORRECTION
    ),
)
"""Configurations. Turns and their KV are kept, and tokens weighed by TIS, unless the name says
otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Result of one run."""

    way: str
    seed: int
    at_s: list[float]
    """Virtual time at which each version was published, the initial one first; in seconds."""
    rewards: list[float]
    """Expected held-out reward of each version."""
    reward_after: float
    """Mean reward of held-out tasks that the last version played."""
    staleness_mean: float
    dropped_share: float
    """Share of the gradient-carrying tokens to which the correction gave no weight."""
    lengths: list[list[int]]
    """Sampled tokens of each trained rollout, by group."""
    turns_mean: float
    """Mean turns of a rollout."""
    generated: list[int] = field(default_factory=list)
    """Tokens generated before each version was published, the initial one first."""

    @property
    def batch_s(self) -> float:
        """Mean time from one publish to the next, in seconds."""
        return (self.at_s[-1] - self.at_s[1]) / max(1, len(self.at_s) - 2)

    def seconds_to(self, reward: float) -> float | None:
        """Return when a version first had this reward; None if none did."""
        pairs = zip(self.at_s, self.rewards, strict=True)
        return next((at_s for at_s, seen in pairs if seen >= reward), None)

    def tokens_to(self, reward: float) -> int | None:
        """Return the tokens generated before a version first had this reward; None if none did."""
        pairs = zip(self.generated, self.rewards, strict=True)
        return next((tokens for tokens, seen in pairs if seen >= reward), None)

    def batches_to(self, reward: float) -> int | None:
        """Return the first version that had this reward; None if none had."""
        return next((v for v, seen in enumerate(self.rewards) if seen >= reward), None)


@dataclass(slots=True)
class _Weighing:
    """Correction that counts the tokens to which it gives no weight."""

    correction: WeighTokens
    tokens: int = 0
    dropped: int = 0

    def __call__(
        self, log_ratio: Tensor, behaviour: Tensor, advantages: Tensor, mask: Tensor
    ) -> Tensor:
        weight = self.correction(log_ratio, behaviour, advantages, mask)
        self.tokens += int(mask.sum())
        self.dropped += int((mask & (weight == 0)).sum())
        return weight


@dataclass(slots=True)
class HeldOut:
    """Exact measure of a policy on held-out tasks, without sampling's noise.

    A task's expected reward is the probability of the tool path plus that of the bare right answer.
    The few other ways to a reward are left out, so it is a lower bound.
    """

    tasks: Sequence[Task]
    _parts: list[Any] = field(init=False)
    """Paths to a reward, in parts of similar length."""

    def __post_init__(self) -> None:
        tokenizer = make_tokenizer()
        by_tool = [demonstrate(task, tool_actions(task), tokenizer) for task in self.tasks]
        by_head = [demonstrate(task, [task.answer], tokenizer) for task in self.tasks]
        paths = sorted([*by_tool, *by_head], key=lambda path: len(path.token_ids))
        self._parts = [
            paths[start : start + PATHS_TOGETHER] for start in range(0, len(paths), PATHS_TOGETHER)
        ]

    @torch.no_grad()
    def reward(self, model: Any) -> float:
        """Return the policy's expected reward, the mean over the tasks."""
        chances = [demonstration_logprobs(model, part).exp() for part in self._parts]
        return float(torch.cat(chances).sum()) / len(self.tasks)


def train(way: Way, seed: int, model: Path, versions: int) -> Curve:
    """Train once, in virtual time."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    time = VirtualTime(limit_s=TIME_LIMIT_S)
    try:
        return time.run(_train(way, seed, model, versions, time))
    finally:
        time.close()


async def _train(way: Way, seed: int, model: Path, versions: int, time: VirtualTime) -> Curve:
    engines = [ComputingEngine(costs=COSTS) for _ in range(ENGINES)]
    plan = run_plan(
        model=model,
        engines=engines,
        staleness_policy=way.staleness_policy(),
        pause_mode=way.pause_mode,
        kv_policy=way.kv_policy,
        group_size=GROUP_SIZE,
        seed=seed,
    )
    held_out = list(
        itertools.islice(long_tailed_tasks("held_out", HELD_OUT_SEED), EVALUATION_TASKS)
    )
    measure = HeldOut(held_out[:CURVE_TASKS])
    training = list(itertools.islice(long_tailed_tasks("train", seed), versions * GROUPS_PER_BATCH))
    policy, optimizer = load_trainer(model, LEARNING_RATE)
    weighing = _Weighing(CORRECTIONS[way.correction])
    rewards, staleness = [measure.reward(policy)], []
    lengths: list[list[int]] = []
    generated = [0]
    turns = rollouts_trained = 0
    async with SimulatedRollouts(plan, time) as rollouts:
        started_s = time.now_s
        at_s = [0.0]
        async for batch in rollouts.batches(training, episode=solve):
            train_step(policy, optimizer, batch, weigh=weighing)
            await asyncio.sleep(batch.sampled_tokens / TRAINER_TOKENS_PER_S)
            await rollouts.publish(policy.state_dict())
            at_s.append(time.now_s - started_s)
            generated.append(rollouts.statistics().ledger.generated)
            rewards.append(measure.reward(policy))
            staleness.append(float(batch.staleness.float().mean()))
            lengths += _lengths(batch)
            turns += _turns(batch)
            rollouts_trained += len(batch.rewards)
        evaluation = await rollouts.evaluate(held_out, episode=solve)
    return Curve(
        way=way.name,
        seed=seed,
        at_s=at_s,
        rewards=rewards,
        reward_after=evaluation.mean_reward,
        staleness_mean=statistics.fmean(staleness),
        dropped_share=weighing.dropped / max(1, weighing.tokens),
        lengths=lengths,
        turns_mean=turns / rollouts_trained,
        generated=generated,
    )


def _lengths(batch: tidegate.Batch) -> list[list[int]]:
    """Return the sampled tokens of each rollout, by group."""
    groups: dict[int, list[int]] = {}
    tokens = batch.loss_mask.sum(1).tolist()
    for group, sampled in zip(batch.group_ids.tolist(), tokens, strict=True):
        groups.setdefault(group, []).append(int(sampled))
    return list(groups.values())


def _turns(batch: tidegate.Batch) -> int:
    """Return the number of turns: the calculator's answers separate their tokens."""
    mask = batch.loss_mask.bool()
    return int((mask[:, 1:] & ~mask[:, :-1]).sum())


def run(way: Way, seed: int, options: argparse.Namespace) -> Curve:
    """Train once, unless the run exists already."""
    path: Path = options.runs / f"learning-{way.key}-seed{seed}-{options.versions}.json"
    if not path.exists():
        model = options.runs / f"model-{seed}"
        make_model(model, seed=seed)
        curve = train(way, seed, model, options.versions)
        path.write_text(json.dumps(asdict(curve)))
    return Curve(**json.loads(path.read_text()))


def planned_batch_s(way: Way, measured: Curve) -> float:
    """Return the time from batch to batch that ``tidegate plan`` forecasts for a configuration.

    ``measured`` gives the lengths of the rollouts, as a recorded run gives them to ``tidegate plan
    --from``.
    """
    groups = tuple(map(tuple, measured.lengths))
    workload = PlanWorkload(
        groups=groups,
        costs=COSTS,
        trainer_tokens_per_s=TRAINER_TOKENS_PER_S,
        turns=round(measured.turns_mean),
    )
    candidate = PlanCandidate(
        max_staleness=way.max_staleness,
        groups_per_batch=GROUPS_PER_BATCH,
        engines=ENGINES,
        pause_mode=way.pause_mode,
        kv_policy=way.kv_policy,
    )
    return simulated.simulate(workload, candidate).batch_s


FIGURES: dict[str, tuple[str, Callable[[Curve], float | None]]] = {
    **{f"seconds_to_{r:g}": ("s", partial(Curve.seconds_to, reward=r)) for r in REWARDS_WANTED},
    **{
        f"batches_to_{r:g}": ("batches", partial(Curve.batches_to, reward=r))
        for r in REWARDS_WANTED
    },
    **{f"tokens_to_{r:g}": ("tokens", partial(Curve.tokens_to, reward=r)) for r in REWARDS_WANTED},
    "batch_s": ("s", lambda curve: curve.batch_s),
    "reward_last": ("reward", lambda curve: curve.rewards[-1]),
    "reward_after": ("reward", lambda curve: curve.reward_after),
    "staleness_mean": ("versions", lambda curve: curve.staleness_mean),
    "dropped_share": ("share of tokens", lambda curve: curve.dropped_share),
}
"""Unit and value of each figure of a run."""


def rows_of(curves: Sequence[Curve], ways: Sequence[Way]) -> Iterator[dict[str, object]]:
    """Yield one row per configuration and figure: medians over seeds, relative to the synchronous
    run, or to the configuration that trains on each group once; then the forecast of ``tidegate
    plan`` from the lengths of the synchronous run, relative to what was measured.

    A configuration without runs, or without runs to compare with, has no rows.
    """
    by_way: dict[str, dict[int, Curve]] = {}
    for curve in curves:
        by_way.setdefault(curve.way, {})[curve.seed] = curve
    sync = by_way.get(WAYS[0].name, {})
    for way in ways:
        ours = list(by_way.get(way.name, {}).values())
        peers = by_way.get(way.peer, {})
        if not ours or not peers:
            continue
        for name, (unit, of) in FIGURES.items():
            pairs = [(of(curve), of(peers[curve.seed])) for curve in ours]
            yield _row(name, way, pairs, unit=unit, peer=way.peer)
        is_planned = way.correction == DEFAULT_CORRECTION and not way.is_one_step
        if is_planned and way.max_uses == 1 and sync:
            planned = [(planned_batch_s(way, sync[c.seed]), c.batch_s) for c in ours]
            yield _row("planned_batch_s", way, planned, unit="s", peer="measured")


def _row(
    name: str,
    way: Way,
    pairs: Sequence[tuple[float | None, float | None]],
    *,
    unit: str,
    peer: str,
) -> dict[str, object]:
    """Return one row from each seed's figure and its peer's; the ratio is the median of ratios.

    A figure that a run did not reach counts as infinite, and is null.
    """
    found = sorted(_or_infinity(value) for value, _ in pairs)
    ratios = [_or_infinity(value) / base for value, base in pairs if base]
    return {
        "name": name,
        "way": way.name,
        "value": _finite(statistics.median(found)),
        "lowest": _finite(found[0]),
        "highest": _finite(found[-1]),
        "seeds": len(found),
        "unit": unit,
        "peer": peer,
        "ratio": _finite(statistics.median(ratios)) if ratios else None,
    }


def _or_infinity(value: float | None) -> float:
    return float("inf") if value is None else value


def _finite(value: float) -> float | None:
    return None if value == float("inf") else round(value, 4)


def draw(path: Path, curves: Sequence[Curve]) -> None:
    """Plot the held-out reward over versions and over time, the mean of all seeds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    by_samples, by_time = figure.subplots(1, 2, sharey=True)
    for key, colour, style in LINES:
        way = next(way for way in WAYS if way.key == key)
        ours = [curve for curve in curves if curve.way == way.name]
        versions = range(min((len(curve.rewards) for curve in ours), default=0))
        rewards = [statistics.fmean(curve.rewards[v] for curve in ours) for v in versions]
        at_s = [statistics.fmean(curve.at_s[v] for curve in ours) for v in versions]
        by_samples.plot(versions, rewards, style, color=colour, lw=1.6, label=way.name)
        by_time.plot(at_s, rewards, style, color=colour, lw=1.6)
    by_samples.set_xlabel(f"batches trained ({GROUPS_PER_BATCH * GROUP_SIZE} rollouts each)")
    by_time.set_xlabel("virtual seconds")
    by_samples.set_ylabel("expected held-out reward, mean of all seeds")
    by_samples.legend(frameon=False, fontsize=8.5)
    for axes in (by_samples, by_time):
        for reward in REWARDS_WANTED:
            axes.axhline(reward, color="#bbbbbb", lw=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


LINES = (
    ("sync", "#22303c", "-"),
    ("eta1", "#f28e2b", "-"),
    ("eta2", "#2a9d8f", "-"),
    ("eta4", "#2f6f9f", "-"),
    ("eta8", "#c0392b", "-"),
    ("eta8-none", "#c0392b", "--"),
)
"""Configurations of the picture, with the colour and style of their lines."""


def main() -> int:
    """Run all configurations, and print the table."""
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--versions", type=int, default=30)
    parser.add_argument("--ways", default=",".join(way.key for way in WAYS))
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    wanted = options.ways.split(",")
    if unknown := sorted(set(wanted) - {way.key for way in WAYS}):
        parser.error(f"--ways has no {unknown}; choose from {[way.key for way in WAYS]}")
    ways = [way for way in WAYS if way.key in wanted]
    options.runs.mkdir(parents=True, exist_ok=True)
    curves = []
    for way, seed in itertools.product(ways, range(options.seeds)):
        curves.append(run(way, seed, options))
        last = curves[-1]
        print(
            f"{way.name}, seed {seed}: reward {last.rewards[-1]:.3f} after {last.at_s[-1]:.1f} s",
            file=sys.stderr,
            flush=True,
        )
    for row in rows_of(curves, ways):
        print_figures(row, as_json=options.json)
    if options.picture is not None:
        draw(options.picture, curves)
    return 0


if __name__ == "__main__":
    sys.exit(main())
