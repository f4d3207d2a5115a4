"""Terminal view of `tidegate top`, over a dashboard's API and over a run's files."""

import dataclasses
import http.server
import io
import json
import threading
from pathlib import Path

import pytest
from rich.console import Console
from tokenizers import Tokenizer

from tidegate.errors import AuditError, ConfigError
from tidegate.observability.dashboard.dashboard import URL_FILE, Dashboard, url_in
from tidegate.observability.dashboard.frames import about, frame
from tidegate.observability.dashboard.rollout_queries import RolloutQuery
from tidegate.observability.dashboard.source import RolloutList
from tidegate.observability.dashboard.terminal import WatchedRun, watch
from tidegate.observability.metrics.live import CollectedData
from tidegate.observability.metrics.snapshots import RunSnapshot
from tidegate.observability.reports.story import Subject
from tidegate.orchestrator.core.ledger import LedgerSnapshot
from tidegate.orchestrator.telemetry.statistics import EngineStatistics, RunForecast, RunStatistics
from tidegate.orchestrator.telemetry.watchdog import Stuck

pytestmark = pytest.mark.wire


def statistics(engines: int = 2) -> RunStatistics:
    return RunStatistics(
        wall_s=10.0,
        trainer_version=5,
        live_version=4,
        admissible_groups=3,
        running_groups=6,
        buffered_groups=2,
        training_groups=1,
        batches=5,
        trained_rollouts=40,
        mixed_version_rollouts=10,
        discarded_rollouts={"timeout": 2},
        max_staleness_seen=2,
        staleness_bound=2,
        mean_staleness=1.25,
        staleness_histogram={0: 10, 1: 10, 2: 20},
        trainer_idle_share=0.1,
        engine_idle_share=0.2,
        tokens_per_s=1234.0,
        ledger=LedgerSnapshot(100, 60, 20, 10, {"timeout": 10}),
        evaluation_ledger=LedgerSnapshot(),
        engines=tuple(
            EngineStatistics(f"engine-{n}", 5, 3, 1, 400, 9.5, max_running_turns=4)
            for n in range(engines)
        ),
        stuck=(Stuck("turn", "7", "somewhere [red]", 61.0),),
        forecast=RunForecast(1.5, 2.0, 1.2, 1.25, 2, 2.0, 1.8, "trainer-bound: wait"),
    )


class Answering:
    """Source of a finished run with a fixed observation."""

    tokenizer: Tokenizer | None = None
    is_live = False
    bound: int | None = 2

    def __init__(self, seen: RunSnapshot) -> None:
        self._seen = seen
        self.is_update = False

    def observe(self, *, is_update: bool = False) -> RunSnapshot:
        self.is_update = is_update
        return self._seen

    def timeline(self, start_us: int, end_us: int) -> None:
        return None

    def rollouts(self, query: RolloutQuery) -> RolloutList:
        return RolloutList((), 0)

    def rollout(self, rollout_id: int) -> None:
        return None

    def story(self, subject: Subject) -> None:
        return None


class NoHttp(http.server.BaseHTTPRequestHandler):
    """Server whose responses are not HTTP."""

    def do_GET(self) -> None:
        self.wfile.write(b"SSH-2.0-none\r\n")

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


class BreakingOff(http.server.BaseHTTPRequestHandler):
    """Server that sends less than its Content-Length, as a run that ends during a response."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(b"{")

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.mark.parametrize(
    ("handler", "error", "output"),
    [
        (BreakingOff, OSError, "ended 999 bytes early"),
        (NoHttp, ConfigError, "not a Tidegate dashboard"),
    ],
)
def test_a_non_http_response_is_distinguished_from_a_truncated_one(
    handler: type[http.server.BaseHTTPRequestHandler], error: type[Exception], output: str
) -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as server:
        requested = threading.Thread(target=server.handle_request)
        requested.start()
        with pytest.raises(error, match=output):
            WatchedRun.find(f"http://127.0.0.1:{server.server_port}").fetch_state()
        requested.join(60)


def observation(engines: int = 2) -> RunSnapshot:
    facts = {"name": "demo [bold]", "model": "m", "is_live": True, "is_whole": True, "settings": {}}
    collected = CollectedData(batches=({"version": 4.0, "reward": 0.625},))
    return RunSnapshot(statistics(engines), collected, about=facts)


def printed(watched: WatchedRun) -> str:
    console = Console(file=io.StringIO(), width=100, highlight=False)
    watch(watched, console)
    output = console.file
    assert isinstance(output, io.StringIO)
    return output.getvalue()


def test_the_terminal_view_shows_engines_groups_staleness_tokens_and_bottleneck() -> None:
    seen = observation()
    state = {**about(seen), "frame": frame(seen)}
    output = printed(WatchedRun(lambda: state, is_live=False))
    for part in (
        "demo [bold]  running",
        "trainer v5, live v4",
        "0.625",
        "6 running, 2 buffered",
        "mean 1.25, bound 2",
        "trainer-bound: wait",
        "somewhere [red]",
        "engine-1",
        "3/4",
        "100 generated = 60 trained + 20 buffered + 10 in flight + 10 discarded",
    ):
        assert part in output, part


def test_the_terminal_view_names_engines_that_are_about_to_leave() -> None:
    leaving = EngineStatistics("engine-7", 5, 3, 1, 400, 9.5, state="draining")
    seen = dataclasses.replace(
        observation(), statistics=dataclasses.replace(statistics(), engines=(leaving,))
    )
    state = {**about(seen), "frame": frame(seen)}
    assert "engine-7 (draining)" in printed(WatchedRun(lambda: state, is_live=False))


def test_a_hundred_engines_do_not_push_out_the_other_panels() -> None:
    seen = observation(engines=100)
    state = {**about(seen), "frame": frame(seen)}
    output = printed(WatchedRun(lambda: state, is_live=False))
    assert "and 84 more" in output
    assert len(output.splitlines()) < 45


def test_a_running_run_is_found_by_its_url_and_by_its_directory(tmp_path: Path) -> None:
    with Dashboard("127.0.0.1:0", directory=tmp_path) as dashboard:
        dashboard.start(source := Answering(observation()))
        by_url, by_directory = WatchedRun.find(dashboard.url), WatchedRun.find(tmp_path)
        assert by_url.is_live
        assert by_directory.is_live
        assert json.dumps(by_url.fetch_state()) == json.dumps(by_directory.fetch_state())
        assert "engine-1" in printed(by_directory)
        assert source.is_update  # the terminal needs no timeline, so it asks for recent data only
    assert url_in(tmp_path) is None


def test_a_killed_runs_url_file_is_ignored(tmp_path: Path) -> None:
    with Dashboard("127.0.0.1:0", directory=tmp_path) as dashboard:
        url = dashboard.url
    (tmp_path / URL_FILE).write_text(url)
    assert url_in(tmp_path) is None
    with pytest.raises(AuditError, match="recorded run"):
        WatchedRun.find(tmp_path)
    with pytest.raises(ConfigError, match="doesn't answer"):
        watch(WatchedRun.find(url), Console(file=io.StringIO()))


def test_a_request_without_the_token_gets_an_error_that_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TIDEGATE_DASHBOARD_TOKEN", "a-token-of-some-length")
    with Dashboard("127.0.0.1:0") as dashboard:
        dashboard.start(Answering(observation()))
        assert WatchedRun.find(dashboard.url).fetch_state()
        with pytest.raises(ConfigError, match="whole URL"):
            WatchedRun.find(dashboard.url.partition("?")[0]).fetch_state()


@pytest.mark.parametrize("url", ["ftp://host", "http://", "nonsense://x"])
def test_an_invalid_dashboard_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="URL"):
        WatchedRun.find(url)
