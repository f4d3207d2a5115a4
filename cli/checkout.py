"""Command `tidegate demo`, which needs a clone of the repository: it replaces this process with a
program of `examples/` and passes all arguments on.
"""

import os
import sys
from pathlib import Path
from typing import NoReturn

import typer

import tidegate
from tidegate.errors import ConfigError


def demo(context: typer.Context) -> None:
    """Train a small model synchronously and asynchronously, in three minutes; compare the runs."""
    _exec_module("examples.async_grpo", context.args)


def is_clone() -> bool:
    """Whether this package is in a clone of the repository, where the demo can run."""
    return (_clone() / "examples" / "async_grpo.py").exists()


def _clone() -> Path:
    return Path(tidegate.__file__).resolve().parents[2]


def _root() -> Path:
    if is_clone():
        return _clone()
    raise ConfigError(
        "the demo is not in the installed package; clone the repository, and run `make demo` "
        "there, or `pip install -e .`"
    )


def _exec_module(module: str, arguments: list[str]) -> NoReturn:
    """Replace this process with ``python -m module``, with the repository on the path."""
    root = str(_root())
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{root}{os.pathsep}{inherited}" if inherited else root
    os.environ["PYTHONUNBUFFERED"] = "1"  # a log shows each line when it is printed
    sys.stdout.flush()
    # -P: a folder `examples` in the working directory must not shadow the repository's.
    os.execv(sys.executable, [sys.executable, "-P", "-m", module, *arguments])
