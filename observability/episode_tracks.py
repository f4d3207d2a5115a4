"""Conversion between episode intervals and Chrome trace events.

:mod:`trace` calls it to write and read ``trace.json``. Episodes are one Perfetto process with one
thread per lane. Within a lane, intervals are nested or disjoint.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from tidegate.orchestrator.telemetry.recorder import EpisodeInterval

EPISODES_PID = 1000
"""Process id of the episodes' tracks: a process of its own can be folded in Perfetto. Must
differ from every lane number, because Perfetto takes a thread whose id equals its process id for
the main thread."""
_EPISODES_PIDS = (EPISODES_PID, 2)
"""Includes 2, the id that older traces have."""


def episode_events(intervals: Iterable[EpisodeInterval]) -> list[dict[str, Any]]:
    """Return Chrome trace events, ordered by lane and start. If two intervals start together,
    the longer one comes first, because viewers nest events in file order."""
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
    """Return whether a Chrome trace event belongs to an episode's track."""
    return event["pid"] in _EPISODES_PIDS


def episode_interval(event: Mapping[str, Any]) -> EpisodeInterval:
    """Read one event that :func:`episode_events` wrote."""
    ended_us = event["ts"] + event["dur"]
    return EpisodeInterval(event["tid"], event["name"], event["ts"], ended_us, event["args"])
