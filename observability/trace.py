"""When was who busy with what? A run's timeline, for ui.perfetto.dev and for the report.

One track per engine, one for the trainer, one counter for the weight version, and lanes for single
episodes. Knows intervals and instants in microseconds of one clock; what they mean is their names'
business.
"""

import os
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tidegate.observability.episode_tracks import (
    EPISODES_PID,
    episode_events,
    episode_interval,
    is_of_episodes,
)
from tidegate.observability.lives import lives
from tidegate.orchestrator.telemetry.recorder import EngineStep, EpisodeInterval, TrainerActivity
from tidegate.transport.private_directory import make_private_file
from tidegate.transport.regular_files import read_regular

TRACE_FILE = "trace.json"


def trace_path(directory: Path) -> Path:
    """Return the timeline of a run's last process that left one, for each has its own clock."""
    found = [life / TRACE_FILE for life in lives(directory) if (life / TRACE_FILE).exists()]
    return found[-1] if found else directory / TRACE_FILE


TRAINER_TRACK = "trainer"
ENGINES_PID = 1

MERGE_GAP_US = 1000
"""Steps of one version closer than this become one interval: a viewer can't tell them apart at
any zoom that shows a batch, and a run of minutes stays under a megabyte."""

INTERVALS_MAX = 8_000
"""Per track: 2 MB of memory and 1 MB of JSON; beyond it, the merge gap doubles."""

INSTANTS_MAX = 8_000
"""Over all tracks; later ones are counted, not kept."""

EPISODE_INTERVALS_MAX = 12_000
"""Over all lanes, the latest: 4 MB of memory and 2 MB of JSON."""


@dataclass(slots=True)
class Interval:
    """Something that went on from ``started_us`` to ``ended_us``."""

    name: str
    started_us: int
    ended_us: int
    version: int
    steps: int = 1
    busy_us: int = 0
    """The part of it spent in steps; the rest are gaps that were merged over."""
    rows: int = 0
    """Tokens, summed over the steps."""
    prefills: int = 0
    """Contexts that were computed in it."""


@dataclass(slots=True)
class Instant:
    """Something that happened at ``at_us``."""

    track: str
    name: str
    at_us: int
    args: Mapping[str, object]


class Trace:
    """Collects a run's timeline in memory, merging as it goes. Not thread-safe."""

    def __init__(self) -> None:
        self.tracks: dict[str, list[Interval]] = {}
        self.instants: list[Instant] = []
        self.instants_left_out = 0
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
        """Double the merge gap until half of the intervals are gone."""
        track = self.tracks[engine]
        length_us = track[-1].ended_us - track[0].started_us
        while len(track) > INTERVALS_MAX // 2 and self._gap_us[engine] <= length_us:
            self._gap_us[engine] *= 2
            track = _merged(track, self._gap_us[engine])
        # More versions than intervals fit: the recent past is what a viewer wants.
        self.tracks[engine] = track[-INTERVALS_MAX // 2 :]

    def trainer_interval(
        self, activity: TrainerActivity, started_us: int, ended_us: int, version: int
    ) -> None:
        """Add what the trainer did while it was at ``version``."""
        track = self.tracks.setdefault(TRAINER_TRACK, [])
        if len(track) < INTERVALS_MAX:
            track.append(Interval(activity, started_us, ended_us, version))

    def instant(self, track: str, name: str, at_us: int, args: Mapping[str, object]) -> None:
        """Mark a point in time on a track."""
        if len(self.instants) < INSTANTS_MAX:
            self.instants.append(Instant(track, name, at_us, args))
        else:
            self.instants_left_out += 1

    def write(self, path: Path) -> None:
        """Write it as Chrome trace events."""
        order = sorted(self.tracks, key=lambda name: (name == TRAINER_TRACK, name))
        order += sorted({i.track for i in self.instants} - set(order))
        thread_ids = {name: number for number, name in enumerate(order, start=1)}
        events = [_process(ENGINES_PID, "engines and trainer"), _process(EPISODES_PID, "episodes")]
        events += [_named(name, thread_id) for name, thread_id in thread_ids.items()]
        for name, track in self.tracks.items():
            events += [_complete(interval, thread_ids[name]) for interval in track]
        events += [_mark(instant, thread_ids[instant.track]) for instant in self.instants]
        events += [*self._version_counter(), *episode_events(self.episodes)]
        body = {
            "displayTimeUnit": "ms",
            "traceEvents": events,
            "otherData": {"instants_left_out": self.instants_left_out},
        }
        draft = path.with_name(path.name + ".draft")
        try:
            make_private_file(draft)
            draft.write_bytes(msgspec.json.encode(body, enc_hook=str))
            os.replace(draft, path)  # a disk that is full leaves no half of a trace
        except OSError:
            draft.unlink(missing_ok=True)
            raise

    def _version_counter(self) -> list[dict[str, Any]]:
        """The version the trainer had published by then, as a staircase."""
        counter = []
        highest = -1
        for interval in self.tracks.get(TRAINER_TRACK, []):
            if interval.version > highest:
                highest = interval.version
                at_us = interval.ended_us if interval.name == "publish" else interval.started_us
                counter.append(
                    {
                        "ph": "C",
                        "name": "weight version",
                        "pid": ENGINES_PID,
                        "ts": at_us,
                        "args": {"version": highest},
                    }
                )
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


def _named(name: str, thread_id: int) -> dict[str, Any]:
    return {
        "ph": "M",
        "name": "thread_name",
        "pid": ENGINES_PID,
        "tid": thread_id,
        "args": {"name": name},
    }


def _complete(interval: Interval, thread_id: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": interval.name,
        "pid": ENGINES_PID,
        "tid": thread_id,
        "ts": interval.started_us,
        "dur": interval.ended_us - interval.started_us,
        "args": {
            "version": interval.version,
            "steps": interval.steps,
            "busy_us": interval.busy_us,
            "tokens": interval.rows,
            "prefills": interval.prefills,
        },
    }


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
    """Read back what :meth:`Trace.write` wrote."""
    events = msgspec.json.decode(read_regular(path))["traceEvents"]
    trace = Trace()
    of_episodes = (e for e in events if is_of_episodes(e) and e["ph"] == "X")
    trace.episodes += [episode_interval(e) for e in of_episodes]
    events = [e for e in events if not is_of_episodes(e)]
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
                    args.get("prefills", 0),  # older traces don't tell
                )
            )
        elif event["ph"] == "i":
            trace.instants.append(
                Instant(names[event["tid"]], event["name"], event["ts"], event["args"])
            )
    return trace
