"""One run of a policy on a workload: real orchestrator, all else simulated in virtual time.

Real: scheduler, core, fleet, weight coordinator, policy, episodes and the codec on both ends of the
wire. Simulated: engines, the wire, the trainer and the clock.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, fields, replace

from benchmarks.scheduling.policies import Variant
from benchmarks.scheduling.workloads import (
    MACHINES,
    PROMPT_TOKENS,
    ROLLOUT_MACHINES,
    SWITCH_S,
    TRAINER_MACHINES,
    Task,
    Workload,
)
from tidegate.orchestrator.core.events import HandOver
from tidegate.orchestrator.episodes.episode import Episode
from tidegate.orchestrator.scheduler.scheduler import Scheduler
from tidegate.orchestrator.settings.config import RunSettings
from tidegate.policies.migration import MigrationPolicy
from tidegate.simulation.engine.coarse import CoarseEngineSpec
from tidegate.simulation.planning.simulated import (
    coarse_context,
    settings_without_timeouts,
    start_engine,
)
from tidegate.simulation.run.simulation import empty_model_files
from tidegate.simulation.run.virtual_time import VirtualTime
from tidegate.transport.messages import InitWeights, UpdateWeights

MakeSpec = Callable[..., CoarseEngineSpec]
"""Creates a simulated engine's spec, from its ``costs`` and ``stopwatch``."""

SLOWEST_STEPS = 60.0
"""Time limit of a step, as a multiple of the bound."""


class Stopwatch:
    """Adds up the wall time spent in ``with`` blocks, the simulated parts; not reentrant."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._since_s = 0.0

    def __enter__(self) -> None:
        self._since_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.total_s += time.perf_counter() - self._since_s


@dataclass(slots=True)
class Tally:
    """Cumulative counters at the time of a version."""

    at_s: float = 0.0
    cpu_s: float = 0.0
    """CPU time of this process."""
    wall_s: float = 0.0
    simulated_s: float = 0.0
    """Part of the wall time spent in simulated engines and the trainer."""
    rollouts: int = 0
    trained_tokens: int = 0
    """Trained tokens, including masked ones, because they pass through the model too."""
    masked_tokens: int = 0
    tail_rollouts: int = 0
    """Number of rollouts longer than half the cap."""
    mixed_rollouts: int = 0
    generated_tokens: int = 0
    discarded_tokens: int = 0
    """Discarded tokens, without masked ones."""
    staleness: Counter[int] = field(default_factory=Counter)
    """Number of rollouts by staleness."""

    @property
    def orchestrator_cpu_s(self) -> float:
        """CPU time of the orchestrator, estimated from its share of wall time: reading the CPU
        clock at each engine message would cost more than the message."""
        return self.cpu_s * (1.0 - self.simulated_s / self.wall_s)

    def efficiency(self, workload: Workload) -> float:
        """Return the unmasked tokens per second, over those of machines that are never idle."""
        used_tokens = self.trained_tokens - self.masked_tokens
        return used_tokens / self.at_s / workload.bound_tokens_per_s

    def since(self, start: "Tally") -> "Tally":
        """Return the difference to an earlier tally."""
        names = [each.name for each in fields(self)]
        return Tally(**{name: getattr(self, name) - getattr(start, name) for name in names})


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one run, after its warm-up."""

    tally: Tally
    steps: int
    mean_tokens: float
    """Mean length of as many tasks' rollouts as were trained, in the order of the tasks."""
    tail_share: float
    """Share of those rollouts that are longer than half the cap."""
    bound: int | None
    """Staleness bound that the policy guarantees."""
    oldest_ever: int
    """Largest staleness of the whole run."""


class Trainer:
    """Takes batches, simulates training time, publishes, and counts."""

    def __init__(
        self, workload: Workload, variant: Variant, scheduler: Scheduler, stopwatch: Stopwatch
    ) -> None:
        self._workload = workload
        self._scheduler = scheduler
        self._stopwatch = stopwatch
        machines = MACHINES if variant.policy.is_colocated else TRAINER_MACHINES
        self._s_per_token = workload.training_machine_s / machines / workload.batch_tokens
        self._switch_s = SWITCH_S if variant.policy.is_colocated else 0.0
        self._total = Tally()

    async def run(self, versions: int) -> list[Tally]:
        """Train for this many versions; return the tally at each, from 0 on."""
        tallies = [self._tally()]
        while len(tallies) <= versions:
            batches: list[int] = []
            for _ in range(self._scheduler.core.policy.batches_per_version):
                batch = await self._scheduler.trainer.next_batch()
                assert batch is not None
                batches.append(batch.number)
                with self._stopwatch:
                    tokens = self._count(batch)
                await asyncio.sleep(self._switch_s + tokens * self._s_per_token)
            version = (await self._scheduler.control.reserve()).version
            self._scheduler.trainer.name_batches(batches)
            update = UpdateWeights(version=version, location="0", tensors=[])
            await self._scheduler.control.publish(version, [update])
            tallies.append(self._tally())
        return tallies

    def _count(self, batch: HandOver) -> int:
        """Count a batch; return its number of tokens."""
        total = self._total
        rollouts = [rollout for group in batch.groups for rollout in group.kept]
        lengths = [rollout.sampled_tokens for rollout in rollouts]
        total.masked_tokens += sum(rollout.masked_tokens for rollout in rollouts)
        total.rollouts += len(lengths)
        total.tail_rollouts += sum(2 * n > self._workload.cap_tokens for n in lengths)
        total.trained_tokens += sum(lengths)
        return sum(lengths)

    def _tally(self) -> Tally:
        core = self._scheduler.core
        ledger = core.ledger.snapshot()
        return replace(
            self._total,
            at_s=asyncio.get_running_loop().time(),
            cpu_s=time.process_time(),
            wall_s=time.perf_counter(),
            simulated_s=self._stopwatch.total_s,
            mixed_rollouts=core.trained.mixed_version,
            generated_tokens=ledger.generated,
            discarded_tokens=ledger.discarded_total - self._total.masked_tokens,
            staleness=Counter(core.trained.staleness),
        )


async def play(episode: Episode, task: Task) -> float:
    """Play one rollout, as long as its task says."""
    episode.append([0] * PROMPT_TOKENS)
    tools = task.tool_s[episode.index]
    for tokens, tool_s in zip(task.turns(episode.index), tools, strict=False):
        await episode.generate(max_tokens=tokens)
        if tool_s:
            await asyncio.sleep(tool_s)
    return float(episode.index % 2)


def of_so_many(trajectories: int) -> Callable[[Episode, Task], Awaitable[float]]:
    """Return :func:`play` limited to this many rollouts at once, in admission order.

    It models a run whose environments or thread pool have limited places; Tidegate itself needs no
    such limit, because a rollout that waits for its tool holds no engine slot.
    """
    places = asyncio.Semaphore(trajectories)

    async def play_in_turn(episode: Episode, task: Task) -> float:
        async with places:
            return await play(episode, task)

    return play_in_turn


def run_once(
    workload: Workload,
    variant: Variant,
    *,
    mode: str,
    seed: int = 0,
    trajectories: int | None = None,
    engine: MakeSpec = CoarseEngineSpec,
    migration_policy: MigrationPolicy | None = None,
) -> Outcome:
    """Run one policy on one workload; ``trajectories`` limits the rollouts at once."""
    limit_s = SLOWEST_STEPS * workload.versions * workload.batch_tokens
    virtual_time = VirtualTime(limit_s=limit_s / workload.bound_tokens_per_s)
    settings = settings_without_timeouts(
        seed=seed,
        group_size=workload.group_size,
        pause_mode=mode,
        kv_policy="keep",
        staleness_policy=variant.staleness_policy(workload.groups_per_batch),
        migration_policy=migration_policy,
    )
    try:
        episode = play if trajectories is None else of_so_many(trajectories)
        tallies = virtual_time.run(
            _main(workload, variant, settings, virtual_time, episode, engine)
        )
    finally:
        virtual_time.close()
    return _outcome(workload, settings, tallies, seed)


async def _main(
    workload: Workload,
    variant: Variant,
    settings: RunSettings,
    virtual_time: VirtualTime,
    episode: Callable[[Episode, Task], Awaitable[float]],
    make_spec: MakeSpec,
) -> list[Tally]:
    loop, stopwatch = virtual_time.loop, Stopwatch()
    context, init = coarse_context(loop), InitWeights(channel="shm")
    scheduler = Scheduler(settings, empty_model_files(), context.router, init, recorder=None)
    # In a colocated run the weights are exchanged as part of the switch.
    costs = replace(workload.costs, swap_s=0.0) if variant.policy.is_colocated else workload.costs
    engines = MACHINES if variant.policy.is_colocated else ROLLOUT_MACHINES
    for number in range(engines):
        spec = make_spec(costs=costs, stopwatch=stopwatch)
        start_engine(f"engine-{number:02}", spec, context, settings.sampling.seed)
    serving = loop.create_task(scheduler.run(), name="scheduler")
    await scheduler.wait_for_engines(engines)
    scheduler.offer(workload.tasks(settings.sampling.seed), episode)
    training = loop.create_task(
        Trainer(workload, variant, scheduler, stopwatch).run(workload.versions), name="trainer"
    )
    await asyncio.wait({serving, training}, return_when=asyncio.FIRST_COMPLETED)
    serving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await serving
    if failed := scheduler.core.groups.failures.total():
        raise AssertionError(f"{failed} episodes of the benchmark failed; nothing here may")
    return await training


def _outcome(workload: Workload, settings: RunSettings, tallies: list[Tally], seed: int) -> Outcome:
    warm_up = workload.warm_up_versions
    steps = len(tallies) - 1 - warm_up
    first, last = (v * workload.groups_per_batch for v in (warm_up, warm_up + steps))
    lengths = _lengths(workload.task(seed, index) for index in range(first, last))
    return Outcome(
        tally=tallies[-1].since(tallies[warm_up]),
        steps=steps,
        mean_tokens=sum(lengths) / len(lengths),
        tail_share=sum(2 * n > workload.cap_tokens for n in lengths) / len(lengths),
        bound=settings.staleness.make_policy().guaranteed_bound,
        oldest_ever=max(tallies[-1].staleness, default=0),
    )


def _lengths(tasks: Iterable[Task]) -> list[int]:
    return [length for task in tasks for length in task.lengths]
