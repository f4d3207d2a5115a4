"""Which arguments does a function take? Read off its type hints, as a schema and as a check.

A function's hints are taken at their word: ``def search(query: str, limit: int = 5)`` takes a
string, and a whole number that may be left out, and nothing else.
"""

import inspect
import typing
from collections.abc import Callable
from typing import Any

import msgspec


class ToolSignature:
    """What can be known about a tool without calling it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """Raises TypeError if some argument can't be given by name."""
        self.description = inspect.getdoc(function) or ""
        self._arguments = msgspec.defstruct(
            "Arguments", _fields(function), kw_only=True, forbid_unknown_fields=True
        )

    @property
    def parameters(self) -> dict[str, Any]:
        """The JSON schema of the arguments, as one object that needs no other."""
        _, parts = msgspec.json.schema_components([self._arguments])
        own = parts.pop("Arguments")
        own.pop("title", None)
        own["additionalProperties"] = False
        if parts:
            own["$defs"] = parts
        local: dict[str, Any] = _with_local_references(own)
        return local

    def convert(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments as the function wants them.

        Raises:
            msgspec.ValidationError: they are not what the hints say.
        """
        given = msgspec.convert(arguments, self._arguments)
        return {name: getattr(given, name) for name in self._arguments.__struct_fields__}


def _fields(function: Callable[..., Any]) -> list[tuple[str, Any] | tuple[str, Any, Any]]:
    hints = typing.get_type_hints(function, include_extras=True)
    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(
                f"a tool takes its arguments by name, but {parameter} of {function.__qualname__} "
                f"can't be given so"
            )
        kind = hints.get(parameter.name, Any)
        if parameter.default is parameter.empty:
            fields.append((parameter.name, kind))
        else:
            fields.append((parameter.name, kind, msgspec.field(default=parameter.default)))
    return fields


def _with_local_references(part: Any) -> Any:
    if isinstance(part, dict):
        return {
            key: value.replace("#/components/schemas/", "#/$defs/")
            if key == "$ref" and isinstance(value, str)
            else _with_local_references(value)
            for key, value in part.items()
        }
    return [_with_local_references(each) for each in part] if isinstance(part, list) else part
