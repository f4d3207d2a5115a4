"""Catalogue of a run's Prometheus metrics: name, type, labels, help, and how to read the value.

:mod:`prometheus` exports it on the dashboard's `/metrics`; the reference lists it. Each metric
reads an :class:`Observation`, a snapshot of the run. Independent of the exposition format.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from tidegate.observability.dashboard.observation import Observation
from tidegate.orchestrator.telemetry.statistics import EngineStatistics, RunStatistics

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Sample:
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
    kind: Kind
    help: str
    read: Callable[[Observation], Iterable[Sample]]
    labels: tuple[str, ...] = ()


def of_run(read: Callable[[RunStatistics], float | None]) -> Callable[[Observation], list[Sample]]:
    """Read one value of the whole run; None gives no sample."""

    def samples(seen: Observation) -> list[Sample]:
        value = read(seen.statistics)
        return [] if value is None else [Sample(float(value))]

    return samples


def by_key(
    read: Callable[[Observation], Mapping[str, float]],
) -> Callable[[Observation], list[Sample]]:
    """Read one value for each value of the metric's only label."""
    return lambda seen: [Sample(float(n), (key,)) for key, n in sorted(read(seen).items())]


def per_engine(
    name: str, kind: Kind, help: str, read: Callable[[EngineStatistics], float]
) -> Metric:
    """Return a metric with one sample for each engine, labelled by the engine's name."""

    def samples(seen: Observation) -> list[Sample]:
        return [Sample(float(read(each)), (each.name,)) for each in seen.statistics.engines]

    return Metric(name, kind, help, samples, ("engine",))


def last_batch(name: str) -> Callable[[Observation], list[Sample]]:
    """Read a figure of the last batch; no sample before the first batch."""

    def samples(seen: Observation) -> list[Sample]:
        batches = seen.noted.batches
        value = batches[-1].get(name) if batches else None
        return [] if value is None else [Sample(value)]

    return samples


def histogram(
    read: Callable[[Observation], Mapping[int, int]],
) -> Callable[[Observation], list[Sample]]:
    """Read a histogram over whole numbers."""
    return lambda seen: [Sample(0.0, counts=read(seen))]


def forecast(name: str, help: str, field_name: str) -> Metric:
    """Return a gauge of a field of the run's forecast; it has no sample before the first one."""

    def value(run: RunStatistics) -> float | None:
        return None if run.forecast is None else float(getattr(run.forecast, field_name))

    return Metric(name, "gauge", help, of_run(value))


def _told(name: str) -> Callable[[Observation], list[Sample]]:
    """Read a field of what the trainer reported about its last batch."""

    def samples(seen: Observation) -> list[Sample]:
        value = getattr(seen.noted.off_policy, name)
        return [] if value is None else [Sample(value)]

    return samples


def _told_by_lag(name: str) -> Callable[[Observation], list[Sample]]:
    def samples(seen: Observation) -> list[Sample]:
        by_lag = sorted(seen.noted.off_policy.by_lag.items())
        return [Sample(told[name], (str(lag),)) for lag, told in by_lag if name in told]

    return samples


STALENESS = (
    Metric(
        "tidegate_staleness_versions",
        "histogram",
        "Trained rollouts by staleness at consumption, from their oldest trained token.",
        histogram(lambda seen: seen.statistics.staleness_histogram),
    ),
    Metric(
        "tidegate_staleness_in_flight_versions",
        "histogram",
        "Part of tidegate_staleness_versions that arose before the rollout's group had ended.",
        histogram(lambda seen: seen.statistics.staleness_in_flight),
    ),
    Metric(
        "tidegate_staleness_in_queue_versions",
        "histogram",
        "Part of tidegate_staleness_versions that arose while the group waited for the trainer.",
        histogram(lambda seen: seen.statistics.staleness_in_queue),
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
        "Trained tokens by lag at consumption.",
        histogram(lambda seen: seen.noted.token_lags),
    ),
    Metric(
        "tidegate_staleness_bound_versions",
        "gauge",
        "Staleness bound that the policy guarantees; absent if it guarantees none.",
        of_run(lambda s: s.staleness_bound),
    ),
    forecast(
        "tidegate_staleness_predicted_versions",
        "Mean staleness that the forecast predicts.",
        "predicted_staleness",
    ),
    forecast(
        "tidegate_staleness_saturating_versions",
        "The max_staleness above which throughput no longer grows.",
        "saturating_staleness",
    ),
    Metric(
        "tidegate_effective_sample_size_ratio",
        "gauge",
        "Effective sample size of the last batch over its size, as the trainer reported it.",
        _told("effective_sample_size"),
    ),
    Metric(
        "tidegate_mismatch_kl_nats",
        "gauge",
        "KL of the sampling policy from the trained one per token, as the trainer reported it.",
        _told("mismatch_kl"),
    ),
    Metric(
        "tidegate_mismatch_k3_nats",
        "gauge",
        "KL by the k3 estimator, which is never negative: mean(w - 1 - log w).",
        _told("k3"),
    ),
    Metric(
        "tidegate_mismatch_chi2_ratio",
        "gauge",
        "Chi-squared divergence per token: mean squared importance weight minus 1.",
        _told("chi2"),
    ),
    Metric(
        "tidegate_mismatch_kl_by_lag_nats",
        "gauge",
        "KL by token lag (a bucket's smallest lag): mean(-log w), which may be negative.",
        _told_by_lag("kl"),
        ("lag",),
    ),
    Metric(
        "tidegate_mismatch_k3_by_lag_nats",
        "gauge",
        "k3 by token lag.",
        _told_by_lag("k3"),
        ("lag",),
    ),
    Metric(
        "tidegate_mismatch_chi2_by_lag_ratio",
        "gauge",
        "Chi-squared by token lag.",
        _told_by_lag("chi2"),
        ("lag",),
    ),
    Metric(
        "tidegate_effective_sample_size_by_lag_ratio",
        "gauge",
        "Effective sample size by token lag.",
        _told_by_lag("ess"),
        ("lag",),
    ),
    Metric(
        "tidegate_mismatch_perplexity_by_lag_ratio",
        "gauge",
        "Perplexity under the trained policy over that under the sampling one, by token lag.",
        _told_by_lag("ppl_ratio"),
        ("lag",),
    ),
)


def _stuck(seen: Observation) -> dict[str, float]:
    counts: dict[str, float] = {}
    for each in seen.statistics.stuck:
        counts[each.what] = counts.get(each.what, 0) + 1
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
        "Time from the first batch request to the trainer's last activity.",
        of_run(lambda s: s.wall_s),
    ),
    Metric(
        "tidegate_trainer_seconds_total",
        "counter",
        "Time that the trainer spent in each activity: train, wait (for a batch), publish.",
        by_key(lambda seen: seen.noted.trainer_s),
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
        "Time of all episodes by activity: environment, score, tools, "
        "and the names given to episode.doing().",
        by_key(lambda seen: seen.statistics.episode_s),
        ("doing",),
    ),
    Metric(
        "tidegate_group_wait_seconds_total",
        "counter",
        "Time between the ends of a trained group's first and last rollout, summed.",
        of_run(lambda s: s.group_wait_s),
    ),
    Metric(
        "tidegate_groups_waited_total",
        "counter",
        "Groups summed in tidegate_group_wait_seconds_total.",
        of_run(lambda s: s.waited_groups),
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
        "tidegate_rho_ratio",
        "Rollout throughput over trainer throughput; above 1 the trainer is the bottleneck.",
        "rho",
    ),
    forecast("tidegate_batch_seconds", "Mean time from one batch to the next.", "batch_s"),
    forecast(
        "tidegate_batch_attainable_seconds",
        "Mean time per batch that would be attainable without avoidable waiting.",
        "attainable_batch_s",
    ),
    Metric(
        "tidegate_paused",
        "gauge",
        "1 while engines are paused.",
        of_run(lambda s: float(s.pause_mode is not None)),
    ),
    Metric(
        "tidegate_loop_longest_block_seconds",
        "gauge",
        "Longest time for which the run's event loop was blocked.",
        of_run(lambda s: s.loop_longest_block_s),
    ),
    Metric(
        "tidegate_stuck",
        "gauge",
        "Engines, turns, episodes and others without progress for stuck_after_s or longer.",
        by_key(_stuck),
        ("what",),
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
        "tidegate_engine_slots",
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
        "Time that the engine spent in steps.",
        lambda e: e.busy_s,
    ),
    per_engine(
        "tidegate_engine_swaps_total", "counter", "Weight swaps of the engine.", lambda e: e.swaps
    ),
    per_engine(
        "tidegate_engine_standstill_seconds_total",
        "counter",
        "Time in which the engine's turns stood still for swaps of weights.",
        lambda e: e.standstill_s,
    ),
    per_engine(
        "tidegate_engine_out_of_memory_steps_total",
        "counter",
        "Steps that ran out of memory and were repeated with less.",
        lambda e: e.out_of_memory_steps,
    ),
    per_engine(
        "tidegate_engine_drafted_tokens_total",
        "counter",
        "Draft tokens that the engine verified.",
        lambda e: e.drafted_tokens,
    ),
    per_engine(
        "tidegate_engine_accepted_tokens_total",
        "counter",
        "Draft tokens that were accepted.",
        lambda e: e.accepted_tokens,
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
        by_key(lambda seen: dict(seen.statistics.ledger.discarded)),
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
        "tidegate_tokens_prefilled_total",
        "counter",
        "Context tokens that turns started from, or that were prefilled again.",
        of_run(lambda s: s.prefilled_tokens),
    ),
    Metric(
        "tidegate_tokens_cached_total",
        "counter",
        "Prefilled tokens whose KV the engines had in cache.",
        of_run(lambda s: s.cached_tokens),
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
        "tidegate_batches_untold_total",
        "counter",
        "Batches for which the on_batch callback raised.",
        of_run(lambda s: s.batches_untold),
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
        by_key(lambda seen: dict(seen.statistics.discarded_rollouts)),
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
        "tidegate_groups_capacity",
        "gauge",
        "Groups that may be admitted now.",
        of_run(lambda s: s.capacity_groups),
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
