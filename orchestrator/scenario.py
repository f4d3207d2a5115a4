"""What is simulated under a seed? The settings, the engines, the tasks and what goes wrong.

Everything is drawn before the run starts; nothing here happens.
"""

import random
from dataclasses import dataclass
from pathlib import Path

from tidegate.orchestrator.config import RunSettings, run_settings
from tidegate.orchestrator.faults import Fault, FaultKind, plan_faults
from tidegate.orchestrator.simulated_engine import EngineCosts

EPISODE_TIMEOUT_S = 30.0
"""Longer than all faults of a run take together, so only what hangs for ever is timed out."""

FAULTS_UNTIL_S = 2.0
"""About as long as a run takes without any."""

FAILING_EPISODES = 0.15
"""Share of those that raise, where episodes fail at all; a sixth as many never return."""


@dataclass(frozen=True, slots=True)
class ScriptedTurn:
    """One turn that an episode takes."""

    given: list[int]
    """Tokens appended before it."""
    max_tokens: int
    tool_s: float
    """Time spent after it."""


@dataclass(frozen=True, slots=True)
class Script:
    """What one episode does."""

    turns: list[ScriptedTurn]
    reward: float
    failure: str | None
    """None, or the reason for which its rollout will be discarded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One seed's run."""

    seed: int
    kinds: frozenset[FaultKind]
    settings: RunSettings
    engines: int
    costs: EngineCosts
    latency_s: float
    tasks: int
    are_tasks_async: bool
    train_s: float
    write_s: float
    """To write one version where engines can read it."""
    batches_per_publish: int
    publishes_twice: bool
    """Whether the trainer publishes now and then without having had a batch in between."""
    evaluation_tasks: int
    """After each publish; 0 evaluates never."""
    faults: list[Fault]

    def chance(self, *name: object) -> random.Random:
        """Random numbers for one purpose, the same in each run of this seed."""
        return random.Random(f"{self.seed}/{name}")

    def script(self, task: int, index: int) -> Script:
        """What the episode of one rollout does. Tasks below 0 are for evaluation."""
        chance = self.chance("episode", task, index)
        turns = [
            ScriptedTurn(
                given=[chance.randrange(2, 1000) for _ in range(chance.randint(1, 12))],
                max_tokens=chance.choice((4, 16, 40)),
                tool_s=chance.choice((0.0, 0.0, 0.01, 0.1)),
            )
            for _ in range(chance.choice((1, 1, 2, 3)))
        ]
        fate = chance.random() / FAILING_EPISODES
        failure = None
        if FaultKind.EPISODE in self.kinds and fate < 1:
            failure = "episode_timeout" if fate < 1 / 6 else "episode_error"
        return Script(turns, chance.choice((0.0, 0.5, 1.0)), failure)


def draw_scenario(seed: int, kinds: frozenset[FaultKind]) -> Scenario:
    """Choose one seed's run. The same seed has the same work under other faults."""
    chance = random.Random(f"{seed}/scenario")
    engines = chance.choice((1, 2, 2, 3))
    settings = _settings(chance, seed, engines)
    return Scenario(
        seed=seed,
        kinds=kinds,
        settings=settings,
        engines=engines,
        costs=EngineCosts(
            step_s=chance.choice((0.005, 0.01, 0.02)),
            running_turn_s=0.001,
            prefill_tokens_per_s=5000.0,
            staging_s=chance.choice((0.005, 0.05, 0.2)),
            max_running_turns=chance.choice((1, 2, 4, 8)),
            chunk_tokens=chance.choice((4, 16, 256)),
        ),
        latency_s=chance.choice((0.0005, 0.002, 0.02, 0.02)),
        tasks=chance.randint(1, 5) * settings.groups_per_batch + chance.randint(0, 1),
        are_tasks_async=chance.random() < 0.3,
        train_s=chance.choice((0.0, 0.05, 0.3)),
        write_s=chance.choice((0.0, 0.05, 0.3)),
        batches_per_publish=chance.choice((1, 1, 1, 2)),
        publishes_twice=chance.random() < 0.1,
        evaluation_tasks=chance.choice((0, 0, 0, 1, 3)),
        faults=plan_faults(
            kinds,
            engines=engines,
            until_s=FAULTS_UNTIL_S,
            chance=random.Random(f"{seed}/faults"),
        ),
    )


def _settings(chance: random.Random, seed: int, engines: int) -> RunSettings:
    groups_per_batch = chance.choice((1, 1, 2, 3))
    max_staleness = chance.choice((0, 1, 1, 2, 4))
    limit = chance.choice((None, None, None, groups_per_batch + 1))
    return run_settings(
        model=Path("simulated"),
        engines=engines,
        max_staleness=max_staleness,
        group_size=chance.choice((1, 2, 3)),
        groups_per_batch=groups_per_batch,
        outstanding_groups_limit=limit,
        pause_mode=chance.choice(("abort", "keep", "wait")),
        kv_policy=chance.choice(("keep", "recompute")),
        seed=seed,
        credit_steps=chance.choice((1, 2, 4, 8, 64)),
        heartbeat_interval_s=0.25,
        engine_timeout_s=1.0,
        weights_timeout_s=60.0,
        episode_timeout_s=EPISODE_TIMEOUT_S,
    )
