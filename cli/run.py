"""The `tidegate run CONFIG.toml` command: runs the tasks, episode and trainer that a file names.

:mod:`tidegate.cli.program` parses and checks the file.
"""

import contextlib
import itertools
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidegate.cli.conventions import STATUS_FOUND, STATUS_INTERRUPTED, echo
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from tidegate.cli.program import Program
    from tidegate.orchestrator.telemetry.statistics import RunStatistics
    from tidegate.orchestrator.trainer.rollouts import Rollouts

EXAMPLES = (
    "tidegate run examples/run.toml",
    "tidegate run examples/run.toml --run.engines 4 --trainer.learning_rate 1e-4",
    "tidegate run examples/run.toml --set run.max_staleness=4 --check > complete.toml",
    "tidegate run examples/run.toml --run.dashboard-address 127.0.0.1:0",
    "tidegate run mine.toml --resume runs/mine-20260801-120000",
    "tidegate run examples/run.toml --cluster ray --run.engines 16 --run.gpus-per-engine 1",
)

EVALUATED_TASKS_MAX = 100_000
"""Limit of the tasks of ``[evaluation]``, so that an endless iterator is refused."""

TAKES_ANY_FLAG: dict[str, Any] = {
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True}
}


def run(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="The run's TOML file.")],
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a value of the file."),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", help="'ray' starts the engines on a Ray cluster."),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Continue the run in this directory from its journal."),
    ] = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Only check the file, and print it with all defaults."),
    ] = False,
) -> None:
    """Run the tasks, episode and trainer that a TOML file names, and write a report.

    The file's sections are [run], with the settings of tidegate.serve, [tasks], [episode] and
    [trainer], which name functions by `use = "module:name"` and give them arguments; and optionally
    [evaluation], tasks that are evaluated every_versions; [on_batch], a function of each batch's
    figures; and [logging], with the tables tensorboard, wandb and mlflow, and json = true. Any
    value can be overridden: --run.engines 4 is the same as --set run.engines=4.
    """
    # Users' modules are beside the file (as with `python program.py`) or in the working directory.
    sys.path[:0] = [str(config.resolve().parent), ""]
    from tidegate.cli.program import read_program

    values = [*(assignments or []), *overrides(context.args)]
    program = read_program(
        config, values if cluster is None else [*values, f"run.cluster={cluster}"], resume=resume
    )
    if check:
        from tidegate.cli.toml_file import toml_lines

        for line in toml_lines(program):
            echo(line)
        _warn_of_model(program)
        return
    try:
        statistics = _run(program)
    except KeyboardInterrupt:
        echo(_how_to_continue(program, config), err=True)
        raise typer.Exit(STATUS_INTERRUPTED) from None
    from tidegate.observability.reports.report import write_report

    echo(f"report: {write_report(program.run_directory)}")
    if statistics.stuck and not statistics.batches:
        for each in statistics.stuck:
            echo(f"error: no batch was made of any task: {each.where}", err=True)
        raise typer.Exit(STATUS_FOUND)


def overrides(arguments: list[str]) -> list[str]:
    """Convert ``--run.engines 4`` and ``--run.engines=4`` into ``run.engines=4``.

    Raises:
        ConfigError: an argument has another form.
    """
    found, rest = [], list(arguments)
    while rest:
        flag = rest.pop(0)
        name, equals, value = flag.removeprefix("--").partition("=")
        if not flag.startswith("--") or "." not in name:
            raise ConfigError(
                f"there is no option {flag!r}; override a value of the file with "
                f"--SECTION.KEY VALUE, such as --run.engines 4"
            )
        if not equals:
            if not rest:
                raise ConfigError(f"{flag} needs a value, as in {flag} VALUE or {flag}=VALUE")
            value = rest.pop(0)
        found.append(f"{name.replace('-', '_')}={value}")
    return found


def _warn_of_model(program: "Program") -> None:
    """Warn if the model's files can't be read yet: the run may be checked where they are not."""
    from tidegate.errors import ModelError
    from tidegate.orchestrator.episodes.model_files import read_model_files

    try:
        read_model_files(program.settings.model)
    except ModelError as error:
        echo(f"warning: the file is valid, but the run could not start now: {error}", err=True)


def _how_to_continue(program: "Program", config: Path) -> str:
    directory = program.run_directory
    lines = [f"interrupted; `tidegate report {directory}` reports what was trained until now"]
    if program.settings.records.journal:
        lines.append(f"`tidegate run {config} --resume {directory}` continues the run")
    return "\n".join(lines)


def _run(program: "Program") -> "RunStatistics":
    """Run the program to its end, with its trackers open; return the final statistics."""
    import asyncio

    from tidegate.orchestrator.trainer.rollouts import Rollouts, SyncRollouts
    from tidegate.runs import run_parts

    with contextlib.ExitStack() as trackers:
        rollouts = Rollouts(
            program.settings,
            run_parts,
            True if program.is_resumed else None,
            on_batch=_on_batch(program, trackers),
        )
        _evaluate_every(rollouts, program)
        if program.is_async:
            asyncio.run(_train(rollouts, program))
        else:
            with SyncRollouts(rollouts) as run:
                _record_facts(run, program.train(run, program.make_tasks(), program.episode))
        return rollouts.statistics()


def _evaluate_every(rollouts: "Rollouts", program: "Program") -> None:
    """Have the run evaluate the tasks of ``[evaluation]``, if the file has the section.

    Raises:
        ConfigError: there are none, or endlessly many.
    """
    part = program.file.evaluation
    if part is None or program.make_held_out is None:
        return
    tasks = list(itertools.islice(program.make_held_out(), EVALUATED_TASKS_MAX + 1))
    if len(tasks) > EVALUATED_TASKS_MAX:
        raise ConfigError(
            f"evaluation.use = {part.use!r} gives more than {EVALUATED_TASKS_MAX} tasks; have it "
            f"return a list that ends"
        )
    rollouts.evaluate_every(part.every_versions, tasks, episode=program.episode)


def _on_batch(
    program: "Program", trackers: contextlib.ExitStack
) -> Callable[[Mapping[str, float]], object] | None:
    """Open the program's trackers; return a callback for them and the file's own function."""
    from tidegate.observability.logs import log_as_json
    from tidegate.observability.trackers import call_all, log_batch
    from tidegate.transport.private_directory import make_private_directory

    make_private_directory(program.run_directory)  # before a tracker makes it for all to read
    callbacks: list[Callable[[Mapping[str, float]], object]] = []
    if program.logs_json:
        log_as_json(run=program.run_directory.name).setLevel(logging.INFO)
        callbacks.append(log_batch)
    callbacks += [trackers.enter_context(make()) for make in program.make_trackers]
    if program.on_batch is not None:
        callbacks.append(program.on_batch)
    return call_all(callbacks) if callbacks else None


async def _train(rollouts: Any, program: "Program") -> None:
    async with rollouts:
        _record_facts(
            rollouts, await program.train(rollouts, program.make_tasks(), program.episode)
        )


def _record_facts(rollouts: Any, facts: object) -> None:
    """Add a trainer's returned mapping, such as held-out rewards, to the run's record."""
    if isinstance(facts, Mapping):
        rollouts.record_facts(**{str(name): value for name, value in facts.items()})
