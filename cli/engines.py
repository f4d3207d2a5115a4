"""Commands `tidegate engine`, which starts an engine here, and `tidegate keys`, for other hosts.

The engine parses its own options, because this layer does not import `tidegate.engine`. Keys are
made by ``transport/security.py``.
"""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from tidegate.cli.conventions import echo


def engine(context: typer.Context) -> None:
    """Run an engine in this process; `tidegate engine --help` lists its options."""
    # exec and no call: the orchestrator's side never imports the engine's.
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "tidegate.engine.worker", *context.args])


def keys(
    directory: Annotated[Path, typer.Argument(help="Directory for the keys, e.g. keys.")],
    engine: Annotated[
        str,
        typer.Option(help="Name of the engines' key, e.g. a host's name if each host has its own."),
    ] = "engine",
) -> None:
    """Create CURVE keys for engines on other hosts; without keys, only this host can connect."""
    from tidegate.transport.security import make_keys

    own = make_keys(directory, engine)
    echo(
        f"Keep {directory} on the orchestrator's host. Start the run with "
        f"curve_key_directory={str(directory)!r} and listen_address='tcp://0.0.0.0:5555'.\n"
        f"Copy {own} to each engine host over a private channel, and start engines there:\n"
        f"    scp -pr {own} HOST:\n"
        f"    tidegate engine --curve-key-directory {own.name} "
        f"--connect tcp://THIS_HOST:5555 --engine NAME …\n"
        f"To revoke the key, delete {directory / 'engines' / own.name}.key; engines with it can "
        f"then not connect any more."
    )
