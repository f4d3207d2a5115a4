"""Scenario of a simulated run: settings, engines, work, policies and faults, drawn from a seed.

A scenario is plain data and can be written as JSON. Its defaults are the smallest run there is, so
that a shrunken scenario is short. The bounds that policies promise are computed here independently
of the policies' code.
"""

import random
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec

from tidegate.errors import ConfigError
from tidegate.orchestrator.core.control_events import PublishWait
from tidegate.orchestrator.core.turns import CONSECUTIVE_LOSSES_MAX
from tidegate.orchestrator.settings.config import RunSettings, run_settings
from tidegate.policies.asynchrony import (
    BoundedStaleness,
    DeadlinePolicy,
    OneStepOffPolicy,
    Unbounded,
)
from tidegate.policies.bottlenecks import RunFigures
from tidegate.policies.consumption import Window
from tidegate.policies.elasticity import Elastic, Scaling
from tidegate.policies.failures import FailurePolicy
from tidegate.policies.filters import DynamicSampling, GroupFilter
from tidegate.policies.migration import EvenOut, LongTailLane
from tidegate.policies.predictions import DecodeCost
from tidegate.policies.rounds import OverSampling, Synchronous, TailPacking
from tidegate.policies.routing import PowerOfTwoChoices, PrefixAffinity, SessionAffinity
from tidegate.policies.speeds import MeasuredSpeeds
from tidegate.policies.staleness import StalenessPolicy
from tidegate.simulation.faults.faults import (
    ALL_FAULTS,
    FAULTS_MAX,
    LONGEST_FAULT_S,
    WEIGHT_FAULTS,
    Fault,
    FaultKind,
    plan_drains,
    plan_faults,
)
from tidegate.transport.messages import KV_POLICIES, PAUSE_MODES, KvPolicy, PauseMode

# ---------------------------------------------------------------- episodes

LONG_TOOL_MAX_S = 2.0
"""Longest tool call, in seconds: longer than most runs take to publish several versions, and far
below an episode's timeout."""


@dataclass(slots=True)
class ScriptedTurn:
    """One turn of a script, with the steps that follow the turn."""

    given: list[int]
    """Tokens that the episode appends before the turn."""
    max_tokens: int
    timeout_s: float | None
    """Time that the episode waits for the turn, in seconds, before it continues with the tokens
    sampled so far; None: no limit."""
    tool_s: float
    """Duration of the tool call after the turn, in seconds."""
    is_scored: bool = False
    """Whether the episode requests log-probs of its context after the turn."""
    parks: bool = False
    """Whether the episode waits for newer weights after the turn."""


@dataclass(slots=True)
class Script:
    """Turns, reward and end of one episode."""

    turns: list[ScriptedTurn]
    reward: float
    fate: str
    """``returns``, ``raises once`` (and returns when it begins again), or the kind of failure:
    ``raises``, ``asks too much``, ``hangs`` or ``ends engines``."""
    forks_before: int | None = None
    """Index of the turn before which the episode forks; None: the episode doesn't fork."""
    branch: list[ScriptedTurn] = field(default_factory=list)
    """Turns of the forked branch."""

    @property
    def failure(self) -> str | None:
        """Reason for which the episode's rollout is discarded; None if the episode returns."""
        match self.fate:
            case "returns" | "raises once":
                return None
            case "hangs":
                return "episode_timeout"
            case "raises":
                return "episode_error"
        return "turn_refused"


def draw_script(scenario: "Scenario", chance: random.Random) -> Script:
    """Draw one episode's turns, reward and end."""
    turns = [_turn(scenario, chance) for _ in range(chance.choice((1, 1, 2, 3)))]
    fate = "returns"
    if chance.random() < scenario.failing_episodes:
        fate = chance.choice(("raises", "raises", "raises", "asks too much", "hangs"))
    return Script(turns[: scenario.turns_max], chance.choice((0.0, 0.5, 1.0)), fate)


def _turn(scenario: "Scenario", chance: random.Random) -> ScriptedTurn:
    given = [chance.randrange(2, 1000) for _ in range(chance.randint(1, 12))]
    tokens, tool_s = chance.choice((4, 16, 40)), chance.choice((0.0, 0.0, 0.01, 0.1))
    timeout_s = chance.choice((0.0, 0.02, 0.1, 0.5))
    is_patient = chance.random() >= scenario.giving_up_turns
    return ScriptedTurn(
        given=given,
        max_tokens=min(tokens, scenario.output_tokens_max),
        timeout_s=None if is_patient else timeout_s,
        tool_s=tool_s,
    )


def draw_habits(chance: random.Random) -> dict[str, Any]:
    """Draw a scenario's settings for forks, scoring, long tools and parking.

    Half of the scenarios have none of these.
    """
    if chance.random() < 0.5:
        return {}
    return {
        "forking_episodes": chance.choice((0.0, 0.5)),
        "scored_turns": chance.choice((0.0, 0.3)),
        "long_tools": chance.choice((0.0, 0.2)),
        "parking_turns": chance.choice((0.0, 0.0, 0.3)),
        "episode_park_after_s": chance.choice((None, None, 0.05, 0.5)),
    }


def add_habits(script: Script, scenario: "Scenario", chance: random.Random) -> None:
    """Add forks, scoring, parking and long tools to a script, by the scenario's shares."""
    if chance.random() < scenario.forking_episodes:
        script.forks_before = chance.randrange(len(script.turns))
        script.branch = [_turn(scenario, chance) for _ in range(chance.choice((1, 1, 2)))]
        del script.branch[
            scenario.turns_max - script.forks_before :
        ]  # a branch makes no context longer
    for turn in (*script.turns, *script.branch):
        turn.is_scored = chance.random() < scenario.scored_turns
        turn.parks = chance.random() < scenario.parking_turns
        if chance.random() < scenario.long_tools:
            turn.tool_s = min(LONG_TOOL_MAX_S, 0.02 * chance.paretovariate(1.0))


# ---------------------------------------------------------------- scenarios

OrderName = Literal["admission", "completion", "window"]

PlacementName = Literal["plain", "session", "prefix", "two-choices", "speeds", "lane", "even"]

PolicyName = Literal[
    "bounded", "synchronous", "one-step", "unbounded", "over-sampling", "tail-packing"
]

Count = Annotated[int, msgspec.Meta(ge=1)]


EPISODE_TIMEOUT_MIN_S = 40.0
"""Shortest episode timeout, in seconds; longer if the engines' work or deadly turns need more."""

FAULTS_S = FAULTS_MAX * LONGEST_FAULT_S
"""Longest time that the planned faults of a run take together, in seconds."""

DEADLY_TURN_S = CONSECUTIVE_LOSSES_MAX * (LONGEST_FAULT_S + 1.0)
"""Time that one deadly turn costs the engine of a one-engine run, in seconds: the turn is refused
after ``CONSECUTIVE_LOSSES_MAX`` losses, and after each loss the engine needs about a second to join
again and take weights."""

TURN_TOKENS = 10
"""Mean number of tokens that a turn samples; see
:func:`tidegate.simulation.checks.model.output_tokens`."""

CONTEXT_TOKENS = 25
"""Mean number of tokens in a turn's context, which an engine prefills before sampling."""

ADAPTER_WORK = 3
"""Largest work of one trained adapter, in units of the run's own work: the adapter's turns, and the
loads of adapters that replace each other in an engine's memory."""

FAULTS_UNTIL_S = 3.0
"""Latest virtual time of a planned fault, in seconds: about the duration of a run without
faults."""

RETRY_DELAY_S = 0.02
"""Time until a failed episode begins again for the first time, in seconds: a few engine steps, so
that its running turn may end in between."""

FAILING_EPISODES = 0.15
"""Share of episodes that fail, in scenarios with failing episodes; a fifth of the failing ones
never return."""

DEADLY_EPISODES = 0.1
"""Share of the episodes that end engines, in one run of eight."""

WEIGHTS_TIMEOUT_S = 60.0
"""Weight timeout, in seconds: longer than any engine without faults takes to serve a new version,
even if the engine waits for its turns to end."""

BLOCK_TOKENS = 4
"""Number of tokens in one KV block of a simulated engine."""

TIGHT_BLOCKS = 15
"""KV blocks of an engine under memory pressure. They hold 60 tokens: the longest context of two
short turns has 56, and several turns start at once."""


def engine_name(number: int) -> str:
    """Return a simulated engine's name."""
    return f"engine-{number}"


def any_figures(engines: int) -> RunFigures:
    """Return figures of a run with so many engines, for a policy that does not read the others."""
    return RunFigures(
        batch_s=1.0,
        trainer_s=1.0,
        publish_s=0.0,
        engines=engines,
        engine_idle_share=0.0,
        full_share=0.0,
        work_s=1.0,
        slots=1,
        full_rows=1.0,
        rows=1.0,
        cost=DecodeCost(0.0, 1.0),
        rollout_s=1.0,
        decode_s=1.0,
        queue_s=0.0,
        activity_s=0.0,
        group_s=(1.0,),
        groups_per_batch=1,
        waits_for_stragglers=True,
        max_staleness=None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticByChance(Elastic):
    """Draws a number of engines within the limits, whatever the figures are."""

    seed: int
    start_s: float = 0.2
    cool_down_s: float = 0.1
    drain_s: float = 0.3

    def decide(self, run: RunFigures, *, quiet_s: float) -> Scaling | None:
        """Return the drawn number, unless the engines have just changed or are as many."""
        chance = random.Random(f"{self.seed}/{run.engines}/{quiet_s}")
        engines = chance.randint(self.engines_min, self.engines_max)
        is_change = quiet_s >= self.cool_down_s and engines != run.engines
        return Scaling(run.engines, engines, "by chance") if is_change else None


Seconds = Annotated[float, msgspec.Meta(gt=0)]


class Scenario(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    dict=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
):
    """Complete description of one simulated run, as plain data."""

    # ---- policies
    seed: int = 0
    """Seed of all random draws of the run: delays, lengths of answers, scripts of episodes."""

    max_staleness: int = 0
    group_size: int = 1
    groups_per_batch: int = 1
    outstanding_groups_limit: int | None = None
    policy: PolicyName = "bounded"
    order: OrderName = "admission"
    window_groups: Count = 1
    deadline_policy: DeadlinePolicy = "wait"
    split_rollouts_limit: int | None = None
    """Most rollouts of split groups that may run on after a batch; None: no limit."""
    batches_per_version: Count = 1
    """Number of batches per version that the policy is told."""
    just_in_time_after_versions: int | None = 8
    """Number of versions without a wait after which groups start later; None: never."""
    max_uses: Count = 1
    """Number of times that a group may be trained on; only for the policy ``bounded``."""
    filters_groups: bool = False
    """Whether groups of equal rewards are dropped."""
    decide_after: int | None = None
    placement: PlacementName = "plain"

    # ---- the run
    engines_per_update_wave: int | None = None
    """Number of engines that swap weights at a time; None: all."""
    publish_wait: PublishWait = "live"
    pausing: float = 0.0
    """Share of versions around which the trainer pauses engines."""
    pause_mode: PauseMode = "keep"
    kv_policy: KvPolicy = "recompute"
    credit_steps: Count = 64
    weight_update_timeout_s: float = WEIGHTS_TIMEOUT_S

    # ---- engines
    engines: Count = 1
    step_s: Seconds = 0.005
    staging_s: float = 0.005
    """Time that an engine needs to copy one version of the weights, in seconds."""
    latency_s: float = 0.0005
    """Mean delay of a frame, in seconds."""
    max_running_turns: Count = 8
    chunk_tokens: Count = 256
    """Most tokens that an engine prefills per step."""
    tokens_per_step: Count = 1
    """Most tokens that one turn samples per step."""
    blocks: Annotated[int, msgspec.Meta(ge=TIGHT_BLOCKS)] | None = None
    """Number of KV blocks per engine; None: unlimited."""
    engines_without_prefills: int = 0
    """Number of engines, counted from the last, that don't report which weights computed a
    context's KV."""
    hands_turns_back: bool = False
    """Whether an engine that runs out of blocks ends turns with ``abort`` instead of preempting
    them."""

    # ---- work
    tasks: Count = 1
    batches_per_offer: Count | None = None
    """Number of batches after which the trainer offers the remaining tasks anew; None: never."""
    are_tasks_async: bool = False
    turns_max: Count = 1
    """Most turns of an episode."""
    output_tokens_max: Count = 4
    failing_episodes: float = 0.0
    """Share of episodes that fail."""
    flaky_episodes: float = 0.0
    """Share of episodes that fail by infrastructure's doing, and return when they begin again."""
    retries_max: int = 0
    """Number of times that an episode begins again after a failure of infrastructure."""
    failure_reward: float | None = None
    """Reward of rollouts that failed by the policy's doing; None: they are discarded."""
    deadly_turns: float = 0.0
    """Share of episodes whose last turn ends every engine that it is sent to."""
    giving_up_turns: float = 0.0
    """Share of turns whose end the episode may not wait for."""
    forking_episodes: float = 0.0
    """Share of episodes that fork."""
    scored_turns: float = 0.0
    """Share of turns after which the episode has its context scored."""
    long_tools: float = 0.0
    """Share of tool calls whose duration has a long tail."""
    parking_turns: float = 0.0
    """Share of turns after which the episode waits for newer weights."""
    episode_park_after_s: Seconds | None = None
    """Time after which an episode is parked without its own request, in seconds; None: never."""

    # ---- the trainer
    train_s: float = 0.0
    write_s: float = 0.0
    """Time that the trainer needs to write one version to the weight buffer, in seconds."""
    batches_per_publish: Count = 1
    names_batches: bool = False
    """Whether publishes name their batches even if the trainer takes one batch at a time."""
    publishing_twice: float = 0.0
    """Share of publishes that are followed by another publish, which names no batch."""
    publishing_partly: float = 0.0
    """Share of publishes that are followed by one of some tensors, which names no batch."""
    rolling_back: float = 0.0
    """Share of publishes that are followed by a rollback."""
    out_of_order: float = 0.0
    """Share of batches that the trainer trains on after the next batch, if it has both."""
    cancelled_publishes: float = 0.0
    """Share of publishes that the trainer cancels after a timeout."""
    patches: bool = False
    """Whether publishes send patches of the weights written last, where engines can have these, as
    with ``weight_deltas="elements"``."""
    discarded_rows: float = 0.0
    """Share of rows that the trainer discards."""
    look_ahead: int = 0
    """Number of batches that the trainer requests ahead, during its train step."""
    batch_poll_delay_s: float = 0.0
    """Mean delay until the trainer's loop checks for an offered batch, in seconds."""
    tasks_per_offer: Count | None = None
    """Number of tasks after which an iterator ends and another follows; None: one iterator gives
    all tasks."""
    batch_timeout_s: float | None = None
    """Time that the trainer waits for a batch before it asks again, in seconds; None: no limit."""
    evaluation_tasks: int = 0
    """Number of tasks evaluated after each publish."""
    evaluates_beside: bool = False
    """Whether the trainer continues training during an evaluation."""
    pins_evaluations: bool = False
    """Whether evaluations are pinned to the version published last."""
    evaluation_engines: int = 0
    """Number of the engines that are kept for evaluations; one is always left for training."""

    is_elastic: bool = False
    """Whether a policy adds and retires engines, up to ``engines``, by chance after each batch."""

    # ---- adapters, in runs that train some: see :mod:`adapter_runs`
    adapters: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Number of adapters that are trained; 0: the run's weights are."""
    adapters_max: Count = 1
    """Most adapter versions in an engine's memory."""

    # ---- what goes wrong
    processes_max: Count = 1
    """Most processes of the orchestrator and its trainer, one after another. With more than one,
    the process dies at any instant and is resumed, at most ``processes - 1`` times."""
    faults: list[Fault] = msgspec.field(default_factory=list)

    def group_filter(self) -> GroupFilter:
        """Return the filter that decides which groups are trained on."""
        if self.filters_groups:
            return DynamicSampling(decide_after=self.decide_after)
        return GroupFilter()

    def placement_settings(self) -> dict[str, object]:
        """Return the settings of routing, engine speeds and stragglers for the placement."""
        settings: dict[PlacementName, dict[str, object]] = {
            "plain": {},
            "session": {"routing_policy": SessionAffinity(margin_turns=2)},
            "prefix": {"routing_policy": PrefixAffinity(margin_turns=2)},
            "two-choices": {"routing_policy": PowerOfTwoChoices(seed=self.seed)},
            "speeds": {"engine_speeds": MeasuredSpeeds()},
            "lane": {
                "migration_policy": LongTailLane(min_tokens=8, engines=1, slots=2, check_steps=2)
            },
            "even": {"migration_policy": EvenOut(gap_turns=2, check_steps=2)},
        }
        return settings[self.placement]

    def staleness_policy(self) -> StalenessPolicy:
        """Return the policy that admits groups and chooses the next batch."""
        batch, limit = self.groups_per_batch, self.outstanding_groups_limit
        match self.policy:
            case "synchronous":
                return Synchronous(groups_per_batch=batch)
            case "one-step":
                return OneStepOffPolicy(groups_per_batch=batch)
            case "unbounded":
                return Unbounded(groups_per_batch=batch, outstanding_groups_limit=3 * batch)
            case "over-sampling":
                return OverSampling(groups_per_batch=batch, factor=2.0)
            case "tail-packing":
                return TailPacking(groups_per_batch=batch, factor=1.5)
            case "bounded":
                window = Window(self.window_groups)
                return BoundedStaleness(
                    max_staleness=self.max_staleness,
                    groups_per_batch=batch,
                    outstanding_groups_limit=limit,
                    consumption_order=window if self.order == "window" else self.order,
                    deadline_policy=self.deadline_policy,
                    split_rollouts_limit=self.split_rollouts_limit,
                    batches_per_version=self.batches_per_version,
                    just_in_time_after_versions=self.just_in_time_after_versions,
                    max_uses=self.max_uses,
                )

    @property
    def outstanding_groups_max(self) -> int:
        """Most groups outstanding at once, computed independently of the policy's code."""
        batch = self.groups_per_batch * self.batches_per_version
        batches: dict[str, float] = {"synchronous": 1, "one-step": 2, "unbounded": 3}
        batches |= {"over-sampling": 2, "tail-packing": 1.5}
        allowed = round(batches.get(self.policy, self.max_staleness + 1) * batch)
        if self.policy == "bounded" and self.max_uses > 1:
            versions = (self.max_staleness + 1 - (self.max_uses - 1)) / self.max_uses
            allowed = int(max(1.0, versions) * batch + 1e-9)
        is_limited = self.policy == "bounded" and self.outstanding_groups_limit is not None
        return min(allowed, self.outstanding_groups_limit or 1) if is_limited else allowed

    @property
    def staleness_bound(self) -> int | None:
        """Largest staleness of a trained token, in versions; None if unbounded.

        The bound is computed independently of the policy's code.
        """
        others = {"synchronous": 0, "one-step": 1, "unbounded": None, "over-sampling": None}
        others["tail-packing"] = 0
        if self.policy in others:
            return others[self.policy]
        if self.order == "window" and self.deadline_policy == "wait":
            groups_per_version = self.groups_per_batch * self.batches_per_version
            return self.max_staleness + 1 + (self.window_groups - 2) // groups_per_version
        return self.max_staleness

    @property
    def is_in_order(self) -> bool:
        """Whether groups are trained in the order of admission."""
        if self.policy == "bounded":
            return self.order == "admission"
        return self.policy in ("synchronous", "one-step")

    @cached_property
    def without_prefills(self) -> tuple[str, ...]:
        """Names of the engines that don't report prefills."""
        names = [engine_name(number) for number in range(self.engines)]
        return tuple(names[max(0, self.engines - self.engines_without_prefills) :])

    @cached_property
    def episode_timeout_s(self) -> float:
        """Timeout of episodes, in seconds: long enough that only hanging episodes are timed out.

        An episode's turns wait for the turns of all other episodes if engines are slow and have few
        slots, and for engines that deadly turns have ended.
        """
        rollouts = self.outstanding_groups_max * self.group_size + self.evaluation_tasks
        rows = rollouts * (1 + self.forking_episodes)
        steps = TURN_TOKENS / self.tokens_per_step + CONTEXT_TOKENS / self.chunk_tokens
        acknowledged_s = 2 * self.latency_s / self.credit_steps
        turn_s = steps * (self.step_s + acknowledged_s)
        work_s = rows * self.turns_max * turn_s / (self.engines * self.max_running_turns)
        deadly_s = rollouts * self.deadly_turns * DEADLY_TURN_S / self.engines
        timeout_s = max(EPISODE_TIMEOUT_MIN_S, FAULTS_S + work_s + deadly_s)
        return timeout_s * (1 + ADAPTER_WORK * self.adapters)

    @property
    def quiet_max_s(self) -> float:
        """Seconds without progress after which a run is stuck: longer than two episode timeouts."""
        return 2 * self.episode_timeout_s + 5.0

    @property
    def longest_run_s(self) -> float:
        """Seconds after which a run is stuck: several times the longest runs that succeed."""
        return 15 * self.episode_timeout_s

    @property
    def engines_kept(self) -> int:
        """Number of engines that are kept for evaluations."""
        return min(self.evaluation_engines, self.engines - 1)

    @property
    def elasticity(self) -> Elastic | None:
        """Policy that decides how many engines there are; None: their number stays."""
        if not self.is_elastic:
            return None
        return ElasticByChance(engines_max=self.engines - self.engines_kept, seed=self.seed)

    @property
    def must_name_batches(self) -> bool:
        """Whether the trainer may hold batches that a publish's weights were not made from."""
        is_told = self.batches_per_publish == self.batches_per_version
        return self.names_batches or self.look_ahead > 0 or not is_told

    def chance(self, *name: object) -> random.Random:
        """Return a random generator for one purpose, the same in each run of the scenario."""
        return random.Random(f"{self.seed}/{name}")

    @cached_property
    def settings(self) -> RunSettings:
        """Run settings of the scenario, as a user would give them.

        Raises:
            ConfigError: the settings are out of range or contradict each other.
        """
        return run_settings(
            model=Path("simulated"),
            engines=self.engines,
            evaluation_engines=self.engines_kept,
            elasticity=self.elasticity,
            staleness_policy=self.staleness_policy(),
            **self.placement_settings(),
            group_filter=self.group_filter(),
            group_size=self.group_size,
            engines_per_update_wave=self.engines_per_update_wave,
            pause_mode=self.pause_mode,
            kv_policy=self.kv_policy,
            seed=self.seed,
            credit_steps=self.credit_steps,
            heartbeat_interval_s=0.25,
            engine_timeout_s=1.0,
            weight_update_timeout_s=self.weight_update_timeout_s,
            episode_timeout_s=self.episode_timeout_s,
            episode_park_after_s=self.episode_park_after_s,
            failure_policy=FailurePolicy(
                reward=self.failure_reward,
                retries_max=self.retries_max,
                retry_delay_s=RETRY_DELAY_S,
            ),
        )

    @cached_property
    def _scripts(self) -> dict[tuple[int, int], Script]:
        """Scripts drawn so far, by task and index; the checks read them again and again."""
        return {}

    def script(self, task: int, index: int) -> Script:
        """Return the script of one rollout's episode. Tasks below 0 are for evaluation."""
        script = self._scripts.get((task, index))
        if script is None:
            script = self._scripts[task, index] = self._draw_script(task, index)
        return script

    def _draw_script(self, task: int, index: int) -> Script:
        script = draw_script(self, self.chance("episode", task, index))
        if self.forking_episodes + self.scored_turns + self.long_tools + self.parking_turns:
            add_habits(script, self, self.chance("habits", task, index))
        if self.deadly_turns and script.fate == "returns":
            chance = self.chance("deadly", task, index)
            script.fate = "ends engines" if chance.random() < self.deadly_turns else "returns"
        if self.flaky_episodes and self.retries_max and script.fate == "returns":
            chance = self.chance("flaky", task, index)
            script.fate = "raises once" if chance.random() < self.flaky_episodes else "returns"
        return script

    def to_json(self) -> str:
        """Return the scenario as one line of JSON, without settings equal to their defaults."""
        return msgspec.json.encode(self).decode()


def read_scenario(text: str) -> Scenario:
    """Read a scenario that :meth:`Scenario.to_json` wrote.

    Raises:
        ConfigError: the text is not a scenario, or its settings are invalid.
    """
    try:
        scenario = msgspec.json.decode(text, type=Scenario)
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError(
            f"not a scenario: {error}; `tidegate simulate` prints one for a seed that fails"
        ) from None
    _ = scenario.settings
    return scenario


def draw_rules(plain: Scenario) -> dict[str, object]:
    """Draw the settings of policies, placement and publishing from the scenario's seed."""
    chance = random.Random(f"{plain.seed}/policy")
    others: tuple[PolicyName, ...] = (
        *("synchronous", "one-step", "unbounded", "over-sampling"),
        "tail-packing",
    )
    policy = chance.choice(others) if chance.random() < 0.2 else "bounded"
    orders: tuple[OrderName, ...] = ("admission", "completion", "completion", "window")
    order = chance.choice(orders)
    deadlines: tuple[DeadlinePolicy, ...] = ("wait", "wait", "mask", "drop")
    if order == "admission":
        deadlines = ("wait",)
    if order == "completion":
        deadlines += ("split", "split")
    rules: dict[str, object] = {
        "policy": policy,
        "order": order,
        "window_groups": chance.randint(1, 2 * plain.groups_per_batch + 1),
        "deadline_policy": chance.choice(deadlines),
        "filters_groups": plain.group_size > 1 and chance.random() < 0.2,
        "decide_after": chance.choice((None, 2)),
        "placement": chance.choice(("plain", "plain", "plain", *get_args(PlacementName))),
        "engines_per_update_wave": chance.choice((None, None, 1, 2)),
        "publish_wait": chance.choice(("live", "live", "staged", "none")),
        "pausing": chance.choice((0.0, 0.0, 0.0, 0.3)),
        "split_rollouts_limit": None,  # an adapter's rules replace all of the scenario's
        "batches_per_version": 1,
        "just_in_time_after_versions": plain.chance("just in time").choice((None, 1, 1, 1, 2)),
        "max_uses": 1,
    }
    if rules["just_in_time_after_versions"] == 1 and plain.max_staleness > 1:
        rules["tasks"] = plain.tasks + 6 * plain.groups_per_batch  # else few groups are ever left
    if policy == "bounded" and rules["deadline_policy"] == "split":
        rules["split_rollouts_limit"] = chance.choice((None, 1, plain.group_size))
    if policy == "bounded" and rules["deadline_policy"] == "wait":
        uses = plain.chance("uses").choice((1, 1, 1, 2, 3))
        rules["max_uses"] = min(uses, plain.max_staleness + 1)
    return rules


def draw_scenario(seed: int, kinds: frozenset[FaultKind] = ALL_FAULTS) -> Scenario:
    """Draw the scenario of a seed. A seed's tasks and episodes are the same for all fault kinds."""
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
        pause_mode=chance.choice(PAUSE_MODES),
        kv_policy=chance.choice(KV_POLICIES),
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
        engines_without_prefills=random.Random(f"{seed}/prefills").choice((0, 0, 0, 1)),
        pins_evaluations=random.Random(f"{seed}/pins").random() < 0.5,
        evaluation_engines=random.Random(f"{seed}/kept").choice((0, 0, 1)),
        discarded_rows=random.Random(f"{seed}/left out").choice((0.0, 0.0, 0.3)),
        look_ahead=random.Random(f"{seed}/look-ahead").choice((0, 0, 0, 0, 1, 2)),
        names_batches=random.Random(f"{seed}/names").random() < 0.5,
        patches=random.Random(f"{seed}/patches").random() < 0.5,
        faults=[
            *plan_faults(
                kinds,
                engines=engines,
                until_s=FAULTS_UNTIL_S,
                chance=random.Random(f"{seed}/faults"),
            ),
            *plan_drains(
                kinds,
                engines=engines,
                until_s=FAULTS_UNTIL_S,
                chance=random.Random(f"{seed}/drain faults"),
            ),
        ],
    )
    ruled = msgspec.structs.replace(plain, **draw_rules(plain))
    return _with_run_wide_faults(_with_batches_per_version(ruled), kinds)


def _with_batches_per_version(plain: Scenario) -> Scenario:
    """Tell half of the policies that may know it how many batches a version is made from."""
    may_know = plain.policy == "bounded" and plain.outstanding_groups_limit is None
    is_told = random.Random(f"{plain.seed}/told").random() < 0.5
    if not may_know or not is_told:
        return plain
    return msgspec.structs.replace(plain, batches_per_version=plain.batches_per_publish)


def _with_run_wide_faults(plain: Scenario, kinds: frozenset[FaultKind]) -> Scenario:
    """Add the settings of faults that apply to the whole run, not to one time."""
    chance = random.Random(f"{plain.seed}/times")
    times: dict[FaultKind, dict[str, object]] = {
        FaultKind.PRESSURE: chance.choice(({}, _draw_memory_pressure(chance))),
        FaultKind.EPISODE: {"failing_episodes": chance.choice((0.0, FAILING_EPISODES))},
        FaultKind.GIVE_UP: {"giving_up_turns": chance.choice((0.0, 0.2))},
        FaultKind.TRAINER: {
            "batches_per_offer": chance.choice((None, None, 1, 2)),
            "publishing_twice": chance.choice((0.0, 0.0, 0.0, 0.3)),
            "cancelled_publishes": chance.choice((0.0, 0.0, 0.3)),
            "batch_timeout_s": chance.choice((None, None, 0.03, 0.3)),
            **_draw_slow_trainer_loop(plain),
            **_draw_unusual_publishes(plain),
        },
    }
    run_wide = [times[kind] for kind in sorted(kinds & times.keys())]
    changes = {name: value for harder in run_wide for name, value in harder.items()}
    if FaultKind.EPISODE in kinds:
        shares = (0.0,) * 7 + (DEADLY_EPISODES,)
        changes["deadly_turns"] = random.Random(f"{plain.seed}/deadly").choice(shares)
        changes |= _draw_failure_policy(random.Random(f"{plain.seed}/failures"))
    if kinds & WEIGHT_FAULTS:
        changes["weight_update_timeout_s"] = chance.choice((3.0, WEIGHTS_TIMEOUT_S))
    return msgspec.structs.replace(plain, **changes)


def _draw_failure_policy(chance: random.Random) -> dict[str, object]:
    """Draw what becomes of failed episodes, and the share of those that only fail once."""
    return {
        "flaky_episodes": chance.choice((0.0, 0.0, 0.2)),
        "retries_max": chance.choice((0, 1, 2)),
        "failure_reward": chance.choice((None, None, -1.0)),
    }


def _draw_slow_trainer_loop(plain: Scenario) -> dict[str, object]:
    """Draw settings of a trainer with a slow event loop and several task iterators."""
    chance = random.Random(f"{plain.seed}/slow loop")
    return {
        "batch_poll_delay_s": chance.choice((0.0, 0.0, 0.0, 0.01, 0.1)),
        "tasks_per_offer": chance.choice((None, None, None, plain.groups_per_batch + 1)),
    }


def _draw_unusual_publishes(plain: Scenario) -> dict[str, object]:
    """Draw the shares of versions made from no batch, and of batches trained out of order."""
    chance = random.Random(f"{plain.seed}/unusual publishes")
    return {
        "publishing_partly": chance.choice((0.0, 0.0, 0.0, 0.2)),
        "rolling_back": chance.choice((0.0, 0.0, 0.0, 0.2)),
        "out_of_order": chance.choice((0.0, 0.5)),
    }


def _draw_memory_pressure(chance: random.Random) -> dict[str, object]:
    """Draw settings of one engine with more turns than its KV memory holds."""
    return {
        "engines": 1,
        "max_running_turns": 8,
        "blocks": TIGHT_BLOCKS,
        "turns_max": 2,
        "output_tokens_max": 16,
        "hands_turns_back": chance.random() < 0.5,
    }
