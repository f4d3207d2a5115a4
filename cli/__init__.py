"""The command `tidegate`: each module holds a few commands, and command.py registers them."""

from tidegate.cli.command import app, main

__all__ = ["app", "main"]
