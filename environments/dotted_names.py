"""What does ``module:name`` stand for? Imported where it is used, never where it is named."""

import importlib
import re
from collections.abc import Callable
from typing import Any

from tidegate.errors import ConfigError

_DOTTED = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def checked_name(name: str) -> str:
    """The name, if it has that form.

    Raises:
        ConfigError: it hasn't.
    """
    if not _DOTTED.fullmatch(name):
        raise ConfigError(
            f"{name!r} names nothing that another process could import; write it as "
            f"'package.module:name', and put the code into a module"
        )
    return name


def imported(name: str) -> Callable[..., Any]:
    """What the name stands for.

    Raises:
        ImportError: there is no such module, or nothing to call by that name in it.
    """
    module, _, attributes = name.partition(":")
    found: Any = importlib.import_module(module)
    for attribute in attributes.split("."):
        found = getattr(found, attribute, None)
    if not callable(found):
        raise ImportError(f"{module} has nothing to call by the name {attributes!r}")
    return found  # type: ignore[no-any-return]
