"""Terminal view of a run for `tidegate top`, drawn with rich.

A running run's dashboard is polled over HTTP for its JSON state. A finished run's state is made in
this process from its files, by ``recorded.py`` and ``frames.py``.
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
RESPONSE_TIMEOUT_S = 10.0
RESPONSE_BYTES_MAX = 64 * 2**20

ENGINES_SHOWN_MAX = 16
ADAPTERS_SHOWN_MAX = 16
BAR_WIDTH = 24

FAILED_REQUESTS_MAX = 3
"""Failed requests in a row after which the dashboard counts as unreachable."""


@dataclass(frozen=True, slots=True)
class WatchedRun:
    """Run whose state can be fetched repeatedly."""

    fetch_state: Callable[[], Mapping[str, Any]]
    """Returns the state, as the dashboard's ``/api/state``; raises OSError without an answer."""
    is_live: bool

    @classmethod
    def find(cls, run: Path | str) -> "WatchedRun":
        """Find a run by its directory, or by its dashboard's URL.

        Raises:
            AuditError: the directory holds no run.
            ConfigError: the text is no URL of a dashboard.
        """
        url = run if isinstance(run, str) else url_in(run)
        if url is not None:
            address = _state_url(url)
            return cls(lambda: _fetch_state(address), is_live=True)
        snapshot = RecordedSource(Path(run)).observe()
        state = {**about(snapshot), "frame": frame(snapshot)}
        return cls(lambda: state, is_live=False)


def watch(watched: WatchedRun, console: Console, *, once: bool = False) -> None:
    """Draw the run until it ends, or Ctrl-C; draw it once if the output is no terminal.

    Raises:
        ConfigError: the first request gets no answer.
    """
    try:
        state = watched.fetch_state()
    except OSError as error:
        raise ConfigError(f"the dashboard doesn't answer: {error}; has the run ended?") from None
    if once or not watched.is_live or not console.is_terminal:
        console.print(screen(state))
        return
    with Live(screen(state), console=console, auto_refresh=False, screen=True) as live:
        last_state = _redraw(watched, live, state)
    console.print(screen(last_state))
    console.print("disconnected: the run has ended or its dashboard is unreachable")


def _redraw(watched: WatchedRun, live: Live, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Redraw until the run gives no more states; return the last one."""
    failures = 0
    while failures < FAILED_REQUESTS_MAX:
        time.sleep(INTERVAL_S)
        try:
            state = watched.fetch_state()
            live.update(screen(state), refresh=True)
            failures = 0
        except OSError:
            failures += 1
    return state


def screen(state: Mapping[str, Any]) -> RenderableType:
    """Return a state as rich text, with control characters in names and model output escaped.

    Red is a bound that was passed or a token that was lost, nothing else.
    """
    state = printable_values(state)
    frame_data, name = state["frame"], state["about"]["name"]
    parts: list[RenderableType] = [
        Text(f"{name}  {_state_text(state)}", style="bold"),
        _figures(frame_data),
    ]
    if frame_data["forecast"] is not None:
        parts.append(Text(frame_data["forecast"]["advice"], style="cyan"))
    if frame_data["scaling"]:
        parts.append(Text(f"engines scaled: {frame_data['scaling']}", style="cyan"))
    parts += [Text(each, style="bold") for each in frame_data["stuck"]]
    parts.append(_engines(frame_data))
    if frame_data["adapters"]:
        parts.append(_adapters(state))
    return Group(*parts, _staleness(frame_data), _ledger(frame_data))


def _state_text(state: Mapping[str, Any]) -> str:
    run, is_live = state["frame"]["run"], state["about"]["is_live"]
    if not is_live:
        return "finished" if state["about"]["is_whole"] else "killed or failed"
    return f"paused ({run['pause_mode']})" if run["pause_mode"] else "running"


def _figures(frame_data: Mapping[str, Any]) -> Table:
    run, batches = frame_data["run"], frame_data["batches"]
    reward = batches[-1][2] if batches else None
    bound = run["staleness_bound"]
    forecast = frame_data["forecast"]
    pairs = [
        ("batches", f"{run['batches']}"),
        ("weights", f"trainer v{run['trainer_version']}, live v{run['live_version']}"),
        ("reward", "-" if reward is None else f"{reward:.3f}"),
        ("tokens/s", f"{run['tokens_per_s']:.0f}"),
        ("groups", f"{run['running_groups']} running, {run['buffered_groups']} buffered"),
        ("admissible", f"{run['admissible_groups']} groups"),
        ("staleness", f"mean {run['mean_staleness']:.2f}, bound {'-' if bound is None else bound}"),
        (
            "rollout/trainer speed",
            "-" if forecast is None else f"{forecast['throughput_ratio']:.2f}",
        ),
        ("trainer idle", f"{run['trainer_idle_share']:.0%}"),
        ("engines idle", f"{run['engine_idle_share']:.0%}"),
    ]
    table = Table.grid(padding=(0, 2))
    for (name, value), (other, other_value) in zip(pairs[::2], pairs[1::2], strict=True):
        table.add_row(Text(name, style="dim"), value, Text(other, style="dim"), other_value)
    return table


def _engines(frame_data: Mapping[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for title in ("engine", "weights", "turns", "", "queued", "tokens", "busy"):
        table.add_column(title)
    engines = frame_data["engines"]
    for name, version, running, waiting, slots, tokens, busy_s, is_alive, state in engines[
        :ENGINES_SHOWN_MAX
    ]:
        is_serving = is_alive and state == "serving"
        shown = name if is_serving else f"{name} ({state if is_alive else 'lost'})"
        table.add_row(
            Text(shown, style="" if is_serving else "dim"),
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


def _adapters(state: Mapping[str, Any]) -> Table:
    """Return a table of the adapters that the run trains."""
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for title in ("adapter", "weights", "batches", "reward", "staleness", "groups", "trained"):
        table.add_column(title)
    columns, rows = state["adapter_columns"], state["frame"]["adapters"]
    for row in rows[:ADAPTERS_SHOWN_MAX]:
        line = dict(zip(columns, row, strict=True))
        bound, reward = line["staleness_bound"], line["reward"]
        is_passed = bound is not None and line["max_staleness"] > bound
        table.add_row(
            line["name"],
            f"v{line['trainer_version']}",
            f"{line['batches']}",
            "-" if reward is None else f"{reward:.3f}",
            Text(
                f"{line['mean_staleness']:.2f}, bound {'-' if bound is None else bound}",
                style="red" if is_passed else "",
            ),
            f"{line['running_groups']} running, {line['buffered_groups']} buffered",
            f"{line['trained_tokens']} tokens",
        )
    if (total := state["frame"]["adapters_total"]) > ADAPTERS_SHOWN_MAX:
        table.add_row(f"and {total - ADAPTERS_SHOWN_MAX} more")
    return table


def _staleness(frame_data: Mapping[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for title in ("staleness", "rollouts", ""):
        table.add_column(title)
    pairs = frame_data["staleness"]
    count_max = max((count for _, count in pairs), default=1)
    bound = frame_data["run"]["staleness_bound"]
    for value, count in pairs:
        style = "red" if bound is not None and value > bound else ""
        table.add_row(f"{value}", f"{count}", _bar(count / count_max), style=style)
    return table


def _ledger(frame_data: Mapping[str, Any]) -> Text:
    ledger = frame_data["ledger"]
    discarded = sum(ledger["discarded"].values())
    body = (
        f"tokens: {ledger['generated']} generated = {ledger['trained']} trained + "
        f"{ledger['buffered']} buffered + {ledger['in_flight']} in flight + {discarded} discarded"
    )
    if ledger["error"]:
        return Text(f"{body}; {ledger['error']} unaccounted for", style="red")
    return Text(body)


def _bar(share: float) -> str:
    filled = round(BAR_WIDTH * min(1.0, max(0.0, share)))
    return "█" * filled + "░" * (BAR_WIDTH - filled)


def _state_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(
            f"a dashboard's URL is http://HOST:PORT, such as http://127.0.0.1:8080, got {url!r}"
        )
    query = "&".join(filter(None, [parts.query, "recent=1"]))
    return urlunsplit(parts._replace(path="/api/state", query=query, fragment=""))


def _fetch_state(url: str) -> Mapping[str, Any]:
    """Fetch the state without a proxy: the dashboard is on this host, or directly reachable."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=RESPONSE_TIMEOUT_S) as response:
            body = response.read(RESPONSE_BYTES_MAX)
            if response.length:  # the server ended while it responded
                raise OSError(f"the response ended {response.length} bytes early")
            body = msgspec.json.decode(body)
    except urllib.error.HTTPError as error:
        if error.code == 403:
            raise ConfigError("this dashboard needs its token; give the whole URL") from None
        raise OSError(f"HTTP status {error.code}") from None
    except (http.client.HTTPException, msgspec.DecodeError):
        raise ConfigError(f"{urlsplit(url).netloc} is not a Tidegate dashboard") from None
    if not isinstance(body, dict) or "frame" not in body:
        raise ConfigError(f"{urlsplit(url).netloc} is not a Tidegate dashboard")
    return body
