"""Prometheus exposition of a run: renders the metric catalogue in the text format.

The dashboard's `/metrics` route calls :func:`exposition` once per scrape. Values come from
:mod:`catalogue`; nothing is kept between scrapes.
"""

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.core import (
    Metric as Family,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from tidegate.observability.metrics.catalogue import METRICS, Metric, MetricSample
from tidegate.observability.metrics.snapshots import RunSnapshot

CONTENT_TYPE = CONTENT_TYPE_LATEST

BUCKETS = (0, 1, 2, 3, 4, 8, 16, 32)
"""Upper bounds of histogram buckets, in versions; fixed, because Prometheus compares scrapes."""


class _SnapshotCollector(Collector):
    def __init__(self, snapshot: RunSnapshot) -> None:
        self._seen = snapshot

    def collect(self) -> Iterable[Family]:
        for metric in METRICS:
            yield _family(metric, list(metric.read(self._seen)))


def exposition(snapshot: RunSnapshot) -> bytes:
    """Return the response body of one scrape."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_SnapshotCollector(snapshot))
    return generate_latest(registry)


def _family(metric: Metric, samples: list[MetricSample]) -> Family:
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
