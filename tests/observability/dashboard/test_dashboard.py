"""The dashboard's HTTP API against a real run, during the run and from its files afterwards."""

import asyncio
import html.parser
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.observability.dashboard.watched_run import (
    BATCHES,
    HOSTILE_TASK,
    LONG_NUMBER,
    Watched,
    watched_run,
)
from tests.observability.trace_events import hold_to_the_format
from tidegate.errors import AuditError, ConfigError, RunClosed
from tidegate.observability.dashboard.dashboard import URL_FILE, Dashboard
from tidegate.observability.dashboard.frames import BATCH_COLUMNS, frame
from tidegate.observability.dashboard.recorded import RecordedSource
from tidegate.observability.dashboard.rollout_queries import RolloutQuery
from tidegate.observability.dashboard.updates import VIEWERS_MAX, TooManyViewers, Updates
from tidegate.observability.metrics.catalogue import METRICS, exposition
from tidegate.observability.records.trace import TRACE_FILE, read_trace
from tidegate.observability.records.trajectories import read_trajectories
from tidegate.observability.reports.explain import explain
from tidegate.observability.reports.story import Subject

pytestmark = pytest.mark.wire

PAGE = Path(__file__).parents[3] / "observability" / "dashboard" / "page"


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    return watched_run(tmp_path_factory.mktemp("watched"))


# ---------------------------------------------------------------- during the run


def test_valid_requests_are_answered_and_others_refused(watched: Watched) -> None:
    refused = {path: status for path, status in watched.statuses.items() if status != 200}
    assert refused == {
        "/api/rollouts?sort=colour": 400,
        "/api/rollouts?state=none": 400,
        "/api/rollouts?group=x": 400,
        "/api/rollouts/0?start=-1": 400,
        "/api/rollouts/999999": 404,
        "/api/rollouts/-1": 404,
        "/api/rollouts/x": 400,
        LONG_NUMBER: 400,
        "/api/stories/batch:999": 404,
        "/api/stories/step:0": 400,
        "/page/../run.json": 404,
        "as a stranger": 403,
    }


def test_api_state_equals_the_runs_statistics(watched: Watched) -> None:
    state = watched.answers["/api/state"]
    shown = state["frame"]
    assert state["about"]["settings"]["max_staleness"] == 2
    assert shown["run"]["trained_rollouts"] == watched.trained == 4 * (BATCHES - 1)
    assert shown["ledger"]["error"] == 0
    assert sum(count for _, count in shown["staleness"]) == watched.trained
    assert sum(tokens for _, tokens in shown["lags"]) == shown["ledger"]["trained"]
    reported: dict[str, Any] = {"ess": 0.75, "kl": 0.01, "k3": None, "chi2": None, "by_lag": []}
    assert shown["off_policy"] == reported
    (engine,) = shown["engines"]
    assert engine[:2] == ["engine-0", BATCHES - 1]
    assert shown["trainer_activity_s"].keys() == {"publish", "train", "wait"}


def test_the_timeline_has_the_engines_busy_time_and_its_swaps(watched: Watched) -> None:
    timeline = watched.answers["/api/state"]["frame"]["timeline"]
    (slices,) = timeline["engines"].values()
    busy_s = sum(decode + prefill for _, _, decode, prefill in slices) / 1e6
    (engine,) = watched.answers["/api/state"]["frame"]["engines"]
    assert busy_s == pytest.approx(engine[6], rel=1e-3)
    assert any(prefill for *_, prefill in slices)
    swaps = [version for _, name, _, version in timeline["marks"] if name == "swap"]
    assert swaps == list(range(1, BATCHES))


def test_a_curve_has_a_point_per_batch_and_an_update_those_of_the_last_seconds(
    watched: Watched,
) -> None:
    frame = watched.answers["/api/state"]["frame"]
    ess = BATCH_COLUMNS.index("effective_sample_size")
    assert [batch[0] for batch in frame["batches"]] == list(range(BATCHES - 1))
    assert [batch[ess] for batch in frame["batches"]] == [None, 0.75, 0.75]
    assert watched.update.keys() == frame.keys()
    assert watched.update["run"]["batches"] == BATCHES - 1


def test_rollouts_are_found_by_state_and_by_group(watched: Watched) -> None:
    trained = watched.answers["/api/rollouts?state=trained"]
    of_group = watched.answers["/api/rollouts?group=0"]
    at = {name: place for place, name in enumerate(trained["columns"])}
    assert trained["total"] == len(trained["rows"]) == watched.trained
    assert {row[at["state"]] for row in trained["rows"]} == {"trained"}
    assert [row[at["group_id"]] for row in of_group["rows"]] == [0, 0]
    mixed = watched.answers["/api/rollouts?state=trained&mixed=1"]
    versions = (at["oldest_version"], at["newest_version"])
    assert mixed["rows"] == [row for row in trained["rows"] if row[versions[0]] != row[versions[1]]]
    everything = watched.answers["/api/rollouts"]
    assert everything["total"] == len({row[0] for row in everything["rows"]})


def test_a_running_runs_rollouts_are_sorted_and_searched(watched: Watched) -> None:
    ids = [row[0] for row in watched.answers["/api/rollouts?sort=rollout_id&descending=1"]["rows"]]
    assert ids == sorted(ids, reverse=True) != []
    found = watched.answers["/api/rollouts?task=ONERROR&reward_min=0.5&reward_max=1"]
    reward = found["columns"].index("reward")
    assert {row[reward] for row in found["rows"]} == {1.0}
    assert watched.answers["/api/rollouts?text=no%20such%20text"]["total"] == 0


def test_a_rollout_is_shown_as_it_is_recorded(watched: Watched) -> None:
    page = watched.answers["/api/rollouts/0"]
    recorded = next(r for r in read_trajectories(watched.directory) if r.rollout_id == 0)
    assert (page["reward"], page["staleness"]) == (recorded.reward, recorded.staleness)
    assert page["context_tokens"] == len(page["texts"]) == len(recorded.token_ids)
    assert page["logprobs"] == pytest.approx(recorded.logprobs, rel=1e-4)
    sampled = [end - start for start, end, turn, *_ in page["segments"] if turn >= 0]
    assert sum(sampled) == sum(turn.length for turn in recorded.turns)
    assert watched.answers["/api/rollouts/0?start=4"]["texts"] == page["texts"][4:]


def test_the_trace_shows_each_episode_with_its_turns_and_a_viewer_can_nest_it(
    watched: Watched,
) -> None:
    path = watched.directory / TRACE_FILE
    hold_to_the_format(json.loads(path.read_text())["traceEvents"])
    whole = [i for i in read_trace(path).episodes if i.name.startswith("rollout ")]
    assert {i.args["turns"] for i in whole if i.args["ended"] == "returned"} == {2}
    rows = list(read_trajectories(watched.directory))
    assert len(whole) == len(rows)


def test_a_run_leaves_each_batchs_figures_and_no_url(watched: Watched) -> None:
    assert [figures["version"] for figures in watched.reported] == list(range(BATCHES))
    last = watched.reported[-1]
    assert last["staleness_max"] <= 2
    assert last["staleness_p50"] <= last["staleness_p99"] <= last["staleness_max"]
    assert (last["effective_sample_size"], last["mismatch_kl"]) == (0.75, 0.01)
    lines = (watched.directory / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == watched.reported
    assert watched.url_file == watched.url
    assert not (watched.directory / URL_FILE).exists()  # it was while the run was served


# ---------------------------------------------------------------- Prometheus


def test_prometheus_reads_every_figure_of_the_catalogue_and_no_other(watched: Watched) -> None:
    families = list(text_string_to_metric_families(watched.answers["/metrics"]))
    reported = {
        family.name + ("_total" if family.type == "counter" else ""): family for family in families
    }
    assert reported.keys() == {metric.name for metric in METRICS}
    values = {
        sample.name: sample.value
        for family in families
        for sample in family.samples
        if not sample.labels
    }
    assert values["tidegate_rollouts_trained_total"] == watched.trained
    assert values["tidegate_tokens_unaccounted"] == 0
    assert values["tidegate_effective_sample_size_ratio"] == 0.75
    buckets = [
        s for s in reported["tidegate_staleness_versions"].samples if s.name.endswith("bucket")
    ]
    counts = [sample.value for sample in buckets]
    assert counts == sorted(counts)
    assert counts[-1] == watched.trained


def test_names_follow_prometheus_rules() -> None:
    for metric in METRICS:
        assert re.fullmatch(r"tidegate_[a-z0-9_]+", metric.name)
        assert metric.help.endswith("."), metric.name
    assert len({metric.name for metric in METRICS}) == len(METRICS)


# ---------------------------------------------------------------- untrusted text


def test_responses_forbid_scripts_from_rollout_text(watched: Watched) -> None:
    task = json.loads(watched.answers["/api/rollouts/0"]["task"])
    assert task == HOSTILE_TASK
    for path, headers in watched.headers.items():
        if watched.statuses[path] == 200:
            assert "script-src 'self'" in headers["content-security-policy"], path
            assert headers["x-content-type-options"] == "nosniff", path
    assert watched.headers["/api/rollouts/0"]["content-type"] == "application/json"


def test_the_page_needs_no_other_host_and_writes_no_html() -> None:
    for file in PAGE.iterdir():
        text = file.read_text()
        found = re.findall(r"https?://[\w./]+", text)
        assert set(found) <= {"http://www.w3.org/2000/svg"}, file.name
        for writes in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert writes not in text, file.name


class _Tags(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, set[str]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, {name for name, _ in attrs}))


def test_the_page_has_no_script_or_style_inside_it() -> None:
    tags = _Tags()
    tags.feed((PAGE / "page.html").read_text())
    assert {"script", "canvas"} <= {tag for tag, _ in tags.found}
    for tag, attributes in tags.found:
        assert tag != "style"
        assert tag != "script" or "src" in attributes
        assert not {name for name in attributes if name == "style" or name.startswith("on")}


# ---------------------------------------------------------------- a finished run


def test_a_finished_run_shows_its_final_state(watched: Watched) -> None:
    source = RecordedSource(watched.directory)
    shown = frame(source.observe())
    assert shown["is_over"]
    assert shown["run"]["trained_rollouts"] == 4 * BATCHES
    assert [batch[0] for batch in shown["batches"]] == list(range(BATCHES))
    assert sum(tokens for _, tokens in shown["lags"]) == shown["ledger"]["trained"]
    assert shown["timeline"]["engines"].keys() == {"engine-0"}
    listed = source.rollouts(RolloutQuery(state="trained"))
    lines, total = listed.lines, listed.total
    assert total == len(lines) == 4 * BATCHES
    found = source.rollout(lines[3].rollout_id)
    assert found is not None
    assert (found.group_id, len(found.token_ids)) == (lines[3].group_id, lines[3].context_tokens)
    assert source.rollout(10**9) is None
    exposition(source.observe())


def test_a_recorded_runs_rollouts_are_searched_in_text_and_task(watched: Watched) -> None:
    source = RecordedSource(watched.directory)
    everything = source.rollouts(RolloutQuery()).total
    assert source.tokenizer is not None
    sample = source.rollout(0)
    assert sample is not None
    text = source.tokenizer.decode(sample.token_ids[:3], skip_special_tokens=False)
    assert source.rollouts(RolloutQuery(text=text.upper())).total == everything
    assert source.rollouts(RolloutQuery(task="<SCRIPT>")).total == everything
    assert source.rollouts(RolloutQuery(task="<script>", text="no such text")).total == 0


def test_live_and_recorded_stories_of_a_rollout_are_equal(watched: Watched) -> None:
    live = [event["text"] for event in watched.answers["/api/stories/rollout:0"]["events"]]
    recorded = explain(watched.directory, Subject.parse("rollout:0"))
    assert set(live) <= {event.text for event in recorded.events}
    assert live[0] == "admitted with group 0, as attempt 1 of 2 at its task"
    assert live[-1].startswith("trained on at v0: ")
    assert all(event.at_s is not None for event in recorded.events)
    group = watched.answers["/api/stories/group:0"]["events"]
    assert group[0]["text"] == "admitted: 2 attempts at one task"
    batch = explain(watched.directory, Subject.parse("batch:0"))
    assert any("4 rows of 2 groups (0 to 1)" in event.text for event in batch.events)
    with pytest.raises(AuditError, match=r"no rollout:999: rollouts are numbered from 0"):
        explain(watched.directory, Subject.parse("rollout:999"))


def test_a_range_of_a_recorded_timeline_has_shorter_slices(watched: Watched) -> None:
    source = RecordedSource(watched.directory)
    whole = source.observe().collected
    (slices,) = whole.slices.values()
    start_us, end_us = (slices[at].number * whole.slice_us for at in (0, len(slices) // 4))
    finer = source.timeline(start_us, end_us)
    assert finer is not None
    assert finer.slice_us < whole.slice_us
    assert finer.slices.keys() == whole.slices.keys()


def test_a_finished_run_is_served_by_the_same_routes(watched: Watched) -> None:
    with Dashboard("127.0.0.1:0") as dashboard:
        dashboard.start(RecordedSource(watched.directory))
        with httpx.Client(base_url=dashboard.url, timeout=30) as http:
            state = http.get("/api/state").json()
            assert state["about"]["is_live"] is False
            page = http.get("/api/rollouts/0").json()
    assert page["texts"] == watched.answers["/api/rollouts/0"]["texts"]


def test_a_missing_run_and_one_of_another_version_are_refused_with_what_to_do(
    watched: Watched, tmp_path: Path
) -> None:
    with pytest.raises(AuditError, match="recorded run"):
        RecordedSource(tmp_path)
    run = json.loads((watched.directory / "run.json").read_bytes())
    del run["statistics"]["live_version"]
    (tmp_path / "run.json").write_text(json.dumps(run))
    with pytest.raises(AuditError, match=r"live_version.*with the version that recorded it"):
        RecordedSource(tmp_path)


def test_a_run_that_was_killed_is_shown_as_far_as_it_can_be_read(
    watched: Watched, tmp_path: Path
) -> None:
    run = json.loads((watched.directory / "run.json").read_bytes())
    (tmp_path / "run.json").write_text(json.dumps({**run, "statistics": None}))
    metrics = (watched.directory / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(metrics[: len(metrics) - 20])
    (tmp_path / "trajectories.parquet").write_bytes(b"PAR1 and nothing that ends it")
    source = RecordedSource(tmp_path)
    assert source.observe().about["is_whole"] is False
    assert len(frame(source.observe())["batches"]) == BATCHES - 1
    assert source.rollouts(RolloutQuery()).lines == []


# ---------------------------------------------------------------- the server


@pytest.mark.parametrize("token", ["a-token-of-some-length", "as+base64/has=it&€;"])
async def test_remote_access_needs_the_token_once_and_then_the_cookie(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setenv("TIDEGATE_DASHBOARD_TOKEN", token)
    with Dashboard("127.0.0.1:0") as dashboard:
        dashboard.start(RecordedSource(watched.directory))
        bare, _, query = dashboard.url.partition("?")
        assert parse_qs(query) == {"token": [token]}
        async with httpx.AsyncClient(base_url=bare, timeout=30) as http:
            assert (await http.get("/metrics")).status_code == 403
            assert (await http.get(f"/?{query}")).status_code == 200
            assert (await http.get("/metrics")).status_code == 200  # authenticated by the cookie


def test_an_address_in_use_is_refused_before_the_run_starts() -> None:
    with Dashboard("127.0.0.1:0") as first, pytest.raises(ConfigError, match="can't listen"):
        Dashboard(first.url.removeprefix("http://").strip("/"))


# ---------------------------------------------------------------- updates


async def first_of(frames: AsyncIterator[bytes], count: int) -> list[bytes]:
    return [await anext(frames) for _ in range(count)]


def counted() -> tuple[list[int], Callable[[], bytes]]:
    made: list[int] = []

    def make() -> bytes:
        made.append(len(made))
        return str(made[-1]).encode()

    return made, make


async def test_frames_are_made_only_with_viewers_and_shared_by_all() -> None:
    made, make = counted()
    updates = Updates(make, interval_s=0.01)
    await asyncio.sleep(0)
    assert made == []
    one, other = updates.viewer(), updates.viewer()
    seen = await asyncio.gather(first_of(one, 2), first_of(other, 2))
    assert seen[0] == seen[1]
    for viewer in (one, other):
        await viewer.aclose()  # type: ignore[attr-defined]
    assert updates.num_viewers == 0
    updates.end()


async def test_viewers_get_the_last_state_once_the_run_is_over() -> None:
    _, make = counted()
    updates = Updates(make, interval_s=0.01)
    viewer = updates.viewer()
    await anext(viewer)
    updates.end(b"last")
    assert [body async for body in viewer] == []
    assert updates.last == b"last"


async def test_a_failed_frame_does_not_end_the_stream_and_the_runs_end_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ended = RunClosed("the run has ended")
    answers: Iterator[bytes | Exception] = iter([ValueError("no"), b"1", ended])

    def make() -> bytes:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert [body async for body in Updates(make, interval_s=0.01).viewer()] == [b"1"]
    assert "could not be made" in caplog.text


async def test_viewers_beyond_the_limit_are_refused() -> None:
    _, make = counted()
    updates = Updates(make, interval_s=0.01)
    viewers = [updates.viewer() for _ in range(VIEWERS_MAX)]
    await asyncio.gather(*(anext(viewer) for viewer in viewers))
    with pytest.raises(TooManyViewers):
        updates.viewer()
    updates.end()
