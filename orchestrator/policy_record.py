"""How is a policy written down? By its class and its settings, to go on with it later."""

import importlib
from typing import Any

import msgspec

from tidegate.errors import ResumeMismatch


class PolicyRecord(msgspec.Struct, frozen=True):
    """A policy as plain data."""

    module: str
    name: str
    settings: dict[str, Any]

    def __str__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
        return f"{self.name}({settings})"


def record_of(policy: object) -> PolicyRecord:
    """What to write down of a policy."""
    kind = type(policy)
    return PolicyRecord(kind.__module__, kind.__qualname__, msgspec.to_builtins(policy))


def policy_of(record: PolicyRecord) -> Any:
    """The policy that was written down.

    Raises:
        ResumeMismatch: there is no such policy here.
    """
    try:
        kind = importlib.import_module(record.module)
        for part in record.name.split("."):
            kind = getattr(kind, part)
        return msgspec.convert(record.settings, kind)
    except (ImportError, AttributeError, msgspec.ValidationError, TypeError) as error:
        raise ResumeMismatch(
            f"the run's policy {record} of module {record.module!r} can't be made here: "
            f"{error}; run this where that module can be imported, as it was then"
        ) from None
