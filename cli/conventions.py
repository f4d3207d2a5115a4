"""What do all commands have in common? Exit statuses, arguments, and how their help looks.

It knows no command, and imports nothing heavy: each of them does.
"""

from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from tidegate.transport.printable import printable

STATUS_FOUND = 1
"""It ran, and found what should not be: an audit that disagrees, a run that failed."""
STATUS_ERROR = 2
"""Asked for in a way that can't work: a wrong option, a file that isn't there."""
STATUS_INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""


def echo(text: object, *, err: bool = False) -> None:
    """Print lines, to standard error if ``err``, with control characters of others escaped."""
    typer.echo(printable(str(text), keeps="\n"), err=err)


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
"""For commands that hand all their arguments, ``--help`` too, to another program."""


class Commands(typer.core.TyperGroup):
    """Lists commands under the headings that they were registered with, in that order.

    Typer would do it through rich, whose import takes longer than all else that `--help` needs.
    """

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the lists."""
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
    """What stands under a command's options; ``\\b`` keeps lines as they are."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in examples) if examples else None
