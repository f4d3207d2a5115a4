"""Commands that show runs: `audit`, `replay`, `report`, `compare`, `explain`, `trace`, `dashboard`
and `top`.

They read the directories of runs, or ask a running one's dashboard, and write only reports and
audit results. The work is done by ``observability/`` and, for replays,
``orchestrator/journal/replay.py``.
"""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from tidegate.cli.conventions import STATUS_FOUND, STATUS_UNDECIDED, RunDirectory, echo, progress


def audit(
    run: RunDirectory,
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Largest difference of log-probs that agree; default: by the engines' dtype.",
        ),
    ] = None,
    exact: Annotated[
        bool,
        typer.Option(
            "--exact",
            help="Sample again with the engine's own code, and compare by bits; for runs with "
            "deterministic=True, on the same kind of processor.",
        ),
    ] = False,
    rollouts_max: Annotated[
        int | None,
        typer.Option(min=1, help="Audit this many rollouts, evenly spaced; default: all."),
    ] = None,
) -> None:
    """Replay a run's tokens through the weights of their tags; status 1 if any differ, 3 if wrong
    tags would not be noticed."""
    from tidegate.observability.audit.audit import audit_run, write_audit

    with progress("reading the run") as show:
        report = audit_run(
            run,
            tolerance=tolerance,
            exact=exact,
            rollouts_max=rollouts_max,
            progress=lambda version: show(f"replaying with weights v{version}"),
        )
    write_audit(run, report)
    for line in report.lines():
        echo(line)
    if not report.agrees:
        raise typer.Exit(STATUS_FOUND)
    if not report.has_power:
        raise typer.Exit(STATUS_UNDECIDED)


def replay(
    run: RunDirectory,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODULE:CLASS",
            help="Policy class of your own that the run used; repeatable. Of the modules that "
            "the journal names, only these are imported.",
        ),
    ] = None,
) -> None:
    """Replay a run's journal in a new core; status 1 if the final states differ."""
    from tidegate.cli.named import find
    from tidegate.errors import ConfigError
    from tidegate.orchestrator.journal.replay import replay_journal

    if policy:
        sys.path.append("")  # last: a file here must not shadow an installed module
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
    from tidegate.observability.reports.report import write_report

    echo(write_report(run))


def compare(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN RUN…", help="Directories of the runs.")
    ],
    picture: Annotated[Path | None, typer.Option(help="Draw the comparison into this PNG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per run.")] = False,
) -> None:
    """Compare runs in a Markdown table: reward, speed, staleness, idle shares, audit."""
    from tidegate.observability.reports import comparison

    with progress(f"reading {len(runs)} runs") as show:
        found = comparison.read_runs(runs, progress=lambda run: show(f"reading {run}"))
    if as_json:
        for each in comparison.comparison_json(found):
            echo(json.dumps(each))
    else:
        for line in comparison.comparison_lines(found):
            echo(line)
    if picture is not None:
        from tidegate.observability.reports.pictures import draw_comparison

        draw_comparison(picture, found)


def explain(
    run: RunDirectory,
    subject: Annotated[
        str, typer.Argument(metavar="SUBJECT", help="rollout:ID, group:ID or batch:VERSION.")
    ],
) -> None:
    """Print what happened to a rollout, group or batch, in order, and by which rule."""
    from tidegate.observability.reports.explain import explain as explain_subject
    from tidegate.observability.reports.story import Subject, story_lines

    for line in story_lines(explain_subject(run, Subject.parse(subject))):
        echo(line)


def trace(run: RunDirectory) -> None:
    """Summarise a run's timeline (trace.json): engines, trainer, weight versions."""
    from tidegate.observability.records.trace import trace_lines

    for line in trace_lines(run):
        echo(line)


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
