"""What does the command `tidegate` do? Checks and reports recorded runs, and starts engines.

Imports nothing heavy: a command that needs torch imports it when it runs.
"""

import importlib.metadata
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tidegate.errors import TidegateError

STATUS_DISAGREES = 1
STATUS_ERROR = 2
STATUS_INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""

app = typer.Typer(
    name="tidegate",
    help="Asynchronous rollouts for RL on language models, with a hard bound on staleness.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

RunDirectory = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run's directory, e.g. runs/demo.")
]


@app.command()
def audit(
    run: RunDirectory,
    tolerance: Annotated[
        float | None, typer.Option(min=0, help="Largest difference of a log-probability.")
    ] = None,
    rollouts_max: Annotated[
        int | None, typer.Option(min=1, help="Audit so many, evenly spaced; all if left out.")
    ] = None,
) -> None:
    """Replay a run's tokens through the weights they are tagged with; status 1 if any differ."""
    from tidegate.orchestrator.audit import TOLERANCE, audit_run, write_audit

    with Console(stderr=True).status("reading the run") as status:
        report = audit_run(
            run,
            tolerance=TOLERANCE if tolerance is None else tolerance,
            rollouts_max=rollouts_max,
            progress=lambda version: status.update(f"replaying with weights v{version}"),
        )
    write_audit(run, report)
    for line in report.lines():
        typer.echo(line)
    if not report.agrees:
        raise typer.Exit(STATUS_DISAGREES)


@app.command()
def report(run: RunDirectory) -> None:
    """Write report.md, report.png and report.json into a finished run's directory."""
    from tidegate.orchestrator.report import write_report

    typer.echo(write_report(run))


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    },
    add_help_option=False,
)
def engine(context: typer.Context) -> None:
    """Serve as an engine in this process; `tidegate engine --help` lists its options."""
    # Replaced, not called: the orchestrator's side never imports the engine's.
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "tidegate.engine.worker", *context.args])


@app.command()
def simulate(
    seeds: Annotated[int, typer.Option(min=1, help="How many to run, one after another.")] = 100,
    first_seed: Annotated[int, typer.Option(min=0, help="The first of them.")] = 0,
    faults: Annotated[
        str, typer.Option(help="all, none, or a list such as crash,cut: what may go wrong.")
    ] = "all",
) -> None:
    """Run the orchestrator in virtual time, with engines that fail; status 1 if it breaks."""
    from tidegate.orchestrator.faults import parse_faults
    from tidegate.orchestrator.simulation import simulate as simulate_seed

    kinds = parse_faults(faults)
    tokens = failures = 0
    with Console(stderr=True).status("simulating") as status:
        for seed in range(first_seed, first_seed + seeds):
            status.update(f"simulating seed {seed}, {failures} failed so far")
            report = simulate_seed(seed, faults=kinds)
            tokens += report.trained_tokens
            if report.failure is not None:
                failures += 1
                typer.echo(f"seed {seed}: {report.failure}\n  replay: {report.replay_command}")
    if seeds == 1:
        for line in (*report.story, f"digest {report.digest}"):
            typer.echo(line)
    typer.echo(f"{seeds - failures} of {seeds} seeds kept every promise; {tokens} tokens trained")
    if failures:
        raise typer.Exit(STATUS_DISAGREES)


@app.command()
def version() -> None:
    """Say which version this is."""
    typer.echo(importlib.metadata.version("tidegate"))


def main() -> None:
    """Run the command; errors made for people are one line, and the status says what kind."""
    try:
        app()
    except TidegateError as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        sys.exit(STATUS_ERROR)
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        sys.exit(STATUS_INTERRUPTED)


if __name__ == "__main__":
    main()
