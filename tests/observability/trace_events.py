"""Rules of the Chrome trace event format, as ui.perfetto.dev needs them."""

from collections import defaultdict
from typing import Any

PHASES = {"M", "X", "C", "i"}


def hold_to_the_format(events: list[dict[str, Any]]) -> None:
    """Check names, times and ids, and that intervals are nested or disjoint."""
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    processes = {e["pid"] for e in events if e["name"] == "process_name"}
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        assert event["ph"] in PHASES, event
        assert isinstance(event["name"], str), event
        assert event["name"], event
        assert event["pid"] in processes, event
        if event["ph"] == "M":
            continue
        assert type(event["ts"]) is int, event
        assert event["ts"] >= 0, event
        assert isinstance(event["args"], dict), event
        if event["ph"] in "Xi":
            assert (event["pid"], event["tid"]) in named, event
        if event["ph"] == "X":
            assert type(event["dur"]) is int, event
            assert event["dur"] >= 0, event
            track = tracks[event["pid"], event["tid"]]
            track.append((event["ts"], event["ts"] + event["dur"]))
    for track in tracks.values():
        _nest(track)


def _nest(track: list[tuple[int, int]]) -> None:
    """Check that no interval begins within another one and ends after it: viewers would drop it."""
    open_ends: list[int] = []
    for start, end in sorted(track, key=lambda interval: interval[0]):  # stable, as viewers are
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1], (start, end, open_ends)
        open_ends.append(end)
