"""JSON schema and argument check of a tool function, derived from its type hints.

The worker process uses it for each tool. ``def search(query: str, limit: int = 5)`` takes a string
and an optional integer, and nothing else.
"""

import inspect
import typing
from collections.abc import Callable
from typing import Any

import msgspec


class ToolSignature:
    """Description, argument schema and argument check of one tool."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """Read the function's signature.

        Raises:
            TypeError: an argument can't be passed by name.
        """
        self.description = inspect.getdoc(function) or ""
        self._arguments = msgspec.defstruct(
            "Arguments", _fields(function), kw_only=True, forbid_unknown_fields=True
        )

    @property
    def parameters(self) -> dict[str, Any]:
        """JSON schema of the arguments, self-contained."""
        _, parts = msgspec.json.schema_components([self._arguments])
        own = parts.pop("Arguments")
        own.pop("title", None)
        own["additionalProperties"] = False
        if parts:
            own["$defs"] = parts
        local: dict[str, Any] = _with_local_references(own)
        return local

    def convert(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Check the arguments, and convert them to their type hints.

        Raises:
            msgspec.ValidationError: they do not match the hints.
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
