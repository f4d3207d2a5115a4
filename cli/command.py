"""Registry of the commands of `tidegate` (typer), and its entry point :func:`main`.

The console script `tidegate` calls :func:`main`. A command is a typer-annotated function in another
module of this folder, and its docstring is its help. To add one, import its module here and
register it with :func:`_add`. Such modules must not import anything heavy at the top, because
`tidegate --help` imports all of them.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

import tidegate
from tidegate.cli import bench, doctor, engines, plan, records, run, simulate
from tidegate.cli.conventions import (
    PASS_ON,
    STATUS_ERROR,
    STATUS_INTERRUPTED,
    CommandGroup,
    echo,
    example_text,
)
from tidegate.cli.serving import serve, tinker
from tidegate.errors import ConfigError, TidegateError

app = typer.Typer(
    name="tidegate",
    cls=CommandGroup,
    help="Asynchronous rollouts for RL on language models, with a hard bound on staleness.",
    epilog="\b\nExit status: 0 success; 1 ran and found a fault; 2 wrong usage or input;\n"
    "130 interrupted. Output has no colours if it is no terminal, or if NO_COLOR is set.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _add(heading: str, function: Callable[..., None], *examples: str, **options: Any) -> None:
    """Register a command under a heading of `tidegate --help`."""
    epilog = example_text(examples)
    app.command(rich_help_panel=heading, epilog=epilog, **options)(function)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        echo(tidegate.__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


CLONE = Path(tidegate.__file__).resolve().parents[2]
"""The repository, if this package is in a clone of it: then it has the demo."""

IS_CLONE = (CLONE / "examples" / "async_grpo.py").exists()


def demo(context: typer.Context) -> None:
    """Train a small model synchronously and asynchronously, in three minutes; compare the runs."""
    if not IS_CLONE:
        raise ConfigError(
            "the demo is not in the installed package; clone the repository, and run `make demo` "
            "there, or `pip install -e .`"
        )
    inherited = filter(None, [os.environ.get("PYTHONPATH")])
    os.environ["PYTHONPATH"] = os.pathsep.join([str(CLONE), *inherited])
    os.environ["PYTHONUNBUFFERED"] = "1"  # a log shows each line when it is printed
    sys.stdout.flush()
    # -P: a folder `examples` in the working directory must not shadow the repository's.
    program = ["-P", "-m", "examples.async_grpo", *context.args]
    os.execv(sys.executable, [sys.executable, *program])


TRAIN, INSPECT, ENGINES, CHECK = "Train", "Inspect a run", "Engines", "Check and measure"

_add(TRAIN, demo, **PASS_ON, hidden=not IS_CLONE)
_add(TRAIN, run.run, *run.EXAMPLES, **run.TAKES_ANY_FLAG)
_add(TRAIN, plan.plan, *plan.EXAMPLES)

_add(INSPECT, records.dashboard, "tidegate dashboard runs/demo", "tidegate dashboard runs/a runs/b")
_add(INSPECT, records.top, "tidegate top runs/demo", "tidegate top http://127.0.0.1:8080")
_add(INSPECT, records.report, "tidegate report runs/demo")
_add(INSPECT, records.compare, "tidegate compare runs/sync runs/async --picture both.png")
_add(
    INSPECT,
    records.explain,
    "tidegate explain runs/demo rollout:41",
    "tidegate explain runs/demo batch:3",
)
_add(INSPECT, records.trace, "tidegate trace runs/demo")
_add(
    INSPECT, records.audit, "tidegate audit runs/demo", "tidegate audit runs/big --rollouts-max 500"
)
_add(INSPECT, records.replay, "tidegate replay runs/demo")

_add(ENGINES, engines.engine, **PASS_ON)
_add(
    ENGINES,
    serve,
    "tidegate serve --model DIR --engines 2 --port 8000",
    "tidegate serve --model Qwen/Qwen3-0.6B --device cuda:0 --device cuda:1",
)
_add(ENGINES, tinker, "tidegate tinker --model DIR --engines 2 --port 8000")
_add(ENGINES, engines.drain, "tidegate drain engine-3", "tidegate drain engine-3 --pid 4711")
_add(ENGINES, engines.keys, "tidegate keys keys", "tidegate keys keys --engine gpu-host-7")
_add(
    ENGINES,
    doctor.doctor,
    "tidegate doctor http://127.0.0.1:8000 --model models/served",
    "tidegate doctor http://127.0.0.1:30000 --json",
)

_add(
    CHECK,
    simulate.simulate,
    "tidegate simulate --seeds 1000 --crash-restart-runs 100",
    "tidegate simulate --first-seed 9 --seeds 1",
    "tidegate simulate --faults crash,cut",
)
_add(CHECK, bench.bench, "tidegate bench", "tidegate bench --rounds 9 --json")


def main() -> None:
    """Run the command. Errors meant for users are printed in one line, and set the exit status."""
    try:
        app()
    except TidegateError as error:
        _end(str(error))
    except OSError as error:
        if error.filename is None:
            raise  # not about a file of the user's: a defect of ours, which needs its traceback
        _end(f"{error.filename}: {error.strerror}")
    except KeyboardInterrupt:
        echo("interrupted", err=True)
        sys.exit(STATUS_INTERRUPTED)


def _end(message: str) -> None:
    echo(f"error: {' '.join(message.split())}", err=True)
    sys.exit(STATUS_ERROR)
