"""Import of objects named `module:name` in a configuration, and checks of their arguments.

`tidegate run`'s TOML file and `tidegate replay --policy` name objects this way. Imports users'
modules.
"""

import importlib
import inspect
import sys
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tidegate.errors import ConfigError
from tidegate.orchestrator.settings.suggestions import did_you_mean, worded


def find(name: str, where: str) -> Any:
    """Import the object ``module:name``; ``where`` is the configuration key, for error messages.

    Raises:
        ConfigError: there is no such module, or no such name in it.
    """
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise ConfigError(f"{where} = {name!r} must be 'module:name', such as 'my_agent:solve'")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise  # the module exists, but one of its imports does not: show the traceback
        folders = dict.fromkeys(path or str(Path.cwd()) for path in sys.path[:2])
        raise ConfigError(
            f"{where} = {name!r}: there is no module {error.name!r}; looked for in "
            f"{', '.join(folders)} and what is installed"
        ) from None
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = [each for each in vars(found) if not each.startswith("_")]
            raise ConfigError(
                f"{where} = {name!r}: {module_name} has no {part!r}; {did_you_mean(part, public)}"
            )
        found = getattr(found, part)
    return found


def parameters_of(function: Callable[..., Any], where: str) -> list[inspect.Parameter]:
    """Return a function's parameters.

    Raises:
        ConfigError: it is a builtin, such as ``range``, without a readable signature.
    """
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{where}.use names {function!r}, whose parameters can't be read ({error}); name a "
            f"function of your own, which may call it"
        ) from None


def check_arguments(
    function: Callable[..., Any], given: Mapping[str, Any], where: str, *, own: int = 0
) -> dict[str, Any]:
    """Check ``given`` against a function's signature, and convert each value to its type hint.

    The first ``own`` parameters are passed by the caller, not by the configuration.

    Raises:
        ConfigError: an argument is unknown, missing, or not of its type.
    """
    parameters = parameters_of(function, where)
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    named = {each.name: each for each in parameters[own:] if each.kind in _BY_NAME}
    hints = _hints(function)
    checked = {}
    for name, value in given.items():
        if name not in named and not takes_any:
            raise ConfigError(f"{where}.{name}: no such argument; {did_you_mean(name, named)}")
        checked[name] = _validated(value, hints.get(name, Any), f"{where}.{name}")
    for name, each in named.items():
        if each.default is each.empty and name not in checked:
            raise ConfigError(f"{where}.{name} is missing; {where}.use requires it")
    return checked


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    target = function.__init__ if inspect.isclass(function) else function
    try:
        return typing.get_type_hints(target)
    except (NameError, TypeError):  # hints that only a type checker can resolve: nothing to check
        return {}


def _validated(value: Any, hint: Any, where: str) -> Any:
    try:
        return TypeAdapter(hint).validate_python(value)
    except ValidationError as error:
        raise ConfigError(f"{where} = {value!r}: {worded(error.errors()[0]['msg'])}") from None
    except Exception as error:
        if type(error).__module__.startswith("pydantic"):
            return value  # a hint that pydantic does not support
        raise
