"""Tests of the picture that README shows of two recorded runs."""

import json
from pathlib import Path

from tests.observability.run_picture import Canvas, colour_of, draw_run, joined
from tidegate.observability.records.trace import TRACE_FILE, Trace
from tidegate.orchestrator.telemetry.recorder import EngineStep

SECOND_US = 1_000_000


def test_bars_that_almost_touch_are_one() -> None:
    assert joined([(0, 10), (12, 5), (30, 1)]) == [(0, 17), (30, 1)]


def test_an_engine_has_a_bar_in_the_colour_of_each_version_and_the_trainer_its_steps(
    tmp_path: Path,
) -> None:
    trace = Trace()
    for version in (1, 2):
        start = version * SECOND_US
        trace.engine_step(EngineStep("engine-0", start, SECOND_US, version, rows=4))
        trace.trainer_interval("train", start, start + SECOND_US // 2, version)
    trace.write(tmp_path / TRACE_FILE)
    (tmp_path / "run.json").write_text(json.dumps({"settings": {"max_staleness": 1}}))

    canvas = Canvas()
    draw_run(canvas, tmp_path, seconds=2, skip=1)
    svg = canvas.svg("a run")

    assert [svg.count(f'fill="{colour_of(version)}"') for version in (1, 2)] == [1, 1]
    assert svg.count(">train</text>") == 2
    assert ">v1</text>" in svg
    assert "max_staleness=1" in svg
