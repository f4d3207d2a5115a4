"""Immutable snapshots of a run and its engines, as ``Rollouts.statistics()`` takes them.

Metrics, dashboard, reports and users' training loops read them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from tidegate.orchestrator.core.discards import DiscardStatistics, LengthBiasStatistics
from tidegate.orchestrator.core.failure_counts import FailureStatistics
from tidegate.orchestrator.core.ledger import LedgerSnapshot
from tidegate.orchestrator.telemetry.watchdog import Stuck
from tidegate.policies.bottlenecks import Change, Limit

EngineState = Literal["serving", "draining"]
"""State of an engine in the run."""


class EngineWork(NamedTuple):
    """Work of an engine so far. Small, because each batch reads it for up to a thousand engines."""

    busy_us: int
    """Time spent in steps, in microseconds."""
    tokens: int
    """Number of tokens sampled so far."""


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """One engine, as the orchestrator sees it."""

    name: str
    """Name of the engine, unique in the run."""
    weight_version: int
    """Version of the weights that the engine serves."""
    running_turns: int
    """Number of turns that the engine decodes now, at most ``max_running_turns``."""
    waiting_turns: int
    """Number of turns that wait in the engine for a decode slot or for KV blocks."""
    tokens: int
    """Number of tokens received from the engine so far."""
    busy_s: float
    """Seconds that the engine spent in steps so far."""
    is_alive: bool = True
    max_running_turns: int = 0
    """Number of decode slots: turns that the engine decodes in one step at most."""
    steps: int = 0
    """Number of steps received from the engine so far."""
    rows: int = 0
    """Sum over the engine's steps of the turns in each."""
    rows_squared: int = 0
    """Sum over the engine's steps of rows squared, for a linear fit of step time over rows."""
    rows_busy_s: float = 0.0
    """Sum over the engine's steps of rows times seconds, for the same fit."""
    full_steps: int = 0
    """Number of steps beside which turns waited for a decode slot or for KV blocks."""
    full_rows: int = 0
    """Sum over ``full_steps`` of the turns in each."""
    full_busy_s: float = 0.0
    """Seconds that ``full_steps`` took."""
    waiting_turns_s: float = 0.0
    """Sum over the engine's steps of waiting turns times seconds."""
    model_code: str = ""
    """Implementation of the model: ``tidegate``, or ``transformers``, which is far slower."""
    dtype: str = ""
    """Dtype that the engine computes in, as torch spells it; empty if the engine reports none."""
    block_tokens: int = 0
    """Tokens per block of the KV cache. The bits of a deterministic engine depend on it."""
    is_deterministic: bool = False
    """Whether a turn gets the same bits whatever other turns run beside it."""
    out_of_memory_steps: int = 0
    """Number of steps that ran out of memory and were repeated with less."""
    speculative_method: str = ""
    """Source of draft tokens: ``lookup``, ``rollouts`` or ``draft``; empty without speculation."""
    draft_tokens: int = 0
    """Number of draft tokens verified in the engine's steps."""
    accepted_draft_tokens: int = 0
    """Number of draft tokens that were accepted: each saved a step."""
    tensor_parallel_size: int = 1
    """Number of processes that share the model."""
    quantization: str = ""
    """Type that the weights are rounded to: ``int8`` or ``fp8``; empty for none."""
    weight_swaps: int = 0
    """Number of weight swaps since the engine joined."""
    weight_swap_stall_s: float = 0.0
    """Seconds without decoding in these swaps, as the engine reports them."""
    state: EngineState = "serving"
    """``serving``; or ``draining``: the engine is about to leave, and gets no more turns."""
    device: str = ""
    """Device that the engine computes on: ``cpu``, ``cuda:0``, …; empty if it reports none."""


@dataclass(frozen=True, slots=True)
class RunForecast:
    """Forecast of what a run could reach, from its measurements so far.

    Staleness is a mean over trained rollouts, in versions. Formulas: tidegate.policies.predictions.
    """

    throughput_ratio: float
    """Rollout throughput over trainer throughput, both at their peak."""
    tail_factor: float
    """Mean length of a group's longest rollout over the mean length of a rollout."""
    predicted_staleness: float
    """Mean staleness predicted for the run so far."""
    measured_staleness: float
    """Mean staleness measured so far."""
    max_useful_staleness: int
    """Smallest ``max_staleness`` that is as fast as larger ones."""
    batch_interval_s: float
    """Mean seconds from one batch to the next."""
    attainable_batch_interval_s: float
    """Mean seconds from one batch to the next without avoidable waiting: the time of the
    slower of rollout and trainer."""
    advice: str
    """Limit, evidence and changes as text."""
    limit: Limit = "balance"
    """What limits the run: ``trainer``, ``engines``, ``admission`` (the staleness bound; both sides
    wait), or ``balance`` if no single change gains anything."""
    changes: tuple[Change, ...] = ()
    """What to change by how much, and what each change alone would gain."""


@dataclass(frozen=True, slots=True)
class RunStatistics:
    """A run at one instant. Shares are of ``wall_s``."""

    wall_s: float
    """Seconds from the first batch request to the trainer's last activity."""
    trainer_version: int
    """Newest version that the trainer has published."""
    live_version: int
    """Oldest version that a living engine serves."""
    admissible_groups: int
    """Number of groups that may be admitted now."""
    running_groups: int
    """Number of groups with a running episode."""
    buffered_groups: int
    """Number of groups that have ended and wait for the trainer."""
    training_groups: int
    """Number of groups in batches that were handed over and whose version is not live yet."""
    batches: int
    """Number of batches handed to the trainer."""
    trained_rollouts: int
    """Number of rollouts handed to the trainer, without those that it reported as not trained on.
    """
    mixed_version_rollouts: int
    """Number of trained rollouts whose tokens came from two or more versions."""
    discarded_rollouts: Mapping[str, int]
    """Number of rollouts that will never be trained, by reason."""
    max_staleness_seen: int
    """Largest staleness of a trained rollout, in versions: final once a publish has named the
    rollout's batch, planned before."""
    staleness_bound: int | None
    """Staleness that the policy guarantees; None if it guarantees none."""
    mean_staleness: float
    """Mean over all trained rollouts, in versions; each use of a rollout counts."""
    staleness_histogram: Mapping[int, int]
    """Number of trained rollouts by staleness, one for each use."""
    trainer_idle_share: float
    """Share of time in which the trainer waited for batches."""
    engine_idle_share: float
    """Share of time in which an engine was in no step; the mean over engines."""
    tokens_per_s: float
    """Tokens sampled per second of ``wall_s``."""
    ledger: LedgerSnapshot
    """Tokens sampled for training, by account."""
    evaluation_ledger: LedgerSnapshot
    """Tokens sampled for evaluation, by account."""
    engines: tuple[EngineStatistics, ...] = ()
    """One entry per engine."""
    engines_wanted: int | None = None
    """Number of engines for training that the elasticity policy wants; None without one."""
    scaling: str = ""
    """Last decision of the elasticity policy, with its figures; empty before the first."""
    held_batches: tuple[int, ...] = ()
    """Numbers of the batches that the trainer has and no publish has named. Batches that were lost
    (too old, or sampled by weights that were rolled back) are not among them."""
    pause_mode: str | None = None
    """Mode in which engines are paused; None while they run."""
    asleep: tuple[str, ...] = ()
    """Tags of the engine memory that is asleep: ``weights``, ``kv_cache``."""
    staging_version: int | None = None
    """Version that is published and not yet staged on every engine; None without one."""
    publish_failure: str | None = None
    """Error of a publish whose call had returned; the next publish or batch raises it."""
    stuck: tuple[Stuck, ...] = ()
    """Things without progress for ``stuck_after_s`` or longer, the longest first; before them,
    batches without anything to learn from. Once the run has ended, only the latter."""
    forecast: RunForecast | None = None
    """Forecast from the measurements so far; None before two batches."""
    reused_rollouts: int = 0
    """Number of further uses of trained rollouts (``max_uses``), which ``trained_rollouts`` and the
    ledger do not count."""
    reused_tokens: int = 0
    """Number of tokens in these uses."""
    discards: Mapping[str, DiscardStatistics] = field(default_factory=dict)
    """Discarded rollouts by reason: how many, how long, and of which tasks."""
    length_bias: LengthBiasStatistics | None = None
    """Length of trained against generated rollouts; None before any was trained."""
    context_tokens: int = 0
    """Number of context tokens that turns started from, recomputed ones included; since this
    process began."""
    cached_context_tokens: int = 0
    """Number of ``context_tokens`` whose KV was cached: another turn had computed it with the same
    weights."""
    parked_episodes: int = 0
    """Number of episodes parked until newer weights are live."""
    staleness_from_generation: Mapping[int, int] = field(default_factory=dict)
    """Number of trained rollouts by versions published from their oldest trained token to their
    group's end. This field and the seven below count since this process began."""
    staleness_from_queue: Mapping[int, int] = field(default_factory=dict)
    """Number of trained rollouts by versions published from their group's end to hand-over."""
    straggler_wait_groups: int = 0
    """Number of trained groups whose episodes' ends are known."""
    straggler_wait_s: float = 0.0
    """Seconds from the first end of an episode in a group to the last, summed over
    ``straggler_wait_groups``."""
    episode_activity_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds that all episodes spent in environments, tools, scoring and named activities."""
    trainer_activity_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds that the trainer spent on each activity: train, wait, publish, evaluate."""
    publishes: int = 0
    """Number of publishes that ``trainer_activity_s`` includes."""
    event_loop_longest_block_s: float = 0.0
    """Longest time in seconds for which the run's event loop was blocked; since this process began.
    Blocks shorter than half a second may be missed."""
    batch_callback_errors: int = 0
    """Number of batches for which the user's ``on_batch`` raised an exception."""
    tool_call_turns: int = 0
    """Number of turns with offered tools whose text resembles a tool call; since this process
    began."""
    parsed_tool_call_turns: int = 0
    """Number of ``tool_call_turns`` whose calls were parsed."""
    escaped_messages: int = 0
    """Number of messages with the text of a special token, which was encoded as plain text; since
    this process began."""
    episode_failures: tuple[FailureStatistics, ...] = ()
    """Failed episodes of training by cause, reason and outcome."""
    groups_kept_at_limit: int = 0
    """Number of groups that the filter rejected after its limit of drops, so that they are trained.
    """
    tasks_drawn: int = 0
    """Number of different tasks that curricula have given."""
    task_draws: int = 0
    """Number of times that curricula have given a task."""
    task_replays: int = 0
    """Number of ``task_draws`` that replayed a hard task."""

    @property
    def mixed_version_share(self) -> float:
        """Share of trained rollouts that span two or more versions."""
        return self.mixed_version_rollouts / max(1, self.trained_rollouts)

    @property
    def mean_staleness_from_generation(self) -> float:
        """Mean staleness that arose before the group's end; 0 if unknown."""
        return mean_of_counts(self.staleness_from_generation)

    @property
    def mean_staleness_from_queue(self) -> float:
        """Mean staleness that arose while the group waited for the trainer; 0 if unknown."""
        return mean_of_counts(self.staleness_from_queue)

    @property
    def mean_straggler_wait_s(self) -> float:
        """Mean seconds from a group's first ended episode to its last."""
        return self.straggler_wait_s / max(1, self.straggler_wait_groups)

    @property
    def mean_weight_swap_stall_s(self) -> float:
        """Mean seconds without decoding per weight swap."""
        swaps = sum(engine.weight_swaps for engine in self.engines)
        return sum(engine.weight_swap_stall_s for engine in self.engines) / max(1, swaps)

    @property
    def cached_context_share(self) -> float:
        """Share of context tokens whose KV was cached."""
        return self.cached_context_tokens / max(1, self.context_tokens)


def mean_of_counts(counts: Mapping[int, int]) -> float:
    """Return the mean of values that occurred so many times each; 0 if none did."""
    return sum(value * n for value, n in counts.items()) / max(1, sum(counts.values()))
