"""Complete TOML text of a checked run, which `tidegate run --check` prints.

:mod:`run` calls :func:`toml_lines` with a :class:`Program`. Every setting and argument has its
line, so the text shows all defaults, and it is itself a valid file for `tidegate run`.
"""

import dataclasses
import functools
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tidegate.cli.program import JSON, TRACKERS, EvaluationPart, Part, Program
from tidegate.orchestrator.settings.config import RECORDS, SET_BY_POLICY


def toml_lines(program: Program) -> Iterator[str]:
    """Yield the lines of the program's complete file. Settings without a value are comments."""
    yield "[run]"
    yield from _line("model", program.settings.model)
    file = program.file
    implied = _implied(program)
    for record in RECORDS:
        yield from ("", f"[run.{record}]")
        for name in RECORDS[record].model_fields:
            value = getattr(getattr(program.settings, record), name)
            if name in implied:
                yield f"# {name} is {value}, by {implied[name]}"
            else:
                yield from _line(name, value)
    sections: dict[str, tuple[Part | None, Callable[..., Any] | None]] = {
        "tasks": (file.tasks, program.make_tasks),
        "episode": (file.episode, program.episode),
        "trainer": (file.trainer, program.train),
        "evaluation": (file.evaluation, program.make_held_out),
        "on_batch": (file.on_batch, program.on_batch),
    }
    for section, (part, function) in sections.items():
        if part is None:
            yield from ("", f"# [{section}] is not set")
            continue
        yield from ("", f"[{section}]")
        yield from _line("use", part.use)
        if isinstance(part, EvaluationPart):
            yield from _line("every_versions", part.every_versions)
        for name, value in (_defaults(function) | part.arguments).items():
            yield from _line(name, value)
    yield from ("", "[logging]")
    for name, value in file.logging.items():
        yield from _line(name, value)
    for name in (JSON, *TRACKERS):
        if name not in file.logging:
            yield f"# {name} is not set"


def _implied(program: Program) -> dict[str, str]:
    """Return the settings that another setting determines, by the name of that setting; the file
    omits them."""
    implied: dict[str, str] = {}
    if program.settings.staleness.staleness_policy is not None:
        implied |= dict.fromkeys(SET_BY_POLICY, "staleness_policy")
    records = program.file.run.get("records", {})
    if "run_directory" not in {**program.file.run, **records}:
        implied["run_directory"] = "the file's name and the time"
    return implied


def _defaults(function: Callable[..., Any] | None) -> dict[str, Any]:
    """Return the defaults of a section's function, without parameters that Tidegate passes."""
    target = function.func if isinstance(function, functools.partial) else function
    if target is None or not callable(target):
        return {}
    parameters = inspect.signature(target).parameters.values()
    return {each.name: each.default for each in parameters if each.default is not each.empty}


def _line(name: str, value: Any) -> Iterator[str]:
    if value is None:
        yield f"# {name} is not set"
    elif (text := toml_value(value)) is not None:
        yield f"{name} = {text}"
    else:
        yield f"# {name} is {value!r}"


def toml_value(value: Any) -> str | None:
    """Return a value in TOML; None if TOML can't express it.

    A dataclass, such as a policy, becomes a table with ``use``, its class, and its fields.
    """
    match value:
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case str() | Path():
            return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
        case Mapping():
            cells = {str(name): toml_value(each) for name, each in value.items()}
            if None in cells.values():
                return None
            return f"{{{', '.join(f'{_key(name)} = {cell}' for name, cell in cells.items())}}}"
        case Sequence():
            items = [toml_value(each) for each in value]
            return None if None in items else f"[{', '.join(filter(None, items))}]"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        fields = [each for each in dataclasses.fields(value) if each.init]
        values = {each.name: getattr(value, each.name) for each in fields}
        known = {name: each for name, each in values.items() if each is not None}
        return toml_value({"use": f"{kind.__module__}:{kind.__qualname__}", **known})
    return None


def _key(name: str) -> str:
    is_bare = name.replace("-", "_").isidentifier() and name.isascii()
    return name if is_bare else json.dumps(name)
