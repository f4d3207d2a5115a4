"""The `tidegate simulate` command: runs seeded simulated clusters in virtual time.

:mod:`tidegate.simulation` runs them, checks the promises after each event, and shrinks failures.
"""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tidegate.cli.conventions import STATUS_FOUND, echo
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tidegate.simulation.run.adapter_runs import AdapterRunReport
    from tidegate.simulation.run.crash_restart import CrashRestartReport
    from tidegate.simulation.run.sweep import Report


def simulate(
    seeds: Annotated[int, typer.Option(min=0, help="Number of seeds.")] = 100,
    first_seed: Annotated[int, typer.Option(min=0, help="First seed.")] = 0,
    faults: Annotated[
        str, typer.Option(help="Faults to inject: all, none, or a list such as crash,cut.")
    ] = "all",
    crash_restart_runs: Annotated[
        int,
        typer.Option(
            min=0, help="Number of further seeds, whose trainer and orchestrator crash and restart."
        ),
    ] = 0,
    adapter_runs: Annotated[
        int,
        typer.Option(
            min=0, help="Number of further seeds that train several adapters; half of them crash."
        ),
    ] = 0,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Worker processes; default: one per core.")
    ] = None,
    replay: Annotated[
        str | None,
        typer.Option(metavar="SCENARIO", help="Run only this scenario: a JSON file, or JSON."),
    ] = None,
) -> None:
    """Simulate the orchestrator in virtual time with injected faults; status 1 if it fails.

    A failing run is shrunk to the smallest one with the same failure.
    """
    from rich.console import Console

    from tidegate.simulation.faults.faults import parse_faults
    from tidegate.simulation.run.adapter_runs import simulate_adapters
    from tidegate.simulation.run.crash_restart import simulate_crash_restarts
    from tidegate.simulation.run.simulation import simulate as simulate_seed
    from tidegate.simulation.run.sweep import SweepSummary, core_count, sweep

    if not (seeds or crash_restart_runs or adapter_runs or replay):
        raise ConfigError(
            "--seeds 0, --crash-restart-runs 0 and --adapter-runs 0 leave nothing to run; raise "
            "one of them"
        )
    if replay is not None:
        _replay_scenario(replay)
        return
    summary, kinds = SweepSummary(), parse_faults(faults)
    chosen = range(first_seed, first_seed + seeds)
    with Console(stderr=True).status("simulating") as status:
        run_seed = partial(simulate_seed, faults=kinds)
        for report in sweep(chosen, run_seed, workers=workers or core_count()):
            for line in summary.add(report):
                echo(line)
            if summary.runs % 10 == 0:
                status.update(f"{summary.runs} of {seeds} seeds, {summary.failures} failed so far")
    if seeds == 1:
        _print_story(report)
    for line in summary.lines() if seeds else ():
        echo(line)
    workers = workers or core_count()
    survived = True
    if crash_restart_runs:
        chosen = range(first_seed, first_seed + crash_restart_runs)
        restarted = sweep(chosen, simulate_crash_restarts, workers=workers)
        survived &= _print_runs(restarted, chosen, "seeds")
    if adapter_runs:
        chosen = range(first_seed, first_seed + adapter_runs)
        reports = sweep(chosen, simulate_adapters, workers=workers)
        survived &= _print_runs(reports, chosen, "seeds with adapters")
    if not survived or summary.failures or (faults == "all" and summary.uncovered):
        raise typer.Exit(STATUS_FOUND)


def _print_runs(
    reports: "Iterable[CrashRestartReport | AdapterRunReport]", seeds: range, kind: str
) -> bool:
    """Print the failed runs of these seeds, and a summary; return whether none failed."""
    from tidegate.simulation.run.sweep import FailureLines

    failures = resumes = 0
    failed = FailureLines()
    for report in reports:
        resumes += report.processes - 1
        failures += report.failure is not None
        for line in failed.lines_of(report):
            echo(line)
    if len(seeds) == 1:
        _print_story(report)
    echo(
        f"{len(seeds) - failures} of {len(seeds)} {kind} passed, over {resumes} crashes of trainer "
        f"and orchestrator"
    )
    return not failures


def _replay_scenario(replay: str) -> None:
    from tidegate.simulation.faults.scenario import read_scenario
    from tidegate.simulation.run.sweep import run_any

    is_json = replay.lstrip().startswith("{")
    report = run_any(read_scenario(replay if is_json else _read(Path(replay))))
    _print_story(report)
    if report.failure is not None:
        echo(f"failed: {report.failure}")
        raise typer.Exit(STATUS_FOUND)
    echo("passed: every invariant held")


def _print_story(report: "Report") -> None:
    for line in (*report.story, f"digest {report.digest}"):
        echo(line)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read the scenario {path}: {error}") from None
