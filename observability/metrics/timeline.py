"""Recent activity of engines and the trainer, in time slices of equal length; fixed memory.

A slice holds how long its engine decoded and prefilled, and with which version; in the rest of the
slice the engine was idle or paused.
"""

import itertools
from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from tidegate.observability.records.trace import Interval, Trace
from tidegate.orchestrator.telemetry.recorder import TrainerActivity

SLICE_US = 250_000
"""A quarter of a second: an update has four new slices per engine, 10 KB for 100 engines."""

SLICES_KEPT = 480
"""Two minutes of 20 bytes each: 1 MB for 100 engines."""

MARKS_KEPT = 2_000
TRAINER_INTERVALS_KEPT = 1_000
ENGINES_MAX = 1_024
"""Largest number of engines drawn; later ones are omitted."""

CLOCK_SHIFT_MIN_US = 1_000_000
"""Engines on other hosts have clocks with another origin. If an engine's messages seem more than
a second early or late, its times are shifted by the delay of its fastest message."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Activity of one engine in one slice of time."""

    number: int
    """Number of the slice since the clock's zero."""
    version: int
    """Version of the engine's last step in the slice."""
    decode_us: int
    prefill_us: int
    """Time in steps that computed at least one turn's context."""


@dataclass(frozen=True, slots=True)
class Mark:
    """An instant of an engine, such as a swap."""

    engine: str
    name: str
    at_us: int
    version: int
    """-1 if the instant concerns no version."""


@dataclass(frozen=True, slots=True)
class Activity:
    """One activity of the trainer."""

    kind: str
    started_us: int
    ended_us: int
    version: int


class _Strip:
    """Slices of one engine, in a ring buffer."""

    __slots__ = ("_decode", "_numbers", "_prefill", "_versions", "clock_shift_us", "newest")

    def __init__(self) -> None:
        self._numbers = array("q", [-1]) * SLICES_KEPT
        self._versions = array("i", [-1]) * SLICES_KEPT
        self._decode = array("i", [0]) * SLICES_KEPT
        self._prefill = array("i", [0]) * SLICES_KEPT
        self.newest = -1
        self.clock_shift_us: int | None = None
        """Smallest delay between a step's end and its arrival; None before the first step."""

    def add(self, number: int, busy_us: int, version: int, *, is_prefill: bool) -> None:
        at = number % SLICES_KEPT
        if self._numbers[at] != number:
            if self._numbers[at] > number:
                return  # too late: a newer slice has taken its place
            self._numbers[at], self._decode[at], self._prefill[at] = number, 0, 0
            self.newest = max(self.newest, number)
        self._versions[at] = version
        (self._prefill if is_prefill else self._decode)[at] += busy_us

    def copy(self) -> "_Strip":
        """Copy four blocks of memory."""
        other = object.__new__(_Strip)
        other._numbers, other._versions = self._numbers[:], self._versions[:]
        other._decode, other._prefill = self._decode[:], self._prefill[:]
        other.newest, other.clock_shift_us = self.newest, self.clock_shift_us
        return other

    def since(self, number: int) -> list[Slice]:
        first = max(number, self.newest - SLICES_KEPT + 1, 0)
        return [
            Slice(n, self._versions[at], self._decode[at], self._prefill[at])
            for n in range(first, self.newest + 1)
            if self._numbers[at := n % SLICES_KEPT] == n
        ]


class Timeline:
    """The last two minutes of all engines and the trainer. Not thread-safe."""

    def __init__(self, slice_us: int = SLICE_US) -> None:
        self.slice_us = slice_us
        self._strips: dict[str, _Strip] = {}
        self.marks: deque[Mark] = deque(maxlen=MARKS_KEPT)
        self.trainer: deque[Activity] = deque(maxlen=TRAINER_INTERVALS_KEPT)

    def engine_step(
        self,
        engine: str,
        *,
        started_us: int,
        busy_us: int,
        version: int,
        is_prefill: bool,
        now_us: int,
    ) -> None:
        """Add a step to every slice that it overlaps."""
        strip = self._strips.get(engine)
        if strip is None:
            if len(self._strips) >= ENGINES_MAX:
                return
            strip = self._strips[engine] = _Strip()
        late_us = now_us - started_us - busy_us
        if strip.clock_shift_us is None or late_us < strip.clock_shift_us:
            strip.clock_shift_us = late_us
        if abs(strip.clock_shift_us) > CLOCK_SHIFT_MIN_US:
            started_us += strip.clock_shift_us
        self._add_to_slices(strip, started_us, busy_us, version, is_prefill)

    def _add_to_slices(
        self, strip: _Strip, started_us: int, busy_us: int, version: int, is_prefill: bool
    ) -> None:
        slice_us = self.slice_us
        number, within_us = divmod(started_us, slice_us)
        part_us = min(busy_us, slice_us - within_us)
        strip.add(number, part_us, version, is_prefill=is_prefill)
        remaining_us = busy_us - part_us
        if not remaining_us:
            return  # the usual case
        for next_number in itertools.islice(itertools.count(number + 1), SLICES_KEPT):
            strip.add(next_number, min(remaining_us, slice_us), version, is_prefill=is_prefill)
            remaining_us -= min(remaining_us, slice_us)
            if not remaining_us:
                return

    def mark(self, engine: str, name: str, at_us: int, version: int = -1) -> None:
        """Add an instant, by the engine's clock."""
        strip = self._strips.get(engine)
        clock_shift_us = strip.clock_shift_us if strip is not None else None
        if (
            clock_shift_us is not None
            and abs(clock_shift_us) > CLOCK_SHIFT_MIN_US
            and name == "swap"
        ):
            at_us += clock_shift_us  # other marks are stamped on arrival
        self.marks.append(Mark(engine, name, at_us, version))

    def trainer_interval(
        self, kind: TrainerActivity | str, started_us: int, ended_us: int, version: int
    ) -> None:
        """Add an activity of the trainer."""
        self.trainer.append(Activity(kind, started_us, ended_us, version))

    def copy(self) -> "Timeline":
        """Return a copy; takes a fraction of a millisecond for 100 engines."""
        other = Timeline(self.slice_us)
        other._strips = {name: strip.copy() for name, strip in self._strips.items()}
        other.marks, other.trainer = self.marks.copy(), self.trainer.copy()
        return other

    def slices(self, since_us: int = 0) -> dict[str, list[Slice]]:
        """Return the slices that end after ``since_us``, by engine."""
        first = since_us // self.slice_us
        return {name: strip.since(first) for name, strip in sorted(self._strips.items())}

    def marks_since(self, since_us: int) -> list[Mark]:
        """Return marks since then, in the order of arrival."""
        return [mark for mark in self.marks if mark.at_us >= since_us]

    def trainer_since(self, since_us: int) -> list[Activity]:
        """Return activities of the trainer that ended since then."""
        return [activity for activity in self.trainer if activity.ended_us >= since_us]


def timeline_of(
    trace: Trace, trainer_track: str, range_us: tuple[int, int] | None = None
) -> Timeline:
    """Return the timeline of a recorded trace, with slices long enough for all of it to fit.

    ``range_us`` selects what overlaps the time between a start and an end; None selects everything.
    """
    tracks = {name: track for name, track in trace.tracks.items() if track}
    if not tracks:
        return Timeline()
    start_us, end_us = range_us or (
        min(track[0].started_us for track in tracks.values()),
        max(track[-1].ended_us for track in tracks.values()),
    )
    timeline = Timeline(max(1, -(-(end_us - start_us + 1) // (SLICES_KEPT - 2))))
    for name, track in tracks.items():
        if name != trainer_track:
            timeline._strips.setdefault(name, _Strip())
        for each in track:
            if each.ended_us < start_us or each.started_us > end_us:
                continue
            if name == trainer_track:
                timeline.trainer_interval(each.name, each.started_us, each.ended_us, each.version)
            else:
                _add_interval(timeline, name, each, start_us, end_us)
    for instant in trace.instants:
        version = instant.args.get("version", -1)
        known = version if isinstance(version, int) else -1
        timeline.marks.append(Mark(instant.track, instant.name, instant.at_us, known))
    return timeline


def _add_interval(
    timeline: Timeline, engine: str, interval: Interval, start_us: int, end_us: int
) -> None:
    """Add an engine's interval, cut to a range, with its busy time spread evenly."""
    length_us = max(1, interval.ended_us - interval.started_us)
    first_us = max(interval.started_us, start_us)
    cut_us = max(1, min(interval.ended_us, end_us) - first_us)
    for number, part_us in _parts(first_us, cut_us, timeline.slice_us):
        busy_us = part_us * interval.busy_us // length_us
        timeline._strips[engine].add(number, busy_us, interval.version, is_prefill=False)


def _parts(started_us: int, length_us: int, slice_us: int) -> Iterable[tuple[int, int]]:
    while length_us > 0:
        number, within_us = divmod(started_us, slice_us)
        part_us = min(length_us, slice_us - within_us)
        yield number, part_us
        started_us, length_us = started_us + part_us, length_us - part_us
