"""The commands `tidegate engine` (start an engine), `tidegate drain` (make one leave) and `tidegate
keys`.

`tidegate drain` concerns an engine of this machine; `tidegate keys` makes CURVE keys for engines on
other hosts. The engine parses its own options, because this layer does not import
`tidegate.engine`. Keys are made by ``transport/security.py``.
"""

import itertools
import os
import select
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from tidegate.cli.conventions import echo
from tidegate.errors import ConfigError


def engine(context: typer.Context) -> None:
    """Run an engine in this process; `tidegate engine --help` lists its options."""
    # exec and no call: the orchestrator's side never imports the engine's.
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "tidegate.engine.worker", *context.args])


WORKERS = ("tidegate.engine.worker", "tidegate.engine.external.worker")
"""Modules of the programs that serve one engine."""


def drain(
    engine: Annotated[
        str, typer.Argument(help="Name of an engine that runs on this machine, e.g. engine-3.")
    ],
    pid: Annotated[
        int | None, typer.Option(help="Its process id, if several runs have an engine so named.")
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Time for it to end.")
    ] = 60.0,
) -> None:
    """Have an engine of this machine leave its run now, and wait until its process has ended.

    Its turns continue on the run's other engines, with all their tokens. Use it where a machine is
    about to go, e.g. on a spot notice or in Kubernetes' preStop hook.
    """
    found = [each for each in _workers(engine) if pid in (None, each)]
    if not found:
        raise ConfigError(
            f"no engine named {engine!r} runs on this machine"
            + (f" as process {pid}" if pid is not None else "")
        )
    if len(found) > 1:
        pids = ", ".join(map(str, found))
        raise ConfigError(f"engines named {engine!r} are processes {pids}; choose one with --pid")
    descriptor = os.pidfd_open(found[0])
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGTERM)
        if not select.select([descriptor], [], [], timeout)[0]:
            raise ConfigError(
                f"engine {engine!r} (process {found[0]}) has not ended within {timeout:g} s; once "
                f"it is killed, its run continues its turns elsewhere"
            )
    finally:
        os.close(descriptor)
    echo(f"{engine} (process {found[0]}) has left its run")


def _workers(engine: str) -> Iterator[int]:
    """Yield the process ids of this machine's workers for engines of this name."""
    for directory in Path("/proc").iterdir():
        if not directory.name.isdecimal():
            continue
        try:
            words = (directory / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue  # it has ended meanwhile, or is another user's
        pairs = itertools.pairwise(words)
        is_named = f"--engine={engine}" in words or ("--engine", engine) in pairs
        if is_named and any(module in words for module in WORKERS):
            yield int(directory.name)


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
