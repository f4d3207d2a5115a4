"""Tests that public names are the field's words, and that a class name stands for one thing.

docs/decisions/names.md says why, and which settings were renamed.
"""

import ast
import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
import typer

import tidegate
from tidegate.cli import app
from tidegate.observability.metrics.catalogue import METRICS
from tidegate.orchestrator.settings.config import RunSettings

ROOT = Path(__file__).parent.parent

FOLDERS = (
    "cli",
    "engine",
    "environments",
    "integrations",
    "kernels",
    "observability",
    "orchestrator",
    "policies",
    "serving",
    "simulation",
    "src/tidegate",
    "transport",
)

ENGINE_PROGRAMS = ("engine/worker.py", "engine/external/worker.py")
"""Programs that parse their own options."""

REPLACED_WORDS = {
    "asker",
    "asking",
    "askings",
    "awaited",
    "book",
    "desk",
    "diary",
    "doorkeeper",
    "face",
    "faces",
    "growing",
    "guess",
    "guesses",
    "hardship",
    "hardships",
    "home",
    "laggard",
    "laggards",
    "lives",
    "look",
    "looks",
    "nearest",
    "note",
    "notes",
    "patience",
    "place",
    "places",
    "recollection",
    "rests",
    "seat",
    "seats",
    "shelf",
    "standstill",
    "stretch",
    "tape",
    "teller",
    "told",
    "traits",
    "truth",
    "untold",
    "whereabouts",
    "wish",
    "wishes",
    "world",
}

REPLACED_PHRASES = ("give_back", "go_on", "goes_on", "last_words", "left_out", "so_far", "if_over")

CLASS = re.compile(r"^ *class (\w+)", re.MULTILINE)
"""Matches the head of a class statement, and of what looks like one in a docstring."""

EXCEPTIONS = {
    "world_size": "torch.distributed's word",
}
"""Part of a name -> why it may stay."""


def parts_of(name: str) -> list[str]:
    """Return a name's words in lower case, split at underscores, dashes, dots and capitals."""
    return [part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]


def replaced_in(name: str) -> set[str]:
    """Return the replaced words and phrases of which ``name`` is built."""
    snake = "_".join(parts_of(name))
    for exception in EXCEPTIONS:
        snake = snake.replace(exception, "")
    words = set(snake.split("_")) & REPLACED_WORDS
    return words | {each for each in REPLACED_PHRASES if f"_{each}_" in f"_{snake}_"}


def modules_of(folder: str) -> list[Path]:
    """Return a folder's modules, without what its links lead to."""
    return sorted(path for path in (ROOT / folder).rglob("*.py") if not path.is_symlink())


def classes_of(path: Path) -> Iterator[ast.ClassDef]:
    """Yield the classes of a module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef):
            yield node


def public_names() -> Iterator[str]:
    """Yield the public names, the arguments of functions, and the members of classes."""
    for name in tidegate.__all__:
        yield name
        thing = getattr(tidegate, name)
        if not inspect.isclass(thing):
            yield from (f"{name}.{each}" for each in inspect.signature(thing).parameters)
            continue
        for kind in thing.__mro__:
            if kind.__module__.startswith("tidegate."):
                members = {*vars(kind), *vars(kind).get("__annotations__", {})}
                yield from (f"{name}.{each}" for each in members if not each.startswith("_"))


def settings() -> Iterator[str]:
    """Yield the names of all settings."""
    yield from RunSettings.model_construct(model=Path("m")).by_flat_name()


def metrics() -> Iterator[str]:
    """Yield the names of all metrics."""
    yield from (metric.name for metric in METRICS)


def options() -> Iterator[str]:
    """Yield the commands, their arguments and options, and the options of engine programs."""
    commands = [typer.main.get_command(app)]
    while commands:
        command = commands.pop()
        yield from (f"{command.name}.{each}" for p in command.params for each in p.opts)
        if isinstance(command, click.Group):
            yield from command.commands
            commands += command.commands.values()
    for program in ENGINE_PROGRAMS:
        yield from re.findall(r'"--([a-z-]+)"', (ROOT / program).read_text())


def wire_names() -> Iterator[str]:
    """Yield the structs of messages, and their fields."""
    for path in (path for folder in FOLDERS for path in modules_of(folder)):
        if ROOT / "transport" not in path.parents and not path.name.endswith("messages.py"):
            continue
        for node in classes_of(path):
            if not node.name.startswith("_"):
                yield node.name
                for field in node.body:
                    if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                        yield f"{node.name}.{field.target.id}"


@pytest.mark.parametrize("names", [public_names, settings, metrics, options, wire_names])
def test_no_public_name_is_built_from_a_replaced_word(names: Callable[[], Iterator[str]]) -> None:
    found = list(names())
    assert found
    assert {name: bad for name in found if (bad := replaced_in(name))} == {}


def test_no_class_name_occurs_in_two_modules() -> None:
    """Modules are parsed only for the names that a search finds twice: all would take seconds."""
    modules = defaultdict(set)
    for path in (path for folder in FOLDERS for path in modules_of(folder)):
        for name in CLASS.findall(path.read_text()):
            modules[name].add(path)
    found = {
        name: [str(p.relative_to(ROOT)) for p in paths if name in {c.name for c in classes_of(p)}]
        for name, paths in modules.items()
        if len(paths) > 1
    }
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("ScoreDesk", {"desk"}),
        ("--keep-notes", {"notes"}),
        ("tidegate_batches_untold_total", {"untold"}),
        ("Episode.turn_so_far", {"so_far"}),
        ("bookkeeping", set()),
        ("world_size", set()),
        ("SimulatedWorld", {"world"}),
    ],
)
def test_names_are_split_at_underscores_dashes_and_capitals(name: str, bad: set[str]) -> None:
    assert replaced_in(name) == bad
