"""The dashboard's timeline: steps, marks and activities in slices."""

from pathlib import Path

from tidegate.observability.metrics.live import LiveRecorder
from tidegate.observability.metrics.timeline import (
    SLICE_US,
    SLICES_KEPT,
    Slice,
    Timeline,
    timeline_of,
)
from tidegate.observability.records.trace import TRAINER_TRACK, Trace, read_trace
from tidegate.orchestrator.telemetry.recorder import EngineStep


def step(
    timeline: Timeline,
    started_us: int,
    busy_us: int,
    *,
    version: int = 0,
    is_prefill: bool = False,
    now_us: int | None = None,
) -> None:
    timeline.engine_step(
        "e",
        started_us=started_us,
        busy_us=busy_us,
        version=version,
        is_prefill=is_prefill,
        now_us=started_us + busy_us if now_us is None else now_us,
    )


def test_steps_add_up_in_their_slice_and_long_ones_are_in_all_that_they_cross() -> None:
    timeline = Timeline(slice_us=100)
    step(timeline, 10, 20, version=3)
    step(timeline, 40, 30, version=4, is_prefill=True)
    step(timeline, 190, 220, version=5)
    assert timeline.slices() == {
        "e": [
            Slice(0, 4, 20, 30),
            Slice(1, 5, 10, 0),
            Slice(2, 5, 100, 0),
            Slice(3, 5, 100, 0),
            Slice(4, 5, 10, 0),
        ]
    }


def test_an_update_has_only_the_slices_that_end_after_it() -> None:
    timeline = Timeline(slice_us=100)
    for start in range(0, 1000, 100):
        step(timeline, start, 50)
    assert [each.number for each in timeline.slices(since_us=750)["e"]] == [7, 8, 9]


def test_the_ring_buffer_keeps_the_latest_slices_and_drops_late_steps() -> None:
    timeline = Timeline()
    for number in range(3 * SLICES_KEPT):
        step(timeline, number * SLICE_US, 5)
    step(timeline, 0, 7, now_us=3 * SLICES_KEPT * SLICE_US)
    kept = timeline.slices()["e"]
    assert [each.number for each in kept] == list(range(2 * SLICES_KEPT, 3 * SLICES_KEPT))
    assert {each.decode_us for each in kept} == {5}


def test_engine_clocks_with_another_origin_are_shifted() -> None:
    timeline = Timeline(slice_us=1_000_000)
    hours_us = 3_600_000_000
    step(timeline, hours_us, 400, now_us=5_000_500)
    step(timeline, hours_us + 1_000_000, 400, now_us=6_000_900)
    timeline.mark("e", "swap", hours_us + 1_000_000, 2)
    assert [each.number for each in timeline.slices()["e"]] == [5, 6]
    assert [mark.at_us // 1_000_000 for mark in timeline.marks] == [6]


def test_a_finished_runs_trace_fits_into_the_same_slices(tmp_path: Path) -> None:
    trace = Trace()
    for number in range(1000):
        trace.engine_step(
            EngineStep("e", number * 10_000, busy_us=5_000, version=number // 500, rows=1)
        )
    trace.trainer_interval("train", 0, 4_000_000, 0)
    trace.instant("e", "swap", 5_000_000, {"version": 1})
    trace.write(tmp_path / "trace.json")
    timeline = timeline_of(read_trace(tmp_path / "trace.json"), TRAINER_TRACK)
    slices = timeline.slices()["e"]
    assert len(slices) <= SLICES_KEPT
    assert abs(sum(each.decode_us for each in slices) - 5_000_000) < 5_000
    assert {each.version for each in slices} == {0, 1}
    assert [(a.kind, a.ended_us) for a in timeline.trainer] == [("train", 4_000_000)]
    assert [(m.name, m.version) for m in timeline.marks] == [("swap", 1)]


def test_a_copy_of_the_timeline_does_not_change() -> None:
    timeline = Timeline(slice_us=100)
    step(timeline, 10, 20)
    copy = timeline.copy()
    step(timeline, 40, 30)
    timeline.mark("e", "swap", 80, 1)
    assert copy.slices() == {"e": [Slice(0, 0, 20, 0)]}
    assert copy.marks_since(0) == []


def test_the_last_batch_is_included_however_old() -> None:
    now_us = 0
    recorder = LiveRecorder(now_us=lambda: now_us)
    for number in range(3):
        now_us = number * 1_000_000
        recorder.batch({"version": number})
    assert [each["version"] for each in recorder.collected(since_us=900_000).batches] == [1, 2]
    assert [each["version"] for each in recorder.collected(since_us=60_000_000).batches] == [2]
