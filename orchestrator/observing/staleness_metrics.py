"""Which figures tell how old a run's data is, and how far off-policy?

Knows nothing of what that costs in time.
"""

from tidegate.orchestrator.observing.metric import Metric, Sample, forecast, histogram, of_run
from tidegate.orchestrator.observing.observation import Observation


def _ess(seen: Observation) -> list[Sample]:
    value = seen.noted.off_policy.effective_sample_size
    return [] if value is None else [Sample(value)]


def _kl(seen: Observation) -> list[Sample]:
    value = seen.noted.off_policy.mismatch_kl
    return [] if value is None else [Sample(value)]


def _kl_by_lag(seen: Observation) -> list[Sample]:
    kl = seen.noted.off_policy.kl_by_lag
    return [Sample(value, (str(lag),)) for lag, value in sorted(kl.items())]


STALENESS = (
    Metric(
        "tidegate_staleness_versions",
        "histogram",
        "Trained rollouts by staleness at consumption, from their oldest trained token.",
        histogram(lambda seen: seen.statistics.staleness_histogram),
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
