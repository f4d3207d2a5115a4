"""The command `tidegate`: a file per few commands, registered in command.py by a line each."""

from tidegate.cli.command import app, main

__all__ = ["app", "main"]
