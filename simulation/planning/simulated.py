"""Prediction of a run by running it in virtual time: the real orchestrator, simulated engines.

Scheduler, core, fleet, weight control, policy, episodes and messages are the real ones. The engines
(by their speeds only), the trainer and the clock are simulated. No faults are injected.
"""

import asyncio
import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tidegate.orchestrator.episodes.episode import Episode
from tidegate.orchestrator.scheduler.scheduler import Scheduler
from tidegate.orchestrator.settings.config import RunSettings, run_settings
from tidegate.policies.asynchrony import BoundedStaleness
from tidegate.simulation.checks.ground_truth import GroundTruth
from tidegate.simulation.engine.coarse import CoarseEngine, CoarseEngineSpec
from tidegate.simulation.engine.context import SimulationContext
from tidegate.simulation.engine.engine import EngineHost
from tidegate.simulation.engine.wire import CarriedFrame, FrameLog
from tidegate.simulation.planning.workload import PlanCandidate, PlanWorkload, Prediction
from tidegate.simulation.run.simulation import empty_model_files
from tidegate.simulation.run.virtual_time import VirtualTime
from tidegate.transport.messages import InitWeights, UpdateWeights

WIRE_S = 0.0002
"""Mean one-way latency of a message, in seconds."""

NEVER_S = 1e8
"""Value of all timeouts, in seconds: never reached, because no faults are injected."""

WARM_UP_VERSIONS_MIN = 4
"""Versions beyond η that are excluded from the figures while the pipeline fills."""


class NullFrameLog(FrameLog):
    """Frame log that only counts frames, because keeping them would be most of their cost."""

    def record(self, carried: CarriedFrame) -> None:
        """Count one frame."""
        self.frames += 1


def coarse_context(loop: asyncio.AbstractEventLoop) -> SimulationContext:
    """Make the state of a run of coarse-grained engines, which keeps no steps and no frames."""
    return SimulationContext(loop, NullFrameLog(), GroundTruth(keeps_steps=False))


def start_engine(name: str, spec: CoarseEngineSpec, context: SimulationContext, seed: int) -> None:
    """Start an engine without faults."""
    chance = random.Random(f"{seed}/{name}")
    EngineHost(
        name,
        spec,
        context=context,
        latency_s=WIRE_S,
        chance=chance,
        engine_class=CoarseEngine,
    ).start()


@dataclass(frozen=True, slots=True)
class _PlanPrompt:
    lengths: tuple[int, ...]


@dataclass(slots=True)
class _BatchTotals:
    """Sums over the batches since the warm-up."""

    at_s: float = 0.0
    """Loop time of the last publish, in seconds."""
    tokens: int = 0
    rollouts: int = 0
    staleness: int = 0
    """Sum of the rollouts' staleness, in versions."""
    waited_s: float = 0.0
    """Time that the trainer has waited for batches, in seconds."""


def simulate(
    workload: PlanWorkload, candidate: PlanCandidate, *, versions: int = 16, seed: int = 0
) -> Prediction:
    """Predict a choice by simulating ``versions`` versions after those that fill the pipeline."""
    virtual_time = VirtualTime(limit_s=NEVER_S)

    async def run() -> Prediction:
        # Inside the running loop, as the scheduler requires.
        return await _Simulation(workload, candidate, virtual_time, seed).run(versions)

    try:
        return virtual_time.run(run())
    finally:
        virtual_time.close()


class _Simulation:
    """One simulated run, with a trainer that measures it."""

    def __init__(
        self, workload: PlanWorkload, candidate: PlanCandidate, virtual_time: VirtualTime, seed: int
    ) -> None:
        self._workload = workload
        self._candidate = candidate
        self._loop = virtual_time.loop
        self._seed = seed
        self._totals = _BatchTotals()
        settings = settings_without_timeouts(
            seed=seed,
            group_size=round(workload.group_size),
            pause_mode=candidate.pause_mode,
            kv_policy=candidate.kv_policy,
            staleness_policy=BoundedStaleness(
                max_staleness=candidate.max_staleness, groups_per_batch=candidate.groups_per_batch
            ),
        )
        self._context = coarse_context(self._loop)
        init = InitWeights(channel="shm")
        self._scheduler = Scheduler(
            settings, empty_model_files(), self._context.router, init, recorder=None
        )

    async def run(self, versions: int) -> Prediction:
        for number in range(self._candidate.engines):
            spec = CoarseEngineSpec(costs=self._workload.costs)
            start_engine(f"engine-{number:03}", spec, self._context, self._seed)
        serving = self._loop.create_task(self._scheduler.run(), name="scheduler")
        await self._scheduler.wait_for_engines(self._candidate.engines)
        self._scheduler.offer(self._prompts(), self._play)
        training = self._loop.create_task(self._train(versions), name="trainer")
        await asyncio.wait({serving, training}, return_when=asyncio.FIRST_COMPLETED)
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        return await training

    def _prompts(self) -> Iterator[_PlanPrompt]:
        """Yield prompts endlessly: all groups of the workload, shuffled anew in each pass."""
        chance = random.Random(f"{self._seed}/prompts")
        groups = list(self._workload.groups)
        size = round(self._workload.group_size)
        while True:
            chance.shuffle(groups)
            for group in groups:
                missing = [chance.choice(group) for _ in range(size - len(group))]
                yield _PlanPrompt((*group[:size], *missing))

    async def _play(self, episode: Episode, prompt: _PlanPrompt) -> float:
        """Play one rollout of the length in its prompt, in turns of equal length."""
        episode.append([0] * max(1, self._workload.costs.prompt_tokens))
        tokens = prompt.lengths[episode.index]
        turns = max(1, min(self._workload.turns, tokens))
        whole, rest = divmod(tokens, turns)
        for turn in range(turns):
            await episode.generate(max_tokens=whole + (turn < rest))
        return float(episode.index % 2)

    async def _train(self, versions: int) -> Prediction:
        speed = self._workload.trainer_tokens_per_s * self._candidate.trainers
        warm_up = self._candidate.max_staleness + WARM_UP_VERSIONS_MIN
        start = self._totals
        for number in range(1, warm_up + versions + 1):
            tokens = await self._take_batch()
            await asyncio.sleep(tokens / speed)
            version = (await self._scheduler.control.reserve()).version
            self._scheduler.trainer.name_batches([number])
            update = UpdateWeights(version=version, location="0", tensors=[])
            await self._scheduler.control.publish(version, [update])
            self._totals.at_s = self._loop.time()
            if number == warm_up:
                start, self._totals = self._totals, _BatchTotals(at_s=self._totals.at_s)
        return _prediction(start.at_s, self._totals, versions)

    async def _take_batch(self) -> int:
        requested_s = self._loop.time()
        batch = await self._scheduler.trainer.next_batch()
        assert batch is not None, "prompts never end"
        totals = self._totals
        totals.waited_s += self._loop.time() - requested_s
        rollouts = [rollout for group in batch.groups for rollout in group.kept]
        tokens = sum(rollout.sampled_tokens for rollout in rollouts)
        totals.tokens += tokens
        totals.rollouts += len(rollouts)
        for rollout in rollouts:
            oldest = rollout.oldest_trained_version
            totals.staleness += 0 if oldest is None else batch.trainer_version - oldest
        return tokens


def _prediction(start_s: float, totals: _BatchTotals, versions: int) -> Prediction:
    elapsed_s = totals.at_s - start_s
    return Prediction(
        batch_s=elapsed_s / versions,
        tokens_per_s=totals.tokens / elapsed_s,
        mean_staleness=totals.staleness / max(1, totals.rollouts),
        trainer_idle_share=totals.waited_s / elapsed_s,
    )


def settings_without_timeouts(**settings: Any) -> RunSettings:
    """Return the settings of a simulated run without faults, in which no timeout may pass."""
    return run_settings(
        model="simulated",
        episode_timeout_s=NEVER_S,
        engine_timeout_s=NEVER_S,
        orchestrator_timeout_s=NEVER_S,
        stuck_after_s=NEVER_S,
        weight_update_timeout_s=NEVER_S,
        heartbeat_interval_s=NEVER_S / 4,
        **settings,
    )
