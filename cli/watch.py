"""Commands that show a run, running or finished: `tidegate dashboard` and `tidegate top`.

They print the URL of a running run's dashboard or poll it, and read a finished run's files. The
work is done by ``observability/dashboard/``.
"""

from pathlib import Path
from typing import Annotated

import typer

from tidegate.cli.conventions import RunDirectory, echo


def dashboard(
    run: RunDirectory,
    others: Annotated[
        list[Path] | None,
        typer.Argument(metavar="OTHER", help="Runs to compare it with, side by side."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, help="Port to listen on; 0: any free one.")] = 0,
) -> None:
    """Show runs in the browser: print a running run's URL, or serve finished runs' files."""
    from tidegate.observability.dashboard.comparisons import ComparableRuns
    from tidegate.observability.dashboard.dashboard import Dashboard, url_in
    from tidegate.observability.dashboard.recorded import RecordedSource

    url = url_in(run)
    if url is not None and not others:
        echo(url)
        return
    comparable = ComparableRuns(run, others or ())
    view = comparable.address(others) if others else ""
    with Dashboard(f"{host}:{port}") as shown:
        shown.start(RecordedSource(run), comparable)
        echo(f"{shown.url}{view}  (Ctrl-C ends it)")
        shown.wait()


def top(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run's directory, or its dashboard's URL.")
    ],
    once: Annotated[bool, typer.Option("--once", help="Print the state once and exit.")] = False,
) -> None:
    """Show a run in the terminal: engines, groups, staleness, tokens, and its bottleneck."""
    from rich.console import Console

    from tidegate.observability.dashboard.terminal import WatchedRun, watch

    watched = WatchedRun.find(run if "://" in run else Path(run))
    watch(watched, Console(highlight=False), once=once)
