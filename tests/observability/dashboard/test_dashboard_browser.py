"""The dashboard in a real browser (Playwright), with hostile text in rollouts; and Perfetto.

``make test-dashboard`` runs it; without a browser it is skipped.
"""

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import tidegate
from tests.models import make_model_directory
from tests.observability.dashboard.chromium import CHROMIUM_FLAGS
from tests.observability.dashboard.perfetto import Read, perfetto_page, served
from tests.observability.dashboard.synthetic_run import SyntheticRun
from tests.observability.dashboard.watched_run import HOSTILE_TASK, two_turns, watched_run
from tidegate.observability.dashboard.comparisons import ComparableRuns
from tidegate.observability.dashboard.dashboard import Dashboard
from tidegate.observability.dashboard.recorded import RecordedSource
from tidegate.observability.records.trace import TRACE_FILE

CHROMIUM = os.environ.get("TIDEGATE_CHROMIUM", "")
AXE = os.environ.get("TIDEGATE_AXE", "")
"""Path of axe-core's axe.min.js."""

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


IS_RED = """id => {
  const canvas = document.getElementById(id), bad = document.createElement("i");
  bad.style.color = "var(--bad)";
  document.body.append(bad);
  const [r, g, b] = getComputedStyle(bad).color.match(/\\d+/g).map(Number);
  bad.remove();
  const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  for (let i = 0; i < data.length; i += 4) {
    if (data[i] === r && data[i + 1] === g && data[i + 2] === b) return true;
  }
  return false;
}"""
"""JavaScript function: whether a canvas has a pixel in the page's red."""

SERIOUS = ("serious", "critical")


class PageViewer:
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

    def open(self, url: str) -> Any:
        """Open a page, wait until it has the run's state, and return it."""
        self.page.goto(url)
        self.page.wait_for_selector("body[data-frames]")
        return self.page

    def violations(self) -> list[str]:
        """Return axe-core's serious findings about the present view."""
        self.page.evaluate(Path(AXE).read_text())
        found = self.page.evaluate("async () => (await axe.run()).violations")
        return [
            f"{each['id']}: {each['help']}: {node['html'][:200]}"
            for each in found
            if each["impact"] in SERIOUS
            for node in each["nodes"]
        ]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_FLAGS)
        yield started
        started.close()


@pytest.fixture
def viewer(browser: Any) -> Iterator[PageViewer]:
    opened = PageViewer(browser)
    yield opened
    assert opened.wrong == []
    opened.page.close()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return watched_run(tmp_path_factory.mktemp("watched")).directory


@pytest.fixture(scope="module")
def recorded_url(finished: Path) -> Iterator[str]:
    with Dashboard("127.0.0.1:0") as dashboard:
        shutil.copytree(finished, finished.parent / "other")
        dashboard.start(RecordedSource(finished), ComparableRuns(finished))
        yield dashboard.url


@contextmanager
def synthetic(**kind: Any) -> Iterator[str]:
    with Dashboard("127.0.0.1:0") as dashboard:
        dashboard.start(SyntheticRun(**kind))
        yield dashboard.url


def test_a_run_is_followed_to_its_end_and_on_into_its_recorded_view(
    viewer: PageViewer, tmp_path: Path
) -> None:
    model, page = make_model_directory(tmp_path / "model"), viewer.page
    with tidegate.serve_sync(
        model=model,
        engines=1,
        group_size=2,
        groups_per_batch=2,
        run_directory=tmp_path / "run",
        dashboard_address="127.0.0.1:0",
    ) as rollouts:
        assert rollouts.dashboard_url is not None
        tasks = [HOSTILE_TASK] * 8
        for number, _ in enumerate(rollouts.batches(tasks, episode=two_turns), start=1):
            rollouts.publish(load_file(model / "model.safetensors"))
            rollouts.report_off_policyness(effective_sample_size=0.9)
            if number == 1:
                page.goto(rollouts.dashboard_url)
                page.wait_for_selector("#state:text-is('live')")
            if number == 3:
                page.wait_for_selector("body[data-frames]:not([data-frames='1'])")
                page.wait_for_selector("text=v3, v3")
                for canvas in ("timeline", "reward", "staleness", "lags", "ess", "ledger"):
                    assert page.evaluate(HAS_DRAWN, canvas) > 2, canvas
                assert page.locator("text=queued turns").count() == 1
    page.wait_for_selector("#state:text-is('ended')")
    assert "ended normally" in page.locator("#outcome-text").text_content()
    command = page.locator("#outcome-command code").text_content()
    host = page.url.split("/")[2]
    name, port = host.split(":")
    assert command == f"tidegate dashboard {tmp_path / 'run'} --host {name} --port {port}"
    assert page.locator("text=queued turns").count() == 0
    assert page.locator("text=v4, v4").count() == 1
    assert page.evaluate(HAS_DRAWN, "reward") > 2
    with Dashboard(host) as dashboard:
        dashboard.start(RecordedSource(tmp_path / "run"))
        page.wait_for_selector("#outcome", state="hidden")
        assert page.locator("#state").text_content() == "ended"
    assert viewer.hosts == {host}
    viewer.wrong.clear()  # requests after the run's end are refused, which the console shows


def test_a_finished_run_shows_nothing_as_running(viewer: PageViewer, recorded_url: str) -> None:
    page = viewer.open(recorded_url)
    assert page.locator("#state").text_content() == "ended"
    assert page.locator("#outcome").is_hidden()
    assert page.locator("text=queued turns").count() == 0
    assert "no group waits" in page.locator("#groups-empty").text_content()


def test_a_killed_run_says_that_it_was_killed(
    viewer: PageViewer, finished: Path, tmp_path: Path
) -> None:
    run = json.loads((finished / "run.json").read_bytes())
    (tmp_path / "run.json").write_text(json.dumps({**run, "is_final": False}))
    with Dashboard("127.0.0.1:0") as dashboard:
        dashboard.start(RecordedSource(tmp_path))
        page = viewer.open(dashboard.url)
        assert page.locator("#state").text_content() == "killed or failed"
        assert "no batch" in page.locator("#reward + .empty").text_content()
        assert page.locator("#timeline-empty").is_visible()


def test_a_lag_at_the_bound_is_not_red_and_one_beyond_it_is(viewer: PageViewer) -> None:
    for staleness_max, is_red in ((2, False), (3, True)):
        with synthetic(engines=1, staleness_max=staleness_max) as url:
            page = viewer.open(url)
            assert page.evaluate(IS_RED, "staleness") is is_red
            assert page.evaluate(IS_RED, "lags") is is_red
            assert page.locator("#warnings .broken").count() == int(is_red)
            for canvas in ("timeline", "engine-rows", "reward", "ledger"):
                assert not page.evaluate(IS_RED, canvas), canvas
            page.goto("about:blank")
    viewer.wrong.clear()


def test_every_canvas_says_its_data_in_words(viewer: PageViewer, recorded_url: str) -> None:
    page = viewer.open(f"{recorded_url}#run")
    labels = {
        canvas.get_attribute("id"): canvas.get_attribute("aria-label") or ""
        for canvas in page.locator("#run-view canvas:visible").all()
    }
    assert labels.keys() >= {"timeline", "engine-rows", "reward", "staleness", "lags", "ledger"}
    assert all(len(label) > 20 for label in labels.values()), labels
    assert labels["staleness"].startswith("rollouts by staleness, versions: 0: ")
    assert labels["staleness"].endswith("Bound 2, not passed")
    assert "engine-0: in steps" in labels["engine-rows"]


def test_lost_tokens_are_red_and_counted(viewer: PageViewer) -> None:
    with synthetic(engines=1, unaccounted=7) as url:
        page = viewer.open(url)
        assert "7 tokens are unaccounted for" in page.locator("#warnings .broken").text_content()
        assert page.evaluate(IS_RED, "ledger")
        page.goto("about:blank")


def test_a_thousand_engines_are_drawn_and_scrolled(viewer: PageViewer) -> None:
    with synthetic(engines=1000) as url:
        page = viewer.open(url)
        label = page.locator("#engine-rows").get_attribute("aria-label")
        assert "and 980 more" in label
        rows_height = page.evaluate("document.getElementById('engine-scroll').clientHeight")
        assert 100 < rows_height < 500
        assert page.evaluate(HAS_DRAWN, "engine-rows") > 5
        page.evaluate("document.getElementById('engine-scroll').scrollTop = 1e6")
        page.wait_for_timeout(100)
        assert page.evaluate(HAS_DRAWN, "engine-rows") > 5
        page.goto("about:blank")


def test_the_timeline_zooms_with_buttons_and_by_dragging(
    viewer: PageViewer, recorded_url: str
) -> None:
    page = viewer.open(recorded_url)
    whole = page.locator("#timeline-span").text_content()
    with page.expect_response(lambda response: "/api/timeline?" in response.url):
        page.click("#zoom-in")
    assert page.locator("#timeline-span").text_content() != whole
    page.click("#zoom-all")
    assert page.locator("#timeline-span").text_content() == whole
    box = page.locator("#timeline").bounding_box()
    page.mouse.move(box["x"] + 400, box["y"] + 30)
    page.mouse.down()
    page.mouse.move(box["x"] + 600, box["y"] + 30)
    page.mouse.up()
    assert page.locator("#zoom-all").is_enabled()
    page.wait_for_load_state("networkidle")


def test_a_mixed_rollout_is_shown_token_by_token_as_text(
    viewer: PageViewer, recorded_url: str
) -> None:
    page = viewer.open(recorded_url)
    page.click("#show-rollouts")
    page.select_option("#filter-state", "trained")
    page.wait_for_url("**/#rollouts?state=trained")
    page.click("#rollouts tbody tr >> nth=0 >> td >> nth=2")
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


def test_a_rollout_has_an_address_that_opens_it_in_its_list(
    viewer: PageViewer, recorded_url: str
) -> None:
    page = viewer.open(f"{recorded_url}#rollouts/3?state=trained&sort=reward&descending=1")
    page.wait_for_selector("text=Rollout 3")
    assert page.input_value("#filter-state") == "trained"
    rewards = page.locator("#rollouts tbody tr td:nth-child(7)").all_text_contents()
    assert rewards == sorted(rewards, reverse=True) != []
    assert page.locator("th[aria-sort='descending']").text_content().startswith("reward")
    page.go_back()
    page.go_forward()
    page.wait_for_selector("text=Rollout 3")


def test_a_rollout_its_group_and_its_batch_show_their_stories(
    viewer: PageViewer, recorded_url: str
) -> None:
    page = viewer.open(f"{recorded_url}#rollouts/0")
    page.wait_for_selector("#story li:has-text('trained on at v0')")
    page.click("text=group 0")
    page.wait_for_selector("#story li:has-text('2 attempts at one task')")
    page.click("text=batch trained at v0")
    page.wait_for_selector("#story li:has-text('handed over at v0')")
    pressed = page.locator("#story-subjects [aria-pressed='true']").all_text_contents()
    assert pressed == ["batch trained at v0"]


def test_rollouts_are_sorted_searched_and_chosen_by_keyboard(
    viewer: PageViewer, recorded_url: str
) -> None:
    page = viewer.open(f"{recorded_url}#rollouts")
    page.fill("#filter-task", "no task has this")
    page.press("#filter-task", "Enter")
    page.wait_for_selector("text=No rollout matches")
    page.click("#clear-filters")
    page.wait_for_selector("#rollouts tbody a")
    page.focus("#rollouts th:first-child button")
    page.keyboard.press("Enter")
    page.wait_for_selector("th[aria-sort='ascending']")
    page.focus("#rollouts tbody tr:first-child a")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_selector("tr[aria-current] a:text-is('1')")


def test_runs_are_compared_side_by_side(viewer: PageViewer, recorded_url: str) -> None:
    page = viewer.open(f"{recorded_url}#compare")
    page.wait_for_selector("text=Choose at least one other run")
    page.check("#compare-runs input[value='other']")
    page.wait_for_url("**/#compare?run=run&run=other")
    page.wait_for_selector("#compare-table th:text-is('other')")
    for canvas in ("compare-time", "compare-version", "compare-staleness", "compare-idle"):
        assert page.evaluate(HAS_DRAWN, canvas) > 4, canvas
    assert "No evaluation" in page.locator("#compare-held-out + .empty").text_content()
    cells = page.locator("#compare-table tr:has-text('rollouts trained') td").all_text_contents()
    assert cells == ["16", "16"]


@pytest.mark.skipif(not AXE, reason="needs axe-core: make test-dashboard")
@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 420)])
def test_axe_finds_nothing_serious_in_any_view(
    viewer: PageViewer, recorded_url: str, scheme: str, width: int
) -> None:
    viewer.page.emulate_media(color_scheme=scheme)
    viewer.page.set_viewport_size({"width": width, "height": 900})
    for view in ("run", "rollouts", "rollouts/3", "compare?run=run&run=other", "settings"):
        viewer.page.goto("about:blank")
        page = viewer.open(f"{recorded_url}#{view}")
        page.wait_for_load_state("networkidle")
        assert viewer.violations() == [], view
    page.goto("about:blank")
    with synthetic(engines=3, staleness_max=3, unaccounted=1) as url:
        viewer.open(url)
        assert viewer.violations() == [], "live"
        page.goto("about:blank")


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
