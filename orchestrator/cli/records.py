"""What does the command say about recorded runs? Whether they add up, and what they achieved.

Reads run directories; starts nothing.
"""

import json
from pathlib import Path
from typing import Annotated

import typer

from tidegate.orchestrator.cli.conventions import STATUS_FOUND, RunDirectory


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
    from rich.console import Console

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
        raise typer.Exit(STATUS_FOUND)


def replay(run: RunDirectory) -> None:
    """Have a new core live through a run's journal; status 1 if it comes into another state."""
    from tidegate.orchestrator.journal.replay import replay_journal

    result = replay_journal(run)
    for line in result.lines():
        typer.echo(line)
    if result.difference is not None:
        raise typer.Exit(STATUS_FOUND)


def report(run: RunDirectory) -> None:
    """Write report.md, report.png and report.json into a finished run's directory."""
    from tidegate.orchestrator.records.report import write_report

    typer.echo(write_report(run))


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN…", help="Their directories.")],
    picture: Annotated[Path | None, typer.Option(help="Draw them into this PNG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per run.")] = False,
) -> None:
    """Set finished runs side by side: reward, speed, staleness, idleness, audit; in Markdown."""
    from tidegate.orchestrator.records import comparison

    found = comparison.read_runs(runs)
    if as_json:
        for each in comparison.comparison_json(found):
            typer.echo(json.dumps(each))
    else:
        for line in comparison.comparison_lines(found):
            typer.echo(line)
    if picture is not None:
        from tidegate.orchestrator.records.comparison_picture import draw_comparison

        draw_comparison(picture, found)


def trace(run: RunDirectory) -> None:
    """Say where a run's timeline is, and what is on it: engines, trainer, weight versions."""
    from tidegate.orchestrator.records.trace_lines import trace_lines

    for line in trace_lines(run):
        typer.echo(line)
