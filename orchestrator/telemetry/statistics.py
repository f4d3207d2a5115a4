"""What does a run look like right now? Immutable snapshots; nothing here changes anything."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tidegate.orchestrator.core.discards import DiscardStatistics, LengthBiasStatistics
from tidegate.orchestrator.core.ledger import LedgerSnapshot
from tidegate.orchestrator.telemetry.watchdog import Stuck


class EngineWork(NamedTuple):
    """What an engine has done so far, for who asks often: of a thousand engines, at each batch."""

    busy_us: int
    """In steps."""
    tokens: int
    """Sampled."""


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """One engine, as the orchestrator sees it."""

    name: str
    weight_version: int
    running_turns: int
    waiting_turns: int
    tokens: int
    """Received from it so far."""
    busy_s: float
    """Time it spent in steps so far."""
    is_alive: bool = True
    max_running_turns: int = 0
    """Its decode slots."""
    steps: int = 0
    rows: int = 0
    """Turns that were in its steps, added up."""
    rows_squared: int = 0
    """Of each step, added up: with this, a line can be fitted through steps' rows and times."""
    rows_busy_s: float = 0.0
    """Rows of each step times its time, added up; likewise."""
    model_code: str = ""
    """Whose code computes its model: ``tidegate``, or ``transformers``, which is far slower."""
    dtype: str = ""
    """What it computes in, as torch spells it; empty: it doesn't say."""
    block_tokens: int = 0
    """Tokens per block of its KV cache. The bits of a deterministic engine depend on it."""
    is_deterministic: bool = False
    """Whether its turns get the same bits in every batch."""
    out_of_memory_steps: int = 0
    """Steps for which it had no memory, and that it tried again with less."""
    speculation: str = ""
    """Where it takes guesses from: ``lookup``, ``rollouts`` or ``draft``; empty: it takes none."""
    drafted_tokens: int = 0
    """Guessed, and verified in a step."""
    accepted_tokens: int = 0
    """Of them, those that were sampled: so many came without a step of their own."""
    ranks: int = 1
    """Processes that share its model out among them."""
    quantization: str = ""
    """What it rounds weights to: ``int8``; empty: nothing."""
    swaps: int = 0
    """Of weights, since it joined."""
    standstill_s: float = 0.0
    """In them, no turn got on; as it says."""


@dataclass(frozen=True, slots=True)
class RunForecast:
    """What a run could reach, worked out from what it has measured so far.

    Staleness is a mean over trained rollouts, in versions. How: tidegate.policies.predictions.
    """

    rho: float
    """Throughput of the rollout over that of the trainer; above 1 the trainer is what limits."""
    tail_factor: float
    """How much longer the longest rollout of a group is than a rollout, on the mean."""
    predicted_staleness: float
    """What it should be by now."""
    measured_staleness: float
    """What it is."""
    saturating_staleness: int
    """The ``max_staleness`` past which nothing is gained."""
    batch_s: float
    """From one batch to the next."""
    attainable_batch_s: float
    """The same if nobody waited who needn't: the slower one of rollout and trainer."""
    advice: str
    """In a sentence."""


@dataclass(frozen=True, slots=True)
class RunStatistics:
    """A run, as of one instant. Shares are of wall time since the first batch was asked for."""

    wall_s: float
    trainer_version: int
    live_version: int
    """The oldest weights that a living engine serves."""
    capacity_groups: int
    """Groups that may still be admitted now."""
    running_groups: int
    buffered_groups: int
    training_groups: int
    """Handed over, and not yet published as a version that is live."""
    batches: int
    trained_rollouts: int
    mixed_version_rollouts: int
    """Trained rollouts whose tokens came from two or more versions."""
    discarded_rollouts: Mapping[str, int]
    max_staleness_seen: int
    staleness_bound: int | None
    """What the policy guarantees; None: nothing."""
    mean_staleness: float
    """Over all trained rollouts."""
    staleness_histogram: Mapping[int, int]
    """Trained rollouts by staleness."""
    trainer_idle_share: float
    engine_idle_share: float
    tokens_per_s: float
    ledger: LedgerSnapshot
    evaluation_ledger: LedgerSnapshot
    engines: tuple[EngineStatistics, ...] = ()
    pause_mode: str | None = None
    """What engines were paused by; None while they run."""
    asleep: tuple[str, ...] = ()
    """Which memory of the engines sleeps: ``weights``, ``kv_cache``."""
    staging_version: int | None = None
    """Published, and not yet staged on every engine."""
    publish_failure: str | None = None
    """Of a publish whose call had returned; the next publish or batch raises it."""
    stuck: tuple[Stuck, ...] = ()
    """What has not got on for ``stuck_after_s`` or longer, the longest first."""
    forecast: RunForecast | None = None
    """None before there were two batches."""
    discards: Mapping[str, DiscardStatistics] = field(default_factory=dict)
    """By reason: how long they were, and of which tasks."""
    length_bias: LengthBiasStatistics | None = None
    """None before anything was trained."""
    prefilled_tokens: int = 0
    """Context that turns started from, or that was computed again for one; since this process
    began."""
    cached_tokens: int = 0
    """Of it, what engines needed not compute, for another turn had, with the same weights."""
    parked_episodes: int = 0
    """That wait for newer weights between two turns."""
    staleness_in_flight: Mapping[int, int] = field(default_factory=dict)
    """Trained rollouts by versions published from their oldest trained token to their group's end;
    since this process began, as the six after this."""
    staleness_in_queue: Mapping[int, int] = field(default_factory=dict)
    """By versions published from there until they were handed over."""
    waited_groups: int = 0
    """Trained, and known when they ended."""
    group_wait_s: float = 0.0
    """From the first end of an episode in a group to the last, added up over them."""
    episode_s: Mapping[str, float] = field(default_factory=dict)
    """Of all episodes, spent in environments, tools, scores, and what they named: by name."""
    trainer_s: Mapping[str, float] = field(default_factory=dict)
    """What the trainer spent on each activity: train, wait, publish."""
    publishes: int = 0
    """In that time."""
    loop_longest_block_s: float = 0.0
    """Longest time for which the run's event loop could do nothing else; since this process
    began. Blocks shorter than half a second may be missed."""
    batches_untold: int = 0
    """Whose figures ``on_batch`` raised at."""

    @property
    def mixed_version_share(self) -> float:
        """Share of trained rollouts that span two or more versions."""
        return self.mixed_version_rollouts / max(1, self.trained_rollouts)

    @property
    def mean_staleness_in_flight(self) -> float:
        """The part of staleness that is of sampling; 0 where nothing is known."""
        return _mean(self.staleness_in_flight)

    @property
    def mean_staleness_in_queue(self) -> float:
        """The part that is of waiting for the trainer; likewise."""
        return _mean(self.staleness_in_queue)

    @property
    def mean_group_wait_s(self) -> float:
        """How long groups waited for their last rollout, from their first one on."""
        return self.group_wait_s / max(1, self.waited_groups)

    @property
    def standstill_s(self) -> float:
        """How long a living engine stood still for a swap of weights, on the mean."""
        swaps = sum(engine.swaps for engine in self.engines)
        return sum(engine.standstill_s for engine in self.engines) / max(1, swaps)

    @property
    def cached_share(self) -> float:
        """Share of the context that engines needed not compute."""
        return self.cached_tokens / max(1, self.prefilled_tokens)


def _mean(counts: Mapping[int, int]) -> float:
    return sum(value * n for value, n in counts.items()) / max(1, sum(counts.values()))
