"""The `tidegate run CONFIG.toml` command: runs the tasks, episode and trainer that a file names.

:mod:`tidegate.cli.program` parses and checks the file.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidegate.cli.conventions import echo
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from tidegate.cli.program import Program

EXAMPLES = (
    "tidegate run examples/run.toml",
    "tidegate run examples/run.toml --run.engines 4 --trainer.learning_rate 1e-4",
    "tidegate run examples/run.toml --set run.max_staleness=4 --check",
    "tidegate run examples/run.toml --cluster ray --run.engines 16 --run.gpus-per-engine 1",
)

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
    check: Annotated[
        bool, typer.Option("--check", help="Only check the file and print the [run] settings.")
    ] = False,
) -> None:
    """Run the tasks, episode and trainer that a TOML file names, and write a report.

    The file's sections are [run], with the settings of tidegate.serve, [tasks], [episode] and
    [trainer], which name functions by `use = "module:name"` and give them arguments. Any value can
    be overridden: --run.engines 4 is the same as --set run.engines=4.
    """
    # Users' modules are beside the file (as with `python program.py`) or in the working directory.
    sys.path[:0] = [str(config.resolve().parent), ""]
    from tidegate.cli.program import read_program

    values = [*(assignments or []), *overrides(context.args)]
    program = read_program(
        config, values if cluster is None else [*values, f"run.cluster={cluster}"]
    )
    if check:
        for line in _settings_lines(program):
            echo(line)
        return
    _run(program)
    echo(f"report: {_report(program)}")


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
                raise ConfigError(f"{flag} needs a value")
            value = rest.pop(0)
        found.append(f"{name.replace('-', '_')}={value}")
    return found


def _settings_lines(program: "Program") -> list[str]:
    settings = program.settings
    lines = [f"run.{name} = {value!r}" for name, value in settings.by_flat_name().items()]
    return [
        *lines,
        f"the file is valid; the run would be recorded in {settings.records.run_directory}",
    ]


def _run(program: "Program") -> None:
    import asyncio

    from tidegate.orchestrator.trainer.rollouts import Rollouts, SyncRollouts
    from tidegate.runs import run_parts

    rollouts = Rollouts(program.settings, run_parts)
    if program.is_async:
        asyncio.run(_train(rollouts, program))
        return
    with SyncRollouts(rollouts) as run:
        _record_facts(run, program.train(run, program.make_tasks(), program.episode))


async def _train(rollouts: Any, program: "Program") -> None:
    async with rollouts:
        _record_facts(
            rollouts, await program.train(rollouts, program.make_tasks(), program.episode)
        )


def _record_facts(rollouts: Any, facts: object) -> None:
    """Add a trainer's returned mapping, such as held-out rewards, to the run's record."""
    if isinstance(facts, Mapping):
        rollouts.record_facts(**{str(name): value for name, value in facts.items()})


def _report(program: "Program") -> Path:
    from tidegate.observability.report import write_report

    directory = program.settings.records.run_directory
    assert directory is not None, "a program's settings have one"
    return write_report(directory)
