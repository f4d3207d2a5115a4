"""Commands that need a clone of the repository: `tidegate demo` and `tidegate bench`.

Each replaces this process with a program of `examples/` or `benchmarks/` and passes all arguments
on.
"""

import os
import sys
from pathlib import Path
from typing import NoReturn

import typer

import tidegate
from tidegate.cli.conventions import echo
from tidegate.errors import ConfigError

SELF = "__init__", "__main__"


def demo(context: typer.Context) -> None:
    """Train a small model synchronously and asynchronously, in three minutes; compare the runs."""
    _exec_module("examples.async_grpo", context.args)


def bench(context: typer.Context) -> None:
    """Run a benchmark, e.g. `tidegate bench transport`; without a name, list them."""
    names = _benchmarks()
    arguments = context.args
    if not arguments or arguments[0] in ("--help", "-h"):
        echo("Usage: tidegate bench NAME [OPTIONS], where NAME is one of:")
        width = max(map(len, names))
        for name, summary in names.items():
            echo(f"  {name:<{width}}  {summary}")
        return
    name = arguments[0].replace("-", "_")
    if name not in names:
        raise ConfigError(f"there is no benchmark {name!r}; the benchmarks are {', '.join(names)}")
    _exec_module(f"benchmarks.{name}", arguments[1:])


def _benchmarks() -> dict[str, str]:
    """Return the benchmarks by name, each with the first line of its module docstring."""
    folder = _root() / "benchmarks"
    programs = {path.parent.name: path for path in folder.glob("*/__main__.py")}
    programs |= {path.stem: path for path in folder.glob("*.py") if path.stem not in SELF}
    found = {}
    for name, path in sorted(programs.items()):
        text = path.read_text()
        if '__name__ == "__main__"' in text:
            found[name] = text.split("\n", 1)[0].strip('" ')
    return found


def is_clone() -> bool:
    """Whether this package is in a clone of the repository, where these commands can run."""
    return (_clone() / "examples" / "async_grpo.py").exists()


def _clone() -> Path:
    return Path(tidegate.__file__).resolve().parents[2]


def _root() -> Path:
    if is_clone():
        return _clone()
    raise ConfigError(
        "the demo and the benchmarks are not in the installed package; clone the repository, "
        "and run `make demo` there, or `pip install -e .`"
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
