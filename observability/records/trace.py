"""Timeline of a run, written as Chrome trace events (``trace.json``) for ui.perfetto.dev.

The recorder fills a :class:`Trace` during the run; reports, the dashboard and ``tidegate trace``
read the file back. It has one track per engine, one for the trainer, a counter of the weight
version, and lanes of episodes. All times are microseconds of one process's monotonic clock.
"""

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tidegate.errors import AuditError
from tidegate.observability.records.run_directories import process_directories
from tidegate.observability.records.run_files import replace_file
from tidegate.orchestrator.telemetry.recorder import EngineStep, EpisodeInterval, TrainerActivity
from tidegate.transport.regular_files import read_regular

TRACE_FILE = "trace.json"


def trace_path(directory: Path) -> Path:
    """Return the path of the last trace that the run's processes left. Traces can't be merged,
    because each process has its own clock."""
    found = [
        part / TRACE_FILE for part in process_directories(directory) if (part / TRACE_FILE).exists()
    ]
    return found[-1] if found else directory / TRACE_FILE


TRAINER_TRACK = "trainer"
ENGINES_PID = 1

EPISODES_PID = 1000
"""Process id of the episodes' tracks, one thread per lane: a process of its own can be folded in
Perfetto. Must differ from every lane number, because Perfetto takes a thread whose id equals its
process id for the main thread."""

_EPISODES_PIDS = (EPISODES_PID, 2)
"""Includes 2, the id that older traces have."""

MERGE_GAP_US = 1000
"""Steps of one version with a shorter gap become one interval. At any zoom that shows a whole
batch, the trace is drawn the same, and the trace of some minutes stays under 1 MB."""

INTERVALS_MAX = 8_000
"""Limit per track: 2 MB of memory and 1 MB of JSON. At the limit the merge gap doubles."""

INSTANTS_MAX = 8_000
"""Limit over all tracks; later instants are only counted."""

EPISODE_INTERVALS_MAX = 12_000
"""Limit over all lanes, 4 MB of memory and 2 MB of JSON; the oldest are dropped."""


@dataclass(slots=True)
class Interval:
    """A time interval on one track: merged steps of an engine, or one activity of the trainer."""

    name: str
    started_us: int
    ended_us: int
    version: int
    """Weight version that the engine used, or that the trainer was at."""
    steps: int = 1
    """Number of steps merged into the interval; 1 for the trainer."""
    busy_us: int = 0
    """Time spent in steps, in microseconds; the interval's other time is gaps between merged steps.
    """
    rows: int = 0
    """Sampled tokens, summed over the steps."""
    prefills: int = 0
    """Contexts computed in the interval."""


@dataclass(slots=True)
class Instant:
    """A point in time on one track, such as a swap of weights."""

    track: str
    name: str
    at_us: int
    args: Mapping[str, object]


class Trace:
    """A run's timeline in memory; bounded, because close steps are merged. Not thread-safe."""

    def __init__(self) -> None:
        self.tracks: dict[str, list[Interval]] = {}
        self.instants: list[Instant] = []
        self.instants_dropped = 0
        self.episodes: deque[EpisodeInterval] = deque(maxlen=EPISODE_INTERVALS_MAX)
        self._gap_us: dict[str, int] = {}

    def engine_step(self, step: EngineStep) -> None:
        """Add a step; extend the previous interval if the version is equal and the gap is small."""
        track = self.tracks.setdefault(step.engine, [])
        gap_us = self._gap_us.setdefault(step.engine, MERGE_GAP_US)
        ended_us = step.started_us + step.busy_us
        last = track[-1] if track else None
        if last and last.version == step.version and step.started_us - last.ended_us < gap_us:
            last.ended_us = max(last.ended_us, ended_us)
            last.steps += 1
            last.busy_us += step.busy_us
            last.rows += step.rows
            last.prefills += step.prefills
            return
        new = Interval(
            name=f"v{step.version}",
            started_us=step.started_us,
            ended_us=ended_us,
            version=step.version,
            busy_us=step.busy_us,
            rows=step.rows,
            prefills=step.prefills,
        )
        track.append(new)
        if len(track) > INTERVALS_MAX:
            self._coarsen(step.engine)

    def _coarsen(self, engine: str) -> None:
        track = self.tracks[engine]
        length_us = track[-1].ended_us - track[0].started_us
        while len(track) > INTERVALS_MAX // 2 and self._gap_us[engine] <= length_us:
            self._gap_us[engine] *= 2
            track = _merged(track, self._gap_us[engine])
        # There may be more versions than fit: keep the newest intervals.
        self.tracks[engine] = track[-INTERVALS_MAX // 2 :]

    def trainer_interval(
        self, activity: TrainerActivity, started_us: int, ended_us: int, version: int
    ) -> None:
        """Add an activity of the trainer, which was at ``version``."""
        track = self.tracks.setdefault(TRAINER_TRACK, [])
        if len(track) < INTERVALS_MAX:
            track.append(Interval(activity, started_us, ended_us, version))

    def instant(self, track: str, name: str, at_us: int, args: Mapping[str, object]) -> None:
        """Add an instant to a track."""
        if len(self.instants) < INSTANTS_MAX:
            self.instants.append(Instant(track, name, at_us, args))
        else:
            self.instants_dropped += 1

    def write(self, path: Path) -> None:
        """Write the Chrome trace file atomically."""
        order = sorted(self.tracks, key=lambda name: (name == TRAINER_TRACK, name))
        order += sorted({i.track for i in self.instants} - set(order))
        thread_ids = {name: number for number, name in enumerate(order, start=1)}
        events = [_process(ENGINES_PID, "engines and trainer"), _process(EPISODES_PID, "episodes")]
        events += [_named(ENGINES_PID, number, name) for name, number in thread_ids.items()]
        for name, track in self.tracks.items():
            thread_id = thread_ids[name]
            events += [_complete(ENGINES_PID, thread_id, each, _counts(each)) for each in track]
        events += [_mark(instant, thread_ids[instant.track]) for instant in self.instants]
        events += [*self._version_counter(), *_episode_events(self.episodes)]
        body = {
            "displayTimeUnit": "ms",
            "traceEvents": events,
            "otherData": {"instants_dropped": self.instants_dropped},
        }
        replace_file(path, msgspec.json.encode(body, enc_hook=str))

    def _version_counter(self) -> list[dict[str, Any]]:
        """Return counter events of the highest version that the trainer had published."""
        counter: list[dict[str, Any]] = []
        highest = -1
        for interval in self.tracks.get(TRAINER_TRACK, []):
            if interval.version > highest:
                highest = interval.version
                at_us = interval.ended_us if interval.name == "publish" else interval.started_us
                about = {"ph": "C", "name": "weight version", "pid": ENGINES_PID}
                counter.append({**about, "ts": at_us, "args": {"version": highest}})
        return counter


def _merged(track: list[Interval], gap_us: int) -> list[Interval]:
    merged: list[Interval] = []
    for interval in track:
        last = merged[-1] if merged else None
        if (
            last
            and last.version == interval.version
            and interval.started_us - last.ended_us < gap_us
        ):
            last.ended_us = max(last.ended_us, interval.ended_us)
            last.steps += interval.steps
            last.busy_us += interval.busy_us
            last.rows += interval.rows
            last.prefills += interval.prefills
        else:
            merged.append(interval)
    return merged


def _process(process_id: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "process_name", "pid": process_id, "args": {"name": name}}


def _named(process_id: int, thread_id: int, name: str) -> dict[str, Any]:
    ids = {"pid": process_id, "tid": thread_id}
    return {"ph": "M", "name": "thread_name", **ids, "args": {"name": name}}


def _complete(
    process_id: int, thread_id: int, span: Interval | EpisodeInterval, args: Mapping[str, object]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": span.name,
        "pid": process_id,
        "tid": thread_id,
        "ts": span.started_us,
        "dur": span.ended_us - span.started_us,
        "args": dict(args),
    }


def _counts(interval: Interval) -> dict[str, int]:
    return {
        "version": interval.version,
        "steps": interval.steps,
        "busy_us": interval.busy_us,
        "tokens": interval.rows,
        "prefills": interval.prefills,
    }


def _episode_events(intervals: Iterable[EpisodeInterval]) -> list[dict[str, Any]]:
    """Return events sorted by lane and start. Of two events that start together the longer one
    comes first, because viewers nest events in file order; intervals of a lane are nested or
    disjoint."""
    ordered = sorted(intervals, key=lambda i: (i.lane, i.started_us, -i.ended_us))
    lanes = sorted({interval.lane for interval in ordered})
    return [
        *(_named(EPISODES_PID, lane, f"lane {lane}") for lane in lanes),
        *(_complete(EPISODES_PID, each.lane, each, each.args) for each in ordered),
    ]


def _mark(instant: Instant, thread_id: int) -> dict[str, Any]:
    return {
        "ph": "i",
        "s": "t",
        "name": instant.name,
        "pid": ENGINES_PID,
        "tid": thread_id,
        "ts": instant.at_us,
        "args": dict(instant.args),
    }


def read_trace(path: Path) -> Trace:
    """Read a file that :meth:`Trace.write` wrote."""
    events = msgspec.json.decode(read_regular(path))["traceEvents"]
    trace = Trace()
    trace.episodes += [
        EpisodeInterval(e["tid"], e["name"], e["ts"], e["ts"] + e["dur"], e["args"])
        for e in events
        if e["pid"] in _EPISODES_PIDS and e["ph"] == "X"
    ]
    events = [e for e in events if e["pid"] not in _EPISODES_PIDS]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    for event in events:
        if event["ph"] == "X":
            args = event["args"]
            trace.tracks.setdefault(names[event["tid"]], []).append(
                Interval(
                    event["name"],
                    event["ts"],
                    event["ts"] + event["dur"],
                    args["version"],
                    args["steps"],
                    args["busy_us"],
                    args["tokens"],
                    args.get("prefills", 0),  # absent in older traces
                )
            )
        elif event["ph"] == "i":
            trace.instants.append(
                Instant(names[event["tid"]], event["name"], event["ts"], event["args"])
            )
    return trace


def trace_of(directory: Path) -> Trace | None:
    """Return the trace of a run's directory; None without one that can be read, as a killed process
    leaves."""
    try:
        return read_trace(trace_path(directory))
    except (OSError, msgspec.MsgspecError, KeyError):
        return None


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
            f"{path} is missing; give the directory of a recorded run that has ended. A process "
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
        "To see it, open https://ui.perfetto.dev and drop the file there (it stays in the "
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
    spent_us: Counter[str] = Counter()
    for interval in track:
        spent_us[interval.name] += interval.ended_us - interval.started_us
    return f"  {name}: {_shares(spent_us, length_us)}"


def _shares(spent_us: Mapping[str, int], total_us: int) -> str:
    return ", ".join(f"{name} {us / max(1, total_us):.0%}" for name, us in sorted(spent_us.items()))


def _episode_lines(intervals: Collection[EpisodeInterval]) -> list[str]:
    """Return each activity's share of the episodes' total time."""
    spent_us: Counter[str] = Counter()
    for interval in intervals:
        spent_us[interval.name.split()[0]] += interval.ended_us - interval.started_us
    episodes = sum(1 for interval in intervals if interval.name.startswith("rollout "))
    total_us = spent_us.pop("rollout", 0)
    return [f"  episodes ({episodes}): {_shares(spent_us, total_us)}"] if episodes else []
