"""The dashboard in a real browser (Playwright), with hostile text in rollouts; and Perfetto.

``make test-dashboard`` runs it; without a browser it is skipped.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import tidegate
from tests.models import make_model_directory
from tests.observability.dashboard.perfetto import Read, perfetto_page, served
from tests.observability.dashboard.watched_run import HOSTILE_TASK, two_turns
from tidegate.observability.dashboard.dashboard import Dashboard
from tidegate.observability.dashboard.recorded import RecordedSource
from tidegate.observability.trace import TRACE_FILE

CHROMIUM = os.environ.get("TIDEGATE_CHROMIUM", "")

pytestmark = [
    pytest.mark.wire,
    pytest.mark.skipif(not CHROMIUM, reason="needs a browser: make test-dashboard"),
]

HAS_DRAWN = """id => {
  const canvas = document.getElementById(id);
  const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  return new Set(new Uint32Array(data.buffer)).size;
}"""
"""JavaScript function: the number of colours in a canvas."""


class Looking:
    """A page, and its errors."""

    def __init__(self, browser: Any) -> None:
        self.page = browser.new_page(viewport={"width": 1280, "height": 1100})
        self.wrong: list[str] = []
        self.hosts: set[str] = set()
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("dialog", lambda dialog: self.wrong.append("a dialog opened"))
        self.page.on("request", lambda request: self.hosts.add(request.url.split("/")[2]))

    def _said(self, message: Any) -> None:
        if message.type == "error":
            self.wrong.append(message.text)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield started
        started.close()


@pytest.fixture
def looking(browser: Any) -> Iterator[Looking]:
    opened = Looking(browser)
    yield opened
    assert opened.wrong == []
    opened.page.close()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.observability.dashboard.watched_run import watched_run

    return watched_run(tmp_path_factory.mktemp("watched")).directory


def test_a_running_run_is_shown(looking: Looking, tmp_path: Path) -> None:
    model, page = make_model_directory(tmp_path / "model"), looking.page
    with tidegate.serve_sync(
        model=model, engines=1, group_size=2, groups_per_batch=2, dashboard_address="127.0.0.1:0"
    ) as rollouts:
        assert rollouts.dashboard_url is not None
        tasks = [HOSTILE_TASK] * 8
        for number, _ in enumerate(rollouts.batches(tasks, episode=two_turns), start=1):
            rollouts.publish(load_file(model / "model.safetensors"))
            rollouts.report_off_policyness(effective_sample_size=0.9)
            if number == 1:
                page.goto(rollouts.dashboard_url)
                page.wait_for_function("document.getElementById('state').textContent === 'live'")
            if number == 3:
                page.wait_for_function("Number(document.body.dataset.frames) >= 2")
                page.wait_for_selector("text=v3, v3")
                for canvas in ("timeline", "reward", "staleness", "lags", "ess", "ledger"):
                    assert page.evaluate(HAS_DRAWN, canvas) > 2, canvas
    assert looking.hosts == {rollouts_host(rollouts_url=page.url)}
    looking.wrong.clear()  # the run has ended, which the page reports in the console


def rollouts_host(rollouts_url: str) -> str:
    return rollouts_url.split("/")[2]


def test_a_mixed_rollout_is_shown_token_by_token_as_text(looking: Looking, finished: Path) -> None:
    page = looking.page
    with Dashboard("127.0.0.1:0") as dashboard:
        dashboard.start(RecordedSource(finished))
        page.goto(dashboard.url)
        page.wait_for_selector("text=finished")
        page.click("#show-rollouts")
        page.select_option("#state-filter", "trained")
        page.click("#rollouts tbody tr >> nth=0")
        page.wait_for_selector("#rollout-text .sampled")
        assert page.locator("#rollout-text .sampled").count() == 14
        assert page.locator("#rollout-text .turn").all_text_contents()[0] == "prompt"
        task = page.locator("#rollout-facts dd >> nth=2").text_content()
        assert "<script>" in task
        for colour in ("logprob", "staleness", "kv"):
            page.select_option("#colour-by", colour)
            assert page.locator("#colour-legend i").count() >= 1
        assert "taken" not in page.title()
        assert page.locator("img").count() == 0


# ---------------------------------------------------------------- Perfetto

SLICES = """
  select process.name as process, thread.name as thread, slice.* from slice
  join thread_track on thread_track.id = slice.track_id
  join thread using (utid) join process using (upid)
"""
OVERLAPS = f"""
  with it as ({SLICES})
  select count(*) from it as engine join it as trainer
  on engine.ts < trainer.ts + trainer.dur and trainer.ts < engine.ts + engine.dur
  where engine.thread glob 'engine-*' and trainer.thread = 'trainer' and trainer.dur > 0
"""


def test_perfetto_reads_a_runs_whole_trace(browser: Any, finished: Path) -> None:
    at = perfetto_page()
    if at is None:
        pytest.skip("needs Perfetto's page: make test-dashboard")
    events = json.loads((finished / TRACE_FILE).read_text())["traceEvents"]
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    with served(at, finished / TRACE_FILE) as url:
        read = Read(page, url)
        wrong = "select name from stats where severity in ('error', 'data_loss') and value > 0"
        assert read.rows(wrong) == []
        tracks = read.rows(f"select process, thread, count(*) from ({SLICES}) group by 1, 2")
        assert {(process, thread): n for process, thread, n in tracks} == written(events)
        (counted,) = read.rows("select count(*) from counter")
        assert counted == [sum(event["ph"] == "C" for event in events)]
        # A track without nesting has depth 0; an episode's intervals are nested.
        depths = read.rows(f"select process, max(depth) from ({SLICES}) group by 1 order by 1")
        assert depths == [["engines and trainer", 0], ["episodes", 1]]
        (overlaps,) = read.rows(OVERLAPS)
        assert overlaps == [len(overlapping(events))] != [0]
    page.close()


def written(events: list[dict[str, Any]]) -> dict[tuple[str, str], int]:
    """Return the number of intervals and marks by process and thread."""
    named = [event for event in events if event["ph"] == "M"]
    processes = {e["pid"]: e["args"]["name"] for e in named if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in named if e["name"] == "thread_name"}
    return Counter(
        (processes[event["pid"]], threads[event["pid"], event["tid"]])
        for event in events
        if event["ph"] in "Xi"
    )


def overlapping(events: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Return the times at which an engine's interval and a trainer's interval overlap."""
    named = [event for event in events if event["name"] == "thread_name" and event["pid"] == 1]
    threads = {event["tid"]: event["args"]["name"] for event in named}
    of_engines: list[tuple[int, int]] = []
    of_trainer: list[tuple[int, int]] = []
    for event in events:
        if event["pid"] == 1 and event["ph"] in "Xi":
            place = (event["ts"], event["ts"] + event.get("dur", 0))
            (of_trainer if threads[event["tid"]] == "trainer" else of_engines).append(place)
    return [
        (mine[0], its[0])
        for mine in of_engines
        for its in of_trainer
        if mine[0] < its[1] and its[0] < mine[1] and its[1] > its[0]
    ]
