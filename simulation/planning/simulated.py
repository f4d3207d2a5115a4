"""Prediction of a run by running it in virtual time: the real orchestrator, simulated engines.

Real: scheduler, core, fleet, weight control, policy, episodes and messages. Simulated: the engines
(by their speeds only), the trainer and the clock. No faults are injected.
"""

import asyncio
import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass

from tidegate.orchestrator.episodes.episode import Episode
from tidegate.orchestrator.scheduler.scheduler import Scheduler
from tidegate.orchestrator.settings.config import RunSettings, run_settings
from tidegate.policies.asynchrony import BoundedStaleness
from tidegate.simulation.coarse_engine import CoarseSimulatedEngine
from tidegate.simulation.coverage_marks import CoverageMarks
from tidegate.simulation.planning.situation import PlanCandidate, PlanWorkload, Prediction
from tidegate.simulation.simulation import model_of_no_words
from tidegate.simulation.virtual_time import VirtualTime
from tidegate.simulation.wire import CarriedFrame, FrameLog, SimulatedRouter
from tidegate.transport.messages import InitWeights, UpdateWeights

WIRE_S = 0.0002
"""Mean one-way latency of a message, in seconds."""

FOR_EVER_S = 1e8
"""Value of all timeouts, in seconds: never reached, because no faults are injected."""

WARM_UP_VERSIONS_MIN = 4
"""Versions beyond η that are excluded from the figures while the pipeline fills."""


class NullFrameLog(FrameLog):
    """Frame log that only counts frames, because keeping them would be most of their cost."""

    def note(self, carried: CarriedFrame) -> None:
        """Count one frame."""
        self.frames += 1


@dataclass(frozen=True, slots=True)
class _Prompt:
    lengths: tuple[int, ...]


@dataclass(slots=True)
class _Tally:
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
    situation: PlanWorkload, choice: PlanCandidate, *, versions: int = 16, seed: int = 0
) -> Prediction:
    """Predict a choice by simulating ``versions`` versions after those that fill the pipeline."""
    virtual_time = VirtualTime(limit_s=FOR_EVER_S)
    try:
        return virtual_time.run(_simulation(situation, choice, virtual_time, versions, seed))
    finally:
        virtual_time.close()


async def _simulation(
    situation: PlanWorkload,
    choice: PlanCandidate,
    virtual_time: VirtualTime,
    versions: int,
    seed: int,
) -> Prediction:
    """Create the simulation inside the running loop, as the scheduler requires, and run it."""
    return await _Simulation(situation, choice, virtual_time, seed).run(versions)


class _Simulation:
    """One simulated run, with a trainer that measures it."""

    def __init__(
        self, situation: PlanWorkload, choice: PlanCandidate, virtual_time: VirtualTime, seed: int
    ) -> None:
        self._situation = situation
        self._choice = choice
        self._loop = virtual_time.loop
        self._seed = seed
        self._tally = _Tally()
        settings = _settings(situation, choice, seed)
        self._router = SimulatedRouter(self._loop, NullFrameLog(), CoverageMarks())
        init = InitWeights(channel="shm")
        self._scheduler = Scheduler(
            settings, model_of_no_words(), self._router, init, recorder=None
        )

    async def run(self, versions: int) -> Prediction:
        """Run engines, scheduler and trainer until the trainer ends, and return its figures."""
        for number in range(self._choice.engines):
            name = f"engine-{number:03}"
            chance = random.Random(f"{self._seed}/{name}")
            link = self._router.link(name, latency_s=WIRE_S, chance=chance)
            none = contextlib.nullcontext()
            costs = self._situation.costs
            CoarseSimulatedEngine(name, costs, loop=self._loop, link=link, stopwatch=none).start()
        serving = self._loop.create_task(self._scheduler.run(), name="scheduler")
        await self._scheduler.wait_for_engines(self._choice.engines)
        self._scheduler.offer(self._prompts(), self._play)
        training = self._loop.create_task(self._train(versions), name="trainer")
        await asyncio.wait({serving, training}, return_when=asyncio.FIRST_COMPLETED)
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        return await training

    def _prompts(self) -> Iterator[_Prompt]:
        """Yield prompts endlessly: all groups of the workload, shuffled anew in each pass."""
        chance = random.Random(f"{self._seed}/prompts")
        groups = list(self._situation.groups)
        size = round(self._situation.group_size)
        while True:
            chance.shuffle(groups)
            for group in groups:
                missing = [chance.choice(group) for _ in range(size - len(group))]
                yield _Prompt((*group[:size], *missing))

    async def _play(self, episode: Episode, prompt: _Prompt) -> float:
        """Play one rollout of the length in its prompt, in turns of equal length."""
        episode.append([0] * max(1, self._situation.costs.prompt_tokens))
        tokens = prompt.lengths[episode.index]
        turns = max(1, min(self._situation.turns, tokens))
        whole, rest = divmod(tokens, turns)
        for turn in range(turns):
            await episode.generate(max_tokens=whole + (turn < rest))
        return float(episode.index % 2)

    async def _train(self, versions: int) -> Prediction:
        """Take batches, train on each for the time of its tokens, publish, and measure."""
        speed = self._situation.trainer_tokens_per_s * self._choice.trainers
        warm_up = self._choice.max_staleness + WARM_UP_VERSIONS_MIN
        start = self._tally
        for number in range(1, warm_up + versions + 1):
            tokens = await self._take_batch()
            await asyncio.sleep(tokens / speed)
            version = (await self._scheduler.control.reserve()).version
            update = UpdateWeights(version=version, location="0", tensors=[])
            await self._scheduler.control.publish(version, [update])
            self._tally.at_s = self._loop.time()
            if number == warm_up:
                start, self._tally = self._tally, _Tally(at_s=self._tally.at_s)
        return _prediction(start.at_s, self._tally, versions)

    async def _take_batch(self) -> int:
        asked_s = self._loop.time()
        batch = await self._scheduler.next_batch()
        assert batch is not None, "prompts never end"
        tally = self._tally
        tally.waited_s += self._loop.time() - asked_s
        rollouts = [rollout for group in batch.groups for rollout in group.kept]
        tokens = sum(rollout.sampled_tokens for rollout in rollouts)
        tally.tokens += tokens
        tally.rollouts += len(rollouts)
        for rollout in rollouts:
            oldest = rollout.oldest_trained_version
            tally.staleness += 0 if oldest is None else batch.trainer_version - oldest
        return tokens


def _prediction(start_s: float, tally: _Tally, versions: int) -> Prediction:
    elapsed_s = tally.at_s - start_s
    return Prediction(
        batch_s=elapsed_s / versions,
        tokens_per_s=tally.tokens / elapsed_s,
        mean_staleness=tally.staleness / max(1, tally.rollouts),
        trainer_idle_share=tally.waited_s / elapsed_s,
    )


def _settings(situation: PlanWorkload, choice: PlanCandidate, seed: int) -> RunSettings:
    return run_settings(
        model="simulated",
        seed=seed,
        group_size=round(situation.group_size),
        pause_mode=choice.pause_mode,
        kv_policy=choice.kv_policy,
        episode_timeout_s=FOR_EVER_S,
        engine_timeout_s=FOR_EVER_S,
        orchestrator_timeout_s=FOR_EVER_S,
        stuck_after_s=FOR_EVER_S,
        weight_update_timeout_s=FOR_EVER_S,
        heartbeat_interval_s=FOR_EVER_S / 4,
        staleness_policy=BoundedStaleness(
            max_staleness=choice.max_staleness, groups_per_batch=choice.groups_per_batch
        ),
    )
