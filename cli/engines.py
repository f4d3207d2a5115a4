"""Which commands are about engines? Starting one here, and keys for those on other hosts.

The engine's own options are the worker's business: the orchestrator's side never imports it.
"""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from tidegate.cli.conventions import echo


def engine(context: typer.Context) -> None:
    """Serve as an engine in this process; `tidegate engine --help` lists its options."""
    # Replaced, not called: the orchestrator's side never imports the engine's.
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "tidegate.engine.worker", *context.args])


def keys(
    directory: Annotated[Path, typer.Argument(help="Where they are kept, e.g. keys.")],
    engine: Annotated[
        str, typer.Option(help="Which engines they are for: a host, say, if each has its own.")
    ] = "engine",
) -> None:
    """Make keys, for engines on other hosts; without keys only this host is served."""
    from tidegate.transport.security import make_keys

    own = make_keys(directory, engine)
    echo(
        f"The orchestrator keeps {directory} to itself. In the run: keys={str(directory)!r} and an "
        f"address such as 'tcp://0.0.0.0:5555'.\n"
        f"Copy {own} to each host of such engines, by a way that nobody can read:\n"
        f"    scp -pr {own} HOST:\n"
        f"    tidegate engine --keys {own.name} --connect tcp://THIS_HOST:5555 --engine NAME …\n"
        f"To shut them out, remove {directory / 'engines' / own.name}.key; they can't connect "
        f"again then."
    )
