"""Terminal view of a run for `tidegate top`, drawn with rich.

A running run's dashboard is polled for its JSON state; a finished run's files give the same state.
"""

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tidegate.errors import ConfigError
from tidegate.observability.dashboard.dashboard import url_in
from tidegate.observability.dashboard.frames import about, frame
from tidegate.observability.dashboard.recorded import RecordedSource
from tidegate.transport.printable import printable_values

INTERVAL_S = 1.0
ANSWER_TIMEOUT_S = 10.0
ANSWER_BYTES_MAX = 64 * 2**20

ENGINES_SHOWN_MAX = 16
BAR_WIDTH = 24

STALE_ANSWERS_MAX = 3
"""Failed requests in a row after which the dashboard counts as gone."""


@dataclass(frozen=True, slots=True)
class Watched:
    """A run whose state can be asked for repeatedly."""

    ask: Callable[[], Mapping[str, Any]]
    """Returns the state, as the dashboard's ``/api/state``; raises OSError without an answer."""
    is_live: bool

    @classmethod
    def found(cls, run: Path | str) -> "Watched":
        """Find a run by its directory, or by its dashboard's URL.

        Raises:
            AuditError: the directory holds no run.
            ConfigError: the text is no URL of a dashboard.
        """
        url = run if isinstance(run, str) else url_in(run)
        if url is not None:
            address = _state_url(url)
            return cls(lambda: _fetched(address), is_live=True)
        seen = RecordedSource(Path(run)).observe()
        state = {**about(seen), "frame": frame(seen)}
        return cls(lambda: state, is_live=False)


def watch(watched: Watched, console: Console, *, once: bool = False) -> None:
    """Draw the run until it ends, or Ctrl-C; draw it once if the output is no terminal.

    Raises:
        ConfigError: the first request gets no answer.
    """
    try:
        state = watched.ask()
    except OSError as error:
        raise ConfigError(f"the dashboard doesn't answer: {error}; has the run ended?") from None
    if once or not watched.is_live or not console.is_terminal:
        console.print(screen(state))
        return
    with Live(screen(state), console=console, auto_refresh=False, screen=True) as live:
        _redraw(watched, live)
    console.print("the run has ended, or its dashboard is out of reach")


def _redraw(watched: Watched, live: Live) -> None:
    failures = 0
    while failures < STALE_ANSWERS_MAX:
        time.sleep(INTERVAL_S)
        try:
            live.update(screen(watched.ask()), refresh=True)
            failures = 0
        except OSError:
            failures += 1


def screen(state: Mapping[str, Any]) -> RenderableType:
    """Return a state as rich text, with control characters in names and model output escaped."""
    state = printable_values(state)
    shown, name = state["frame"], state["about"]["name"]
    parts: list[RenderableType] = [Text(f"{name}  {_said(state)}", style="bold"), _figures(shown)]
    if shown["forecast"] is not None:
        parts.append(Text(shown["forecast"]["advice"], style="cyan"))
    parts += [Text(each, style="red") for each in shown["stuck"]]
    return Group(*parts, _engines(shown), _staleness(shown), _ledger(shown))


def _said(state: Mapping[str, Any]) -> str:
    run, is_live = state["frame"]["run"], state["about"]["is_live"]
    if not is_live:
        return "finished" if state["about"]["is_whole"] else "did not end properly"
    return f"paused by {run['pause_mode']}" if run["pause_mode"] else "running"


def _figures(shown: Mapping[str, Any]) -> Table:
    run, batches = shown["run"], shown["batches"]
    reward = batches[-1][2] if batches else None
    bound = run["staleness_bound"]
    forecast = shown["forecast"]
    pairs = [
        ("batches", f"{run['batches']}"),
        ("weights", f"trainer v{run['trainer_version']}, live v{run['live_version']}"),
        ("reward", "-" if reward is None else f"{reward:.3f}"),
        ("tokens/s", f"{run['tokens_per_s']:.0f}"),
        ("groups", f"{run['running_groups']} running, {run['buffered_groups']} buffered"),
        ("admissible", f"{run['admissible_groups']} groups"),
        ("staleness", f"mean {run['mean_staleness']:.2f}, bound {'-' if bound is None else bound}"),
        ("rho", "-" if forecast is None else f"{forecast['throughput_ratio']:.2f}"),
        ("trainer idle", f"{run['trainer_idle_share']:.0%}"),
        ("engines idle", f"{run['engine_idle_share']:.0%}"),
    ]
    table = Table.grid(padding=(0, 2))
    for (name, value), (other, its_value) in zip(pairs[::2], pairs[1::2], strict=True):
        table.add_row(Text(name, style="dim"), value, Text(other, style="dim"), its_value)
    return table


def _engines(shown: Mapping[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for title in ("engine", "weights", "turns", "", "queued", "tokens", "busy"):
        table.add_column(title)
    engines = shown["engines"]
    for name, version, running, waiting, slots, tokens, busy_s, is_alive in engines[
        :ENGINES_SHOWN_MAX
    ]:
        table.add_row(
            Text(name, style="" if is_alive else "red"),
            f"v{version}",
            f"{running}/{slots}",
            _bar(running / max(1, slots)),
            f"{waiting}",
            f"{tokens}",
            f"{busy_s or 0:.1f} s",
        )
    if len(engines) > ENGINES_SHOWN_MAX:
        table.add_row(f"and {len(engines) - ENGINES_SHOWN_MAX} more")
    return table


def _staleness(shown: Mapping[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for title in ("staleness", "rollouts", ""):
        table.add_column(title)
    pairs = shown["staleness"]
    most = max((count for _, count in pairs), default=1)
    for value, count in pairs:
        table.add_row(f"{value}", f"{count}", _bar(count / most))
    return table


def _ledger(shown: Mapping[str, Any]) -> Text:
    ledger = shown["ledger"]
    gone = sum(ledger["discarded"].values())
    said = (
        f"tokens: {ledger['generated']} generated = {ledger['trained']} trained + "
        f"{ledger['buffered']} buffered + {ledger['in_flight']} in flight + {gone} discarded"
    )
    if ledger["error"]:
        return Text(f"{said}; {ledger['error']} unaccounted for", style="red")
    return Text(said)


def _bar(share: float) -> str:
    filled = round(BAR_WIDTH * min(1.0, max(0.0, share)))
    return "█" * filled + "░" * (BAR_WIDTH - filled)


def _state_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"a dashboard's URL is like http://127.0.0.1:8080, got {url!r}")
    query = "&".join(filter(None, [parts.query, "recent=1"]))
    return urlunsplit(parts._replace(path="/api/state", query=query, fragment=""))


def _fetched(url: str) -> Mapping[str, Any]:
    """Fetch the state without a proxy: the dashboard is on this host, or directly reachable."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=ANSWER_TIMEOUT_S) as answer:
            said = answer.read(ANSWER_BYTES_MAX)
            if answer.length:  # the server ended during its answer
                raise OSError(f"it broke off {answer.length} bytes before its end")
            body = msgspec.json.decode(said)
    except urllib.error.HTTPError as error:
        if error.code == 403:
            raise ConfigError("this dashboard wants its token: give the whole URL") from None
        raise OSError(f"it answers {error.code}") from None
    except (http.client.HTTPException, msgspec.DecodeError):
        raise ConfigError(f"{urlsplit(url).netloc} is no dashboard of Tidegate's") from None
    if not isinstance(body, dict) or "frame" not in body:
        raise ConfigError(f"{urlsplit(url).netloc} is no dashboard of Tidegate's")
    return body
