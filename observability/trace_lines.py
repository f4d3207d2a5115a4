"""Text summary of a recorded timeline, printed by ``tidegate trace``: one line per track.

Reads ``trace.json`` with :mod:`trace`.
"""

from collections.abc import Collection
from pathlib import Path

from tidegate.errors import AuditError
from tidegate.observability.trace import Interval, read_trace, trace_path
from tidegate.orchestrator.telemetry.recorder import EpisodeInterval


def trace_lines(directory: Path) -> list[str]:
    """Return a line per track of the run's ``trace.json``, and how to open the file in Perfetto.

    Raises:
        AuditError: the run left no trace, or it can't be read.
    """
    path = trace_path(Path(directory))
    try:
        trace = read_trace(path)
    except FileNotFoundError:
        raise AuditError(
            f"{path} is missing: is this the directory of a recorded run that has ended? A process "
            f"that is killed leaves no timeline"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise AuditError(f"{path} can't be read as a trace: {error}") from None
    ends_us = [interval.ended_us for track in trace.tracks.values() for interval in track]
    starts_us = [interval.started_us for track in trace.tracks.values() for interval in track]
    length_us = max(ends_us, default=0) - min(starts_us, default=0)
    return [
        f"{path}: {length_us / 1e6:.1f} s, {len(trace.instants)} marks",
        *(_track_line(name, track, length_us) for name, track in sorted(trace.tracks.items())),
        *_episode_lines(trace.episodes),
        "To look at it: open https://ui.perfetto.dev and drop the file there (it stays in the "
        "browser).",
    ]


def _track_line(name: str, track: list[Interval], length_us: int) -> str:
    """Summarise a track; intervals are named after versions (engine) or activities (trainer)."""
    if all(interval.name == f"v{interval.version}" for interval in track):
        busy_us = sum(interval.busy_us for interval in track)
        versions = {interval.version for interval in track}
        tokens = sum(interval.rows for interval in track)
        return (
            f"  {name}: {tokens} tokens, weights v{min(versions)} to v{max(versions)}, "
            f"in steps {busy_us / max(1, length_us):.0%} of the time"
        )
    shares: dict[str, int] = {}
    for interval in track:
        shares[interval.name] = shares.get(interval.name, 0) + interval.ended_us
        shares[interval.name] -= interval.started_us
    parts = [f"{activity} {us / max(1, length_us):.0%}" for activity, us in sorted(shares.items())]
    return f"  {name}: {', '.join(parts)}"


def _episode_lines(intervals: Collection[EpisodeInterval]) -> list[str]:
    """Return each activity's share of the episodes' total time."""
    spent_us: dict[str, int] = {}
    for interval in intervals:
        kind = interval.name.split()[0]
        spent_us[kind] = spent_us.get(kind, 0) + interval.ended_us - interval.started_us
    episodes = sum(1 for interval in intervals if interval.name.startswith("rollout "))
    total_us = spent_us.pop("rollout", 0)
    parts = [f"{activity} {us / max(1, total_us):.0%}" for activity, us in sorted(spent_us.items())]
    return [f"  episodes ({episodes}): {', '.join(parts)}"] if episodes else []
