"""The command `tidegate` (typer): each module holds a few commands; command.py registers them.

The console script of the package calls :func:`main`. Commands call the public API,
``observability/`` and ``simulation/``.
"""

from tidegate.cli.command import app, main

__all__ = ["app", "main"]
