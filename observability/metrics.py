"""Catalogue of a run's Prometheus metrics: name, type, labels, help, and how to read the value.

:mod:`prometheus` exports it on the dashboard's `/metrics`; the reference lists it. Each metric
reads a :class:`DashboardSnapshot` of the run. Independent of the exposition format.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from tidegate.observability.dashboard.snapshots import DashboardSnapshot
from tidegate.orchestrator.telemetry.statistics import EngineStatistics, RunStatistics

MetricKind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class MetricSample:
    """One value of a metric."""

    value: float
    labels: tuple[str, ...] = ()
    """Label values, in the order of :attr:`Metric.labels`."""
    counts: Mapping[int, int] = field(default_factory=dict)
    """For a histogram, instead of ``value``: number of observations of each whole number."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of the catalogue."""

    name: str
    """As exported: counters end in ``_total``, units are Prometheus' base units."""
    kind: MetricKind
    help: str
    read: Callable[[DashboardSnapshot], Iterable[MetricSample]]
    labels: tuple[str, ...] = ()


def of_run(
    read: Callable[[RunStatistics], float | None],
) -> Callable[[DashboardSnapshot], list[MetricSample]]:
    """Read one value of the whole run; None gives no sample."""

    def samples(snapshot: DashboardSnapshot) -> list[MetricSample]:
        value = read(snapshot.statistics)
        return [] if value is None else [MetricSample(float(value))]

    return samples


def by_key(
    read: Callable[[DashboardSnapshot], Mapping[str, float]],
) -> Callable[[DashboardSnapshot], list[MetricSample]]:
    """Read one value for each value of the metric's only label."""
    return lambda snapshot: [
        MetricSample(float(n), (key,)) for key, n in sorted(read(snapshot).items())
    ]


def per_engine(
    name: str, kind: MetricKind, help: str, read: Callable[[EngineStatistics], float]
) -> Metric:
    """Return a metric with one sample for each engine, labelled by the engine's name."""

    def samples(snapshot: DashboardSnapshot) -> list[MetricSample]:
        return [
            MetricSample(float(read(each)), (each.name,)) for each in snapshot.statistics.engines
        ]

    return Metric(name, kind, help, samples, ("engine",))


def last_batch(name: str) -> Callable[[DashboardSnapshot], list[MetricSample]]:
    """Read a figure of the last batch; no sample before the first batch."""

    def samples(snapshot: DashboardSnapshot) -> list[MetricSample]:
        batches = snapshot.collected.batches
        value = batches[-1].get(name) if batches else None
        return [] if value is None else [MetricSample(value)]

    return samples


def histogram(
    read: Callable[[DashboardSnapshot], Mapping[int, int]],
) -> Callable[[DashboardSnapshot], list[MetricSample]]:
    """Read a histogram over whole numbers."""
    return lambda snapshot: [MetricSample(0.0, counts=read(snapshot))]


def forecast(name: str, help: str, field_name: str) -> Metric:
    """Return a gauge of a field of the run's forecast; it has no sample before the first one."""

    def value(run: RunStatistics) -> float | None:
        return None if run.forecast is None else float(getattr(run.forecast, field_name))

    return Metric(name, "gauge", help, of_run(value))


def _reported(name: str) -> Callable[[DashboardSnapshot], list[MetricSample]]:
    """Read a field of what the trainer reported about its last batch."""

    def samples(snapshot: DashboardSnapshot) -> list[MetricSample]:
        value = getattr(snapshot.collected.off_policy, name)
        return [] if value is None else [MetricSample(value)]

    return samples


def _reported_by_lag(name: str) -> Callable[[DashboardSnapshot], list[MetricSample]]:
    def samples(snapshot: DashboardSnapshot) -> list[MetricSample]:
        by_lag = sorted(snapshot.collected.off_policy.by_lag.items())
        return [MetricSample(values[name], (str(lag),)) for lag, values in by_lag if name in values]

    return samples


STALENESS = (
    Metric(
        "tidegate_staleness_versions",
        "histogram",
        "Trained rollouts by staleness in versions, of their oldest trained token at consumption.",
        histogram(lambda snapshot: snapshot.statistics.staleness_histogram),
    ),
    Metric(
        "tidegate_staleness_from_generation_versions",
        "histogram",
        "Trained rollouts by versions published from their oldest trained token to their group's "
        "end.",
        histogram(lambda snapshot: snapshot.statistics.staleness_from_generation),
    ),
    Metric(
        "tidegate_staleness_from_queue_versions",
        "histogram",
        "Trained rollouts by versions published while their ended group waited for the trainer.",
        histogram(lambda snapshot: snapshot.statistics.staleness_from_queue),
    ),
    Metric(
        "tidegate_version_span_max_versions",
        "gauge",
        "Largest number of versions that one rollout of the last batch spans.",
        last_batch("version_span_max"),
    ),
    Metric(
        "tidegate_token_lag_versions",
        "histogram",
        "Trained tokens by lag in versions at consumption.",
        histogram(lambda snapshot: snapshot.collected.token_lags),
    ),
    Metric(
        "tidegate_staleness_bound_versions",
        "gauge",
        "Staleness in versions that the policy guarantees; absent if it guarantees none.",
        of_run(lambda s: s.staleness_bound),
    ),
    forecast(
        "tidegate_staleness_predicted_versions",
        "Mean staleness in versions that the forecast predicts.",
        "predicted_staleness",
    ),
    forecast(
        "tidegate_staleness_max_useful_versions",
        "The max_staleness in versions above which throughput no longer grows.",
        "max_useful_staleness",
    ),
    Metric(
        "tidegate_effective_sample_size_ratio",
        "gauge",
        "Effective sample size of the last batch over its size, as the trainer reported it.",
        _reported("effective_sample_size"),
    ),
    Metric(
        "tidegate_mismatch_kl_nats",
        "gauge",
        "KL of the sampling policy from the trained one per token, as the trainer reported it.",
        _reported("mismatch_kl"),
    ),
    Metric(
        "tidegate_mismatch_k3_nats",
        "gauge",
        "KL by the k3 estimator, which is never negative: mean(w - 1 - log w).",
        _reported("k3"),
    ),
    Metric(
        "tidegate_mismatch_chi2_ratio",
        "gauge",
        "Chi-squared divergence per token: mean squared importance weight minus 1.",
        _reported("chi2"),
    ),
    Metric(
        "tidegate_mismatch_kl_by_lag_nats",
        "gauge",
        "KL by token lag (a bucket's smallest lag): mean(-log w), which may be negative.",
        _reported_by_lag("kl"),
        ("lag",),
    ),
    Metric(
        "tidegate_mismatch_k3_by_lag_nats",
        "gauge",
        "k3 by token lag.",
        _reported_by_lag("k3"),
        ("lag",),
    ),
    Metric(
        "tidegate_mismatch_chi2_by_lag_ratio",
        "gauge",
        "Chi-squared by token lag.",
        _reported_by_lag("chi2"),
        ("lag",),
    ),
    Metric(
        "tidegate_effective_sample_size_by_lag_ratio",
        "gauge",
        "Effective sample size by token lag.",
        _reported_by_lag("ess"),
        ("lag",),
    ),
    Metric(
        "tidegate_mismatch_perplexity_by_lag_ratio",
        "gauge",
        "Perplexity under the trained policy over that under the sampling one, by token lag.",
        _reported_by_lag("ppl_ratio"),
        ("lag",),
    ),
)


def _stuck(snapshot: DashboardSnapshot) -> dict[str, float]:
    counts: dict[str, float] = {}
    for each in snapshot.statistics.stuck:
        counts[each.kind] = counts.get(each.kind, 0) + 1
    return counts


TIMES = (
    Metric(
        "tidegate_trainer_version",
        "gauge",
        "Newest published weight version.",
        of_run(lambda s: s.trainer_version),
    ),
    Metric(
        "tidegate_live_version",
        "gauge",
        "Oldest weight version that a live engine serves.",
        of_run(lambda s: s.live_version),
    ),
    Metric(
        "tidegate_run_seconds",
        "gauge",
        "Seconds from the first batch request to the trainer's last activity.",
        of_run(lambda s: s.wall_s),
    ),
    Metric(
        "tidegate_trainer_seconds_total",
        "counter",
        "Seconds that the trainer spent in each activity: train, wait (for a batch), publish.",
        by_key(lambda snapshot: snapshot.collected.trainer_activity_s),
        ("activity",),
    ),
    Metric(
        "tidegate_publishes_total",
        "counter",
        "Publishes that the trainer waited for.",
        of_run(lambda s: s.publishes),
    ),
    Metric(
        "tidegate_episode_seconds_total",
        "counter",
        "Seconds of all episodes by activity: environment, score, tools, "
        "and the names given to episode.activity().",
        by_key(lambda snapshot: snapshot.statistics.episode_activity_s),
        ("activity",),
    ),
    Metric(
        "tidegate_straggler_wait_seconds_total",
        "counter",
        "Seconds between the ends of a group's first and last rollout, summed over trained groups.",
        of_run(lambda s: s.straggler_wait_s),
    ),
    Metric(
        "tidegate_straggler_wait_groups_total",
        "counter",
        "Trained groups counted in tidegate_straggler_wait_seconds_total.",
        of_run(lambda s: s.straggler_wait_groups),
    ),
    Metric(
        "tidegate_trainer_idle_ratio",
        "gauge",
        "Share of the run's time in which the trainer waited for batches.",
        of_run(lambda s: s.trainer_idle_share),
    ),
    Metric(
        "tidegate_engine_idle_ratio",
        "gauge",
        "Share of the run's time in which an engine ran no step, mean over engines.",
        of_run(lambda s: s.engine_idle_share),
    ),
    forecast(
        "tidegate_rollout_trainer_throughput_ratio",
        "Rollout throughput over trainer throughput; above 1 the trainer is the bottleneck.",
        "throughput_ratio",
    ),
    forecast(
        "tidegate_batch_interval_seconds",
        "Mean seconds from one batch to the next.",
        "batch_interval_s",
    ),
    forecast(
        "tidegate_batch_interval_attainable_seconds",
        "Mean seconds from one batch to the next that are attainable without avoidable waiting.",
        "attainable_batch_interval_s",
    ),
    Metric(
        "tidegate_paused",
        "gauge",
        "1 while engines are paused.",
        of_run(lambda s: float(s.pause_mode is not None)),
    ),
    Metric(
        "tidegate_event_loop_longest_block_seconds",
        "gauge",
        "Longest time in seconds for which user code blocked the run's event loop.",
        of_run(lambda s: s.event_loop_longest_block_s),
    ),
    Metric(
        "tidegate_stuck",
        "gauge",
        "Engines, turns, episodes and others without progress for stuck_after_s or longer, by "
        "kind.",
        by_key(_stuck),
        ("kind",),
    ),
)

ENGINES = (
    per_engine(
        "tidegate_engine_weight_version",
        "gauge",
        "Weight version that the engine serves.",
        lambda e: e.weight_version,
    ),
    per_engine(
        "tidegate_engine_running_turns",
        "gauge",
        "Turns in the engine's running set.",
        lambda e: e.running_turns,
    ),
    per_engine(
        "tidegate_engine_waiting_turns",
        "gauge",
        "Turns in the engine's queue.",
        lambda e: e.waiting_turns,
    ),
    per_engine(
        "tidegate_engine_max_running_turns",
        "gauge",
        "Largest number of turns that the engine decodes at once.",
        lambda e: e.max_running_turns,
    ),
    per_engine(
        "tidegate_engine_tokens_total",
        "counter",
        "Tokens received from the engine.",
        lambda e: e.tokens,
    ),
    per_engine(
        "tidegate_engine_steps_total", "counter", "Decode steps of the engine.", lambda e: e.steps
    ),
    per_engine(
        "tidegate_engine_busy_seconds_total",
        "counter",
        "Seconds that the engine spent in steps.",
        lambda e: e.busy_s,
    ),
    per_engine(
        "tidegate_engine_weight_swaps_total",
        "counter",
        "Weight swaps of the engine: updates to another version.",
        lambda e: e.weight_swaps,
    ),
    per_engine(
        "tidegate_engine_weight_swap_stall_seconds_total",
        "counter",
        "Seconds in which the engine decoded nothing because it swapped weights.",
        lambda e: e.weight_swap_stall_s,
    ),
    per_engine(
        "tidegate_engine_out_of_memory_steps_total",
        "counter",
        "Steps that ran out of memory and were repeated with less.",
        lambda e: e.out_of_memory_steps,
    ),
    per_engine(
        "tidegate_engine_draft_tokens_total",
        "counter",
        "Draft tokens that the engine verified.",
        lambda e: e.draft_tokens,
    ),
    per_engine(
        "tidegate_engine_accepted_draft_tokens_total",
        "counter",
        "Draft tokens that the engine accepted.",
        lambda e: e.accepted_draft_tokens,
    ),
)


TOKENS = (
    Metric(
        "tidegate_tokens_generated_total",
        "counter",
        "Tokens sampled for training; equals trained + buffered + in flight + discarded.",
        of_run(lambda s: s.ledger.generated),
    ),
    Metric(
        "tidegate_tokens_trained_total",
        "counter",
        "Tokens handed to the trainer, minus those that it reported as not trained on.",
        of_run(lambda s: s.ledger.trained),
    ),
    Metric(
        "tidegate_tokens_discarded_total",
        "counter",
        "Tokens that will never be trained.",
        by_key(lambda snapshot: dict(snapshot.statistics.ledger.discarded)),
        ("reason",),
    ),
    Metric(
        "tidegate_tokens_buffered",
        "gauge",
        "Tokens of finished rollouts that wait for the trainer.",
        of_run(lambda s: s.ledger.buffered),
    ),
    Metric(
        "tidegate_tokens_in_flight",
        "gauge",
        "Tokens of rollouts whose episode is running.",
        of_run(lambda s: s.ledger.in_flight),
    ),
    Metric(
        "tidegate_tokens_unaccounted",
        "gauge",
        "Generated tokens minus all accounts of the ledger; a value other than 0 is a bug.",
        of_run(lambda s: s.ledger.error),
    ),
    Metric(
        "tidegate_tokens_evaluation_total",
        "counter",
        "Tokens sampled for evaluation only.",
        of_run(lambda s: s.evaluation_ledger.generated),
    ),
    Metric(
        "tidegate_tokens_context_total",
        "counter",
        "Context tokens that turns started from, recomputed ones included.",
        of_run(lambda s: s.context_tokens),
    ),
    Metric(
        "tidegate_tokens_context_cached_total",
        "counter",
        "Context tokens whose KV the engines had in cache.",
        of_run(lambda s: s.cached_context_tokens),
    ),
    Metric(
        "tidegate_tokens_per_second",
        "gauge",
        "Tokens sampled per second since the first batch request.",
        of_run(lambda s: s.tokens_per_s),
    ),
)

ROLLOUTS = (
    Metric(
        "tidegate_batches_total",
        "counter",
        "Batches handed to the trainer.",
        of_run(lambda s: s.batches),
    ),
    Metric(
        "tidegate_batch_callback_errors_total",
        "counter",
        "Batches for which the on_batch callback raised an exception.",
        of_run(lambda s: s.batch_callback_errors),
    ),
    Metric(
        "tidegate_rollouts_trained_total",
        "counter",
        "Rollouts handed to the trainer, minus those that it reported as not trained on.",
        of_run(lambda s: s.trained_rollouts),
    ),
    Metric(
        "tidegate_rollouts_mixed_version_total",
        "counter",
        "Trained rollouts whose tokens came from two or more versions.",
        of_run(lambda s: s.mixed_version_rollouts),
    ),
    Metric(
        "tidegate_rollouts_discarded_total",
        "counter",
        "Rollouts that will never be trained.",
        by_key(lambda snapshot: dict(snapshot.statistics.discarded_rollouts)),
        ("reason",),
    ),
    Metric(
        "tidegate_groups_running",
        "gauge",
        "Groups with a running episode.",
        of_run(lambda s: s.running_groups),
    ),
    Metric(
        "tidegate_groups_buffered",
        "gauge",
        "Groups that have ended and wait for the trainer.",
        of_run(lambda s: s.buffered_groups),
    ),
    Metric(
        "tidegate_groups_training",
        "gauge",
        "Groups handed to the trainer whose version is not live yet.",
        of_run(lambda s: s.training_groups),
    ),
    Metric(
        "tidegate_groups_admissible",
        "gauge",
        "Groups that may be admitted now.",
        of_run(lambda s: s.admissible_groups),
    ),
    Metric(
        "tidegate_reward_mean",
        "gauge",
        "Mean reward of the last batch.",
        last_batch("reward"),
    ),
    Metric(
        "tidegate_length_bias_ratio",
        "gauge",
        "Mean trained over mean generated length of recent rollouts; below 1 favours short.",
        of_run(lambda s: None if s.length_bias is None else s.length_bias.ratio),
    ),
)


METRICS: tuple[Metric, ...] = (*TOKENS, *ROLLOUTS, *STALENESS, *TIMES, *ENGINES)
