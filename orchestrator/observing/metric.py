"""What is one figure that a monitoring system gets, and how is it read of a run?

Knows observations, and neither which figures there are nor how they are exposed.
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


def of_run(read: Callable[[RunStatistics], float | None]) -> Callable[[Observation], list[Sample]]:
    """One value of the whole run; None: there is none to tell."""

    def samples(seen: Observation) -> list[Sample]:
        value = read(seen.statistics)
        return [] if value is None else [Sample(float(value))]

    return samples


def by_key(
    read: Callable[[Observation], Mapping[str, float]],
) -> Callable[[Observation], list[Sample]]:
    """A value for each of the one label's values."""
    return lambda seen: [Sample(float(n), (key,)) for key, n in sorted(read(seen).items())]


def of_engines(read: Callable[[EngineStatistics], float]) -> Callable[[Observation], list[Sample]]:
    """A value for each engine."""
    return lambda seen: [Sample(float(read(e)), (e.name,)) for e in seen.statistics.engines]


def last_batch(name: str) -> Callable[[Observation], list[Sample]]:
    """A figure of the last batch."""

    def samples(seen: Observation) -> list[Sample]:
        batches = seen.noted.batches
        value = batches[-1].get(name) if batches else None
        return [] if value is None else [Sample(value)]

    return samples


def histogram(
    read: Callable[[Observation], Mapping[int, int]],
) -> Callable[[Observation], list[Sample]]:
    """How often each whole number was seen."""
    return lambda seen: [Sample(0.0, counts=read(seen))]


def forecast(name: str) -> Callable[[RunStatistics], float | None]:
    """A figure of the run's forecast, once there is one."""
    return lambda s: None if s.forecast is None else float(getattr(s.forecast, name))
