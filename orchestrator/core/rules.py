"""Policies of a core as one record: as objects, and as the plain data in a journal's header.

``serve`` makes :class:`Rules` from the run's settings, and a resume compares their plain data with
the header. Only a replay makes objects from a header. A header names each policy by a registered
name, so reading another person's journal never imports or calls its code. A user's own class is
used only if the caller passes it. Every policy class of ``policies/`` is registered here.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tidegate.errors import ConfigError, ResumeMismatch
from tidegate.orchestrator.core.placement import PlacementRules
from tidegate.policies.asynchrony import BoundedStaleness, OneStepOffPolicy, Unbounded
from tidegate.policies.consumption import Window
from tidegate.policies.failures import FailurePolicy
from tidegate.policies.filters import DynamicSampling, GroupFilter
from tidegate.policies.migration import EvenOut, LongTailLane
from tidegate.policies.rounds import OverSampling, Synchronous, TailPacking
from tidegate.policies.routing import (
    LeastLoaded,
    PowerOfTwoChoices,
    PrefixAffinity,
    SessionAffinity,
)
from tidegate.policies.speeds import DeclaredSpeeds, MeasuredSpeeds
from tidegate.policies.staleness import StalenessPolicy

CLASS = "class"
"""Key under which a record names its class."""

OUR_PACKAGE = "tidegate."
"""Prefix of module names in records of journals written before classes had registered names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Policies that a run's core decides by: staleness, filter, failures, routing, group size.

    The journal's header has a record of them, from which another process makes an equal core.
    """

    policy: StalenessPolicy
    group_size: int
    group_filter: GroupFilter = field(default_factory=GroupFilter)
    placement: PlacementRules = field(default_factory=PlacementRules)
    failure_policy: FailurePolicy = field(default_factory=FailurePolicy)


OUR_CLASSES: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        Rules,
        PlacementRules,
        BoundedStaleness,
        OneStepOffPolicy,
        OverSampling,
        Synchronous,
        TailPacking,
        Unbounded,
        Window,
        DynamicSampling,
        GroupFilter,
        FailurePolicy,
        LeastLoaded,
        PowerOfTwoChoices,
        PrefixAffinity,
        SessionAffinity,
        DeclaredSpeeds,
        MeasuredSpeeds,
        EvenOut,
        LongTailLane,
    )
}
"""Classes that a record may name without the caller passing them, by their names there. A name is
part of the journal's format: it stays when its class is moved or renamed."""

FORMER_FIELDS = {
    "order": "consumption_order",
    "on_deadline": "deadline_policy",
    "routing": "routing_policy",
    "stragglers": "migration_policy",
}
"""Former name of a field of our classes -> its name now, for journals written before."""

ADDED_FIELDS: dict[tuple[type, str], object] = {(BoundedStaleness, "max_uses"): 1}
"""Fields of our classes that older journals lack, with the values that these journals have meant. A
record leaves out a field with this value, so that it equals the older one."""

ADDED_POLICIES = {"failure_policy"}
"""Policies that older journals lack. No event of such a journal depends on them, so the journal can
be resumed with any."""

RECORD_DEPTH_MAX = 16
"""Nesting limit of a record. Rules have four levels; a foreign header may have any number."""


def class_name(kind: type) -> str:
    """Return a class's name in records: its registered one, or a user's ``module:qualname``."""
    if OUR_CLASSES.get(kind.__name__) is kind:
        return kind.__name__
    return f"{kind.__module__}:{kind.__qualname__}"


def record_of(value: Any) -> Any:
    """Return rules, or a policy, as plain data.

    Raises:
        ConfigError: a part of it has no plain form.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        fields = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
        settings = {
            name: record_of(field_value)
            for name, field_value in fields
            if (kind, name) not in ADDED_FIELDS or ADDED_FIELDS[kind, name] != field_value
        }
        return {CLASS: class_name(kind), **settings}
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


def renamed(record: Any) -> Any:
    """Return a record with the present names of our classes and fields, whichever version wrote
    it."""
    if isinstance(record, list):
        return [renamed(each) for each in record]
    if not isinstance(record, dict):
        return record
    record = {name: renamed(value) for name, value in record.items()}
    module, colon, name = str(record.get(CLASS, "")).partition(":")
    if colon and module.startswith(OUR_PACKAGE) and name in OUR_CLASSES:
        record[CLASS] = name
    if str(record.get(CLASS)) in OUR_CLASSES:
        record = {FORMER_FIELDS.get(name, name): value for name, value in record.items()}
    return record


def made_of(record: Any, classes: Iterable[type] = ()) -> Any:
    """Return an object equal to the one that :func:`record_of` encoded. Imports nothing.

    ``classes``: the user's own policies that the record may name.

    Raises:
        ResumeMismatch: the record names a class that is neither ours nor one of ``classes``, or
            settings that the class refuses.
    """
    known = OUR_CLASSES | {class_name(kind): kind for kind in classes}
    return _made(renamed(_checked_depth(record)), known)


def _checked_depth(record: Any, depth: int = 0) -> Any:
    if depth > RECORD_DEPTH_MAX:
        raise ResumeMismatch(f"the journal's rules are nested over {RECORD_DEPTH_MAX} levels deep")
    if isinstance(record, dict | list):
        for each in record.values() if isinstance(record, dict) else record:
            _checked_depth(each, depth + 1)
    return record


def _made(record: Any, known: Mapping[str, type]) -> Any:
    if isinstance(record, list):
        return tuple(_made(each, known) for each in record)
    if not isinstance(record, dict):
        return record
    settings = {name: _made(value, known) for name, value in record.items() if name != CLASS}
    if CLASS not in record:
        return settings
    name = record[CLASS]
    kind = known.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ResumeMismatch(
            f"the journal's rules name {name!r:.200}, which is no policy of Tidegate's; if it is "
            f"yours, pass the class: replay_journal(policies=[…]), or "
            f"`tidegate replay --policy module:Name`"
        )
    try:
        return kind(**settings)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ResumeMismatch(
            f"the journal's {name}({settings!r:.200}) can't be made: {error}"
        ) from None


def classes_of(value: Any) -> Iterator[type]:
    """Return the classes of a policy and of all policies within it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield type(value)
        for each in dataclasses.fields(value):
            yield from classes_of(getattr(value, each.name))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from classes_of(each)


def check_can_be_made_again(rules: Rules) -> None:
    """Check that rules equal to ``rules`` can be made from their record, before it is written to a
    journal.

    Raises:
        ConfigError: they cannot, so the run could be neither resumed nor replayed.
    """
    for kind in classes_of(rules):
        if "<locals>" in kind.__qualname__:
            raise ConfigError(
                f"a run with a journal must be able to make its policies again, and "
                f"{kind.__qualname__} can't be named: define them in a module, not in a function"
            )
    try:
        made_of(record_of(rules), classes_of(rules))
    except ResumeMismatch as error:
        raise ConfigError(
            f"a run with a journal must be able to make its policies again: {error}"
        ) from None


def describe(record: Any) -> str:
    """Return a record as text for error messages."""
    if not isinstance(record, dict):
        return repr(record)
    settings = ", ".join(
        f"{name}={describe(value)}" for name, value in record.items() if name != CLASS
    )
    return f"{str(record.get(CLASS, '')).rpartition(':')[2]}({settings})"
