"""Which figures tell how old a run's data is, and how far off-policy?

Knows nothing of what that costs in time.
"""

from collections.abc import Callable

from tidegate.orchestrator.observing.metric import (
    Metric,
    Sample,
    forecast,
    histogram,
    last_batch,
    of_run,
)
from tidegate.orchestrator.observing.observation import Observation


def _told(name: str) -> Callable[[Observation], list[Sample]]:
    """What the trainer told of its last batch."""

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
        "The part of it until the rollout's group had ended.",
        histogram(lambda seen: seen.statistics.staleness_in_flight),
    ),
    Metric(
        "tidegate_staleness_in_queue_versions",
        "histogram",
        "The part of it from then on: versions published while the group waited for the trainer.",
        histogram(lambda seen: seen.statistics.staleness_in_queue),
    ),
    Metric(
        "tidegate_version_span_max_versions",
        "gauge",
        "The most versions that one rollout of the last batch spans, first to last token.",
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
        "What the policy guarantees; absent if nothing.",
        of_run(lambda s: s.staleness_bound),
    ),
    Metric(
        "tidegate_staleness_predicted_versions",
        "gauge",
        "Mean staleness that the forecast expects by now.",
        of_run(forecast("predicted_staleness")),
    ),
    Metric(
        "tidegate_staleness_saturating_versions",
        "gauge",
        "The max_staleness past which nothing is gained.",
        of_run(forecast("saturating_staleness")),
    ),
    Metric(
        "tidegate_effective_sample_size_ratio",
        "gauge",
        "Share of the last batch that its importance weights leave, as the trainer told.",
        _told("effective_sample_size"),
    ),
    Metric(
        "tidegate_mismatch_kl_nats",
        "gauge",
        "KL of the sampling policy from the trained one per token, as the trainer told.",
        _told("mismatch_kl"),
    ),
    Metric(
        "tidegate_mismatch_k3_nats",
        "gauge",
        "The same, by an estimate that is never negative: mean(w - 1 - log w).",
        _told("k3"),
    ),
    Metric(
        "tidegate_mismatch_chi2_ratio",
        "gauge",
        "Mean squared importance weight of a token, less 1.",
        _told("chi2"),
    ),
    Metric(
        "tidegate_mismatch_kl_by_lag_nats",
        "gauge",
        "KL by token lag, the smallest of each bucket: mean(-log w), which may be negative.",
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
