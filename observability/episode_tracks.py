"""How do single episodes look on a run's timeline? As nested intervals, in lanes of their own.

A lane holds one episode at a time: no two of its intervals overlap but for those that lie within
another. Knows intervals; which episodes have them, and when one ends, is others' business.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from tidegate.orchestrator.telemetry.recorder import EpisodeInterval

EPISODES_PID = 1000
"""A process of its own to a viewer: it can be folded. No lane has its number: Perfetto would take
that one for the main thread, and draw it first."""
_EPISODES_PIDS = (EPISODES_PID, 2)
"""With that of older traces."""


def episode_events(intervals: Iterable[EpisodeInterval]) -> list[dict[str, Any]]:
    """As Chrome trace events; of those that begin together, the one that holds the others first,
    as viewers nest them in that order."""
    ordered = sorted(intervals, key=lambda i: (i.lane, i.started_us, -i.ended_us))
    lanes = sorted({interval.lane for interval in ordered})
    return [*(_named(lane) for lane in lanes), *(_complete(interval) for interval in ordered)]


def _named(lane: int) -> dict[str, Any]:
    return {
        "ph": "M",
        "name": "thread_name",
        "pid": EPISODES_PID,
        "tid": lane,
        "args": {"name": f"lane {lane}"},
    }


def _complete(interval: EpisodeInterval) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": interval.name,
        "pid": EPISODES_PID,
        "tid": interval.lane,
        "ts": interval.started_us,
        "dur": interval.ended_us - interval.started_us,
        "args": dict(interval.args),
    }


def is_of_episodes(event: Mapping[str, Any]) -> bool:
    """Whether a Chrome trace event is about episodes."""
    return event["pid"] in _EPISODES_PIDS


def episode_interval(event: Mapping[str, Any]) -> EpisodeInterval:
    """Read back what :func:`episode_events` wrote."""
    ended_us = event["ts"] + event["dur"]
    return EpisodeInterval(event["tid"], event["name"], event["ts"], ended_us, event["args"])
