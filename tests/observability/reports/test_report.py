"""Reports: report.json, the page and the picture."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread
from safetensors.torch import save_file

from tests.observability.recorded import REPORT_KEYS
from tests.observability.records.test_recording import a_rollout, some_statistics
from tidegate.errors import AuditError
from tidegate.observability.records.recording import RunRecorder
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


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    save_file({}, path / "model.safetensors")
    return path


def a_run(
    directory: Path, model: Path, *, statistics: RunStatistics | None = None, **facts: object
) -> Path:
    """Record three versions, trained while one engine decodes."""
    settings = {"mode": "async", "pause_mode": "keep", "kv_policy": "recompute"}
    with RunRecorder(directory, settings=settings, model=model) as recorder:
        for version in range(3):
            at_us = 1_000_000 * version
            recorder.engine_step(EngineStep("engine-0", at_us, 900_000, version, 8))
            recorder.engine_event("engine-0", "swap", at_us + 900_000, version=version + 1)
            recorder.trainer_interval("train", at_us, at_us + 800_000, version)
            recorder.trainer_interval("publish", at_us + 800_000, at_us + 850_000, version + 1)
            recorder.batch({"version": version, "reward": 0.2 * version})
        recorder.rollout(a_rollout(), task=None, advantage=0.0, consumed_version=5)
        recorder.finish(statistics or some_statistics(), **facts)
    return directory


def report_of(directory: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((directory / "report.json").read_text())
    return body


def page_of(directory: Path, model: Path, statistics: RunStatistics) -> str:
    return write_report(a_run(directory, model, statistics=statistics)).read_text()


def test_report_json_has_the_numbers_of_the_run(tmp_path: Path, model: Path) -> None:
    run = a_run(tmp_path / "runs" / "one", model, reward_before=0.25, reward_after=0.75)

    assert write_report(run) == run / "report.md"

    report = report_of(run)
    assert set(report) >= REPORT_KEYS
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
    assert (report["mode"], report["pause_mode"], report["kv_policy"]) == (
        "async",
        "keep",
        "recompute",
    )


def test_the_report_separates_the_warm_up_from_the_gain_of_rl(tmp_path: Path, model: Path) -> None:
    run = a_run(
        tmp_path / "runs" / "one",
        model,
        reward_before=0.25,
        reward_after=0.75,
        warm_up={"steps": 200, "wall_s": 28.4},
    )
    page = write_report(run).read_text()
    assert "warmed up by supervised training (steps 200, wall s 28.4)" in page
    assert "from 0.250 to 0.750 (+0.500)" in page
    assert "| discarded: episode_error | 2 |" in page


def test_the_report_shows_the_share_of_cached_context(tmp_path: Path, model: Path) -> None:
    plain = some_statistics()
    assert "prefilled tokens found in cache" not in page_of(tmp_path / "one", model, plain)

    sampled = plain.ledger.generated + plain.evaluation_ledger.generated
    reported = dataclasses.replace(
        plain, context_tokens=8 * sampled, cached_context_tokens=6 * sampled
    )
    page = page_of(tmp_path / "two", model, reported)
    assert "found in cache | 75.0%; 2.00 tokens prefilled per sampled token |" in page
    assert "| unaccounted for | 0 |" in page
    assert "bound 2: kept." in page
    assert "Not audited yet" in page


def test_the_report_shows_a_broken_bound_and_lost_tokens(tmp_path: Path, model: Path) -> None:
    broken = dataclasses.replace(
        some_statistics(), max_staleness_seen=3, ledger=LedgerSnapshot(generated=9, trained=5)
    )
    page = write_report(a_run(tmp_path / "runs" / "one", model, statistics=broken)).read_text()
    assert "bound 2: **EXCEEDED**" in page
    assert "| unaccounted for | 4 |" in page


def test_the_report_compares_runs_of_the_same_model_only(tmp_path: Path, model: Path) -> None:
    other_model = tmp_path / "other-model"
    other_model.mkdir()
    (other_model / "config.json").write_text("{}")
    runs = tmp_path / "runs"
    a_run(runs / "sibling", model, mode="sync")
    a_run(runs / "stranger", other_model)
    RunRecorder(runs / "unfinished", settings={}, model=model).close()

    page = write_report(a_run(runs / "one", model)).read_text()

    assert "| **one** | async; keep; recompute | 2.5 | 25.0% | 12.5% |" in page
    assert "| sibling | sync; keep; recompute | 2.5 | 25.0% | 12.5% |" in page
    assert "stranger" not in page
    assert "unfinished" not in page


def test_a_run_without_a_mode_or_held_out_rewards_shows_no_dashes_in_their_place(
    tmp_path: Path, model: Path
) -> None:
    runs = tmp_path / "runs"
    a_run(runs / "sibling", model)
    page = write_report(a_run(runs / "one", model, mode=None)).read_text()
    assert "| pause mode; KV policy | keep; recompute |" in page
    (row,) = [line for line in page.splitlines() if line.startswith("| **one** ")]
    assert row.split(" | ")[1] == "keep; recompute"
    assert row.split(" | ")[5] == "0.000 to 0.400 (training)"


def test_a_run_without_a_timeline_still_has_a_picture(tmp_path: Path, model: Path) -> None:
    run = a_run(tmp_path / "runs" / "one", model)
    write_report(run)
    height, width, _ = imread(run / "report.png").shape
    assert height > 500
    assert width > 900

    empty = tmp_path / "runs" / "empty"
    with RunRecorder(empty, settings={}, model=model) as recorder:
        recorder.finish(dataclasses.replace(some_statistics(), staleness_histogram={}))
    write_report(empty)
    assert (empty / "report.png").stat().st_size > 10_000


def test_a_report_of_a_missing_or_unfinished_run_raises(tmp_path: Path, model: Path) -> None:
    RunRecorder(tmp_path / "run", settings={}, model=model).close()
    with pytest.raises(AuditError, match="has not ended"):
        write_report(tmp_path / "run")
    with pytest.raises(AuditError, match=r"run\.json is missing"):
        write_report(tmp_path)
    (tmp_path / "run" / "run.json").write_text("[1")
    with pytest.raises(AuditError, match="can't be read"):
        write_report(tmp_path / "run")


def test_the_report_shows_the_forecast_and_the_discards(tmp_path: Path, model: Path) -> None:
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
    statistics = dataclasses.replace(
        some_statistics(),
        forecast=forecast,
        discards={"stale": DiscardStatistics(9, 900, 100.0, 0.125, {64: 9}, tasks)},
        length_bias=LengthBiasStatistics(64, 80.0, 60.0, 0.75, {64: 0.5}),
    )
    run = a_run(tmp_path / "runs" / "one", model, statistics=statistics)
    page = write_report(run).read_text()

    assert "Predicted mean 1.90, measured 1.88." in page
    assert "(rho) 0.85" in page
    assert "**Both sides idle: admission-bound; max_staleness=4 would gain about 33%.**" in page
    assert "| stale | 9 | 900 | 100.0 | 12.5% | 0:17 (5), 0:3 (1 to 4) |" in page
    assert "trained 60.0 tokens on average, generated 80.0, ratio 0.75" in page
    report = report_of(run)
    assert report["forecast"]["changes"] == [
        {"lever": "max_staleness", "value": 4, "gain": 0.33, "noise": 0.0}
    ]
    assert report["discards"]["stale"]["lengths"] == {"64": 9}


def test_results_leave_out_what_the_run_did_not_have(tmp_path: Path, model: Path) -> None:
    page = write_report(a_run(tmp_path / "runs" / "one", model)).read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    assert not [row for row in rows if row.split(" | ")[-1].strip(" |") in ("-", "-; -")]
    assert "draft tokens verified" not in page


def test_a_run_too_short_for_a_forecast_has_a_report_without_it(
    tmp_path: Path, model: Path
) -> None:
    page = write_report(a_run(tmp_path / "runs" / "one", model)).read_text()
    assert "Predicted" not in page
    assert "Length bias" not in page


def test_seconds_per_publish_average_this_processes_publishes(tmp_path: Path, model: Path) -> None:
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
    assert read_facts(a_run(tmp_path / "one", model, statistics=resumed)).publish_s == 0.5


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"statistics": {"trainer_version": 1}}, "of another, or damaged: KeyError 'settings'"),
        ({"statistics": 7, "settings": {}, "extra": {}}, "of another, or damaged: TypeError"),
        ({"statistics": None}, "the run has not ended, or was killed"),
        ({}, "of another, or damaged: KeyError 'statistics'"),
    ],
)
def test_a_report_of_another_versions_run_raises(
    tmp_path: Path, body: dict[str, Any], says: str
) -> None:
    (tmp_path / "run.json").write_text(json.dumps(body))
    with pytest.raises(AuditError, match=says):
        read_facts(tmp_path)
