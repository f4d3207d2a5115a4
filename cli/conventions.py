"""Conventions shared by all commands: exit statuses, arguments, and the layout of help.

Every command module imports it, so it imports nothing heavy.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from tidegate.transport.printable import printable

STATUS_FOUND = 1
"""The command ran and found a fault, such as an audit that disagrees."""
STATUS_ERROR = 2
"""The command can't work as it was called: a wrong option, a missing file."""
PROGRESS_INTERVAL_S = 2.0
"""Shortest time between two lines of progress in a log, and before the first."""
STATUS_UNDECIDED = 3
"""The command ran, and what it ran on is too little to tell: an audit that would have noticed
nothing."""
STATUS_INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""


def echo(text: object, *, err: bool = False) -> None:
    """Print text, to standard error if ``err``, with control characters escaped."""
    typer.echo(printable(str(text), keeps="\n"), err=err)


@contextlib.contextmanager
def progress(text: str) -> Iterator[Callable[[str], None]]:
    """Show on standard error what a command does; yield a function that takes the next text.

    In a terminal a spinner shows the last text. Otherwise a text is printed if there was none for
    PROGRESS_INTERVAL_S, so that a quick command prints none.
    """
    if sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True).status(printable(text)) as status:
            yield lambda text: status.update(printable(text))
        return
    printed_s = time.monotonic()

    def show(text: str) -> None:
        nonlocal printed_s
        if time.monotonic() - printed_s >= PROGRESS_INTERVAL_S:
            printed_s = time.monotonic()
            echo(text, err=True)

    yield show


RunDirectory = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run's directory, e.g. runs/demo.")
]

PASS_ON: dict[str, Any] = {
    "context_settings": {
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    },
    "add_help_option": False,
}
"""Typer options of commands that pass all arguments, ``--help`` included, to another program."""


class CommandGroup(typer.core.TyperGroup):
    """Command group that lists commands under their headings, in the order of registration.

    Typer can do this through rich, but importing rich takes longer than everything else in
    `--help`.
    """

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write one section per heading."""
        headings: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                heading = getattr(command, "rich_help_panel", None) or "More"
                rows = headings.setdefault(str(heading), [])
                rows.append((name, (command.help or "").partition("\n\n")[0]))
        for heading, rows in headings.items():
            with formatter.section(heading):
                formatter.write_dl(rows)


def example_text(examples: tuple[str, ...]) -> str | None:
    r"""Return the epilog of a command's help; ``\b`` makes typer keep its line breaks."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in examples) if examples else None
