"""The command `tidegate` (typer): each module holds a few commands; command.py registers them.

Commands call the public API, ``observability/`` and ``simulation/``.
"""

from tidegate.cli.command import app, main

__all__ = ["app", "main"]
