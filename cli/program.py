"""Parser of a run's TOML file for `tidegate run`: settings, tasks, episode function, trainer.

Reads the file, applies overrides from flags, imports what it names and checks all arguments;
:mod:`tidegate.cli.run` runs the result.

    [run]                          # the settings of tidegate.serve
    model = "path/to/model"
    [tasks]
    use = "my_tasks:train_tasks"   # module:name; the section's other keys are its arguments
    [episode]
    use = "my_agent:solve"
    [trainer]
    use = "my_trainer:train"
    [evaluation]                   # optional: tasks that are evaluated every so many versions
    use = "my_tasks:held_out"
    every_versions = 10
    [on_batch]                     # optional: called with each batch's figures
    use = "my_figures:write"
    [logging]                      # optional: trackers, with their constructors' arguments
    tensorboard = {directory = "runs/tb"}
"""

import functools
import importlib.util
import inspect
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tidegate.cli.named import check_arguments, find, parameters_of
from tidegate.errors import ConfigError
from tidegate.observability.trackers import MLflow, TensorBoard, Tracker, WandB
from tidegate.orchestrator.journal.resuming import JOURNAL_FILE
from tidegate.orchestrator.settings.config import (
    RECORD_OF,
    RECORDS,
    RunSettings,
    run_settings,
)
from tidegate.orchestrator.settings.suggestions import did_you_mean, worded

TRACKERS: dict[str, type[Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
}
"""Trackers that ``[logging]`` may name, by the package that each needs."""

JSON = "json"
"""Key of ``[logging]`` that turns Tidegate's log into JSON lines, with each batch's figures."""


class Part(BaseModel):
    """A section that names an object by its import path, and gives it arguments."""

    model_config = ConfigDict(extra="allow", frozen=True)

    use: str

    @property
    def arguments(self) -> dict[str, Any]:
        """All keys but ``use``."""
        return dict(self.model_extra or {})


class EvaluationPart(Part):
    """The section of tasks that are evaluated and not trained on."""

    every_versions: int = Field(ge=1)


class RunFile(BaseModel):
    """Sections of a TOML file for `tidegate run`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: dict[str, Any]
    tasks: Part
    episode: Part
    trainer: Part
    evaluation: EvaluationPart | None = None
    on_batch: Part | None = None
    logging: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Program:
    """A checked run, ready to start: every name was imported, and every argument fits."""

    file: RunFile
    """The sections as written in the file, with overrides."""
    settings: RunSettings
    make_tasks: Callable[[], Iterable[Any]]
    episode: Callable[..., Any]
    train: Callable[..., Any]
    """Called with the run, the tasks and the episode function."""
    make_held_out: Callable[[], Iterable[Any]] | None
    """Returns the tasks of ``[evaluation]``; None if the file has no such section."""
    on_batch: Callable[..., Any] | None
    """Called with each batch's figures; None if the file has no such section."""
    make_trackers: Sequence[Callable[[], Tracker]]
    """Constructors of the trackers that ``[logging]`` names."""
    is_resumed: bool
    """Whether the run in ``run_directory`` is continued."""

    @property
    def is_async(self) -> bool:
        """Whether ``train`` is a coroutine function."""
        return inspect.iscoroutinefunction(self.train)

    @property
    def logs_json(self) -> bool:
        """Whether Tidegate's log is written as JSON lines."""
        return bool(self.file.logging.get(JSON))

    @property
    def run_directory(self) -> Path:
        """Directory of the run's records."""
        assert self.settings.records.run_directory is not None, "a program's settings have one"
        return self.settings.records.run_directory


def read_program(
    path: Path, overrides: Sequence[str] = (), *, resume: Path | None = None
) -> Program:
    """Read and check a file; ``overrides`` are ``section.key=value``, the value in TOML syntax.

    ``resume`` is the directory of the run to continue, in place of the file's ``run_directory``.

    Raises:
        ConfigError: the file can't be read, or something in it is unknown or invalid; or there is
            no journal in ``resume``.
    """
    if resume is not None and not (resume / JOURNAL_FILE).exists():
        raise ConfigError(
            f"{resume} has no {JOURNAL_FILE}, so there is no run to resume; a run keeps a journal "
            f"if its [run] has journal = true"
        )
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read {path}: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    for override in overrides:
        _apply_override(table, override)
    return _program(_validate(table, path), path, resume)


def _apply_override(table: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    names = key.strip().split(".")
    if not equals or len(names) < 2 or not all(names):
        raise ConfigError(
            f"{override!r} must be SECTION.KEY=VALUE, such as run.engines=4; sections are "
            f"{', '.join(RunFile.model_fields)}"
        )
    try:
        value: Any = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # not TOML: a string without quotes
    _forget_setting(table, names)
    for name in names[:-1]:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{override!r}: {name} is not a table but {table!r}")
    table[names[-1]] = value


def _forget_setting(table: dict[str, Any], names: Sequence[str]) -> None:
    """Remove a setting of ``[run]`` from the file, where it may be in another table than ``names``:
    ``engines`` in ``[run]`` and in ``[run.fleet]`` are the same setting."""
    run = table.get("run")
    if names[0] != "run" or not isinstance(run, dict) or names[-1] not in RECORD_OF:
        return
    record = RECORD_OF[names[-1]]
    if len(names) == 2 and isinstance(run.get(record), dict):
        run[record].pop(names[-1], None)
    elif list(names[1:-1]) == [record]:
        run.pop(names[-1], None)


def _validate(table: Mapping[str, Any], path: Path) -> RunFile:
    try:
        return RunFile.model_validate(table)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        if problem["type"] == "extra_forbidden":
            suggestion = did_you_mean(str(problem["loc"][-1]), RunFile.model_fields)
            raise ConfigError(f"{path}: there is no section [{where}]; {suggestion}") from None
        if problem["type"] == "missing":
            raise ConfigError(f"{path}: {where} is missing") from None
        raise ConfigError(
            f"{path}: {where} = {problem['input']!r}: {worded(problem['msg'])}"
        ) from None


def _program(file: RunFile, path: Path, resume: Path | None) -> Program:
    values = _run_values(file.run)
    records = values.pop("records", {})
    if not isinstance(records, dict):
        raise ConfigError(f"run.records = {records!r} must be a table of settings")
    for name in RECORDS["records"].model_fields.keys() & values.keys() - records.keys():
        records[name] = values.pop(name)
    records.setdefault("progress", not file.logging.get(JSON))
    now = time.strftime("%Y%m%d-%H%M%S")
    records.setdefault("run_directory", Path("runs") / f"{path.stem}-{now}")
    if resume is not None:
        records |= {"run_directory": resume, "journal": True}
    settings = run_settings(**values, records=records)
    return Program(
        file=file,
        settings=settings,
        make_tasks=_task_function(file.tasks, "tasks"),
        make_held_out=_task_function(file.evaluation, "evaluation") if file.evaluation else None,
        episode=_function(file.episode, "episode"),
        train=_function(file.trainer, "trainer"),
        on_batch=_function(file.on_batch, "on_batch") if file.on_batch else None,
        make_trackers=_trackers(file.logging, settings),
        is_resumed=resume is not None,
    )


def _trackers(section: Mapping[str, Any], settings: RunSettings) -> Sequence[Callable[[], Tracker]]:
    """Return the trackers' constructors, with checked arguments."""
    found: list[Callable[[], Tracker]] = []
    for name, value in section.items():
        where = f"logging.{name}"
        if name == JSON:
            if not isinstance(value, bool):
                raise ConfigError(f"{where} = {value!r} must be true or false")
            continue
        if name not in TRACKERS:
            raise ConfigError(f"{where}: no such log; {did_you_mean(name, (JSON, *TRACKERS))}")
        if not isinstance(value, dict):
            raise ConfigError(f"{where} = {value!r} must be a table of options, such as {{}}")
        package = importlib.util.find_spec(name)
        if package is None or package.origin is None:  # no origin: a folder, such as W&B's ./wandb
            raise ConfigError(f"{where} needs the package {name!r}, which is not installed")
        arguments = dict(value)
        if name == "tensorboard":
            assert settings.records.run_directory is not None, "a program's settings have one"
            arguments.setdefault("directory", settings.records.run_directory / "tensorboard")
        checked = check_arguments(TRACKERS[name], arguments, where)
        found.append(functools.partial(TRACKERS[name], **checked))
    return found


def _run_values(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``run`` section with its objects made; its tables may be settings' records."""
    values: dict[str, Any] = {}
    for name, value in section.items():
        if name in RECORDS and isinstance(value, dict):
            values[name] = {
                key: _make_object(f"run.{name}.{key}", each) for key, each in value.items()
            }
        else:
            values[name] = _make_object(f"run.{name}", value)
    return values


def _make_object(where: str, value: Any) -> Any:
    """Return the object that a table with ``use`` stands for, such as a policy or a routing."""
    if not isinstance(value, dict) or "use" not in value:
        return value
    arguments = {
        name: _make_object(f"{where}.{name}", each) for name, each in value.items() if name != "use"
    }
    factory = find(str(value["use"]), f"{where}.use")
    return factory(**check_arguments(factory, arguments, where))


_OWN_PARAMETERS: dict[str, tuple[str, ...]] = {
    "episode": ("episode", "task"),
    "trainer": ("rollouts", "tasks", "episode"),
    "on_batch": ("figures",),
}
"""Parameters that Tidegate passes to the function of each section; none to those of tasks."""


def _function(part: Part, where: str) -> Callable[..., Any]:
    """Return the function that a section names, with the section's arguments bound."""
    function, own = find(part.use, f"{where}.use"), _OWN_PARAMETERS.get(where, ())
    if not callable(function):
        raise ConfigError(f"{where}.use = {part.use!r} is not a function but {function!r}")
    if where == "episode" and not inspect.iscoroutinefunction(function):
        raise ConfigError(f"episode.use = {part.use!r} must be an `async def` of (episode, task)")
    positional = [
        each
        for each in parameters_of(function, where)
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD, each.VAR_POSITIONAL)
    ]
    if len(own) > len(positional) and not any(e.kind is e.VAR_POSITIONAL for e in positional):
        raise ConfigError(
            f"the function that the run's file names in {where}.use = {part.use!r} must take "
            f"({', '.join(own)}) before its own arguments; change its signature"
        )
    arguments = check_arguments(function, part.arguments, where, own=len(own))
    return functools.partial(function, **arguments) if arguments else function


def _task_function(part: Part, where: str) -> Callable[[], Iterable[Any]]:
    """Return a function without arguments for a section that names a function or an iterable."""
    tasks = find(part.use, f"{where}.use")
    if callable(tasks):
        return _function(part, where)
    if part.arguments or not isinstance(tasks, Iterable):
        raise ConfigError(
            f"{where}.use = {part.use!r} is not a function, so it must be iterable, without "
            f"arguments"
        )
    return lambda: tasks
