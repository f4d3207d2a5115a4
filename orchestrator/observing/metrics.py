"""Which figures of a run does a monitoring system get, under which names, in which units?

The whole catalogue: docs/observing.md shows it, the Grafana dashboard draws it, and nothing else is
exported. It knows observations, and no exposition format.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from tidegate.orchestrator.observing.observation import Observation
from tidegate.orchestrator.statistics import EngineStatistics, RunStatistics

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of a metric."""

    value: float
    labels: tuple[str, ...] = ()
    """In the order of the metric's."""
    counts: Mapping[int, int] = field(default_factory=dict)
    """Of a histogram instead of the value: how often each whole number was seen."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A name, what it means, and how it is read."""

    name: str
    """As exported: counters end in ``_total``, units are Prometheus' base units."""
    kind: Kind
    help: str
    read: Callable[[Observation], Iterable[Sample]]
    labels: tuple[str, ...] = ()


def _of_run(read: Callable[[RunStatistics], float | None]) -> Callable[[Observation], list[Sample]]:
    def samples(seen: Observation) -> list[Sample]:
        value = read(seen.statistics)
        return [] if value is None else [Sample(float(value))]

    return samples


def _by_key(
    read: Callable[[Observation], Mapping[str, float]],
) -> Callable[[Observation], list[Sample]]:
    return lambda seen: [Sample(float(n), (key,)) for key, n in sorted(read(seen).items())]


def _of_engines(read: Callable[[EngineStatistics], float]) -> Callable[[Observation], list[Sample]]:
    return lambda seen: [Sample(float(read(e)), (e.name,)) for e in seen.statistics.engines]


def _histogram(
    read: Callable[[Observation], Mapping[int, int]],
) -> Callable[[Observation], list[Sample]]:
    return lambda seen: [Sample(0.0, counts=read(seen))]


def _forecast(name: str) -> Callable[[RunStatistics], float | None]:
    return lambda s: None if s.forecast is None else float(getattr(s.forecast, name))


def _stuck(seen: Observation) -> dict[str, float]:
    counts: dict[str, float] = {}
    for each in seen.statistics.stuck:
        counts[each.what] = counts.get(each.what, 0) + 1
    return counts


def _last_batch(name: str) -> Callable[[Observation], list[Sample]]:
    def samples(seen: Observation) -> list[Sample]:
        batches = seen.noted.batches
        return [Sample(batches[-1][name])] if batches and name in batches[-1] else []

    return samples


def _ess(seen: Observation) -> list[Sample]:
    value = seen.noted.off_policy.effective_sample_size
    return [] if value is None else [Sample(value)]


def _kl(seen: Observation) -> list[Sample]:
    value = seen.noted.off_policy.mismatch_kl
    return [] if value is None else [Sample(value)]


def _kl_by_lag(seen: Observation) -> list[Sample]:
    kl = seen.noted.off_policy.kl_by_lag
    return [Sample(value, (str(lag),)) for lag, value in sorted(kl.items())]


TOKENS = (
    Metric(
        "tidegate_tokens_generated_total",
        "counter",
        "Tokens sampled for training; equals trained + buffered + in flight + discarded.",
        _of_run(lambda s: s.ledger.generated),
    ),
    Metric(
        "tidegate_tokens_trained_total",
        "counter",
        "Tokens handed to the trainer.",
        _of_run(lambda s: s.ledger.trained),
    ),
    Metric(
        "tidegate_tokens_discarded_total",
        "counter",
        "Tokens that will never be trained.",
        _by_key(lambda seen: dict(seen.statistics.ledger.discarded)),
        ("reason",),
    ),
    Metric(
        "tidegate_tokens_buffered",
        "gauge",
        "Tokens of finished rollouts that the trainer has not had.",
        _of_run(lambda s: s.ledger.buffered),
    ),
    Metric(
        "tidegate_tokens_in_flight",
        "gauge",
        "Tokens of rollouts whose episode is going on.",
        _of_run(lambda s: s.ledger.in_flight),
    ),
    Metric(
        "tidegate_tokens_unaccounted",
        "gauge",
        "Generated less all accounts of the ledger: 0, or a bug.",
        _of_run(lambda s: s.ledger.error),
    ),
    Metric(
        "tidegate_tokens_evaluation_total",
        "counter",
        "Tokens sampled for evaluation only.",
        _of_run(lambda s: s.evaluation_ledger.generated),
    ),
    Metric(
        "tidegate_tokens_prefilled_total",
        "counter",
        "Context tokens that turns started from, or that were computed again.",
        _of_run(lambda s: s.prefilled_tokens),
    ),
    Metric(
        "tidegate_tokens_cached_total",
        "counter",
        "Of those prefilled, tokens whose KV engines had already.",
        _of_run(lambda s: s.cached_tokens),
    ),
    Metric(
        "tidegate_tokens_per_second",
        "gauge",
        "Tokens sampled per second, since the first batch was asked for.",
        _of_run(lambda s: s.tokens_per_s),
    ),
)

ROLLOUTS = (
    Metric(
        "tidegate_batches_total",
        "counter",
        "Batches handed to the trainer.",
        _of_run(lambda s: s.batches),
    ),
    Metric(
        "tidegate_rollouts_trained_total",
        "counter",
        "Rollouts handed to the trainer.",
        _of_run(lambda s: s.trained_rollouts),
    ),
    Metric(
        "tidegate_rollouts_mixed_version_total",
        "counter",
        "Trained rollouts whose tokens came from two or more versions.",
        _of_run(lambda s: s.mixed_version_rollouts),
    ),
    Metric(
        "tidegate_rollouts_discarded_total",
        "counter",
        "Rollouts that will never be trained.",
        _by_key(lambda seen: dict(seen.statistics.discarded_rollouts)),
        ("reason",),
    ),
    Metric(
        "tidegate_groups_running",
        "gauge",
        "Groups with an episode going on.",
        _of_run(lambda s: s.running_groups),
    ),
    Metric(
        "tidegate_groups_buffered",
        "gauge",
        "Groups that have ended and wait for the trainer.",
        _of_run(lambda s: s.buffered_groups),
    ),
    Metric(
        "tidegate_groups_training",
        "gauge",
        "Groups handed over, and not yet in a version that is live.",
        _of_run(lambda s: s.training_groups),
    ),
    Metric(
        "tidegate_groups_capacity",
        "gauge",
        "Groups that may still be admitted now.",
        _of_run(lambda s: s.capacity_groups),
    ),
    Metric(
        "tidegate_reward_mean",
        "gauge",
        "Mean reward of the last batch.",
        _last_batch("reward"),
    ),
    Metric(
        "tidegate_length_bias_ratio",
        "gauge",
        "Mean length trained over mean length generated, lately; below 1 short ones were favoured.",
        _of_run(lambda s: None if s.length_bias is None else s.length_bias.ratio),
    ),
)

STALENESS = (
    Metric(
        "tidegate_staleness_versions",
        "histogram",
        "Trained rollouts by staleness at consumption, from their oldest trained token.",
        _histogram(lambda seen: seen.statistics.staleness_histogram),
    ),
    Metric(
        "tidegate_token_lag_versions",
        "histogram",
        "Trained tokens by lag at consumption.",
        _histogram(lambda seen: seen.noted.token_lags),
    ),
    Metric(
        "tidegate_staleness_bound_versions",
        "gauge",
        "What the policy guarantees; absent if nothing.",
        _of_run(lambda s: s.staleness_bound),
    ),
    Metric(
        "tidegate_staleness_predicted_versions",
        "gauge",
        "Mean staleness that the forecast expects by now.",
        _of_run(_forecast("predicted_staleness")),
    ),
    Metric(
        "tidegate_staleness_saturating_versions",
        "gauge",
        "The max_staleness past which nothing is gained.",
        _of_run(_forecast("saturating_staleness")),
    ),
    Metric(
        "tidegate_effective_sample_size_ratio",
        "gauge",
        "Share of the last batch that its importance weights leave, as the trainer told.",
        _ess,
    ),
    Metric(
        "tidegate_mismatch_kl_nats",
        "gauge",
        "KL of the sampling policy from the trained one per token, as the trainer told.",
        _kl,
    ),
    Metric(
        "tidegate_mismatch_kl_by_lag_nats",
        "gauge",
        "The same by token lag: the smallest of each bucket.",
        _kl_by_lag,
        ("lag",),
    ),
)

TIMES = (
    Metric(
        "tidegate_trainer_version",
        "gauge",
        "The newest weight version published.",
        _of_run(lambda s: s.trainer_version),
    ),
    Metric(
        "tidegate_live_version",
        "gauge",
        "The oldest weights that a living engine serves.",
        _of_run(lambda s: s.live_version),
    ),
    Metric(
        "tidegate_run_seconds",
        "gauge",
        "Since the first batch was asked for, up to the trainer's last activity.",
        _of_run(lambda s: s.wall_s),
    ),
    Metric(
        "tidegate_trainer_seconds_total",
        "counter",
        "Time the trainer spent: train, wait (for a batch), publish.",
        _by_key(lambda seen: seen.noted.trainer_s),
        ("activity",),
    ),
    Metric(
        "tidegate_trainer_idle_ratio",
        "gauge",
        "Share of the run that the trainer waited for batches.",
        _of_run(lambda s: s.trainer_idle_share),
    ),
    Metric(
        "tidegate_engine_idle_ratio",
        "gauge",
        "Share of the run that an engine was in no step, the mean over engines.",
        _of_run(lambda s: s.engine_idle_share),
    ),
    Metric(
        "tidegate_rho_ratio",
        "gauge",
        "Throughput of the rollout over that of the trainer; above 1 the trainer limits.",
        _of_run(_forecast("rho")),
    ),
    Metric(
        "tidegate_batch_seconds",
        "gauge",
        "From one batch to the next, on the mean.",
        _of_run(_forecast("batch_s")),
    ),
    Metric(
        "tidegate_batch_attainable_seconds",
        "gauge",
        "The same if nobody waited who needn't.",
        _of_run(_forecast("attainable_batch_s")),
    ),
    Metric(
        "tidegate_paused",
        "gauge",
        "1 while engines are paused.",
        _of_run(lambda s: float(s.pause_mode is not None)),
    ),
    Metric(
        "tidegate_stuck",
        "gauge",
        "Things that have not got on for stuck_after_s or longer.",
        _by_key(_stuck),
        ("what",),
    ),
)

ENGINES = (
    Metric(
        "tidegate_engine_weight_version",
        "gauge",
        "The version that it serves.",
        _of_engines(lambda e: e.weight_version),
        ("engine",),
    ),
    Metric(
        "tidegate_engine_running_turns",
        "gauge",
        "Turns it decodes.",
        _of_engines(lambda e: e.running_turns),
        ("engine",),
    ),
    Metric(
        "tidegate_engine_waiting_turns",
        "gauge",
        "Turns in its queue.",
        _of_engines(lambda e: e.waiting_turns),
        ("engine",),
    ),
    Metric(
        "tidegate_engine_slots",
        "gauge",
        "Turns it can decode at once.",
        _of_engines(lambda e: e.max_running_turns),
        ("engine",),
    ),
    Metric(
        "tidegate_engine_tokens_total",
        "counter",
        "Tokens received from it.",
        _of_engines(lambda e: e.tokens),
        ("engine",),
    ),
    Metric(
        "tidegate_engine_steps_total",
        "counter",
        "Its steps.",
        _of_engines(lambda e: e.steps),
        ("engine",),
    ),
    Metric(
        "tidegate_engine_busy_seconds_total",
        "counter",
        "Time it spent in steps.",
        _of_engines(lambda e: e.busy_s),
        ("engine",),
    ),
    Metric(
        "tidegate_engine_out_of_memory_steps_total",
        "counter",
        "Steps for which it had no memory, and that it tried again with less.",
        _of_engines(lambda e: e.out_of_memory_steps),
        ("engine",),
    ),
    Metric(
        "tidegate_engine_drafted_tokens_total",
        "counter",
        "Tokens it guessed and verified.",
        _of_engines(lambda e: e.drafted_tokens),
        ("engine",),
    ),
    Metric(
        "tidegate_engine_accepted_tokens_total",
        "counter",
        "Of its guesses, those that were sampled.",
        _of_engines(lambda e: e.accepted_tokens),
        ("engine",),
    ),
)

METRICS: tuple[Metric, ...] = (*TOKENS, *ROLLOUTS, *STALENESS, *TIMES, *ENGINES)


def metric_lines() -> list[str]:
    """The catalogue as a table, for the documentation."""
    lines = ["| name | kind | labels | meaning |", "|---|---|---|---|"]
    for each in METRICS:
        labels = ", ".join(each.labels) or "-"
        lines.append(f"| `{each.name}` | {each.kind} | {labels} | {each.help} |")
    return lines
