"""By what does a core decide? Everything that its answers depend on, but for the events."""

import dataclasses
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tidegate.errors import ConfigError, ResumeMismatch
from tidegate.orchestrator.turns.placement import PlacementRules
from tidegate.policies.filters import GroupFilter
from tidegate.policies.staleness import StalenessPolicy

CLASS = "class"
"""Where a record says what it is of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """A core's policies. Written down, they make an equal core anywhere."""

    policy: StalenessPolicy
    group_size: int
    group_filter: GroupFilter = field(default_factory=GroupFilter)
    placement: PlacementRules = field(default_factory=PlacementRules)


def record_of(value: Any) -> Any:
    """Rules, or any of them, as plain data.

    Raises:
        ConfigError: something of it can't be written down.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        settings = {f.name: record_of(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {CLASS: f"{kind.__module__}:{kind.__qualname__}", **settings}
    if isinstance(value, list | tuple):
        return [record_of(each) for each in value]
    if isinstance(value, Mapping):
        return {str(key): record_of(each) for key, each in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ConfigError(
        f"{value!r:.200} can't be written down, so a run by it could not be resumed; make "
        f"{type(value).__name__} a frozen dataclass of plain values"
    )


def made_of(record: Any) -> Any:
    """What :func:`record_of` has written down.

    Raises:
        ResumeMismatch: there is no such class here, or it takes other settings.
    """
    if isinstance(record, list):
        return tuple(made_of(each) for each in record)
    if not isinstance(record, dict):
        return record
    settings = {name: made_of(value) for name, value in record.items() if name != CLASS}
    if CLASS not in record:
        return settings
    module, _, name = str(record[CLASS]).partition(":")
    try:
        kind: Any = importlib.import_module(module)
        for part in name.split("."):
            kind = getattr(kind, part)
        return kind(**settings)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ResumeMismatch(
            f"the run's {name}({settings}) can't be made here: {error}; run this where "
            f"{module!r} can be imported, as it was then"
        ) from None


def check_can_be_made_again(rules: Rules) -> None:
    """See that a run by these can be resumed, before there is a journal.

    Raises:
        ConfigError: it could not.
    """
    try:
        made_of(record_of(rules))
    except ResumeMismatch as error:
        raise ConfigError(
            f"a run with a journal must be able to make its policies again: {error}; define them "
            f"in a module, not in a function"
        ) from None


def say(record: Any) -> str:
    """A record, for people."""
    if not isinstance(record, dict):
        return repr(record)
    settings = ", ".join(f"{name}={say(value)}" for name, value in record.items() if name != CLASS)
    return f"{str(record.get(CLASS, '')).partition(':')[2]}({settings})"
