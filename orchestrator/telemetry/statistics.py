"""Immutable snapshots of a run and its engines, for users, metrics, dashboard and reports.

``Rollouts.statistics()`` takes them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tidegate.orchestrator.core.discards import DiscardStatistics, LengthBiasStatistics
from tidegate.orchestrator.core.ledger import LedgerSnapshot
from tidegate.orchestrator.telemetry.watchdog import Stuck


class EngineWork(NamedTuple):
    """Work of an engine so far. Cheap, because each batch reads it for up to a thousand engines."""

    busy_us: int
    """Time spent in steps, in microseconds."""
    tokens: int
    """Number of sampled tokens."""


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """One engine, as the orchestrator sees it."""

    name: str
    weight_version: int
    running_turns: int
    waiting_turns: int
    tokens: int
    """Number of tokens received from it so far."""
    busy_s: float
    """Seconds that it spent in steps so far."""
    is_alive: bool = True
    max_running_turns: int = 0
    """Number of its decode slots."""
    steps: int = 0
    rows: int = 0
    """Sum over its steps of the turns in each."""
    rows_squared: int = 0
    """Sum over its steps of rows squared, for a linear fit of step time over rows."""
    rows_busy_s: float = 0.0
    """Sum over its steps of rows times seconds, for the same fit."""
    model_code: str = ""
    """Implementation of its model: ``tidegate``, or ``transformers``, which is far slower."""
    dtype: str = ""
    """Dtype that it computes in, as torch spells it; empty if it doesn't report it."""
    block_tokens: int = 0
    """Tokens per block of its KV cache. The bits of a deterministic engine depend on it."""
    is_deterministic: bool = False
    """Whether a turn gets the same bits whatever other turns run beside it."""
    out_of_memory_steps: int = 0
    """Number of steps that ran out of memory and were repeated with less."""
    speculation: str = ""
    """Source of draft tokens: ``lookup``, ``rollouts`` or ``draft``; empty without speculation."""
    drafted_tokens: int = 0
    """Number of draft tokens verified in its steps."""
    accepted_tokens: int = 0
    """Number of draft tokens that were accepted: each saved a step."""
    ranks: int = 1
    """Number of processes that share its model."""
    quantization: str = ""
    """Quantization of its weights: ``int8``; empty for none."""
    swaps: int = 0
    """Number of weight swaps since it joined."""
    standstill_s: float = 0.0
    """Seconds without decoding in these swaps, as the engine reports them."""


@dataclass(frozen=True, slots=True)
class RunForecast:
    """Forecast of what a run could reach, from its measurements so far.

    Staleness is a mean over trained rollouts, in versions. Formulas: tidegate.policies.predictions.
    """

    rho: float
    """Throughput of the rollout over that of the trainer; above 1 the trainer is the bottleneck."""
    tail_factor: float
    """Mean length of a group's longest rollout over the mean length of a rollout."""
    predicted_staleness: float
    """Mean staleness predicted for the run so far."""
    measured_staleness: float
    """Mean staleness measured so far."""
    saturating_staleness: int
    """The ``max_staleness`` above which throughput does not increase."""
    batch_s: float
    """Mean seconds from one batch to the next."""
    attainable_batch_s: float
    """The same without avoidable waiting: the slower one of rollout and trainer."""
    advice: str
    """Advice on ``max_staleness``, in one sentence."""


@dataclass(frozen=True, slots=True)
class RunStatistics:
    """A run at one instant. Shares are of wall time since the first batch was asked for."""

    wall_s: float
    trainer_version: int
    live_version: int
    """Oldest version that a living engine serves."""
    capacity_groups: int
    """Number of groups that may be admitted now."""
    running_groups: int
    buffered_groups: int
    training_groups: int
    """Admission places of batches that were handed over and whose version is not live yet."""
    batches: int
    trained_rollouts: int
    mixed_version_rollouts: int
    """Number of trained rollouts whose tokens came from two or more versions."""
    discarded_rollouts: Mapping[str, int]
    max_staleness_seen: int
    staleness_bound: int | None
    """Staleness that the policy guarantees; None if it guarantees none."""
    mean_staleness: float
    """Mean over all trained rollouts, in versions."""
    staleness_histogram: Mapping[int, int]
    """Number of trained rollouts by staleness."""
    trainer_idle_share: float
    engine_idle_share: float
    tokens_per_s: float
    ledger: LedgerSnapshot
    evaluation_ledger: LedgerSnapshot
    engines: tuple[EngineStatistics, ...] = ()
    pause_mode: str | None = None
    """Mode by which engines are paused; None while they run."""
    asleep: tuple[str, ...] = ()
    """Memory of the engines that sleeps: ``weights``, ``kv_cache``."""
    staging_version: int | None = None
    """Version that is published and not yet staged on every engine; None without one."""
    publish_failure: str | None = None
    """Error of a publish whose call had returned; the next publish or batch raises it."""
    stuck: tuple[Stuck, ...] = ()
    """Things without progress for ``stuck_after_s`` or longer, the longest first."""
    forecast: RunForecast | None = None
    """Forecast from the measurements so far; None before two batches."""
    discards: Mapping[str, DiscardStatistics] = field(default_factory=dict)
    """Discarded rollouts by reason: how many, how long, and of which tasks."""
    length_bias: LengthBiasStatistics | None = None
    """Length of trained against generated rollouts; None before any was trained."""
    prefilled_tokens: int = 0
    """Context tokens that turns started from, recomputations included; since this process began."""
    cached_tokens: int = 0
    """Number of these whose KV was cached: another turn had computed it with the same weights."""
    parked_episodes: int = 0
    """Number of episodes parked until newer weights are live."""
    staleness_in_flight: Mapping[int, int] = field(default_factory=dict)
    """Number of trained rollouts by versions published from their oldest trained token to their
    group's end. This and the next six fields count since this process began."""
    staleness_in_queue: Mapping[int, int] = field(default_factory=dict)
    """Number of trained rollouts by versions published from their group's end to hand-over."""
    waited_groups: int = 0
    """Number of trained groups whose episodes' ends are known."""
    group_wait_s: float = 0.0
    """Seconds from the first end of an episode in a group to the last, summed over these groups."""
    episode_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds that all episodes spent in environments, tools, scoring and named activities."""
    trainer_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds that the trainer spent on each activity: train, wait, publish."""
    publishes: int = 0
    """Number of publishes in that time."""
    loop_longest_block_s: float = 0.0
    """Longest time in seconds for which the run's event loop was blocked; since this process began.
    Blocks shorter than half a second may be missed."""
    batches_untold: int = 0
    """Number of batches for which the user's ``on_batch`` raised an exception."""

    @property
    def mixed_version_share(self) -> float:
        """Share of trained rollouts that span two or more versions."""
        return self.mixed_version_rollouts / max(1, self.trained_rollouts)

    @property
    def mean_staleness_in_flight(self) -> float:
        """Mean staleness that arose before the group's end; 0 if unknown."""
        return _mean(self.staleness_in_flight)

    @property
    def mean_staleness_in_queue(self) -> float:
        """Mean staleness that arose while the group waited for the trainer; 0 if unknown."""
        return _mean(self.staleness_in_queue)

    @property
    def mean_group_wait_s(self) -> float:
        """Mean seconds from a group's first ended episode to its last."""
        return self.group_wait_s / max(1, self.waited_groups)

    @property
    def standstill_s(self) -> float:
        """Mean seconds that a living engine stood still for a weight swap."""
        swaps = sum(engine.swaps for engine in self.engines)
        return sum(engine.standstill_s for engine in self.engines) / max(1, swaps)

    @property
    def cached_share(self) -> float:
        """Share of context tokens whose KV was cached."""
        return self.cached_tokens / max(1, self.prefilled_tokens)


def _mean(counts: Mapping[int, int]) -> float:
    return sum(value * n for value, n in counts.items()) / max(1, sum(counts.values()))
