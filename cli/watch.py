"""How is a run watched from a shell? In the browser, or in the terminal, going on or finished.

Starts no run, and changes none.
"""

from pathlib import Path
from typing import Annotated

import typer

from tidegate.cli.conventions import RunDirectory, echo


def dashboard(
    run: RunDirectory,
    address: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where; port 0 takes a free one.")
    ] = "127.0.0.1:0",
) -> None:
    """Show a run in the browser: where a running one is shown, or a finished one from its files."""
    from tidegate.observability.dashboard.dashboard import Dashboard, url_in
    from tidegate.observability.dashboard.recorded import RecordedSource

    url = url_in(run)
    if url is not None:
        echo(url)
        return
    with Dashboard(address) as shown:
        shown.start(RecordedSource(run))
        echo(f"{shown.url}  (Ctrl-C ends it)")
        shown.wait()


def top(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run's directory, or its dashboard's URL.")
    ],
    once: Annotated[bool, typer.Option("--once", help="Print it once, and end.")] = False,
) -> None:
    """Watch a run in the terminal: engines, groups, staleness, tokens, and what limits it."""
    from rich.console import Console

    from tidegate.observability.dashboard.terminal import Watched, watch

    watched = Watched.found(run if "://" in run else Path(run))
    watch(watched, Console(highlight=False), once=once)
