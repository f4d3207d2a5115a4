"""Terminal view of `tidegate top`, over a dashboard's API and over a run's files."""

import io
import json
import socketserver
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.observability.dashboard.synthetic_run import SyntheticRun
from tidegate.errors import AuditError, ConfigError
from tidegate.observability.dashboard.dashboard import URL_FILE, Dashboard, url_in
from tidegate.observability.dashboard.frames import about, frame
from tidegate.observability.dashboard.terminal import WatchedRun, watch
from tidegate.orchestrator.telemetry.statistics import EngineStatistics, RunForecast
from tidegate.orchestrator.telemetry.watchdog import Stuck

pytestmark = pytest.mark.wire


@pytest.mark.parametrize(
    ("response", "error", "output"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{", OSError, "ended 999 bytes early"),
        (b"SSH-2.0-none\r\n", ConfigError, "not a Tidegate dashboard"),
    ],
)
def test_a_non_http_response_is_distinguished_from_a_truncated_one(
    response: bytes, error: type[Exception], output: str
) -> None:
    """A run that ends during a response sends less than its Content-Length."""

    class Answering(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while self.rfile.readline().strip():
                pass
            self.wfile.write(response)

    with socketserver.TCPServer(("127.0.0.1", 0), Answering) as server:
        requested = threading.Thread(target=server.handle_request)
        requested.start()
        with pytest.raises(error, match=output):
            WatchedRun.find(f"http://127.0.0.1:{server.server_address[1]}").fetch_state()
        requested.join(60)


def printed(watched: WatchedRun) -> str:
    console = Console(file=io.StringIO(), width=100, highlight=False)
    watch(watched, console)
    output = console.file
    assert isinstance(output, io.StringIO)
    return output.getvalue()


def shown(count: int = 2, **statistics: Any) -> str:
    """Return the view of a run of this many engines, with these statistics."""
    seen = SyntheticRun(engines=count, changed=statistics).observe()
    state = {**about(seen), "frame": frame(seen)}
    state["about"]["name"] = "demo [bold]"
    return printed(WatchedRun(lambda: state, is_live=False))


def test_the_terminal_view_shows_engines_groups_staleness_tokens_and_bottleneck() -> None:
    output = shown(
        live_version=11,
        stuck=(Stuck("turn", "7", "somewhere [red]", 61.0),),
        forecast=RunForecast(1.5, 2.0, 1.2, 1.25, 2, 2.0, 1.8, "trainer-bound: wait"),
    )
    for part in (
        "demo [bold]  running",
        "trainer v12, live v11",
        "0.758",
        "2 running, 12 buffered",
        "mean 1.00, bound 2",
        "trainer-bound: wait",
        "somewhere [red]",
        "engine-1",
        "50/64",
        "1000000 generated = 800000 trained + 100000 buffered + 90000 in flight + 10000 discarded",
    ):
        assert part in output, part
    leaving = EngineStatistics("engine-7", 5, 3, 1, 400, 9.5, state="draining")
    assert "engine-7 (draining)" in shown(engines=(leaving,))


def test_a_hundred_engines_do_not_push_out_the_other_panels() -> None:
    output = shown(100)
    assert "and 84 more" in output
    assert len(output.splitlines()) < 45


def test_a_running_run_is_found_by_its_url_and_by_its_directory(tmp_path: Path) -> None:
    with Dashboard("127.0.0.1:0", directory=tmp_path) as dashboard:
        dashboard.start(source := SyntheticRun(engines=2))
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
        dashboard.start(SyntheticRun(engines=2))
        assert WatchedRun.find(dashboard.url).fetch_state()
        with pytest.raises(ConfigError, match="whole URL"):
            WatchedRun.find(dashboard.url.partition("?")[0]).fetch_state()


@pytest.mark.parametrize("url", ["ftp://host", "http://", "nonsense://x"])
def test_an_invalid_dashboard_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="URL"):
        WatchedRun.find(url)
