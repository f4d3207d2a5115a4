"""What is simulated under a seed? The settings, the engines, the work and what goes wrong.

Everything is drawn before the run starts; nothing here happens. A scenario is plain data: it can be
written down as JSON, and its defaults are the smallest run that there is, so a shrunken one is
short.
"""

import random
from functools import cached_property
from pathlib import Path
from typing import Annotated

import msgspec

from tidegate.errors import ConfigError
from tidegate.orchestrator.config import RunSettings, run_settings
from tidegate.orchestrator.simulation.faults import (
    ALL_FAULTS,
    WEIGHT_FAULTS,
    Fault,
    FaultKind,
    plan_faults,
)
from tidegate.orchestrator.simulation.scenario_rules import ScenarioRules, draw_rules
from tidegate.orchestrator.simulation.script import (
    Script,
    Work,
    add_habits,
    draw_habits,
    draw_script,
)
from tidegate.orchestrator.weights.publishing import PublishWait
from tidegate.transport.messages import KvPolicy, PauseMode

EPISODE_TIMEOUT_S = 40.0
"""Longer than all faults of a run take together, so only what hangs for ever is timed out."""

FAULTS_UNTIL_S = 3.0
"""About as long as a run takes without any."""

FAILING_EPISODES = 0.15
"""Share of those that do, where episodes fail at all; a fifth of these never return."""

WEIGHTS_TIMEOUT_S = 60.0
"""Longer than any honest engine takes to serve a new version, if it waits for turns to end."""

BLOCK_TOKENS = 4
"""Of the simulated engines' KV."""

TIGHT_BLOCKS = 15
"""Hold 60 tokens: the longest context of two short turns has 56, and several start at once."""


Count = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]


class Scenario(ScenarioRules, frozen=True, kw_only=True):
    """One run."""

    # ---- the run
    update_wave: int | None = None
    """Engines that swap at a time."""
    publish_wait: PublishWait = "live"
    pausing: float = 0.0
    """Share of versions around which the trainer pauses engines."""
    pause_mode: PauseMode = "keep"
    kv_policy: KvPolicy = "recompute"
    credit_steps: int = 64
    weights_timeout_s: float = WEIGHTS_TIMEOUT_S

    # ---- engines
    engines: Count = 1
    step_s: Seconds = 0.005
    staging_s: float = 0.005
    """To copy one version of the weights."""
    latency_s: float = 0.0005
    """Mean delay of a frame."""
    max_running_turns: Count = 8
    chunk_tokens: Count = 256
    """Tokens prefilled per step, at most."""
    tokens_per_step: Count = 1
    """Of one turn."""
    blocks: Annotated[int, msgspec.Meta(ge=TIGHT_BLOCKS)] | None = None
    """Of KV memory per engine; None has no end of it."""
    hands_turns_back: bool = False
    """Whether an engine without blocks ends turns with ``abort``, or preempts them."""

    # ---- work
    tasks: Count = 1
    batches_per_offer: Count | None = None
    """After so many the trainer breaks out, and goes on with the tasks that are left."""
    are_tasks_async: bool = False
    turns_max: Count = 1
    """Episodes take fewer or as many."""
    output_tokens_max: Count = 4
    failing_episodes: float = 0.0
    """Share of them."""
    giving_up_turns: float = 0.0
    """Share of them."""
    forking_episodes: float = 0.0
    """Share of them."""
    scored_turns: float = 0.0
    """Share of turns after which the episode has its context scored."""
    long_tools: float = 0.0
    """Share of tools whose time has a long tail."""
    parking_turns: float = 0.0
    """Share of turns after which the episode waits for newer weights."""
    episode_budget_s: Seconds | None = None
    """After so long it is parked without asking."""

    # ---- the trainer
    train_s: float = 0.0
    write_s: float = 0.0
    """To write one version where engines can read it."""
    batches_per_publish: Count = 1
    publishing_twice: float = 0.0
    """Share of publishes that are followed by another, without a batch in between."""
    cancelled_publishes: float = 0.0
    """Share of them."""
    leaving_out: float = 0.0
    """Share of rows that it does not train on."""
    patience_s: float | None = None
    """It waits so long for a batch, then asks again; None waits on."""
    evaluation_tasks: int = 0
    """After each publish."""
    evaluates_beside: bool = False
    """Whether it goes on meanwhile."""

    # ---- what goes wrong
    faults: list[Fault] = msgspec.field(default_factory=list)

    def chance(self, *name: object) -> random.Random:
        """Random numbers for one purpose, the same in each run of this scenario."""
        return random.Random(f"{self.seed}/{name}")

    @cached_property
    def settings(self) -> RunSettings:
        """As a user would give them.

        Raises:
            ConfigError: they can't work.
        """
        return run_settings(
            model=Path("simulated"),
            engines=self.engines,
            policy=self.staleness_policy(),
            **self.placement_settings(),
            group_filter=self.group_filter(),
            group_size=self.group_size,
            update_wave=self.update_wave,
            pause_mode=self.pause_mode,
            kv_policy=self.kv_policy,
            seed=self.seed,
            credit_steps=self.credit_steps,
            heartbeat_interval_s=0.25,
            engine_timeout_s=1.0,
            weights_timeout_s=self.weights_timeout_s,
            episode_timeout_s=EPISODE_TIMEOUT_S,
            episode_budget_s=self.episode_budget_s,
        )

    def script(self, task: int, index: int) -> Script:
        """What the episode of one rollout does. Tasks below 0 are for evaluation."""
        script = draw_script(self.work, self.chance("episode", task, index))
        if not self.work.is_plain:
            add_habits(script, self.work, self.chance("habits", task, index))
        return script

    @cached_property
    def work(self) -> Work:
        """What episodes may do, and how often they do it."""
        return Work(
            turns_max=self.turns_max,
            output_tokens_max=self.output_tokens_max,
            failing_episodes=self.failing_episodes,
            giving_up_turns=self.giving_up_turns,
            forking_episodes=self.forking_episodes,
            scored_turns=self.scored_turns,
            long_tools=self.long_tools,
            parking_turns=self.parking_turns,
        )

    def to_json(self) -> str:
        """On one line; what is as in the smallest run is left out."""
        return msgspec.json.encode(self).decode()


def read_scenario(text: str) -> Scenario:
    """Read what :meth:`Scenario.to_json` wrote.

    Raises:
        ConfigError: it is something else, or can't work.
    """
    try:
        scenario = msgspec.json.decode(text, type=Scenario)
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError(
            f"not a scenario: {error}; `tidegate simulate` prints one for a seed that fails"
        ) from None
    _ = scenario.settings
    return scenario


def draw_scenario(seed: int, kinds: frozenset[FaultKind] = ALL_FAULTS) -> Scenario:
    """Choose one seed's run. The same seed has the same work under other faults."""
    chance = random.Random(f"{seed}/scenario")
    engines = chance.choice((1, 2, 2, 3))
    groups_per_batch = chance.choice((1, 1, 2, 3))
    tasks = chance.randint(1, 5) * groups_per_batch + chance.randint(0, 1)
    plain = Scenario(
        **draw_habits(random.Random(f"{seed}/habits")),
        seed=seed,
        max_staleness=chance.choice((0, 1, 2, 2, 4)),
        group_size=chance.choice((1, 2, 3)),
        groups_per_batch=groups_per_batch,
        outstanding_groups_limit=chance.choice((None, None, None, groups_per_batch + 1)),
        pause_mode=chance.choice(("abort", "keep", "wait")),
        kv_policy=chance.choice(("keep", "recompute")),
        credit_steps=chance.choice((1, 2, 4, 8, 64)),
        engines=engines,
        step_s=chance.choice((0.005, 0.01, 0.03)),
        staging_s=chance.choice((0.005, 0.05, 0.2)),
        latency_s=chance.choice((0.0005, 0.002, 0.02, 0.02)),
        max_running_turns=chance.choice((1, 2, 4, 8)),
        chunk_tokens=chance.choice((8, 32, 256)),
        tokens_per_step=chance.choice((1, 1, 1, 3)),
        tasks=tasks,
        are_tasks_async=chance.random() < 0.3,
        turns_max=3,
        output_tokens_max=40,
        train_s=chance.choice((0.0, 0.0, 0.05, 0.3, 1.0)),
        write_s=chance.choice((0.0, 0.0, 0.05, 0.3)),
        batches_per_publish=chance.choice((1, 1, 1, 2)),
        evaluation_tasks=chance.choice((0, 0, 0, 1, 3)),
        evaluates_beside=chance.random() < 0.5,
        leaving_out=random.Random(f"{seed}/left out").choice((0.0, 0.0, 0.3)),
        faults=plan_faults(
            kinds, engines=engines, until_s=FAULTS_UNTIL_S, chance=random.Random(f"{seed}/faults")
        ),
    )
    return _with_hard_times(msgspec.structs.replace(plain, **draw_rules(plain)), kinds)


def _with_hard_times(plain: Scenario, kinds: frozenset[FaultKind]) -> Scenario:
    """Add what isn't one fault at one time, but how the whole run is."""
    chance = random.Random(f"{plain.seed}/times")
    times: dict[FaultKind, dict[str, object]] = {
        FaultKind.PRESSURE: chance.choice(({}, _under_pressure(chance))),
        FaultKind.EPISODE: {"failing_episodes": chance.choice((0.0, FAILING_EPISODES))},
        FaultKind.GIVE_UP: {"giving_up_turns": chance.choice((0.0, 0.2))},
        FaultKind.TRAINER: {
            "batches_per_offer": chance.choice((None, None, 1, 2)),
            "publishing_twice": chance.choice((0.0, 0.0, 0.0, 0.3)),
            "cancelled_publishes": chance.choice((0.0, 0.0, 0.3)),
            "patience_s": chance.choice((None, None, 0.03, 0.3)),
        },
    }
    ours = [times[kind] for kind in sorted(kinds & times.keys())]
    changes = {name: value for harder in ours for name, value in harder.items()}
    if kinds & WEIGHT_FAULTS:
        changes["weights_timeout_s"] = chance.choice((3.0, WEIGHTS_TIMEOUT_S))
    return msgspec.structs.replace(plain, **changes)


def _under_pressure(chance: random.Random) -> dict[str, object]:
    """One engine, with more turns than it has memory for."""
    return {
        "engines": 1,
        "max_running_turns": 8,
        "blocks": TIGHT_BLOCKS,
        "turns_max": 2,
        "output_tokens_max": 16,
        "hands_turns_back": chance.random() < 0.5,
    }
