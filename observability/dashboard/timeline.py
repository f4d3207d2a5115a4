"""When was which engine busy with what, lately? Time in slices of equal length, in fixed memory.

A slice knows how long its engine decoded and prefilled in it, and with which version; the rest of
it the engine was idle, or paused. It knows microseconds of one clock, and no engine's protocol.
"""

import itertools
from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from tidegate.observability.trace import Trace
from tidegate.orchestrator.telemetry.recorder import TrainerActivity

SLICE_US = 250_000
"""A quarter of a second: an update brings four new slices per engine, 100 engines 10 KB."""

SLICES_KEPT = 480
"""Two minutes, of 20 bytes each: a megabyte for 100 engines."""

MARKS_KEPT = 2_000
TRAINER_INTERVALS_KEPT = 1_000
ENGINES_MAX = 512
"""Later ones are not drawn; no screen has lines for more."""

CLOCKS_DIFFER_US = 1_000_000
"""Engines on other hosts count from another start; what arrives over a second early or late is
moved by what the fastest of its messages took."""


@dataclass(frozen=True, slots=True)
class Slice:
    """One engine in one slice of time."""

    number: int
    """Counts slices from the clock's zero."""
    version: int
    """Of its last step in it."""
    decode_us: int
    prefill_us: int
    """Spent in steps in which turns' contexts were computed, beside others' decoding."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened to an engine at one instant."""

    engine: str
    name: str
    at_us: int
    version: int
    """-1 where it has none to do with it."""


@dataclass(frozen=True, slots=True)
class Activity:
    """Something that the trainer did."""

    kind: str
    started_us: int
    ended_us: int
    version: int


class _Strip:
    """One engine's slices, in a ring."""

    __slots__ = ("_decode", "_numbers", "_prefill", "_versions", "newest", "shift_us")

    def __init__(self) -> None:
        self._numbers = array("q", [-1]) * SLICES_KEPT
        self._versions = array("i", [-1]) * SLICES_KEPT
        self._decode = array("i", [0]) * SLICES_KEPT
        self._prefill = array("i", [0]) * SLICES_KEPT
        self.newest = -1
        self.shift_us: int | None = None
        """The least that a step of it was heard after its end."""

    def add(self, number: int, busy_us: int, version: int, *, is_prefill: bool) -> None:
        at = number % SLICES_KEPT
        if self._numbers[at] != number:
            if self._numbers[at] > number:
                return  # so late that its place is another's
            self._numbers[at], self._decode[at], self._prefill[at] = number, 0, 0
            self.newest = max(self.newest, number)
        self._versions[at] = version
        (self._prefill if is_prefill else self._decode)[at] += busy_us

    def copy(self) -> "_Strip":
        """Cheap: four blocks of memory."""
        other = object.__new__(_Strip)
        other._numbers, other._versions = self._numbers[:], self._versions[:]
        other._decode, other._prefill = self._decode[:], self._prefill[:]
        other.newest, other.shift_us = self.newest, self.shift_us
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
        """Add a step, to every slice that it was in."""
        strip = self._strips.get(engine)
        if strip is None:
            if len(self._strips) >= ENGINES_MAX:
                return
            strip = self._strips[engine] = _Strip()
        late_us = now_us - started_us - busy_us
        if strip.shift_us is None or late_us < strip.shift_us:
            strip.shift_us = late_us
        if abs(strip.shift_us) > CLOCKS_DIFFER_US:
            started_us += strip.shift_us
        self._spread(strip, started_us, busy_us, version, is_prefill)

    def _spread(
        self, strip: _Strip, started_us: int, busy_us: int, version: int, is_prefill: bool
    ) -> None:
        slice_us = self.slice_us
        number, within_us = divmod(started_us, slice_us)
        part_us = min(busy_us, slice_us - within_us)
        strip.add(number, part_us, version, is_prefill=is_prefill)
        rest_us = busy_us - part_us
        if not rest_us:
            return  # nearly always
        for later in itertools.islice(itertools.count(number + 1), SLICES_KEPT):
            strip.add(later, min(rest_us, slice_us), version, is_prefill=is_prefill)
            rest_us -= min(rest_us, slice_us)
            if not rest_us:
                return

    def mark(self, engine: str, name: str, at_us: int, version: int = -1) -> None:
        """Add an instant, by the engine's clock."""
        strip = self._strips.get(engine)
        shift_us = strip.shift_us if strip is not None else None
        if shift_us is not None and abs(shift_us) > CLOCKS_DIFFER_US and name == "swap":
            at_us += shift_us  # all else is stamped when it is heard
        self.marks.append(Mark(engine, name, at_us, version))

    def trainer_interval(
        self, kind: TrainerActivity, started_us: int, ended_us: int, version: int
    ) -> None:
        """Add what the trainer did."""
        self.trainer.append(Activity(kind, started_us, ended_us, version))

    def copy(self) -> "Timeline":
        """As it is now; a fraction of a millisecond for 100 engines."""
        other = Timeline(self.slice_us)
        other._strips = {name: strip.copy() for name, strip in self._strips.items()}
        other.marks, other.trainer = self.marks.copy(), self.trainer.copy()
        return other

    def slices(self, since_us: int = 0) -> dict[str, list[Slice]]:
        """By engine, those that end after ``since_us``."""
        first = since_us // self.slice_us
        return {name: strip.since(first) for name, strip in sorted(self._strips.items())}

    def marks_since(self, since_us: int) -> list[Mark]:
        """The last ones, in the order of being heard of."""
        return [mark for mark in self.marks if mark.at_us >= since_us]

    def trainer_since(self, since_us: int) -> list[Activity]:
        """What the trainer has ended since."""
        return [activity for activity in self.trainer if activity.ended_us >= since_us]


def timeline_of(trace: Trace, trainer_track: str) -> Timeline:
    """A finished run's, as a whole: its slices are as long as it takes for all to fit."""
    tracks = {name: track for name, track in trace.tracks.items() if track}
    if not tracks:
        return Timeline()
    start_us = min(track[0].started_us for track in tracks.values())
    end_us = max(track[-1].ended_us for track in tracks.values())
    timeline = Timeline(max(1, -(-(end_us - start_us + 1) // (SLICES_KEPT - 2))))
    for name, track in tracks.items():
        for each in track:
            if name == trainer_track:
                timeline.trainer.append(
                    Activity(each.name, each.started_us, each.ended_us, each.version)
                )
                continue
            strip = timeline._strips.setdefault(name, _Strip())
            length_us = max(1, each.ended_us - each.started_us)
            for number, part_us in _parts(each.started_us, length_us, timeline.slice_us):
                busy_us = part_us * each.busy_us // length_us
                strip.add(number, busy_us, each.version, is_prefill=False)
    for instant in trace.instants:
        version = instant.args.get("version", -1)
        known = version if isinstance(version, int) else -1
        timeline.marks.append(Mark(instant.track, instant.name, instant.at_us, known))
    return timeline


def _parts(started_us: int, length_us: int, slice_us: int) -> Iterable[tuple[int, int]]:
    while length_us > 0:
        number, within_us = divmod(started_us, slice_us)
        part_us = min(length_us, slice_us - within_us)
        yield number, part_us
        started_us, length_us = started_us + part_us, length_us - part_us
