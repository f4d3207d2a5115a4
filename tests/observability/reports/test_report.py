"""Reports: report.json, the page and the picture."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from tests.observability.recorded import REPORT_KEYS, a_rollout, keep, recorder, some_statistics
from tidegate.errors import AuditError
from tidegate.observability.reports.facts import read_facts
from tidegate.observability.reports.report import write_report
from tidegate.orchestrator.core.discards import (
    DiscardStatistics,
    LengthBiasStatistics,
    TaskDiscards,
)
from tidegate.orchestrator.core.ledger import LedgerSnapshot
from tidegate.orchestrator.telemetry.recorder import EngineStep, TrainerActivity
from tidegate.orchestrator.telemetry.statistics import RunForecast, RunStatistics
from tidegate.orchestrator.telemetry.timekeeping import Timekeeper
from tidegate.policies.bottlenecks import Change

pytestmark = pytest.mark.slow


def a_run(directory: Path, *, statistics: RunStatistics | None = None, **facts: object) -> Path:
    """Record three versions, trained while one engine decodes."""
    settings = {"mode": "async", "pause_mode": "keep", "kv_policy": "recompute"}
    with recorder(directory, settings) as records:
        for version in range(3):
            at_us = 1_000_000 * version
            records.engine_step(EngineStep("engine-0", at_us, 900_000, version, 8))
            records.engine_event("engine-0", "swap", at_us + 900_000, version=version + 1)
            records.trainer_interval("train", at_us, at_us + 800_000, version)
            records.trainer_interval("publish", at_us + 800_000, at_us + 850_000, version + 1)
            records.batch({"version": version, "reward": 0.2 * version})
        keep(records, a_rollout(), version=5)
        records.finish(statistics or some_statistics(), **facts)
    return directory


def page_of(directory: Path, **figures: Any) -> str:
    """Return the report of a run with these statistics."""
    statistics = dataclasses.replace(some_statistics(), **figures)
    return write_report(a_run(directory, statistics=statistics)).read_text()


def test_report_json_has_the_numbers_of_the_run(tmp_path: Path) -> None:
    run = a_run(tmp_path / "one", reward_before=0.25, reward_after=0.75)
    assert write_report(run) == run / "report.md"
    report = json.loads((run / "report.json").read_text())
    assert {key: report[key] for key in REPORT_KEYS} == {
        "reward_before": 0.25,
        "reward_after": 0.75,
        "versions": 4,
        "mixed_version_share": 1.0,
        "max_staleness": 2,
        "staleness_bound": 2,
        "wall_s": 2.5,
        "tokens_trained": 3,
        "tokens_discarded": 2,
        "trainer_idle_share": 0.25,
        "engine_idle_share": 0.125,
    }
    modes = [report[name] for name in ("mode", "pause_mode", "kv_policy")]
    assert modes == ["async", "keep", "recompute"]


def test_the_report_separates_the_warm_up_from_the_gain_of_rl(tmp_path: Path) -> None:
    facts: dict[str, Any] = {"reward_before": 0.25, "reward_after": 0.75}
    run = a_run(tmp_path / "one", **facts, warm_up={"steps": 200, "wall_s": 28.4})
    page = write_report(run).read_text()
    assert "warmed up by supervised training (steps 200, wall s 28.4)" in page
    assert "from 0.250 to 0.750 (+0.500)" in page
    assert "| discarded: episode_error | 2 |" in page


def test_the_report_shows_the_share_of_cached_context(tmp_path: Path) -> None:
    page = page_of(tmp_path / "two", context_tokens=8 * 5, cached_context_tokens=6 * 5)
    assert "found in cache | 75.0%; 2.00 tokens prefilled per sampled token |" in page
    assert "| unaccounted for | 0 |" in page
    assert "bound 2: kept." in page
    assert "Not audited yet" in page


def test_the_report_shows_a_broken_bound_and_lost_tokens(tmp_path: Path) -> None:
    ledger = LedgerSnapshot(generated=9, trained=5)
    page = page_of(tmp_path / "one", max_staleness_seen=3, ledger=ledger)
    assert "bound 2: **EXCEEDED**" in page
    assert "| unaccounted for | 4 |" in page


def test_the_report_compares_runs_of_the_same_model_only(tmp_path: Path) -> None:
    a_run(tmp_path / "sibling", mode="sync")
    (tmp_path / "config.json").write_text("{}")
    with recorder(tmp_path / "stranger", model=tmp_path) as records:
        records.finish(some_statistics())
    recorder(tmp_path / "unfinished").close()

    page = write_report(a_run(tmp_path / "one", mode=None)).read_text()

    # Without a mode and held-out rewards, no dashes stand in their place.
    assert "| pause mode; KV policy | keep; recompute |" in page
    assert "| **one** | keep; recompute | 2.5 | 25.0% | 12.5% | 0.000 to 0.400 (training) |" in page
    assert "| sibling | sync; keep; recompute | 2.5 | 25.0% | 12.5% |" in page
    assert "stranger" not in page
    assert "unfinished" not in page


def test_a_run_without_a_timeline_still_has_a_picture(tmp_path: Path) -> None:
    run = a_run(tmp_path / "one")
    write_report(run)
    height, width, _ = imread(run / "report.png").shape
    assert height > 500
    assert width > 900

    empty = tmp_path / "empty"
    with recorder(empty) as records:
        records.finish(dataclasses.replace(some_statistics(), staleness_histogram={}))
    write_report(empty)
    assert (empty / "report.png").stat().st_size > 10_000


def test_the_report_shows_the_forecast_and_the_discards(tmp_path: Path) -> None:
    forecast = RunForecast(
        throughput_ratio=0.85,
        tail_factor=2.5,
        predicted_staleness=1.9,
        measured_staleness=1.875,
        max_useful_staleness=4,
        limit="admission",
        changes=(Change("max_staleness", 4, 0.33),),
        batch_interval_s=2.0,
        attainable_batch_interval_s=1.5,
        advice="both sides idle: admission-bound; max_staleness=4 would gain about 33%",
    )
    tasks = (TaskDiscards(0, 17, 5, 5), TaskDiscards(0, 3, 4, 1))
    run = tmp_path / "one"
    page = page_of(
        run,
        forecast=forecast,
        discards={"stale": DiscardStatistics(9, 900, 100.0, 0.125, {64: 9}, tasks)},
        length_bias=LengthBiasStatistics(64, 80.0, 60.0, 0.75, {64: 0.5}),
    )

    assert "Predicted mean 1.90, measured 1.88." in page
    assert "(rho) 0.85" in page
    assert "**Both sides idle: admission-bound; max_staleness=4 would gain about 33%.**" in page
    assert "| stale | 9 | 900 | 100.0 | 12.5% | 0:17 (5), 0:3 (1 to 4) |" in page
    assert "trained 60.0 tokens on average, generated 80.0, ratio 0.75" in page
    report = json.loads((run / "report.json").read_text())
    assert report["forecast"]["changes"] == [
        {"lever": "max_staleness", "value": 4, "gain": 0.33, "noise": 0.0}
    ]
    assert report["discards"]["stale"]["lengths"] == {"64": 9}


def test_a_report_leaves_out_what_the_run_did_not_have(tmp_path: Path) -> None:
    page = page_of(tmp_path / "one")
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    assert not [row for row in rows if row.split(" | ")[-1].strip(" |") in ("-", "-; -")]
    for absent in ("draft tokens verified", "found in cache", "Predicted", "Length bias"):
        assert absent not in page


def test_seconds_per_publish_average_this_processes_publishes(tmp_path: Path) -> None:
    """A resumed run's versions continue, and its time starts at 0."""
    now_us = iter(range(0, 10_000_000, 500_000))
    keeper = Timekeeper(None, now_us=lambda: next(now_us))
    activities: list[TrainerActivity] = ["wait", "wait", "train", "publish", "train", "publish"]
    for activity in activities:
        keeper.mark(activity, 100, {})
    resumed = dataclasses.replace(
        some_statistics(),
        trainer_version=102,
        trainer_activity_s=keeper.spent_s(),
        publishes=keeper.publishes,
    )
    assert read_facts(a_run(tmp_path / "one", statistics=resumed)).publish_s == 0.5


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ('{"statistics": {"trainer_version": 1}}', "of another, or damaged: KeyError 'settings'"),
        ('{"statistics": 7, "settings": {}, "extra": {}}', "of another, or damaged: TypeError"),
        ('{"statistics": null}', "the run has not ended, or was killed"),
        ("{}", "of another, or damaged: KeyError 'statistics'"),
        ("[1", "can't be read"),
        (None, r"run\.json is missing"),
    ],
)
def test_a_report_of_an_unfinished_damaged_or_missing_run_raises(
    tmp_path: Path, body: str | None, says: str
) -> None:
    if body is not None:
        (tmp_path / "run.json").write_text(body)
    with pytest.raises(AuditError, match=says):
        write_report(tmp_path)
