"""What does the command say about recorded runs? Whether they add up, and what they achieved.

Reads run directories; starts nothing.
"""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from tidegate.cli.conventions import STATUS_FOUND, RunDirectory, echo


def audit(
    run: RunDirectory,
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0, help="Largest difference of a log-probability; by precision if left out."
        ),
    ] = None,
    rollouts_max: Annotated[
        int | None, typer.Option(min=1, help="Audit so many, evenly spaced; all if left out.")
    ] = None,
) -> None:
    """Replay a run's tokens through the weights they are tagged with; status 1 if any differ."""
    from rich.console import Console

    from tidegate.observability.audit.audit import audit_run, write_audit

    with Console(stderr=True).status("reading the run") as status:
        report = audit_run(
            run,
            tolerance=tolerance,
            rollouts_max=rollouts_max,
            progress=lambda version: status.update(f"replaying with weights v{version}"),
        )
    write_audit(run, report)
    for line in report.lines():
        echo(line)
    if not report.agrees:
        raise typer.Exit(STATUS_FOUND)


def replay(
    run: RunDirectory,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODULE:CLASS",
            help="A policy class of your own that the run was started with; repeat for several. "
            "Its module is imported. Nothing else is, whatever the journal names.",
        ),
    ] = None,
) -> None:
    """Replay a run's journal in a new core; status 1 if it ends in another state."""
    from tidegate.cli.named import find
    from tidegate.errors import ConfigError
    from tidegate.orchestrator.journal.replay import replay_journal

    if policy:
        sys.path.append("")  # last: a file here must not stand in for an installed module
    classes = [find(name, "--policy") for name in policy or ()]
    for name, found in zip(policy or (), classes, strict=True):
        if not isinstance(found, type):
            raise ConfigError(f"--policy {name} is no class, but a {type(found).__name__}")
    result = replay_journal(run, policies=classes)
    for line in result.lines():
        echo(line)
    if result.difference is not None:
        raise typer.Exit(STATUS_FOUND)


def report(run: RunDirectory) -> None:
    """Write report.md, report.png and report.json into a finished run's directory."""
    from tidegate.observability.report import write_report

    echo(write_report(run))


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN…", help="Their directories.")],
    picture: Annotated[Path | None, typer.Option(help="Draw them into this PNG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per run.")] = False,
) -> None:
    """Set finished runs side by side: reward, speed, staleness, idleness, audit; in Markdown."""
    from tidegate.observability import comparison

    found = comparison.read_runs(runs)
    if as_json:
        for each in comparison.comparison_json(found):
            echo(json.dumps(each))
    else:
        for line in comparison.comparison_lines(found):
            echo(line)
    if picture is not None:
        from tidegate.observability.comparison_picture import draw_comparison

        draw_comparison(picture, found)


def trace(run: RunDirectory) -> None:
    """Say where a run's timeline is, and what is on it: engines, trainer, weight versions."""
    from tidegate.observability.trace_lines import trace_lines

    for line in trace_lines(run):
        echo(line)
