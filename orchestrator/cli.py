"""What does the command `tidegate` do? Checks and reports recorded runs, and starts engines.

Imports nothing heavy: a command that needs torch imports it when it runs.
"""

import importlib.metadata
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from tidegate.errors import ConfigError, TidegateError

if TYPE_CHECKING:
    from tidegate.orchestrator.simulation.simulation import SimulationReport

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
    from tidegate.orchestrator.records.audit import TOLERANCE, audit_run, write_audit

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
def replay(run: RunDirectory) -> None:
    """Have a new core live through a run's journal; status 1 if it comes into another state."""
    from tidegate.orchestrator.journal.replay import replay_journal

    result = replay_journal(run)
    for line in result.lines():
        typer.echo(line)
    if result.difference is not None:
        raise typer.Exit(STATUS_DISAGREES)


@app.command()
def report(run: RunDirectory) -> None:
    """Write report.md, report.png and report.json into a finished run's directory."""
    from tidegate.orchestrator.records.report import write_report

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
def keys(
    directory: Annotated[Path, typer.Argument(help="Where they are kept, e.g. keys.")],
    engine: Annotated[
        str, typer.Option(help="Which engines they are for: a host, say, if each has its own.")
    ] = "engine",
) -> None:
    """Make keys, for engines on other hosts; without keys only this host is served."""
    from tidegate.transport.security import make_keys

    own = make_keys(directory, engine)
    typer.echo(
        f"The orchestrator keeps {directory} to itself. In the run: keys={str(directory)!r} and an "
        f"address such as 'tcp://0.0.0.0:5555'.\n"
        f"Copy {own} to each host of such engines, by a way that nobody can read:\n"
        f"    scp -pr {own} HOST:\n"
        f"    tidegate engine --keys {own.name} --connect tcp://THIS_HOST:5555 --engine NAME …\n"
        f"To shut them out, remove {directory / 'engines' / own.name}.key; they can't connect "
        f"again then."
    )


@app.command()
def simulate(
    seeds: Annotated[int, typer.Option(min=1, help="How many to run.")] = 100,
    first_seed: Annotated[int, typer.Option(min=0, help="The first of them.")] = 0,
    faults: Annotated[
        str, typer.Option(help="all, none, or a list such as crash,cut: what may go wrong.")
    ] = "all",
    lives: Annotated[
        int,
        typer.Option(min=0, help="More, whose trainer and orchestrator die and resume."),
    ] = 0,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes to run them on; left out, one per core.")
    ] = None,
    replay: Annotated[
        str | None,
        typer.Option(metavar="SCENARIO", help="Run this instead: a JSON file, or JSON itself."),
    ] = None,
) -> None:
    """Run the orchestrator in virtual time, with engines that fail; status 1 if it breaks.

    A run that fails is shrunken to the smallest that fails alike.
    """
    from tidegate.orchestrator.simulation.faults import parse_faults
    from tidegate.orchestrator.simulation.sweep import SweepSummary, cores, sweep

    if replay is not None:
        _replay_scenario(replay)
        return
    summary, kinds = SweepSummary(), parse_faults(faults)
    chosen = range(first_seed, first_seed + seeds)
    with Console(stderr=True).status("simulating") as status:
        for report in sweep(chosen, kinds, workers=workers or cores()):
            for line in summary.add(report):
                typer.echo(line)
            if summary.runs % 10 == 0:
                status.update(f"{summary.runs} of {seeds} seeds, {summary.failures} failed so far")
    if seeds == 1:
        _tell_story(report)
    for line in summary.lines():
        typer.echo(line)
    has_died_badly = lives > 0 and not _simulate_lives(first_seed, lives, workers or cores())
    if has_died_badly or summary.failures or (faults == "all" and summary.unreached):
        raise typer.Exit(STATUS_DISAGREES)


def _simulate_lives(first_seed: int, seeds: int, workers: int) -> bool:
    from tidegate.orchestrator.simulation.sweep import sweep_lives

    resumes = failures = 0
    for report in sweep_lives(range(first_seed, first_seed + seeds), workers=workers):
        resumes += report.lives - 1
        if report.failure is not None:
            failures += 1
            typer.echo(f"seed {report.seed}, with deaths: {report.failure}")
    typer.echo(
        f"{seeds - failures} of {seeds} seeds kept every promise over {resumes} deaths of trainer "
        f"and orchestrator"
    )
    return not failures


def _replay_scenario(replay: str) -> None:
    from tidegate.orchestrator.simulation.scenario import read_scenario
    from tidegate.orchestrator.simulation.simulation import run_scenario

    is_json = replay.lstrip().startswith("{")
    report = run_scenario(read_scenario(replay if is_json else _read(Path(replay))))
    _tell_story(report)
    if report.failure is not None:
        typer.echo(f"failed: {report.failure}")
        raise typer.Exit(STATUS_DISAGREES)
    typer.echo("it kept every promise")


def _tell_story(report: "SimulationReport") -> None:
    for line in (*report.story, f"digest {report.digest}"):
        typer.echo(line)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read the scenario {path}: {error}") from None


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
