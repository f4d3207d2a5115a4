"""Catalogue of a run's Prometheus metrics: name, help, labels, and how to read the value.

:func:`exposition` renders it for the dashboard's `/metrics`, once per scrape; nothing is kept in
between. The reference lists it. Each metric reads a :class:`RunSnapshot`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as MetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from tidegate.observability.metrics.snapshots import AdapterLine, RunSnapshot
from tidegate.orchestrator.telemetry.statistics import EngineStatistics, RunStatistics


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
    """As exported: counters, and no others, end in ``_total``; units are Prometheus' base units."""
    help: str
    read: Callable[[RunSnapshot], Iterable[MetricSample]]
    labels: tuple[str, ...] = ()
    is_histogram: bool = False

    @property
    def kind(self) -> Literal["counter", "gauge", "histogram"]:
        """Prometheus' type of the metric."""
        if self.is_histogram:
            return "histogram"
        return "counter" if self.name.endswith("_total") else "gauge"


Samples = Callable[[RunSnapshot], list[MetricSample]]


def _one(read: Callable[[RunSnapshot], float | None]) -> Samples:
    """Read one value; None gives no sample."""

    def samples(snapshot: RunSnapshot) -> list[MetricSample]:
        value = read(snapshot)
        return [] if value is None else [MetricSample(float(value))]

    return samples


def _of_run(read: Callable[[RunStatistics], float | None]) -> Samples:
    return _one(lambda snapshot: read(snapshot.statistics))


def _last_batch(name: str) -> Samples:
    return _one(lambda s: s.collected.batches[-1].get(name) if s.collected.batches else None)


def _reported(name: str) -> Samples:
    """Read a field of what the trainer reported about its last batch."""
    return _one(lambda snapshot: getattr(snapshot.collected.off_policy, name))


def _reported_by_lag(name: str) -> Samples:
    def samples(snapshot: RunSnapshot) -> list[MetricSample]:
        by_lag = sorted(snapshot.collected.off_policy.by_lag.items())
        return [MetricSample(values[name], (str(lag),)) for lag, values in by_lag if name in values]

    return samples


def _by_key(read: Callable[[RunSnapshot], Mapping[str, float]]) -> Samples:
    """Read one value for each value of the metric's only label."""
    return lambda snapshot: [
        MetricSample(float(n), (key,)) for key, n in sorted(read(snapshot).items())
    ]


def _histogram(name: str, help: str, read: Callable[[RunSnapshot], Mapping[int, int]]) -> Metric:
    """Return a histogram over whole numbers."""

    def samples(snapshot: RunSnapshot) -> list[MetricSample]:
        return [MetricSample(0.0, counts=read(snapshot))]

    return Metric(name, help, samples, is_histogram=True)


def _forecast(name: str, help: str, field_name: str) -> Metric:
    """Return a gauge of a field of the run's forecast; it has no sample before the first one."""
    return Metric(name, help, _of_run(lambda s: getattr(s.forecast, field_name, None)))


def _per_engine(name: str, help: str, read: Callable[[EngineStatistics], float]) -> Metric:
    def samples(snapshot: RunSnapshot) -> list[MetricSample]:
        engines = snapshot.statistics.engines
        return [MetricSample(float(read(each)), (each.name,)) for each in engines]

    return Metric(name, help, samples, ("engine",))


def _per_adapter(name: str, help: str, read: Callable[[AdapterLine], float | None]) -> Metric:
    """Return a metric with one sample for each adapter that the run trains."""

    def samples(snapshot: RunSnapshot) -> list[MetricSample]:
        values = ((line.name, read(line)) for line in snapshot.adapters)
        return [MetricSample(float(value), (n,)) for n, value in values if value is not None]

    return Metric(name, help, samples, ("adapter",))


def _adapter_tokens(snapshot: RunSnapshot) -> list[MetricSample]:
    return [
        MetricSample(float(getattr(line, f"{account}_tokens")), (line.name, account))
        for line in snapshot.adapters
        for account in ("trained", "buffered", "in_flight", "discarded")
    ]


def _failures(snapshot: RunSnapshot) -> list[MetricSample]:
    return [
        MetricSample(float(getattr(each, outcome)), (each.cause, each.reason, outcome))
        for each in snapshot.statistics.episode_failures
        for outcome in ("retried", "rewarded", "discarded")
    ]


def _call_turns(snapshot: RunSnapshot) -> dict[str, int]:
    s = snapshot.statistics
    return {"yes": s.parsed_tool_call_turns, "no": s.tool_call_turns - s.parsed_tool_call_turns}


METRICS: tuple[Metric, ...] = (
    Metric(
        "tidegate_tokens_generated_total",
        "Tokens sampled for training. Always the sum of tokens trained, buffered, in flight and "
        "discarded.",
        _of_run(lambda s: s.ledger.generated),
    ),
    Metric(
        "tidegate_tokens_trained_total",
        "Sampled tokens handed to the trainer, less those that it reported as not trained on.",
        _of_run(lambda s: s.ledger.trained),
    ),
    Metric(
        "tidegate_tokens_discarded_total",
        "Sampled tokens that will never be trained on, by `reason`. A high share of "
        "tidegate_tokens_generated_total is wasted generation.",
        _by_key(lambda snapshot: dict(snapshot.statistics.ledger.discarded)),
        ("reason",),
    ),
    Metric(
        "tidegate_tokens_buffered",
        "Sampled tokens of ended rollouts that are not yet handed to the trainer. Rises when the "
        "trainer is slower than the engines.",
        _of_run(lambda s: s.ledger.buffered),
    ),
    Metric(
        "tidegate_tokens_in_flight",
        "Sampled tokens of rollouts whose episodes are still running.",
        _of_run(lambda s: s.ledger.in_flight),
    ),
    Metric(
        "tidegate_tokens_unaccounted",
        "tidegate_tokens_generated_total minus all accounts of the token ledger. Any value but 0 "
        "is a bug of Tidegate.",
        _of_run(lambda s: s.ledger.error),
    ),
    Metric(
        "tidegate_tokens_evaluation_total",
        "Tokens sampled for evaluation; not part of tidegate_tokens_generated_total.",
        _of_run(lambda s: s.evaluation_ledger.generated),
    ),
    Metric(
        "tidegate_tokens_context_total",
        "Context tokens (prompt, observations, earlier output) that turns started from, counted "
        "again for each start, cached ones included.",
        _of_run(lambda s: s.context_tokens),
    ),
    Metric(
        "tidegate_tokens_context_cached_total",
        "Those of tidegate_tokens_context_total whose KV an engine had in its prefix cache. "
        "Divide the two for the hit rate.",
        _of_run(lambda s: s.cached_context_tokens),
    ),
    Metric(
        "tidegate_tokens_per_second",
        "Sampled tokens per second, all engines together, averaged over tidegate_run_seconds.",
        _of_run(lambda s: s.tokens_per_s),
    ),
    Metric(
        "tidegate_batches_total",
        "Batches handed to the trainer.",
        _of_run(lambda s: s.batches),
    ),
    Metric(
        "tidegate_batch_callback_errors_total",
        "Batches for which the user's on_batch callback raised an exception, which was logged and "
        "ignored.",
        _of_run(lambda s: s.batch_callback_errors),
    ),
    Metric(
        "tidegate_rollouts_trained_total",
        "Rollouts handed to the trainer, less those that it reported as not trained on.",
        _of_run(lambda s: s.trained_rollouts),
    ),
    Metric(
        "tidegate_rollouts_reused_total",
        "Further uses of trained rollouts (`max_uses`), which no other count of rollouts has.",
        _of_run(lambda s: s.reused_rollouts),
    ),
    Metric(
        "tidegate_rollouts_mixed_version_total",
        "Trained rollouts whose tokens were sampled by two or more weight versions. A high share "
        "is normal if rollouts outlast train steps.",
        _of_run(lambda s: s.mixed_version_rollouts),
    ),
    Metric(
        "tidegate_rollouts_discarded_total",
        "Rollouts that will never be trained on, by `reason`, such as staleness, a failed episode "
        "or a group filter.",
        _by_key(lambda snapshot: dict(snapshot.statistics.discarded_rollouts)),
        ("reason",),
    ),
    Metric(
        "tidegate_episode_failures_total",
        "Failed episodes, by `cause` (`policy`: the model; `infrastructure`: tools, graders, "
        "engines; `code`: the episode function), `reason` and `outcome` of the rollout (`retried`, "
        "`rewarded`, `discarded`).",
        _failures,
        ("cause", "reason", "outcome"),
    ),
    Metric(
        "tidegate_tool_call_turns_total",
        "Turns with offered tools that resemble tool calls, by `parsed` (`yes`, `no`). If none is "
        "parsed, the model writes calls in a form that is not read.",
        _by_key(_call_turns),
        ("parsed",),
    ),
    Metric(
        "tidegate_groups_running",
        "Groups in which at least one episode is running. Few, with 0 groups admissible: ended "
        "groups wait for the trainer (tidegate_groups_buffered).",
        _of_run(lambda s: s.running_groups),
    ),
    Metric(
        "tidegate_groups_buffered",
        "Groups of which all rollouts have ended, and which wait for hand-over to the trainer.",
        _of_run(lambda s: s.buffered_groups),
    ),
    Metric(
        "tidegate_groups_training",
        "Groups in batches that the trainer has, whose weights are not published and live on the "
        "engines yet.",
        _of_run(lambda s: s.training_groups),
    ),
    Metric(
        "tidegate_groups_admissible",
        "Number of further groups that the staleness bound lets start now; 0 once all tasks have "
        "started. 0 for long: engines wait for the trainer. Above 0 for long: the tasks' iterator "
        "gives tasks too slowly.",
        _of_run(lambda s: s.admissible_groups),
    ),
    Metric(
        "tidegate_reward_mean",
        "Mean reward of the last batch's rollouts, in the units of the task's reward.",
        _last_batch("reward"),
    ),
    Metric(
        "tidegate_length_bias_ratio",
        "Mean length in tokens of recently trained rollouts, divided by that of all recently "
        "generated ones. Below 1, discards hit long rollouts more often.",
        _of_run(lambda s: None if s.length_bias is None else s.length_bias.ratio),
    ),
    _histogram(
        "tidegate_staleness_versions",
        "Rollouts handed to the trainer, in buckets of staleness. A rollout's staleness is the "
        "number of weight versions published between the sampling of its oldest trained token "
        "and the hand-over. High values mean off-policy training; the bound is "
        "tidegate_staleness_bound_versions.",
        lambda snapshot: snapshot.statistics.staleness_histogram,
    ),
    _histogram(
        "tidegate_staleness_from_generation_versions",
        "The part of tidegate_staleness_versions that arose until the group's last rollout ended. "
        "High values: rollouts take longer than train steps, so shorten them, add engines or "
        "lower max_staleness.",
        lambda snapshot: snapshot.statistics.staleness_from_generation,
    ),
    _histogram(
        "tidegate_staleness_from_queue_versions",
        "The part of tidegate_staleness_versions that arose while the ended group waited for "
        "hand-over. High values: engines are ahead of the trainer, so a lower max_staleness may "
        "cost no throughput.",
        lambda snapshot: snapshot.statistics.staleness_from_queue,
    ),
    Metric(
        "tidegate_version_span_max_versions",
        "Newest minus oldest weight version that sampled one rollout, the largest of the last "
        "batch, in versions. 0: no rollout saw a weight update while it was generated.",
        _last_batch("version_span_max"),
    ),
    _histogram(
        "tidegate_token_lag_versions",
        "Trained tokens, by the weight versions published between the token's sampling and its "
        "hand-over to the trainer. At most tidegate_staleness_bound_versions, if there is a bound.",
        lambda snapshot: snapshot.collected.token_lags,
    ),
    Metric(
        "tidegate_staleness_bound_versions",
        "Largest staleness in versions that the policy allows a trained token (max_staleness). No "
        "sample if the policy has no bound.",
        _of_run(lambda s: s.staleness_bound),
    ),
    _forecast(
        "tidegate_staleness_predicted_versions",
        "Mean staleness of trained rollouts in versions that the closed-form forecast predicts. "
        "Compare with the mean of tidegate_staleness_versions.",
        "predicted_staleness",
    ),
    _forecast(
        "tidegate_staleness_max_useful_versions",
        "Smallest max_staleness, in versions, that is about as fast as larger ones, by the "
        "diagnosis of statistics().forecast.",
        "max_useful_staleness",
    ),
    Metric(
        "tidegate_effective_sample_size_ratio",
        "Effective sample size of the last batch's importance weights over its number of tokens, "
        "0 to 1, as the trainer reported it. 1 is on-policy; a fall means that few tokens "
        "dominate the loss.",
        _reported("effective_sample_size"),
    ),
    Metric(
        "tidegate_mismatch_kl_nats",
        "KL divergence between the sampling and the trained policy in nats per token of the last "
        "batch, as mean(-log w), w = trained / sampling probability, as the trainer reports it. "
        "0 is on-policy; a rise means staleness or an engine whose log-probs differ.",
        _reported("mismatch_kl"),
    ),
    Metric(
        "tidegate_mismatch_k3_nats",
        "KL divergence between the sampling and the trained policy in nats per token of the last "
        "batch by the k3 estimator, mean(w - 1 - log w), w = trained / sampling probability. "
        "It has less noise than tidegate_mismatch_kl_nats and is never negative; 0 is on-policy. "
        "A rise has the same causes.",
        _reported("k3"),
    ),
    Metric(
        "tidegate_mismatch_chi2_ratio",
        "Chi-squared divergence of the last batch, without unit, as the trainer reports it: "
        "mean(w^2) - 1 of the importance weights w. 0 is on-policy. If a few tokens have large "
        "weights it rises before the KL divergence does; then clip or truncate the weights.",
        _reported("chi2"),
    ),
    Metric(
        "tidegate_mismatch_kl_by_lag_nats",
        "KL divergence in nats per token, mean(-log w), of the last batch's tokens of one lag "
        "bucket; `lag` is the bucket's smallest lag in versions. May be negative by noise. A rise "
        "with lag shows what staleness costs.",
        _reported_by_lag("kl"),
        ("lag",),
    ),
    Metric(
        "tidegate_mismatch_k3_by_lag_nats",
        "KL divergence in nats per token by the k3 estimator, mean(w - 1 - log w), of the last "
        "batch's tokens of one lag bucket. A high value at lag 0 is engine mismatch, not "
        "staleness.",
        _reported_by_lag("k3"),
        ("lag",),
    ),
    Metric(
        "tidegate_mismatch_chi2_by_lag_ratio",
        "Chi-squared divergence, mean squared importance weight minus 1, of the last batch's "
        "tokens of one lag bucket. 0 is on-policy.",
        _reported_by_lag("chi2"),
        ("lag",),
    ),
    Metric(
        "tidegate_effective_sample_size_by_lag_ratio",
        "Effective sample size over number of tokens, 0 to 1, of the last batch's tokens of one "
        "lag bucket. 1 is on-policy; low: these tokens teach little.",
        _reported_by_lag("ess"),
        ("lag",),
    ),
    Metric(
        "tidegate_mismatch_perplexity_by_lag_ratio",
        "Perplexity of the last batch's tokens of one lag bucket under the trained policy, "
        "divided by that under the sampling policy. 1 is on-policy.",
        _reported_by_lag("ppl_ratio"),
        ("lag",),
    ),
    Metric(
        "tidegate_trainer_version",
        "Newest weight version that the trainer has published; each publish adds 1. 0: the model "
        "directory's weights.",
        _of_run(lambda s: s.trainer_version),
    ),
    Metric(
        "tidegate_live_version",
        "Oldest weight version that a connected engine still serves. If it stays below "
        "tidegate_trainer_version, an engine is slow to load weights.",
        _of_run(lambda s: s.live_version),
    ),
    Metric(
        "tidegate_run_seconds",
        "Seconds from the first batch request to the trainer's last activity. Idle ratios and "
        "tokens per second refer to this time.",
        _of_run(lambda s: s.wall_s),
    ),
    Metric(
        "tidegate_trainer_seconds_total",
        "Seconds that the trainer has spent in `activity`: train, wait (for a batch), publish or "
        "evaluate.",
        _by_key(lambda snapshot: snapshot.collected.trainer_activity_s),
        ("activity",),
    ),
    Metric(
        "tidegate_publishes_total",
        "Publishes of weights that the trainer has waited for, the number behind "
        'tidegate_trainer_seconds_total{activity="publish"}.',
        _of_run(lambda s: s.publishes),
    ),
    Metric(
        "tidegate_episode_seconds_total",
        "Seconds, summed over all episodes, spent in `activity`: environment, score, tool NAME, or "
        "a name given to episode.activity(). Generation is not included.",
        _by_key(lambda snapshot: snapshot.statistics.episode_activity_s),
        ("activity",),
    ),
    Metric(
        "tidegate_straggler_wait_seconds_total",
        "Seconds from the end of a group's first rollout to the end of its last, summed over "
        "trained groups. Divide by tidegate_straggler_wait_groups_total; high: few long rollouts "
        "hold back their groups.",
        _of_run(lambda s: s.straggler_wait_s),
    ),
    Metric(
        "tidegate_straggler_wait_groups_total",
        "Trained groups that tidegate_straggler_wait_seconds_total sums over.",
        _of_run(lambda s: s.straggler_wait_groups),
    ),
    Metric(
        "tidegate_trainer_idle_ratio",
        "Share of tidegate_run_seconds in which the trainer waited for a batch, 0 to 1.",
        _of_run(lambda s: s.trainer_idle_share),
    ),
    Metric(
        "tidegate_engine_idle_ratio",
        "Share of tidegate_run_seconds in which an engine computed no step, 0 to 1, the mean over "
        "engines.",
        _of_run(lambda s: s.engine_idle_share),
    ),
    _forecast(
        "tidegate_rollout_trainer_throughput_ratio",
        "Rollouts per second that the engines can generate, divided by those that the trainer can "
        "train on, both at their peak.",
        "throughput_ratio",
    ),
    _forecast(
        "tidegate_batch_interval_seconds",
        "Mean seconds from one batch's hand-over to the next, as measured by the forecast.",
        "batch_interval_s",
    ),
    _forecast(
        "tidegate_batch_interval_attainable_seconds",
        "Mean seconds per batch without avoidable waits: the time of the slower of generation "
        "and training. The excess of tidegate_batch_interval_seconds can be saved.",
        "attainable_batch_interval_s",
    ),
    Metric(
        "tidegate_engines_wanted",
        "Engines for training that the elasticity policy wants; statistics().scaling says why. No "
        "sample without a policy.",
        _of_run(lambda s: s.engines_wanted),
    ),
    Metric(
        "tidegate_paused",
        "1 while the engines are paused by a pause() call, 0 while they run.",
        _of_run(lambda s: float(s.pause_mode is not None)),
    ),
    Metric(
        "tidegate_event_loop_longest_block_seconds",
        "Longest time in seconds, since the process began, for which user code blocked the run's "
        "event loop. Meanwhile no turn was sent or received; move blocking calls of an episode to "
        "a thread.",
        _of_run(lambda s: s.event_loop_longest_block_s),
    ),
    Metric(
        "tidegate_stuck",
        "Things of `kind` (engine, turn, episode, tasks, trainer, publish, loop, memory) without "
        "progress for stuck_after_s or longer; and batches without anything to learn from "
        "(learning). Above 0: see the log and statistics().stuck.",
        _by_key(lambda snapshot: Counter(each.kind for each in snapshot.statistics.stuck)),
        ("kind",),
    ),
    _per_engine(
        "tidegate_engine_weight_version",
        "Weight version that the engine serves now. Behind tidegate_trainer_version only while it "
        "loads.",
        lambda e: e.weight_version,
    ),
    _per_engine(
        "tidegate_engine_draining",
        "1 while the engine drains: it is about to leave, and gets no more turns. Otherwise 0.",
        lambda e: e.state == "draining",
    ),
    _per_engine(
        "tidegate_engine_running_turns",
        "Turns that the engine is decoding now. At most tidegate_engine_max_running_turns.",
        lambda e: e.running_turns,
    ),
    _per_engine(
        "tidegate_engine_waiting_turns",
        "Turns sent to the engine that wait for a decode slot or KV blocks. Above 0 for long: the "
        "engine is full.",
        lambda e: e.waiting_turns,
    ),
    _per_engine(
        "tidegate_engine_max_running_turns",
        "Decode slots of the engine: the largest number of turns that it decodes at once (a "
        "constant).",
        lambda e: e.max_running_turns,
    ),
    _per_engine(
        "tidegate_engine_tokens_total",
        "Sampled tokens received from the engine, for training and evaluation. Its rate is the "
        "engine's throughput.",
        lambda e: e.tokens,
    ),
    _per_engine(
        "tidegate_engine_steps_total",
        "Steps (forward passes) that the engine has reported.",
        lambda e: e.steps,
    ),
    _per_engine(
        "tidegate_engine_busy_seconds_total",
        "Seconds that the engine has spent in steps. Its rate is the share of time that the "
        "engine is busy.",
        lambda e: e.busy_s,
    ),
    _per_engine(
        "tidegate_engine_weight_swaps_total",
        "Times that the engine replaced its weights by another version.",
        lambda e: e.weight_swaps,
    ),
    _per_engine(
        "tidegate_engine_weight_swap_stall_seconds_total",
        "Seconds in which the engine decoded nothing because it replaced its weights. Divide by "
        "tidegate_engine_weight_swaps_total for the cost of one update.",
        lambda e: e.weight_swap_stall_s,
    ),
    _per_engine(
        "tidegate_engine_out_of_memory_steps_total",
        "Steps that ran out of memory and were repeated with fewer tokens. Above 0: lower "
        "max_running_turns or num_kv_blocks.",
        lambda e: e.out_of_memory_steps,
    ),
    _per_engine(
        "tidegate_engine_draft_tokens_total",
        "Draft tokens of speculative decoding that the engine has verified.",
        lambda e: e.draft_tokens,
    ),
    _per_engine(
        "tidegate_engine_accepted_draft_tokens_total",
        "Draft tokens that the engine has accepted; each saved a decode step. Divided by "
        "tidegate_engine_draft_tokens_total: the acceptance rate.",
        lambda e: e.accepted_draft_tokens,
    ),
    _per_adapter(
        "tidegate_adapter_trainer_version",
        "Newest weight version of a trained adapter that its trainer has published, counted by the "
        "adapter itself from 1. 0: none yet, so nothing can be sampled.",
        lambda line: line.trainer_version,
    ),
    _per_adapter(
        "tidegate_adapter_live_version",
        "Oldest version of a trained adapter that an engine may still sample with.",
        lambda line: line.live_version,
    ),
    _per_adapter(
        "tidegate_adapter_staleness_mean_versions",
        "Mean staleness of a trained adapter's trained rollouts, in the adapter's own versions.",
        lambda line: line.mean_staleness,
    ),
    _per_adapter(
        "tidegate_adapter_staleness_max_versions",
        "Largest staleness of a trained adapter's trained rollouts, in the adapter's own versions. "
        "Never above tidegate_adapter_staleness_bound_versions.",
        lambda line: line.max_staleness,
    ),
    _per_adapter(
        "tidegate_adapter_staleness_bound_versions",
        "Largest staleness that a trained adapter's policy allows. No sample if it has no bound.",
        lambda line: line.staleness_bound,
    ),
    _per_adapter(
        "tidegate_adapter_groups_running",
        "Groups of a trained adapter in which at least one episode is running.",
        lambda line: line.running_groups,
    ),
    _per_adapter(
        "tidegate_adapter_groups_buffered",
        "Groups of a trained adapter of which all rollouts have ended, and which wait for its "
        "trainer.",
        lambda line: line.buffered_groups,
    ),
    _per_adapter(
        "tidegate_adapter_batches_total",
        "Batches handed to a trained adapter's trainer.",
        lambda line: line.batches,
    ),
    _per_adapter(
        "tidegate_adapter_rollouts_trained_total",
        "Rollouts handed to a trained adapter's trainer.",
        lambda line: line.trained_rollouts,
    ),
    _per_adapter(
        "tidegate_adapter_rollouts_mixed_version_total",
        "Trained rollouts of an adapter whose tokens were sampled by two or more of its versions.",
        lambda line: line.mixed_version_rollouts,
    ),
    Metric(
        "tidegate_adapter_tokens",
        "Tokens sampled for a trained adapter, by `account` (`trained`, `buffered`, `in_flight`, "
        "`discarded`). Together they are all that its episodes sampled.",
        _adapter_tokens,
        ("adapter", "account"),
    ),
    _per_adapter(
        "tidegate_adapter_reward_mean",
        "Mean reward of the last batch of a trained adapter, in the units of the task's reward.",
        lambda line: line.reward,
    ),
)


# ---------------------------------------------------------------- exposition

BUCKETS = (0, 1, 2, 3, 4, 8, 16, 32)
"""Upper bounds of histogram buckets, in versions; fixed, because Prometheus compares scrapes."""


class _SnapshotCollector(Collector):
    def __init__(self, snapshot: RunSnapshot) -> None:
        self._seen = snapshot

    def collect(self) -> Iterable[MetricFamily]:
        for metric in METRICS:
            yield _family(metric, list(metric.read(self._seen)))


def exposition(snapshot: RunSnapshot) -> bytes:
    """Return the response body of one scrape."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_SnapshotCollector(snapshot))
    return generate_latest(registry)


def _family(metric: Metric, samples: list[MetricSample]) -> MetricFamily:
    if metric.kind == "histogram":
        histogram = HistogramMetricFamily(metric.name, metric.help)
        for sample in samples:
            histogram.add_metric([], _buckets(sample.counts), _sum(sample.counts))
        return histogram
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(metric.name, metric.help, labels=metric.labels)
    for sample in samples:
        family.add_metric(list(sample.labels), sample.value)
    return family


def _buckets(counts: Mapping[int, int]) -> list[tuple[str, float]]:
    """Return cumulative counts up to each bound and ``+Inf``, as the text format requires."""
    buckets: list[tuple[str, float]] = [
        (
            str(float(upper_bound)),
            float(sum(n for value, n in counts.items() if value <= upper_bound)),
        )
        for upper_bound in BUCKETS
    ]
    return [*buckets, ("+Inf", float(sum(counts.values())))]


def _sum(counts: Mapping[int, int]) -> float:
    return float(sum(value * n for value, n in counts.items()))
